"""Networks that cannot be hosts are refused with what was found and the way out."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

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


class Twice(network()):
    def __init__(self) -> None:
        super().__init__()
        self.alias = self.a


class Remembering(network()):
    """Keeps something beside its buffers."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.a(x).mean(0).detach() + getattr(self, "last", 0.0)
        return self.b(self.last + self.a(x))


class Annealed(network()):
    """Goes another way after twenty passes."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return self.b(self.a(x)) if self.passes < 20 else self.b(x)


def hooked(register: str) -> nn.Module:
    net = network()()
    getattr(net.b.weight, register)(lambda grad: None)
    return net


HELD: dict[str, Callable[[], object]] = {
    "layers": lambda: [nn.Linear(6, 6)],
    "by_name": lambda: {"layer": nn.Linear(6, 6)},
    "weight_of_own": lambda: torch.zeros(6, requires_grad=True),
}


def holding(name: str) -> nn.Module:
    net = network()()
    setattr(net.b, name, HELD[name]())
    return net


class Late(network()):
    """Registers a parameter in training."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale = nn.Parameter(torch.ones(6))
        return self.b(self.a(x))


class Tapped(network()):
    """Reads what a layer gives by a hook of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda layer, given, h: setattr(self, "tapped", h))

    def forward(self, x: Tensor) -> Tensor:
        self.a(x)
        return self.b(self.__dict__.pop("tapped"))


class Silent(network()):
    """Forgets what `train` gives."""

    def train(self, mode: bool = True) -> None:
        super().train(mode)


def force(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(net.b(net.a(x)).square().sum(), x, create_graph=True)[0]


class Listing(nn.Module):
    """Reads its weight from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.weights = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.weights[0])


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


def attending(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.attend(*(net.a(x)[:, None],) * 3)[0][:, 0])


def recurrent(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.lstm(net.a(x)[:, None])[0][:, 0])


def guarded(guard: Callable[[], object]) -> Callable[[nn.Module, Tensor], Tensor]:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        with guard():
            h = F.relu(net.a(x))
        return net.b(h.clone())

    return forward


def clamped(net: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.b.weight.clamp_(-1.0, 1.0)
    return net.b(net.a(x))


def noisy(of: torch.Generator | np.random.Generator, *, evaluation: bool) -> type[nn.Module]:
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        h = net.a(x)
        if evaluation or net.training:
            drawn = torch.randn(h.shape, generator=of) if isinstance(of, torch.Generator) else of.normal(size=h.shape)
            h = h + torch.as_tensor(drawn, dtype=torch.float32)
        return net.b(h)

    return network(forward)


def drawn_by(generator: np.random.Generator) -> nn.Module:
    net = named(a=nn.Linear(6, 6))
    net.a.weight.data = torch.from_numpy(generator.normal(size=(6, 6)).astype(np.float32))
    return net


def linear() -> nn.Module:
    return nn.Linear(6, 6)


SHARED, BACKBONE = MLP(), nn.Linear(6, 6)
OTHERS = "of Own for one example depends on the other examples"
OWN_GENERATOR = "Own gives other outputs in a second pass over the same inputs.* a generator of its own"
REFUSED: list[tuple[object, ...]] = [  # what is said, the model, its slots (a), the example (vectors)
    # the model and its slots
    ("the model is a MLP, but every host needs a network of its own; pass the class", SHARED),
    ("the model gives a dict; it must give an nn.Module", lambda: {}),
    ("cannot be called without arguments: missing a required argument: 'in_features'", nn.Linear),
    ("it must be a list of different paths", network(), "a"),
    ("it must be a list of different paths", network(), []),
    ("it must be a list of different paths", network(), ["a", "a"]),
    (r"ResNet8 has no submodule 'layer4' for a slot; did you mean 'layer\d'", ResNet8, ["layer4"], IMAGES),
    ("slots 'a' and 'alias' are the same module", Twice, ["a", "alias"]),
    ("the module of slot 'unused' is never called", network(unused=linear), ["unused"]),
    ("the module of slot 'a' is called 2 times", network(lambda net, x: net.a(net.a(x)))),
    ("the module of slot 'layers' is never called", network(layers=nn.ModuleList), ["layers"]),
    ("slot 'b' is never called", network(lambda net, x: net.a(x) if net.training else net.b(net.a(x))), ["b"]),
    ("slot 'attend' gives a tuple; seeds need a tensor",
     network(attending, attend=lambda: nn.MultiheadAttention(6, 2, batch_first=True)), ["attend"]),
    (r"slot 'flat' gives \[24\] of torch.float32 for 4 examples",
     network(lambda net, x: net.b(net.a(x)) + net.flat(x).mean(), flat=lambda: nn.Flatten(0)), ["flat"]),
    (r"slot 'turn' gives \[6, 4\] .* for 4 examples",
     network(lambda net, x: net.b(net.turn(net.a(x)).mT), turn=lambda: Lambda(lambda h: h.mT)), ["turn"]),
    (r"slot 'five' gives \[4, 1, 2, 3, 1\]",
     network(lambda net, x: net.b(net.five(net.a(x)).flatten(1)), five=lambda: nn.Unflatten(1, (1, 2, 3, 1))),
     ["five"]),
    (r"slot '0' gives \[4, 1\]: single values", lambda: nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 2)), ["0"]),
    (r"of two families: stem \[8, 12, 12\], head \[10\]", ResNet8, ["stem", "head"], IMAGES),
    (r"train\(\) of Silent does not give the network; end it with return self", Silent),
    (r"Own computes gradients in its forward pass, as by torch.autograd.grad", network(force)),
    ("no gradient flows from the output of Tapped to slot 'a'", Tapped),
    ("no gradient flows from the output of Own to slot 'a'", network(lambda net, x: net.b(net.a(x).detach()))),
    ("no gradient flows from the output of Own to slot 'a'", network(lambda net, x: (net.a(x), net.b(x))[1])),
    ("no gradient flows", network(lambda net, x: net.b(net.a(x)).detach())),
    (r"slot 'a', so .* it lies within torch.no_grad\(\), and not at the end", network(guarded(torch.no_grad))),
    (r"slot 'a' lies within torch.inference_mode\(\) of Own", network(guarded(torch.inference_mode))),
    # the forward pass
    (r"Own gives a dict with \['logits'\], but .* say which with outputs=lambda out: out\['logits'\], or give a loss",
     network(lambda net, x: {"logits": net.b(net.a(x))})),
    (r"Own gives \[\] of torch.float32 for 4 examples", network(lambda net, x: net.b(net.a(x)).mean())),
    (r"Own cannot process inputs \[4, 5\] of torch.float32.*shapes cannot be multiplied", network(), ["a"],
     VECTORS[:, :5]),
    (r"cannot process inputs \[3, 6\]", network(lambda net, x: net.b(net.a(x)).view(4, 6))),
    (r"the output of Own is \[4, 3\], \[3, \d\] and \[4, \d\].*must not depend on the values",
     network(lambda net, x: net.b(net.a(x))[:, : 2 + int(x.sum() > VECTORS[:4].sum() - 1e-3)])),
    (OTHERS, network(lambda net, x: net.b(net.a(x) - x.mean(0)))),
    (OTHERS, network(lambda net, x: net.b(net.a(x)) * len(x))),
    (OTHERS, network(recurrent, lstm=lambda: nn.LSTM(6, 6))),
    ("slot 'norm' for one example depends on the other",
     network(lambda net, x: net.b(net.norm(net.a(x))), norm=lambda: nn.BatchNorm1d(6, track_running_stats=False)),
     ["norm"]),
    ("Own edits its inputs in place", network(lambda net, x: net.b(net.a(x.mul_(1.0))))),
    ("Own edits its inputs in place", network(lambda net, x: net.b(net.a(x if net.training else x.add_(1.0))))),
    ("Own edits its inputs in place", network(lambda net, x: net.b(net.a(x.data.add_(1.0))))),
    *((OWN_GENERATOR, noisy(of, evaluation=evaluation)) for evaluation in (False, True)
      for of in (torch.Generator().manual_seed(0), np.random.default_rng(0))),
    ("keeps something beside its buffers", Remembering),
    ("attribute 'passes' of Annealed changes in every forward pass", Annealed),
    *(("parameter 'b.weight' of Own has a gradient hook", partial(hooked, register))
      for register in ("register_hook", "register_post_accumulate_grad_hook")),
    # weights and buffers
    ("'a.weight' of Sequential is the same memory in two calls", lambda: named(a=BACKBONE)),
    (r"'body.0.weight' of MLP is the same memory", lambda: SHARED, ["body.0"]),
    ("'a.weight' of Sequential differs between two builds under the same seed",
     partial(drawn_by, np.random.default_rng(0))),
    ("'c.weight' of Own is lazy and found no shape", network(c=lambda: nn.LazyLinear(3))),
    ("'a.weight' of Sequential is on meta", lambda: named(a=nn.Linear(6, 6, device="meta"))),
    ("Sequential has no parameters", lambda: named(a=nn.ReLU())),
    *((f"'b.{held}' of Own has weights that are not among its parameters", partial(holding, held)) for held in HELD),
    ("'a.weight' is torch.float64", lambda: named(a=nn.Linear(6, 6).double())),
    ("Listing keeps references to its weights beside its parameters", Listing),
    ("Own cannot be trained .* must not write into weights, as clamp_", network(clamped)),
    ("norm has momentum=None", network(norm=lambda: nn.BatchNorm1d(6, momentum=None))),
    ("parameter 'scale' of Late is registered or removed by a forward pass in training", Late),
    *((f"buffer 'a.{name}' of Sequential is {why}", lambda how=how: named(a=Counting(how))) for how, name, why in (
        ("replaced", "steps", "replaced or registered by the forward pass"),
        ("int", "steps", "torch.int64 and changed by the forward pass, but all hosts share"),
        ("new", "mask", "replaced or registered by the forward pass"))),
    (r"it must be inputs \[B, ...\]", network(), ["a"], torch.zeros(0, 6)),
    (r"it must be inputs \[B, ...\]", network(), ["a"], torch.zeros(())),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0][:60])
def test_networks_that_cannot_be_hosts_are_refused(case):
    message, model, slots, example = (*case, *(None, None, ["a"], VECTORS)[len(case) :])
    with pytest.raises(ConfigError, match=message):
        ModuleHostSpec.of(model, slots, example)


def test_a_network_of_torch_jit_is_refused():
    with pytest.warns(DeprecationWarning, match="torch.jit"):
        scripted = torch.jit.script(nn.Linear(6, 6))
    with pytest.raises(ConfigError, match=r"Linear was compiled by torch\.jit"):
        ModuleHostSpec.of(network(c=lambda: copy.deepcopy(scripted)), ["a"], VECTORS)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # in evaluation
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused_where_it_computes_a_slot_or_dropout_again(reentrant):
    def around(inside: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module, Tensor], Tensor]:
        def forward(net: nn.Module, x: Tensor) -> Tensor:
            h = net.c(x) if inside(net) is net.a else net.a(x)
            return net.b(checkpoint(inside(net), h, use_reentrant=reentrant))

        return forward

    dropping = network(around(lambda net: net.c), c=lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)))
    for path, model in (("a", network(around(lambda net: net.a), c=linear)), ("c.1", dropping)):
        with pytest.raises(ConfigError, match=f"torch.utils.checkpoint.* computes '{path}' again"):
            ModuleHostSpec.of(model, ["a"], VECTORS)
    ModuleHostSpec.of(network(around(lambda net: net.c), c=linear), ["a"], VECTORS)


def test_what_a_first_pass_sets_alone_may_be_an_attribute():
    def forward(net: nn.Module, x: Tensor) -> Tensor:
        net.length = len(x[0])  # as a cache of positions does
        return net.b(net.a(x))

    ModuleHostSpec.of(network(forward), ["a"], VECTORS)


@pytest.mark.parametrize(
    ("model", "slots", "params"),
    [
        (network(), ["a", "b"], 84),
        (Twice, ["alias"], 84),
        (network(lambda net, x: net.b(net.norm(net.a(x))), norm=lambda: nn.BatchNorm1d(6)), ["a"], 96),
        (network(recurrent, lstm=lambda: nn.LSTM(6, 6, batch_first=True)), ["a"], 84 + 4 * (36 + 36 + 6 + 6)),
        (lambda: named(a=Counting("float")), ["a"], 42),
    ],
    ids=["plain", "two paths", "examples meet in training alone", "recurrent", "a float buffer written in place"],
)
def test_what_is_like_it_but_no_obstacle_is_a_host(model, slots, params):
    spec = ModuleHostSpec.of(model, slots, VECTORS)
    assert (spec.num_params(), [point.slot_id for point in spec.points()]) == (params, slots)


def test_layers_beside_the_parameters_are_allowed_if_they_are_frozen_or_registered_elsewhere():
    class Holding(network()):
        def __init__(self) -> None:
            super().__init__()
            self.held = [self.b, nn.Linear(6, 6).requires_grad_(False)]

        def forward(self, x: Tensor) -> Tensor:
            return self.held[0](self.held[1](self.a(x)))

    ModuleHostSpec.of(Holding, ["a"], VECTORS)


def test_a_model_that_has_become_another_one_is_refused():
    widths = [8]
    spec = ModuleHostSpec.of(lambda: named(a=nn.Linear(6, widths[0]), b=nn.Linear(widths[0], 3)), ["a"], VECTORS)
    assert spec.build(["a"], VECTORS).network.a.out_features == 8
    widths[0] = 9
    with pytest.raises(ConfigError, match=r"another Sequential .* 'a.bias' is \[9\], and was \[8\].*functools.partial"):
        spec.build(["a"], VECTORS)
