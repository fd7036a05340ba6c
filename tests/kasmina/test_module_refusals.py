"""Networks that cannot be hosts are refused with what was found and the way out."""

import copy
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.leyline.errors import ConfigError
from user_networks import MLP, ResNet8

VECTORS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def refuses(message: str, model: object, slots: object = ("a",), example: object = VECTORS) -> None:
    with pytest.raises(ConfigError, match=message):
        ModuleHostSpec.of(model, slots, example)


def network(
    forward: Callable[[nn.Module, Tensor], object] | None = None, **more: Callable[[], nn.Module]
) -> type[nn.Module]:
    """A network of layers a, b [6 -> 6] and `more`, whose forward is `forward` or b(ReLU(a(x)))."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            for name, build in more.items():
                setattr(self, name, build())

        def forward(self, x: Tensor) -> object:
            return self.b(F.relu(self.a(x))) if forward is None else forward(self, x)

    return Own


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_the_toy_network_of_these_tests_is_a_host():
    assert ModuleHostSpec.of(network(), ["a", "b"], VECTORS).num_params() == 84


# -- the model and its slots ------------------------------------------------------------------------------------------


def test_a_built_network_is_refused_in_favour_of_its_class():
    refuses("the model is a MLP, but every host needs a network of its own; pass the class", MLP())


def test_something_else_than_a_network_is_refused():
    refuses("the model gives a dict; it must give an nn.Module", lambda: {})


def test_a_model_that_needs_arguments_is_refused():
    refuses("cannot be called without arguments: missing a required argument: 'in_features'", nn.Linear)


@pytest.mark.parametrize("slots", ["a", [], ["a", "a"]])
def test_slots_are_a_list_of_different_paths(slots):
    refuses("it must be a list of different paths", network(), slots)


def test_a_slot_that_does_not_exist_gets_the_nearest_name():
    refuses(r"ResNet8 has no submodule 'layer4' for a slot; did you mean 'layer\d'", ResNet8, ["layer4"], IMAGES)


def test_two_slots_at_one_module_are_refused():
    class Twice(network()):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.a

    refuses("slots 'a' and 'alias' are the same module", Twice, ["a", "alias"])
    assert ModuleHostSpec.of(Twice, ["alias"], VECTORS).points()[0].slot_id == "alias"


def test_a_slot_that_is_not_called_exactly_once_is_refused():
    unused = network(unused=lambda: nn.Linear(6, 6))
    refuses("the module of slot 'unused' is never called", unused, ["unused"])
    refuses("the module of slot 'a' is called 2 times", network(lambda net, x: net.a(net.a(x))))
    refuses("the module of slot 'layers' is never called", network(layers=nn.ModuleList), ["layers"])


def test_a_slot_that_is_skipped_in_training_is_refused():
    refuses(
        "slot 'b' is never called", network(lambda net, x: net.a(x) if net.training else net.b(net.a(x))), ["a", "b"]
    )


def test_a_slot_that_gives_no_tensor_is_refused():
    attention = network(lambda net, x: net.b(net.attend(*(net.a(x)[:, None],) * 3)[0][:, 0]),
                        attend=lambda: nn.MultiheadAttention(6, 2, batch_first=True))  # fmt: skip
    refuses("slot 'attend' gives a tuple; seeds need a tensor", attention, ["attend"])


def test_features_that_no_blueprint_fits_are_refused():
    flat = network(lambda net, x: net.b(net.a(x)) + net.flat(x).mean(), flat=lambda: nn.Flatten(0))
    refuses(r"slot 'flat' gives \[24\] of torch.float32 for 4 examples", flat, ["flat"])
    turned = network(lambda net, x: net.b(net.turn(net.a(x)).mT), turn=lambda: Lambda(lambda h: h.mT))
    refuses(r"slot 'turn' gives \[6, 4\] .* for 4 examples", turned, ["turn"])
    five = network(lambda net, x: net.b(net.five(net.a(x)).flatten(1)), five=lambda: nn.Unflatten(1, (1, 2, 3, 1)))
    refuses(r"slot 'five' gives \[4, 1, 2, 3, 1\]", five, ["five"])


def test_single_values_are_refused():
    refuses(r"slot '0' gives \[4, 1\]: single values", lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 2)), ["0"])


def test_slots_of_two_families_are_refused():
    refuses(r"of two families: stem \[8, 12, 12\], head \[10\]", ResNet8, ["stem", "head"], IMAGES)


def test_a_slot_without_gradient_is_refused():
    refuses("no gradient flows from the output of Own to slot 'a'", network(lambda net, x: net.b(net.a(x).detach())))
    dead = network(lambda net, x: (net.a(x), net.b(x))[1])
    refuses("no gradient flows from the output of Own to slot 'a'", dead)
    refuses("no gradient flows", network(lambda net, x: net.b(net.a(x)).detach()))


def guarded(guard: Callable[[], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with guard():
            h = F.relu(net.a(x))
        return net.b(h.clone())

    return forward


def test_a_slot_within_no_grad_or_inference_mode_is_refused_for_that_reason():
    refuses(r"slot 'a', so .* it lies within torch.no_grad\(\), and not at the end", network(guarded(torch.no_grad)))
    refuses(r"slot 'a' lies within torch.inference_mode\(\) of Own", network(guarded(torch.inference_mode)))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused_where_it_computes_a_slot_or_dropout_again(reentrant):
    def around(inside: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module, Tensor], Tensor]:
        def forward(net: nn.Module, x: Tensor) -> Tensor:
            h = net.c(x) if inside(net) is net.a else net.a(x)
            return net.b(checkpoint(inside(net), h, use_reentrant=reentrant))

        return forward

    refuses(
        "torch.utils.checkpoint.* computes 'a' again", network(around(lambda net: net.a), c=lambda: nn.Linear(6, 6))
    )
    dropping = network(around(lambda net: net.c), c=lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
    refuses(r"torch.utils.checkpoint.* computes 'c.1' again", dropping)
    ModuleHostSpec.of(network(around(lambda net: net.c), c=lambda: nn.Linear(6, 6)), ["a"], VECTORS)


# -- the forward pass -------------------------------------------------------------------------------------------------


def test_an_output_that_is_no_tensor_is_refused():
    said = (
        r"Own gives a dict with \['logits'\], but .* say which with outputs=lambda out: out\['logits'\], or give a loss"
    )
    refuses(said, network(lambda net, x: {"logits": net.b(net.a(x))}))


def test_a_network_that_computes_its_loss_is_refused():
    refuses(r"Own gives \[\] of torch.float32 for 4 examples", network(lambda net, x: net.b(net.a(x)).mean()))


def test_a_network_that_fails_is_refused_with_its_error():
    refuses(
        r"Own cannot process inputs \[4, 5\] of torch.float32.*shapes cannot be multiplied",
        network(),
        ["a"],
        VECTORS[:, :5],
    )


def test_a_fixed_number_of_examples_is_refused():
    refuses(r"cannot process inputs \[3, 6\]", network(lambda net, x: net.b(net.a(x)).view(4, 6)))


def test_a_shape_that_depends_on_the_values_is_refused():
    largest = network(lambda net, x: net.b(net.a(x))[:, : 2 + int(x.sum() > VECTORS[:4].sum() - 1e-3)])
    refuses(r"the output of Own is \[4, 3\], \[3, \d\] and \[4, \d\].*must not depend on the values", largest)


def test_examples_that_see_each_other_in_evaluation_are_refused():
    refuses(
        "the output of Own for one example depends on the other", network(lambda net, x: net.b(net.a(x) - x.mean(0)))
    )
    refuses("the output of Own for one example depends on the other", network(lambda net, x: net.b(net.a(x)) * len(x)))
    norm = network(lambda net, x: net.b(net.norm(net.a(x))), norm=lambda: nn.BatchNorm1d(6, track_running_stats=False))
    refuses("slot 'norm' for one example depends on the other", norm, ["norm"])


def test_a_sequence_whose_first_axis_is_not_the_batch_is_refused():
    recurrent = network(lambda net, x: net.b(net.lstm(net.a(x)[:, None])[0][:, 0]), lstm=lambda: nn.LSTM(6, 6))
    refuses("the output of Own for one example depends on the other examples", recurrent)


def test_examples_that_see_each_other_in_training_alone_are_normal():
    normed = network(lambda net, x: net.b(net.norm(net.a(x))), norm=lambda: nn.BatchNorm1d(6))
    assert ModuleHostSpec.of(normed, ["a"], VECTORS).num_params() == 96


def test_a_network_that_edits_its_inputs_is_refused():
    refuses("Own edits its inputs in place", network(lambda net, x: net.b(net.a(x.mul_(1.0)))))
    evaluation = network(lambda net, x: net.b(net.a(x if net.training else x.add_(1.0))))
    refuses("Own edits its inputs in place", evaluation)
    unversioned = network(lambda net, x: net.b(net.a(x.data.add_(1.0))))
    refuses("Own edits its inputs in place", unversioned)


def test_a_generator_of_its_own_is_refused():
    for generator in (torch.Generator().manual_seed(0), np.random.default_rng(0)):

        def noise(h: Tensor, of=generator) -> Tensor:
            drawn = torch.randn(h.shape, generator=of) if isinstance(of, torch.Generator) else of.normal(size=h.shape)
            return h + torch.as_tensor(drawn, dtype=torch.float32)

        refuses(
            "Own gives other outputs in a second pass over the same inputs.* a generator of its own",
            network(lambda net, x, noise=noise: net.b(noise(net.a(x)) if net.training else net.a(x))),
        )
        refuses("a generator of its own", network(lambda net, x, noise=noise: net.b(noise(net.a(x)))))


def test_state_beside_the_buffers_is_refused():
    class Remembering(network()):
        def forward(self, x: Tensor) -> Tensor:
            self.last = self.a(x).mean(0).detach() + getattr(self, "last", 0.0)
            return self.b(self.last + self.a(x))

    refuses("keeps something beside its buffers", Remembering)


# -- weights and buffers ----------------------------------------------------------------------------------------------


def test_weights_that_two_hosts_would_share_are_refused():
    backbone = nn.Linear(6, 6)
    refuses("'a.weight' of Sequential is the same memory in two calls", lambda: named(a=backbone))
    whole = MLP()
    refuses(r"'body.0.weight' of MLP is the same memory", lambda: whole, ["body.0"])


def test_weights_from_another_generator_are_refused():
    generator = np.random.default_rng(0)

    def build() -> nn.Module:
        net = named(a=nn.Linear(6, 6))
        net.a.weight.data = torch.from_numpy(generator.normal(size=(6, 6)).astype(np.float32))
        return net

    refuses("'a.weight' of Sequential differs between two builds under the same seed", build)


def test_a_lazy_layer_that_is_not_called_is_refused():
    refuses("'c.weight' of Own is lazy and found no shape", network(c=lambda: nn.LazyLinear(3)))


def test_weights_on_another_device_are_refused():
    refuses("'a.weight' of Sequential is on meta", lambda: named(a=nn.Linear(6, 6, device="meta")))


def test_a_network_without_parameters_is_refused():
    refuses("Sequential has no parameters", lambda: named(a=nn.ReLU()))


def test_double_parameters_are_refused():
    refuses("'a.weight' is torch.float64", lambda: named(a=nn.Linear(6, 6).double()))


class Listing(nn.Module):
    """Reads its weight from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.weights = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.weights[0])


def test_references_to_weights_beside_the_parameters_are_refused():
    refuses("Listing keeps references to its weights beside its parameters", Listing)


def test_a_network_that_writes_into_its_weights_is_refused():
    def clamped(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            net.b.weight.clamp_(-1.0, 1.0)
        return net.b(net.a(x))

    refuses("Own cannot be trained .* must not write into weights, as clamp_", network(clamped))


def test_a_network_of_torch_jit_is_refused():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.Linear(6, 6))
    refuses("Linear was compiled by torch.jit", network(c=lambda: copy.deepcopy(scripted)))


def test_a_recurrent_layer_is_no_obstacle():
    recurrent = network(
        lambda net, x: net.b(net.lstm(net.a(x)[:, None])[0][:, 0]), lstm=lambda: nn.LSTM(6, 6, batch_first=True)
    )
    assert ModuleHostSpec.of(recurrent, ["a"], VECTORS).num_params() == 84 + 4 * (36 + 36 + 6 + 6)


def test_cumulative_averages_are_refused():
    refuses("norm has momentum=None", network(norm=lambda: nn.BatchNorm1d(6, momentum=None)))


class Counting(nn.Module):
    """A buffer that the forward pass changes in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(6, 6)
        self.register_buffer("steps", torch.zeros((), dtype=torch.float32 if how == "float" else torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "replaced":
            self.steps = self.steps + 1
        elif self.training and self.how == "new":
            self.register_buffer("mask", x[0].detach())
        elif self.training:
            self.steps += 1
        return self.linear(x)


@pytest.mark.parametrize(
    ("how", "name", "reason"),
    [
        ("replaced", "steps", "replaced or registered by the forward pass"),
        ("int", "steps", "torch.int64 and changed by the forward pass, but all hosts share"),
        ("new", "mask", "replaced or registered by the forward pass"),
    ],
)
def test_buffers_that_hosts_could_not_own_are_refused(how, name, reason):
    refuses(f"buffer 'a.{name}' of Sequential is {reason}", lambda: named(a=Counting(how)))


def test_a_parameter_that_training_registers_is_refused():
    class Late(network()):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.scale = nn.Parameter(torch.ones(6))
            return self.b(self.a(x))

    refuses("parameter 'scale' of Late is registered or removed by a forward pass in training", Late)


def test_a_float_buffer_that_is_written_in_place_is_each_hosts_own():
    assert ModuleHostSpec.of(lambda: named(a=Counting("float")), ["a"], VECTORS).num_params() == 42


@pytest.mark.parametrize("example", [torch.zeros(0, 6), torch.zeros(())])
def test_an_example_has_inputs(example):
    refuses(r"it must be inputs \[B, ...\]", network(), ["a"], example)
