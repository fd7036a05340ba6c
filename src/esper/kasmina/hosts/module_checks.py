"""Why a user's network cannot be a host: each check raises a ConfigError with what was found and the way out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts.module_pass import Pass, plain_pass, recorded_pass
from esper.kasmina.parameters.attention import KeyedAttention
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers
from esper.kasmina.parameters.flat_layout import Template, buffer_layout, parameter_layout
from esper.leyline.errors import ConfigError, nearest


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
            raise ConfigError(f"{path!r} of {name} is lazy and has no shape yet; give its layer the number of inputs.")
        if tensor.device.type != "cpu":
            raise ConfigError(f"{path!r} of {name} is on {tensor.device}; build the network on the CPU, from where it "
                              "is moved to the device of the run.")  # fmt: skip
    if not any(True for _ in network.parameters()):
        raise ConfigError(f"{name} has no parameters, so there is nothing to train; layers that are kept in a list "
                          "count only in an nn.ModuleList.")  # fmt: skip
    parameter_layout(network)
    buffer_layout(network)
    for path, tensor in ours.items():
        if not tensor.isfinite().all():
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
    if h._version != calls[0].version:
        raise ConfigError(
            f"the output of slot {slot!r} is edited in place after the slot, e.g. by nn.ReLU(inplace=True) or `+=`, "
            "while seeds still need it; use the operation that makes a new tensor, or a slot behind it."
        )
    return h


def check_output(network: nn.Module, run: Pass, rows: int) -> Tensor:
    """The output of the network: one float tensor [rows, ...]."""
    out, name = run.output, type(network).__name__
    if not isinstance(out, Tensor):
        raise ConfigError(f"{name} gives {_kind(out)}; an objective needs one tensor: wrap the network in a module "
                          "that returns it.")  # fmt: skip
    if out.dim() == 0 or len(out) != rows or not out.is_floating_point():
        raise ConfigError(f"{name} gives {list(out.shape)} of {out.dtype} for {rows} examples; outputs are floats "
                          f"[{rows}, ...], and the network computes no loss.")  # fmt: skip
    return out


def check_examples(network: nn.Module, slots: Sequence[str], x: Tensor, others: Tensor) -> None:
    """In evaluation, the results of an example depend neither on the other examples, nor on its place, nor on B."""
    mixed = torch.cat((others[:2], x[1:2], others[3:]))  # x[1] in third place
    full, fewer, changed = (recorded_pass(network, inputs) for inputs in (x, x[:-1], mixed))
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
        if not near(h[:-1], fewer_h) or not near(h[1], changed_h[2]):
            raise ConfigError(
                f"{of} for one example depends on the other examples in evaluation mode, so that measurements would "
                "depend on the batches; examples can be mixed in training alone, as nn.BatchNorm2d does."
            )


def check_training(network: nn.Module, slots: Sequence[str], x: Tensor) -> None:
    """In training: keyed randomness alone, buffers written in place, and a gradient at every slot."""
    name = type(network).__name__
    buffers = {path: (buffer, buffer.clone()) for path, buffer in network.named_buffers(remove_duplicate=False)}
    draw_for(dropout_layers(network), Draws(Moment(0), torch.zeros(1, dtype=torch.int64), 0))
    with torch.random.fork_rng(devices=[]):
        before = torch.get_rng_state()
        run = recorded_pass(network.train(), x, differentiable=slots)
        unkeyed = not torch.equal(torch.get_rng_state(), before)
    network.eval()
    if unkeyed:
        raise ConfigError(
            f"{name} draws from the global random generator in training, so that a host would depend on others; use "
            f"layers of nn.Dropout, whose masks are keyed{_attention_hint(network)}."
        )
    for path, buffer in network.named_buffers(remove_duplicate=False):
        old, value = buffers.get(path, (None, buffer))
        if buffer is not old or not (buffer.is_floating_point() or torch.equal(buffer, value)):
            raise ConfigError(
                f"buffer {path!r} of {name} is replaced or counted up by the forward pass; register it in __init__ as "
                "floats, and write into it (copy_, mul_)."
            )
    features = [check_slot(slot, run, len(x)) for slot in slots]
    out = check_output(network, run, len(x))
    grads = (
        torch.autograd.grad(out.sum(), features, allow_unused=True) if out.requires_grad else (None,) * len(features)
    )
    for slot, grad in zip(slots, grads, strict=True):
        if grad is None:
            raise ConfigError(f"no gradient flows from the output of {name} to slot {slot!r}, so a seed there could "
                              "not learn; the module is unused or detached.")  # fmt: skip


def check_binding(network: nn.Module, again: nn.Module, x: Tensor) -> None:
    """The network runs on weights that it is given; `again` is the same network with other weights."""
    template, params, buffers = Template(again.eval()), dict(network.named_parameters()), dict(network.named_buffers())
    template.bind(template.parameters.pack(params), template.buffers.pack(buffers))
    if not near(template(x), plain_pass(network, x)):
        raise ConfigError(
            f"{type(network).__name__} keeps references to its weights beside its parameters (e.g. in a list), so that "
            "it cannot run with the weights of another host; read them from their modules in forward."
        )


def _kind(found: object) -> str:
    return f"a {type(found).__name__}"


def _attention_hint(network: nn.Module) -> str:
    """The usual reason."""
    for path, layer in network.named_modules():
        if isinstance(layer, nn.MultiheadAttention) and layer.dropout > 0.0 and type(layer) is not KeyedAttention:
            return f", and set dropout=0.0 in the nn.MultiheadAttention {path!r}"
    return ""
