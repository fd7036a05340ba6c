"""A user's own network as a host, without editing it: the slots are outputs of named submodules.

    spec = ModuleHostSpec.of(ResNet, ["stem", "layer2.1"], example)
    host = spec.build(["stem"], example)

output of the submodule    features    family
[B, C, H, W]               (C, H, W)   CNN
[B, T, D]                  (T, D)      TRANSFORMER
[B, C, T] of nn.Conv1d     (T, C)      TRANSFORMER: seeds get them as [B, T, C]
[B, D]                     (1, D)      TRANSFORMER: a sequence of one token

A batch is one tensor [B, ...] for executors, and so are the outputs. The network itself may take and return several:

    forward(x, apply)  =  collected(run(arguments(x), apply))

    arguments(x)               (args, kwargs) of the network, e.g. ((), {"input_ids": ..., "attention_mask": ...})
    run(arguments, apply)      what the network returns, e.g. a dataclass with .logits; `apply` at the slots
    collected(result)          what the objective takes: `outputs=` of the user's, or several tensors packed

So a saved network is `run` with the arguments as they come; it knows no packed batches. Its figures are those of
`objective.scores(host.collected(saved(*args, **kwargs)), y)`.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts.host import (
    ONE_TENSOR,
    Apply,
    Arguments,
    Host,
    InjectionPoint,
    Interface,
    enabled_points,
    inputs_in_words,
    near,
)
from esper.kasmina.hosts.weights import Model
from esper.kasmina.parameters.dropout import Draws, Dropout, Moment, draw_for, dropout_layers
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import (
    Template,
    as_buffers,
    buffer_layout,
    count_params,
    drop_batch_counters,
    frozen_parameters,
    own_frozen,
    parameter_layout,
    refuse_counters,
)
from esper.kasmina.parameters.population import OWN_STATE, prepared
from esper.leyline.errors import ConfigError, in_words, nearest
from esper.leyline.lifecycle import HostFamily
from esper.leyline.random import seeded_generators
from esper.leyline.structure import flatten, unflatten


@contextmanager
def replaced_outputs(network: nn.Module, replace: Callable[[str, Any], Any], paths: Iterable[str]) -> Iterator[None]:
    """Replace the output of each of these submodules by `replace(path, output)`, until the end of the context.

    The hooks run after those that the user has registered, and are gone when the context ends.
    """
    handles = [
        network.get_submodule(path).register_forward_hook(lambda layer, args, output, path=path: replace(path, output))
        for path in paths
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Call(NamedTuple):
    """One call of a submodule: its path, its output, the version of the output if it is a tensor, and `grad`.

    `grad` says whether it ran with gradients enabled.
    """

    path: str
    output: Any
    version: int
    grad: bool


class Pass(NamedTuple):
    """The output of a network, and the calls of its submodules in the order in which they ended.

    `draws` says whether it used the global generators.
    """

    output: Any
    calls: tuple[Call, ...]
    draws: bool

    def of(self, path: str) -> list[Call]:
        """The calls of one submodule."""
        return [call for call in self.calls if call.path == path]


def run_once(network: nn.Module, x: Tensor, *, differentiable: Collection[str] = (), seed: int = 0) -> Pass:
    """A forward pass that records every call; the outputs of `differentiable` submodules require a gradient.

    It starts with global generators from `seed`. Raises ConfigError if it fails or edits its inputs, or if a
    differentiable output lies within `torch.inference_mode()`.
    """
    calls, name = list[Call](), type(network).__name__
    before, version, within, done = x.clone(), x._version, list[bool](), False

    def record(path: str, output: object) -> object:
        if path in differentiable and isinstance(output, Tensor) and output.requires_grad:
            output = output.clone()  # what a hook of the network's own has seen is not what a slot gives
        elif path in differentiable and isinstance(output, Tensor):
            if output.is_inference():
                raise ConfigError(
                    f"slot {path!r} lies within torch.inference_mode() of {name}, in which nothing "
                    "can learn; use torch.no_grad() there, or choose a slot behind it."
                )
            with torch.enable_grad():  # a leaf could not be edited in place
                output = output.detach().requires_grad_().clone()
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda grad: within.append(not done))
        edits = output._version if isinstance(output, Tensor) and not output.is_inference() else 0
        calls.append(Call(path, output, edits, torch.is_grad_enabled()))
        return output

    paths = [path for path, _ in network.named_modules(remove_duplicate=False)]
    with replaced_outputs(network, record, paths), seeded_generators(seed) as used:
        try:
            output = network(x)
            done = True
            if any(within):
                raise ConfigError(
                    f"{name} computes gradients in its forward pass, as by torch.autograd.grad. Seeds that are not yet "
                    "blended in would change them, so such a network cannot grow; grow one that gives energies or "
                    "values alone."
                )
        except ConfigError:
            raise  # says already what the network returns
        except Exception as error:  # any error of the user's code
            raise ConfigError(
                f"{name} cannot process inputs {inputs_in_words(network, x)}, which are like the example: "
                f"{in_words(error)}. Inputs come as [B, ...] with any B, as in the data; {_likely_causes(network, x)}"
                "correct the network or the example."
            ) from error
        if x._version != version or not torch.allclose(x, before, rtol=0.0, atol=0.0, equal_nan=True):
            raise ConfigError(f"{name} edits its inputs in place, which all hosts read; let it work on a copy, e.g. "
                              "x = x.clone().")  # fmt: skip
        return Pass(output, tuple(calls), used())


def _likely_causes(network: nn.Module, x: Tensor) -> str:
    """Why a network may fail on inputs of this shape and type; each cause ends with a semicolon."""
    channels_last = x.dim() == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] > 4
    causes = "images have channels first, [B, C, H, W]: x.permute(0, 3, 1, 2); " * channels_last
    if not x.is_floating_point():
        return causes + "integers stay integers, as tokens do: give floats, or inputs=lambda x: x.float(); "
    if others := {str(p.dtype) for p in network.parameters() if p.is_floating_point() and p.dtype != x.dtype}:
        causes += (
            f"floats are given as {x.dtype}, but it has weights of {', '.join(sorted(others))}: give "
            "model.float(), or convert in forward; "
        )
    return causes


def check_weights(network: nn.Module, again: nn.Module) -> None:
    """Two networks built under the same seed: weights of usable kinds, equal in both, and shared by neither."""
    name = type(network).__name__
    ours, theirs = (dict((*of.named_parameters(), *of.named_buffers())) for of in (network, again))
    for path, tensor in ours.items():
        if is_lazy(tensor):
            raise ConfigError(f"{path!r} of {name} is lazy and found no shape in a forward pass, which does not call "
                              "its layer; give the layer the number of inputs.")  # fmt: skip
        if tensor.device.type != "cpu":
            raise ConfigError(f"{path!r} of {name} is on {tensor.device}; build the network on the CPU, from where it "
                              "is moved to the device of the run.")  # fmt: skip
    for path, module in network.named_modules():
        for attribute, value in vars(module).items():
            check_registered(network, f"{path}.{attribute}".lstrip("."), value)
    if not any(True for _ in network.parameters()):
        raise ConfigError(f"{name} has no parameters, so there is nothing to train.")
    parameter_layout(network)
    buffer_layout(network)
    for path, tensor in ours.items():
        if isinstance(tensor, nn.Parameter) and not tensor.isfinite().all():
            raise ConfigError(f"{path!r} of {name} is NaN or infinite in a new network; correct its initialization.")
        other = theirs.get(path)
        if other is not None and tensor.numel() and tensor.data_ptr() == other.data_ptr():
            raise ConfigError(
                f"{path!r} of {name} is the same memory in two calls of the model, so all hosts would share it; build "
                "or copy it (copy.deepcopy) inside the function or class."
            )
        if other is None or not torch.equal(tensor, other):
            raise ConfigError(
                f"{path!r} of {name} differs between two builds under the same seed; draw initial weights from the "
                "generator of PyTorch (torch.randn, nn.init), which is seeded for each host."
            )


def shapes_of_weights(network: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Path and shape of each parameter and buffer."""
    return tuple(
        sorted((path, tuple(of.shape)) for path, of in (*network.named_parameters(), *network.named_buffers()))
    )


def check_unchanged(network: nn.Module, expected: tuple[tuple[str, tuple[int, ...]], ...]) -> None:
    """The model still gives a network with the weights that were found before."""
    before, now = dict(expected), dict(shapes_of_weights(network))
    if changed := [path for path in before | now if before.get(path) != now.get(path)]:
        was, found = ("missing" if of is None else list(of) for of in (before.get(changed[0]), now.get(changed[0])))
        raise ConfigError(
            f"the model gives another {type(network).__name__} than when the task was made: {changed[0]!r} is {found}, "
            f"and was {was}. It reads a variable that has changed, or a class was defined again: make the task anew, "
            "and give the model its values, as functools.partial(Net, width) does."
        )


def check_registered(network: nn.Module, attribute: str, value: object) -> None:
    """An attribute of a module holds no weights that could be trained, and that PyTorch does not know of."""
    known, name = set(network.parameters()), type(network).__name__
    for held in value if isinstance(value, list | tuple) else value.values() if isinstance(value, dict) else [value]:
        weights = held.parameters() if isinstance(held, nn.Module) else [held] if isinstance(held, Tensor) else ()
        if any(weight.requires_grad and weight.is_leaf and weight not in known for weight in weights):
            raise ConfigError(
                f"{attribute!r} of {name} has weights that are not among its parameters, so they would be neither "
                f"trained nor saved; keep layers in an nn.ModuleList or nn.ModuleDict, weights in an nn.ParameterList "
                "or as an nn.Parameter, and freeze what is not to be trained with requires_grad_(False)."
            )


def check_paths(network: nn.Module, slots: Sequence[str]) -> None:
    """Each slot is the path of a submodule, and no two are the same one."""
    offered = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    for slot in slots:
        if slot not in offered:
            raise ConfigError(
                f"{type(network).__name__} has no submodule {slot!r} for a slot; {nearest(slot, offered)}"
            )
    paths = {id(network.get_submodule(slot)): slot for slot in slots}
    for slot in slots:
        if (other := paths[id(network.get_submodule(slot))]) != slot:
            raise ConfigError(f"slots {slot!r} and {other!r} are the same module; remove one of them.")


def check_slot(slot: str, run: Pass, rows: int) -> Tensor:
    """The output of a slot: one float tensor [rows, C, H, W], [rows, T, D] or [rows, D] per pass."""
    calls = run.of(slot)
    if len(calls) != 1:
        found = f"is called {len(calls)} times" if calls else "is never called"
        raise ConfigError(
            f"the module of slot {slot!r} {found} in a forward pass; a slot is the output of a module "
            "that is called exactly once" + ", such as a layer behind these calls." * bool(calls)
        )
    h = calls[0].output
    if not isinstance(h, Tensor):
        raise ConfigError(f"slot {slot!r} gives a {type(h).__name__}; seeds need a tensor: choose a submodule that "
                          "returns one.")  # fmt: skip
    if h.dim() not in (2, 3, 4) or len(h) != rows or not h.is_floating_point():
        raise ConfigError(
            f"slot {slot!r} gives {list(h.shape)} of {h.dtype} for {rows} examples; seeds need floats "
            f"[{rows}, C, H, W], [{rows}, T, D] or [{rows}, D]."
        )
    single = h[0].numel() == 1 if h.dim() == 4 else h.shape[-1] == 1
    if single:
        raise ConfigError(f"slot {slot!r} gives {list(h.shape)}: single values, which no seed can normalize; choose "
                          "a submodule with more channels.")  # fmt: skip
    return h


_CHANNELS_FIRST = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention)


def is_transposed(network: nn.Module, slot: str, run: Pass) -> bool:
    """Whether the features of a slot are [B, C, T]: the last layer before they end has its channels there."""
    end = next(i for i, call in enumerate(run.calls) if call.path == slot)
    h = run.calls[end].output
    if h.dim() != 3:
        return False
    for path, output, _, _ in run.calls[end::-1]:
        layer = network.get_submodule(path)
        if isinstance(output, Tensor) and output.dim() != 3:
            continue
        if isinstance(layer, (*_CHANNELS_FIRST, *_CHANNELS_LAST)):
            return isinstance(layer, _CHANNELS_FIRST) and output.shape[1] == h.shape[1]
    return False


def is_edited(slot: str, run: Pass) -> bool:
    """Whether the output of a slot is edited in place behind it, e.g. by nn.ReLU(inplace=True) or `+=`."""
    return any(not h.is_inference() and h._version != version for _, h, version, _ in run.of(slot))


def check_output(network: nn.Module, run: Pass, rows: int) -> Tensor:
    """The output of the network: one float tensor [rows, ...]."""
    out: Tensor = run.output
    name = type(network).__name__
    if out.dim() == 0 or len(out) != rows or not out.is_floating_point():
        raise ConfigError(f"{name} gives {list(out.shape)} of {out.dtype} for {rows} example{'s' * (rows > 1)}; "
                          f"outputs are floats [{rows}, ...]. Keep the axis of examples (x.squeeze(-1), not "
                          "x.squeeze()), and leave the loss to esper.")  # fmt: skip
    return out


def check_examples(network: nn.Module, slots: Sequence[str], x: Tensor, others: Tensor) -> None:
    """In evaluation, the results of an example depend neither on the other examples, nor on its place, nor on B.

    Where random numbers are drawn, the shapes alone are compared.
    """
    mixed = torch.cat((others[:2], x[1:2], others[3:]))  # x[1] in third place
    full, fewer, changed = (run_once(network, inputs) for inputs in (x, x[:-1], mixed))
    check_repeats(network, full.output, run_once(network, x).output)
    for slot in (*slots, None):
        of = f"slot {slot!r}" if slot else f"the output of {type(network).__name__}"
        h, fewer_h, changed_h = (
            check_slot(slot, run, len(inputs)) if slot else check_output(network, run, len(inputs))
            for run, inputs in ((full, x), (fewer, x[:-1]), (changed, mixed))
        )
        if not h.shape[1:] == fewer_h.shape[1:] == changed_h.shape[1:]:
            raise ConfigError(
                f"{of} is {list(h.shape)}, {list(fewer_h.shape)} and {list(changed_h.shape)} for inputs of "
                f"{len(x)}, {len(x) - 1} and {len(x)} examples; its shape must not depend on the values."
            )
        if not full.draws and not (near(h[:-1], fewer_h) and near(h[1], changed_h[2])):
            raise ConfigError(
                f"{of} for one example depends on the other examples in evaluation mode, so that measurements would "
                "depend on the batches; examples can be mixed in training alone, as nn.BatchNorm2d does."
            )
    check_output(network, run_once(network, x[:1]), 1)


def check_repeats(network: nn.Module, first: object, second: object) -> None:
    """Two passes over the same inputs, from the same weights, buffers and generators, gave the same outputs."""
    if isinstance(first, Tensor) and isinstance(second, Tensor) and not near(first, second):
        raise ConfigError(f"{type(network).__name__} gives {OWN_STATE}")


_TRIES = 32
"""Most passes in training until each slot was met, if a network leaves out layers at random."""


def check_training(network: nn.Module, slots: Sequence[str], x: Tensor) -> Pass:
    """In training: no state beside weights and buffers, buffers written in place, and a gradient at every slot.

    The pass in which it was found is returned.
    """
    name = type(network).__name__
    buffers = {path: (buffer, buffer.clone()) for path, buffer in network.named_buffers(remove_duplicate=False)}
    weights = {path for path, _ in network.named_parameters()}

    def run_with(seed: int) -> Pass:
        draw_for(dropout_layers(network), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
        with torch.no_grad():
            for buffer, value in buffers.values():
                buffer.copy_(value)
        return run_once(network, x, differentiable=slots, seed=seed)

    network.train()
    for seed in range(_TRIES):
        run = run_with(seed)
        if not run.draws or all(run.of(slot) for slot in slots):
            break
    for path in {path for path, _ in network.named_parameters()} ^ weights:
        raise ConfigError(f"parameter {path!r} of {name} is registered or removed by a forward pass in training, so "
                          "that it is not trained; register it in __init__.")  # fmt: skip
    for path, buffer in network.named_buffers(remove_duplicate=False):
        old, value = buffers.get(path, (None, buffer))
        if buffer is not old:
            raise ConfigError(f"buffer {path!r} of {name} is replaced or registered by the forward pass; register it "
                              "in __init__, and write into it (copy_, mul_).")  # fmt: skip
        if not buffer.is_floating_point() and not torch.equal(buffer, value):
            raise ConfigError(f"buffer {path!r} of {name} is {buffer.dtype} and changed by the forward pass, but all "
                              "hosts share buffers of whole numbers; register it as floats.")  # fmt: skip
    features = [check_slot(slot, run, len(x)) for slot in slots]
    out = check_output(network, run, len(x))
    for slot, grad in zip(slots, _gradients(network, slots, features, out), strict=True):
        if grad is None:
            found = "the module is unused or detached" if run.of(slot)[0].grad else (
                "it lies within torch.no_grad(), and not at the end of it; choose a slot behind it"
            )  # fmt: skip
            raise ConfigError(f"no gradient flows from the output of {name} to slot {slot!r}, so a seed there could "
                              f"not learn: {found}.")  # fmt: skip
    again = list[object]()
    refuse_counters(name, network, lambda: again.append(run_with(seed).output))
    check_repeats(network, run.output, again[0])  # last, because it writes into the buffers
    with torch.no_grad():
        evaluated = run_once(network.eval(), x).output
    if out.shape != evaluated.shape:
        raise ConfigError(
            f"{name} gives outputs {list(out.shape)} in training and {list(evaluated.shape)} in evaluation for "
            f"{len(x)} examples; choose what both have with outputs=, e.g. outputs=lambda out: out[0]."
        )
    return run


def _gradients(network: nn.Module, slots: Sequence[str], features: list[Tensor], out: Tensor) -> list[Tensor | None]:
    """The gradient of the outputs with respect to the features of each slot, None where none flows."""
    name, again = type(network).__name__, list[str]()
    keyed = [path for path, layer in network.named_modules() if isinstance(layer, Dropout) and layer.p > 0.0]
    hooks = [
        network.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: again.append(path))
        for path in (*slots, *keyed)
    ]
    for h in features:
        if h.requires_grad:
            h.retain_grad()
    try:
        if out.requires_grad:
            out.sum().backward()
    except RuntimeError as error:
        if not again:
            raise ConfigError(f"the backward pass of {name} fails: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        network.zero_grad(set_to_none=True)
    if again:
        raise ConfigError(
            f"activation checkpointing (torch.utils.checkpoint) of {name} computes {again[0]!r} again in the backward "
            "pass, where a seed would be missing or dropout draw another mask; leave that module out of it, or "
            "switch it off."
        )
    return [h.grad for h in features]


def check_binding(network: nn.Module, again: nn.Module, x: Tensor) -> None:
    """The network runs and trains on weights that it is given; `again` is the same network with other weights."""
    name = type(network).__name__
    template, params, buffers = Template(again.eval()), dict(network.named_parameters()), dict(network.named_buffers())
    row, state = template.parameters.pack(params).requires_grad_(), template.buffers.pack(buffers)

    def run(*, training: bool) -> Tensor:
        template.train(training)
        template.bind(row, state, Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
        with seeded_generators(0), torch.set_grad_enabled(training):
            return template(x)

    if not near(run(training=False), run_once(network, x).output):
        raise ConfigError(
            f"{name} keeps references to its weights beside its parameters (e.g. in a list), so that it cannot run "
            "with the weights of another host; read them from their modules in forward."
        )
    try:
        outputs = run(training=True)
        if outputs.requires_grad:  # not where the whole network is frozen
            outputs.sum().backward()
    except RuntimeError as error:
        raise ConfigError(
            f"{name} cannot be trained with the weights of all its layers in one tensor: {error} A forward pass must "
            "not write into weights, as clamp_ and max_norm do; compute with a changed copy instead."
        ) from error


_ROWS = 4


@dataclass(frozen=True, kw_only=True)
class ModuleFacts:
    """What the probe found, for one example.

    Attributes:
        points: the slots in action order. shapes: of the output of each slot's module.
        inputs: shape of an input. dtype: of that. shares_prefix: of each slot (see `Host.shares_prefixes`).
        edited: of each slot, whether its output is edited in place behind it.
        built_by_pass: whether a first forward pass finds shapes or adds layers (nn.LazyLinear). global_rng: see `Host`.
        causal: whether no output depends on later positions.
        own_frozen: paths of the frozen parameters that each host has a copy of.
        weights: path and shape of each parameter and buffer.
    """

    family: HostFamily
    points: tuple[InjectionPoint, ...]
    shapes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    num_params: int
    largest_activation: int
    shares_prefix: tuple[bool, ...]
    causal: bool
    dtype: torch.dtype
    edited: tuple[bool, ...]
    built_by_pass: bool
    global_rng: bool
    own_frozen: tuple[str, ...]
    weights: tuple[tuple[str, tuple[int, ...]], ...]


def new_network(model: Model, example: Arguments | None = None) -> nn.Module:
    """A network of the user's with keyed dropout and without batch counters.

    With an `example` of its arguments it runs once in evaluation first, so that lazy layers find their shapes. Raises
    ConfigError if `model` gives no module, or a normalization that needs its counter.
    """
    try:
        network = model()
    except ConfigError:
        raise  # says already what is wrong with the weights
    except Exception as error:  # any error of the user's code
        out = "; give its arguments: model=lambda: Net(...)" if "argument" in str(error) else ""
        raise ConfigError(f"the model cannot be built: {in_words(error)}{out}") from error
    if not isinstance(network, nn.Module):
        raise ConfigError(f"the model gives a {type(network).__name__}; it must give an nn.Module.")
    modes = {layer: layer.training for layer in network.modules()}
    if not isinstance(network.train(network.training), nn.Module):
        raise ConfigError(f"train() of {type(network).__name__} does not give the network; end it with return self.")
    for layer, mode in modes.items():
        layer.training = mode
    if example is not None:
        modes = {layer: layer.training for layer in network.modules()}
        with torch.no_grad():
            try:
                network.eval()(*example[0], **example[1])
            except Exception as error:  # any error of the user's code
                raise ConfigError(
                    f"the first pass of {type(network).__name__}, in which lazy layers find their shapes, fails on "
                    f"inputs like the example: {in_words(error)}"
                ) from error
        for layer in network.modules():
            layer.training = modes.get(layer, True)
    network = prepared(network)
    drop_batch_counters(network)
    return network


def probe(model: Model, slots: Sequence[str], example: Tensor, interface: Interface) -> ModuleFacts:
    """Run the network of `model` on inputs like `example` [B, ...]; raises ConfigError if it cannot be a host."""
    _check_model(model)
    x, others = probe_inputs(example, interface)
    first = interface.arguments(x[:1])

    def built(example: Arguments | None) -> nn.Module:
        return interface.attach(deterministic_build(lambda: new_network(model, example)))

    network, again = built(None), built(None)
    _check_padding(deterministic_build(model), network, x, interface)
    if built_by_pass := _is_built_by_pass(network, again, x):
        network, again = built(first), built(first)
        check_weights(network, again)
    check_paths(network, slots)
    disturb(network.eval())
    with torch.no_grad():
        check_examples(network, slots, x, others)
        run = run_once(network, x)
        shapes = [tuple(run.of(slot)[0].output.shape[1:]) for slot in slots]
        family = _family(slots, shapes)
        shares_prefix = tuple(not run.draws and _shares_prefix(network, slot, x) for slot in slots)
        causal = _is_causal(network, x, run.output, interface)
        edited = {slot for slot in slots if is_edited(slot, run)}
    own: tuple[str, ...] = ()
    if frozen_parameters(network):
        own = own_frozen(
            network, deterministic_build(lambda: new_network(model, first if built_by_pass else None), seed=1)
        )
    trained = check_training(network, slots, x)
    check_binding(network, again, x)
    return ModuleFacts(
        family=family,
        points=_points(network, slots, shapes, run),
        shapes=tuple(shapes),
        inputs=tuple(x.shape[1:]),
        num_params=count_params(network, ()),
        largest_activation=max(x.numel(), *(_largest(call.output) for call in run.calls)) // len(x),
        shares_prefix=shares_prefix,
        causal=causal,
        dtype=x.dtype,
        edited=tuple(slot in edited or is_edited(slot, trained) for slot in slots),
        built_by_pass=built_by_pass,
        global_rng=run.draws or trained.draws,
        own_frozen=own,
        weights=shapes_of_weights(network),
    )


def _points(
    network: nn.Module, slots: Sequence[str], shapes: Sequence[tuple[int, ...]], run: Pass
) -> tuple[InjectionPoint, ...]:
    order = [call.path for call in run.calls]
    return tuple(
        InjectionPoint(slot_id=slot, channels=shape[0] if len(shape) == 3 or transposed else shape[-1],
                       order=i, position=(order.index(slot) + 1) / len(order), transposed=transposed)
        for i, (slot, shape) in enumerate(zip(slots, shapes, strict=True))
        for transposed in (is_transposed(network, slot, run),)
    )  # fmt: skip


@torch.no_grad()
def _check_padding(plain: nn.Module, network: nn.Module, x: Tensor, interface: Interface) -> None:
    """The outputs are those of the plain network, whose nested tensors lose what is masked as padding."""
    if not any(getattr(layer, "use_nested_tensor", False) for layer in plain.modules()):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are a prototype
        outputs = interface.attach(plain.eval())(x)
    if not near(outputs, run_once(network.eval(), x).output):
        raise ConfigError(
            f"in evaluation nn.TransformerEncoder sets what is masked as padding to 0, in training it does not, and "
            f"outputs of {type(plain).__name__} depend on it; pool over other tokens alone, or build it with "
            "enable_nested_tensor=False."
        )


def _is_built_by_pass(network: nn.Module, again: nn.Module, x: Tensor) -> bool:
    """Whether a network has lazy layers, or gets further weights in its first forward pass; `again` is run.

    Raises ConfigError if the two builds do not fit each other.
    """
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        return True
    check_weights(network, again)
    with torch.no_grad():
        run_once(again.eval(), x)
    names, more = ({name for name, _ in (*of.named_parameters(), *of.named_buffers())} for of in (network, again))
    return names != more


def _check_model(model: Model) -> None:
    if isinstance(model, nn.Module) or not callable(model):
        raise ConfigError(
            f"the model is a {type(model).__name__}, but every host needs a network of its own; pass the class, or a "
            "function that builds and returns the network."
        )
    try:
        inspect.signature(model).bind()
    except TypeError as error:
        raise ConfigError(
            f"the model cannot be called without arguments: {error}; pass a function that builds the network, e.g. "
            "functools.partial(Network, 10)."
        ) from error


def _family(slots: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> HostFamily:
    """The family of features [C, H, W], or of sequences [T, D] and vectors [D]."""
    families = {
        slot: HostFamily.CNN if len(of) == 3 else HostFamily.TRANSFORMER for slot, of in zip(slots, shapes, strict=True)
    }
    if len(set(families.values())) > 1:
        found = ", ".join(f"{slot} {list(shape)}" for slot, shape in zip(slots, shapes, strict=True))
        raise ConfigError(
            f"the slots give features of two families: {found}; choose slots that are all [C, H, W], or all [T, D] or "
            "[D], because blueprints belong to one family."
        )
    return families[slots[0]]


def _shares_prefix(network: nn.Module, slot: str, x: Tensor) -> bool:
    """Whether the network continues with twice the rows behind a slot, as if they were examples of their own."""

    def run(change: Callable[[Tensor], Tensor]) -> Tensor:
        with replaced_outputs(network, lambda _, h: change(h), [slot]):
            out: Tensor = run_once(network, x).output
        return out

    def changed(h: Tensor) -> Tensor:
        return 0.5 * h + 0.1

    try:
        together = run(lambda h: torch.cat((h, changed(h))))
    except ConfigError:
        return False  # something from before the slot has the old number of rows
    return near(together, torch.cat((run(lambda h: h), run(changed))))


def _is_causal(network: nn.Module, x: Tensor, outputs: Tensor, interface: Interface) -> bool:
    """Whether outputs [B, T, ...] of inputs [B, T, ...] keep their first half where those change in the second half."""
    tensors, form = flatten(x if interface.inputs is None else interface.inputs.unpack(x))
    half = outputs.shape[1] // 2 if outputs.dim() > 1 else 0
    sequences = [of.dim() > 1 and of.shape[:2] == outputs.shape[:2] for of in tensors]
    if not any(sequences):
        return False
    others = [
        torch.cat((of[:, :half], of.roll(1, dims=0)[:, half:]), dim=1) if sequence else of
        for of, sequence in zip(tensors, sequences, strict=True)
    ]
    changed = unflatten(form, others)
    batch = changed if interface.inputs is None else interface.inputs.pack(changed)
    return near(run_once(network, batch).output[:, :half], outputs[:, :half])


def probe_inputs(example: Tensor, interface: Interface) -> tuple[Tensor, Tensor]:
    """Two batches of different inputs: those of the example, or others with its values if there are too few.

    The tensors of one example belong together, so several are drawn as they are. Raises ConfigError for no example.
    """
    if example.dim() == 0 or not example.numel():
        raise ConfigError(f"the example is {list(example.shape)}; it must be inputs [B, ...] as in the data.")
    if len(example) >= 2 * _ROWS:
        x, others = example[: 2 * _ROWS].cpu().clone().split(_ROWS)
        return x, others
    generator, values = torch.Generator().manual_seed(0), example.detach().cpu()
    shape = (2 * _ROWS, *example.shape[1:])
    if interface.inputs is None:
        drawn = values.flatten()[torch.randint(values.numel(), shape, generator=generator)]
    else:
        drawn = values[torch.arange(len(values)).repeat(2 * _ROWS)[: 2 * _ROWS]]
    if drawn.is_floating_point():
        scale = float(values.std(correction=0)) or 1.0
        drawn = drawn + scale * torch.randn(shape, generator=generator)
    return drawn[:_ROWS], drawn[_ROWS:]


@torch.no_grad()
def disturb(network: nn.Module) -> None:
    """Add small numbers to all trainable weights, because those that start at zero would hide things."""
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for p in network.parameters() if p.requires_grad):
        parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def _largest(output: Any) -> int:  # noqa: ANN401 -- whatever a module of the user's returns
    """Elements of the largest tensor in an output."""
    if isinstance(output, Tensor):
        return output.numel()
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return max((_largest(part) for part in parts), default=0)


@final
@dataclass(frozen=True, kw_only=True)
class ModuleHostSpec:
    """The network that `model` builds, with its slots; made by `of`."""

    model: Model
    facts: ModuleFacts
    interface: Interface = ONE_TENSOR

    @classmethod
    def of(
        cls, model: Model, slots: Sequence[str], example: Tensor, *, interface: Interface = ONE_TENSOR
    ) -> "ModuleHostSpec":
        """Probe the network of which `model`, a class, function or partial, gives a new one in every call.

        `slots` are paths of submodules, in action order. `example` is a batch [B, ...] as the interface takes it; the
        probe makes up some from its values if it has fewer than eight. Raises ConfigError if the network cannot be a
        host; the message says which module, and the way out.
        """
        if isinstance(slots, str) or not slots or len(set(slots)) < len(slots):
            raise ConfigError(f"slots is {slots!r}; it must be a list of different paths of submodules, at least one.")
        return cls(model=model, facts=probe(model, slots, example, interface), interface=interface)

    @property
    def family(self) -> HostFamily:
        """Decided by the number of axes of the features."""
        return self.facts.family

    def points(self) -> tuple[InjectionPoint, ...]:
        """All slots in the user's order."""
        return self.facts.points

    def num_params(self) -> int:
        """Number of parameters, frozen ones included; tied ones count once."""
        return self.facts.num_params

    def build(self, slot_ids: Iterable[str], example: Tensor) -> "ModuleHost":
        """A host with these slots enabled, for inputs like `example` [1, ...].

        Raises ConfigError for a slot that does not exist, or inputs of another shape than the probed ones.
        """
        if tuple(example.shape[1:]) != self.facts.inputs:
            raise ConfigError(
                f"the data have inputs {list(example.shape[1:])}, but the network was probed with "
                f"{list(self.facts.inputs)}; probe it with an example of the data."
            )
        return ModuleHost(self, slot_ids)


@final
class ModuleHost(Host):
    """The user's network, with dropout whose masks are keyed."""

    any_layout = True

    def __init__(self, spec: ModuleHostSpec, slot_ids: Iterable[str]) -> None:
        """A new network; raises ConfigError if a slot does not exist."""
        super().__init__()
        self.spec = spec
        self.enabled = enabled_points(spec.points(), slot_ids)
        self.family = spec.family
        self.largest_activation = spec.facts.largest_activation
        self.causal = spec.facts.causal
        self.shares_prefixes = all(spec.facts.shares_prefix[point.order] for point in self.enabled)
        self.global_rng = spec.facts.global_rng
        example = torch.zeros(1, *spec.facts.inputs, dtype=spec.facts.dtype)
        self.network = new_network(spec.model, self.arguments(example) if spec.facts.built_by_pass else None)
        check_unchanged(self.network, spec.facts.weights)
        as_buffers(self.network, spec.facts.own_frozen)
        self.frozen = tuple(f"network.{path}" for path in spec.facts.own_frozen)

    def features(self, point: InjectionPoint) -> tuple[int, ...]:
        """(C, H, W), or (T, D) with T = 1 for a vector."""
        shape = self.spec.facts.shapes[point.order]
        return (1, *shape) if len(shape) == 1 else shape[::-1] if point.transposed else shape

    def rebuild(self) -> "ModuleHost":
        """A host with a newly built network."""
        return ModuleHost(self.spec, [point.slot_id for point in self.enabled])

    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        """Outputs [B, ...] of a batch [B, ...]; `apply` runs once per enabled slot, in execution order.

        Raises ConfigError if this pass calls the slots otherwise than the probe found.
        """
        return self.collected(self.run(self.arguments(x), apply))

    def arguments(self, x: Tensor) -> Arguments:
        """See the module docstring."""
        return self.spec.interface.arguments(x)

    def collected(self, result: Any) -> Tensor:  # noqa: ANN401 -- whatever the network returns
        """See the module docstring."""
        return self.spec.interface.collected(self.network, result)

    def run(self, arguments: Arguments, apply: Apply) -> Any:  # noqa: ANN401
        """See the module docstring; raises ConfigError as `forward`."""
        args, kwargs = arguments
        met: list[str] = []
        trains = torch.is_grad_enabled()
        # by the shapes of the probe, because torch.fx cannot trace a test of the features
        vectors = {point.slot_id for point in self.enabled if len(self.spec.facts.shapes[point.order]) == 1}
        transposed = {point.slot_id for point in self.enabled if point.transposed}
        edited = {point.slot_id for point in self.enabled if self.spec.facts.edited[point.order]}

        def at_slot(slot_id: str, h: Tensor) -> Tensor:
            met.append(slot_id)
            # a network may run what is frozen under no_grad, but seeds learn
            guarded = trains and not torch.is_grad_enabled()
            with torch.enable_grad() if guarded else nullcontext():
                if slot_id in vectors:
                    out = apply(slot_id, h[:, None]).squeeze(1)
                elif slot_id in transposed:
                    out = apply(slot_id, h.transpose(1, 2)).transpose(1, 2)
                else:
                    out = apply(slot_id, h)
                # a seed needs what it got, so the layer that edits it gets a tensor of its own
                return out.clone() if slot_id in edited and out is not h else out

        order = self.execution_order()
        with replaced_outputs(self.network, at_slot, order):
            result = self.network(*args, **kwargs)
        left_out = set(order) - set(met) if self.global_rng else ()  # e.g. by stochastic depth
        if tuple(met) != tuple(slot for slot in order if slot not in left_out):
            raise ConfigError(
                f"a forward pass of {type(self.network).__name__} met the slots {', '.join(met) or 'not at all'}, but "
                f"the probe met {', '.join(order)}; the path through the network must not depend on the inputs."
            )
        return result
