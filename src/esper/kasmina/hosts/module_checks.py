"""Why a user's network cannot be a host: each check raises a ConfigError with what was found and the way out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts.module_pass import Pass, plain_pass, recorded_pass
from esper.kasmina.parameters.dropout import Draws, Dropout, Moment, draw_for, dropout_layers
from esper.kasmina.parameters.flat_layout import Template, buffer_layout, parameter_layout
from esper.kasmina.parameters.kinds import OWN_STATE
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.random import seeded_generators


def near(got: Tensor, want: Tensor) -> bool:
    """Equal shapes, and values up to the rounding of the largest one; NaN equals NaN."""
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    largest = max(1.0, float(want.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return torch.allclose(got, want, rtol=0.0, atol=1e-4 * largest, equal_nan=True)


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
    if not any(True for _ in network.parameters()):
        raise ConfigError(f"{name} has no parameters, so there is nothing to train; layers that are kept in a list "
                          "count only in an nn.ModuleList.")  # fmt: skip
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
        raise ConfigError(f"the module of slot {slot!r} {found} in a forward pass; a slot is the output of a module "
                          "that is called exactly once.")  # fmt: skip
    h = calls[0].output
    if not isinstance(h, Tensor):
        raise ConfigError(f"slot {slot!r} gives {_kind(h)}; seeds need a tensor: choose a submodule that returns one.")
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


def is_edited(slot: str, run: Pass) -> bool:
    """Whether the output of a slot is edited in place behind it, e.g. by nn.ReLU(inplace=True) or `+=`."""
    return any(not h.is_inference() and h._version != version for _, h, version, _ in run.of(slot))


def check_output(network: nn.Module, run: Pass, rows: int) -> Tensor:
    """The output of the network: one float tensor [rows, ...]."""
    out: Tensor = run.output
    name = type(network).__name__
    if out.dim() == 0 or len(out) != rows or not out.is_floating_point():
        raise ConfigError(f"{name} gives {list(out.shape)} of {out.dtype} for {rows} example{'s' * (rows > 1)}; "
                          f"outputs are floats [{rows}, ...], and the network computes no loss.")  # fmt: skip
    return out


def check_examples(network: nn.Module, slots: Sequence[str], x: Tensor, others: Tensor) -> None:
    """In evaluation, the results of an example depend neither on the other examples, nor on its place, nor on B.

    Where random numbers are drawn, the shapes alone are compared.
    """
    mixed = torch.cat((others[:2], x[1:2], others[3:]))  # x[1] in third place
    full, fewer, changed = (recorded_pass(network, inputs) for inputs in (x, x[:-1], mixed))
    check_repeats(network, full.output, plain_pass(network, x))
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
    check_output(network, recorded_pass(network, x[:1]), 1)


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
        return recorded_pass(network, x, differentiable=slots, seed=seed)

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
    check_repeats(network, run.output, run_with(seed).output)  # last, because it writes into the buffers
    with torch.no_grad():
        evaluated = plain_pass(network.eval(), x)
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

    if not near(run(training=False), plain_pass(network, x)):
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


def _kind(found: object) -> str:
    return f"a {type(found).__name__}"
