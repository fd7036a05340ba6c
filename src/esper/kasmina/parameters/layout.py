"""The tensors of a module as one flat row, so that the modules of many hosts are one matrix.

    layout    | conv.weight ....... | norm.weight .. pad | norm.bias .. pad |      one row = one module
    rows      host 0  [P]
              host 1  [P]        optimizer, clipping, initialization, snapshots: plain operations on [N, P]

A `Template` is bound to a row and then called. Every tensor starts at a multiple of 16 floats (64 bytes), so that
kernels see aligned memory. Frozen parameters (`requires_grad=False`) of a host have no gradient and are in no row:

    equal in builds under two seeds               shared: one tensor for all hosts, a parameter of the module that runs
    drawn at random                               each host's own: registered as buffers, which have a row per host
    beside trained weights or running statistics  each host's own as well: a stacked layer has rows alone

Shape legend: N = rows, P = padded length of a row of parameters, Q = the same for buffers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.kasmina.parameters.dropout import Draws, draw_for, dropout_layers
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import tensor_dataclass

ALIGNMENT = 16
"""Floats; 64 bytes."""


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies in a flat row.

    Attributes:
        name: dotted path in the module, e.g. "conv.weight". aliases: further paths of the same (tied) tensor.
        offset, numel: the slice [offset, offset + numel) of the row; unused floats may follow. part: index in `sizes`.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    offset: int
    numel: int
    part: int


@tensor_dataclass
class FlatLayout:
    """All tensors of one kind (parameters or buffers) of a module, in the order of the module.

    `sizes` are those of the tensors and of the padding between them. `total` counts padding, `num_params` does not.
    `segment_ids` holds the index of each element's tensor (their number for padding); `matrix_mask` marks elements of
    tensors with two or more axes, which decoupled decay applies to.
    """

    tensors: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]
    total: int
    num_params: int
    segment_ids: Int[Tensor, " P"]
    matrix_mask: Bool[Tensor, " P"]
    padding_mask: Bool[Tensor, " P"]

    @torch.no_grad()
    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """New rows [*rows, P] from tensors [*rows, *shape] by name; padding is 0, and no gradient flows back."""
        if not self.tensors:
            return torch.zeros(0)
        first = self.tensors[0]
        lead = tensors[first.name].shape[: tensors[first.name].dim() - len(first.shape)]
        flat = tensors[first.name].new_zeros((*lead, self.total))
        for name, view in self.unpack(flat).items():
            view.copy_(tensors[name])
        return flat

    def split(self, flat: Float[Tensor, "*R P"]) -> tuple[Tensor, ...]:
        """The same views in the order of the layout, by one split, whose backward pass is one concatenation.

        Those of one row share their version counter: what writes into them in place uses their `data`, or it would
        invalidate what autograd has saved of the others.
        """
        if not self.tensors:
            return ()
        parts, lead = flat.split_with_sizes(self.sizes, dim=-1), flat.shape[:-1]
        shaped = [(parts[s.part], s.shape) for s in self.tensors]
        return tuple([x if len(shape) == 1 else x.view((*lead, *shape) if lead else shape) for x, shape in shaped])

    def unpack(self, flat: Float[Tensor, "*R P"]) -> dict[str, Tensor]:
        """Views [*rows, *shape] into rows [*rows, P], by name."""
        lead = flat.shape[:-1]
        return {s.name: flat[..., s.offset : s.offset + s.numel].view((*lead, *s.shape)) for s in self.tensors}


def parameter_layout(module: nn.Module) -> FlatLayout:
    """Layout of all parameters but frozen ones, which all rows share; raises ConfigError if one is not float32."""
    for name, parameter in module.named_parameters():
        if parameter.dtype != torch.float32:
            out = "build it so, or call .float(), and convert in forward where the network computes in another type"
            if parameter.is_complex():
                out = "let it be two, and call torch.complex(real, imag) in forward"
            raise ConfigError(f"parameter {name!r} is {parameter.dtype}, but parameters must be float32; {out}.")
    return _layout((name, p) for name, p in module.named_parameters(remove_duplicate=False) if p.requires_grad)


def buffer_layout(module: nn.Module) -> FlatLayout:
    """Layout of the buffers of floats; others are constants that all rows share. Raises ConfigError as above."""
    buffers = [(name, b) for name, b in module.named_buffers(remove_duplicate=False) if b.is_floating_point()]
    for name, buffer in buffers:
        if buffer.dtype != torch.float32:
            raise ConfigError(
                f"buffer {name!r} is {buffer.dtype}, but buffers of floats must be float32; register it so, and "
                "convert it in forward."
            )
    return _layout(buffers)


def _layout(named: Iterable[tuple[str, Tensor]]) -> FlatLayout:
    paths: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        tensors.setdefault(id(tensor), tensor)
        paths.setdefault(id(tensor), []).append(name)
    specs, sizes, owners, offset = list[TensorSpec](), list[int](), list[int](), 0
    for index, (key, tensor) in enumerate(tensors.items()):
        numel, (name, *aliases), shape = tensor.numel(), paths[key], tuple(tensor.shape)
        specs.append(
            TensorSpec(name=name, aliases=tuple(aliases), shape=shape, offset=offset, numel=numel, part=len(sizes))
        )
        padding = -numel % ALIGNMENT
        sizes += [numel, padding] if padding else [numel]
        owners += [index, len(tensors)] if padding else [index]
        offset += numel + padding
    segment_ids = torch.tensor(owners, dtype=torch.int64).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    return FlatLayout(
        tensors=tuple(specs),
        sizes=tuple(sizes),
        total=offset,
        num_params=sum(spec.numel for spec in specs),
        segment_ids=segment_ids,
        matrix_mask=torch.tensor([*(len(spec.shape) >= 2 for spec in specs), False])[segment_ids],
        padding_mask=segment_ids == len(specs),
    )


def drop_batch_counters(module: nn.Module) -> None:
    """Remove `num_batches_tracked` from every normalization layer, in place.

    All rows would share the counter, and it costs an operator per layer and batch. Raises ConfigError if a layer
    averages cumulatively (momentum None), which needs it.
    """
    for name, layer in module.named_modules():
        if layer._buffers.get("num_batches_tracked") is None:
            continue
        if getattr(layer, "momentum", None) is None:
            raise ConfigError(f"{name or type(layer).__name__} has momentum=None; give it a number such as 0.1.")
        layer._buffers["num_batches_tracked"] = None


class _BoundModule:
    """A module that runs on rows of parameters, and the places of its own tensors in a row."""

    def __init__(self, module: nn.Module, parameters: FlatLayout, buffers: FlatLayout) -> None:
        module.train(module.training)  # a network may keep some of its layers in evaluation mode
        self.module, self.dropouts = module, dropout_layers(module)
        self.shared = frozen_parameters(module)
        """Frozen parameters, which all rows share, by path."""
        self.parameters, self.buffers = parameters, buffers
        self._parameter_places = _places(module, parameters, "_parameters")
        self._buffer_places = _places(module, buffers, "_buffers")

    def assign(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        """Put tensors into the places of those of the module."""
        for tensors, places in ((parameters, self._parameter_places), (buffers, self._buffer_places)):
            for tensor, own in zip(tensors, places, strict=True):
                for table, leaf in own:
                    table[leaf] = tensor

    def train(self, mode: bool) -> None:
        """Set train or eval mode, unless it is set already."""
        if self.module.training != mode:
            self.module.train(mode)

    def __call__(self, *args: Any) -> Tensor:  # noqa: ANN401 -- the arguments of the module
        """Run the module with the bound tensors."""
        out: Tensor = self.module(*args)
        return out


@final
class Template(_BoundModule):
    """A module without weights of its own, which runs on one row of parameters. It owns the module.

    The rows are bound, not copied: gradients flow to the row, and buffers that a layer updates in place (running
    statistics) are updated in the row. A layer that replaces a buffer instead of writing into it is not supported.
    """

    def __init__(self, module: nn.Module, *, global_rng: bool = False) -> None:
        """Move `module` to its device first; batch counters are removed from it.

        `global_rng` says whether it draws from the global generators, which are then seeded by what `bind` gets.
        """
        drop_batch_counters(module)
        super().__init__(module, parameter_layout(module), buffer_layout(module))
        self.global_rng = global_rng
        self._draws: Draws | None = None

    @property
    def draws(self) -> bool:
        """Whether it needs random numbers."""
        return self.global_rng or bool(self.dropouts)

    def __call__(self, *args: Any) -> Tensor:  # noqa: ANN401 -- the arguments of the module
        """Run the module on the bound row."""
        if not self.global_rng:
            return super().__call__(*args)
        assert self._draws is not None, "a module that draws is bound with its random numbers"
        with self._draws.seeded(self._device):
            return super().__call__(*args)

    def bind(self, flat_row: Float[Tensor, " P"], buffer_row: Float[Tensor, " Q"], draws: Draws | None = None) -> None:
        """Let the module use these parameters, buffers and random numbers until the next call of `bind`.

        One split for the whole row: its backward is one concatenation, so a row that is a leaf with a preset `.grad`
        (a row of a matrix of gradients) receives its gradient by one addition in place.
        """
        self._draws, self._device = draws, flat_row.device
        draw_for(self.dropouts, draws)
        self.assign(self.parameters.split(flat_row), (x.data for x in self.buffers.split(buffer_row)))


@final
class StackedTemplate(_BoundModule):
    """A stacked module (see `stacking`), which runs on several rows at once.

    It has the paths and the layouts of the module for one host, but its layers expect weights [G, *shape]; rows of
    examples come as [B * G, ...] with the host as the fastest index.
    """

    def share(self, tensors: Mapping[str, Tensor]) -> None:
        """Run on these frozen parameters instead of copies of them."""
        for path, tensor in tensors.items():
            owner, _, leaf = path.rpartition(".")
            self.module.get_submodule(owner)._parameters[leaf] = tensor  # type: ignore[assignment]

    def views(self, rows: Float[Tensor, "G P"]) -> tuple[Tensor, ...]:
        """The parameters [G, *shape] in these rows, to `assign`: views without gradient history, made once per pass."""
        return self.parameters.split(rows.detach())

    def buffer_views(self, rows: Float[Tensor, "G Q"]) -> tuple[Tensor, ...]:
        """The same for buffers, which a pass may write in place."""
        return tuple(x.data for x in self.buffers.split(rows.detach()))


def _places(module: nn.Module, layout: FlatLayout, kind: str) -> list[list[tuple[dict[str, Any], str]]]:
    """The tables and keys that hold each tensor of a layout."""
    return [
        [
            (getattr(module.get_submodule(path), kind), leaf)
            for path, _, leaf in (name.rpartition(".") for name in (spec.name, *spec.aliases))
        ]
        for spec in layout.tensors
    ]


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Those of a module that is not bound to a row, by each of their paths."""
    return {name: p for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}


def own_frozen(module: nn.Module, other: nn.Module) -> tuple[str, ...]:
    """Paths of the frozen parameters that each host needs a copy of; `other` was built under another seed."""
    frozen, others = frozen_parameters(module), frozen_parameters(other)
    own = {id(p) for name, p in frozen.items() if not torch.equal(p, others[name])}
    found = -1
    while found != len(own):  # a tied parameter carries its kind from one layer to another
        found = len(own)
        for layer in module.modules():
            weights = list(layer.parameters(recurse=False))
            if _has_rows(layer) or any(id(p) in own for p in weights):
                own |= {id(p) for p in weights if not p.requires_grad}
    return tuple(name for name, p in frozen.items() if id(p) in own)


def _has_rows(layer: nn.Module) -> bool:
    """Whether something of a layer differs between hosts; normalization over examples does, even without weights."""
    floats = any(b.is_floating_point() for b in layer.buffers(recurse=False))
    return floats or isinstance(layer, _BatchNorm) or any(p.requires_grad for p in layer.parameters(recurse=False))


def as_buffers(module: nn.Module, paths: Iterable[str]) -> None:
    """Make these parameters buffers, in place."""
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        layer = module.get_submodule(owner)
        layer._buffers[leaf] = layer.get_parameter(leaf).detach()
        del layer._parameters[leaf]


def count_params(module: nn.Module, paths: Iterable[str]) -> int:
    """Number of parameters, with those that `as_buffers` has moved; tied ones count once."""
    moved = {b.data_ptr(): b.numel() for b in map(module.get_buffer, paths)}
    return sum(p.numel() for p in module.parameters()) + sum(moved.values())


def digest(module: nn.Module) -> Tensor | None:
    """A number, int64, that tells whether hosts share the same frozen parameters; None where they share none."""
    shared = frozen_parameters(module)
    if not shared:
        return None
    found = sha256()
    for name, value in shared.items():
        found.update(name.encode() + value.detach().numpy().tobytes())
    return torch.tensor(int.from_bytes(found.digest()[:8], signed=True))


def check_shared(module: nn.Module, other: nn.Module) -> None:
    """Raise ConfigError if a frozen parameter of a host is random; `other` was built under another seed."""
    others: dict[str, Tensor] = dict(other.named_parameters())
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad and not torch.equal(parameter, others[name]):
            raise ConfigError(
                f"parameter {name!r} of {type(module).__name__} is frozen and drawn at random, but all hosts share "
                "what is frozen; register it as a buffer, which each host has its own copy of."
            )


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Raises ConfigError if a parameter has a hook of its own, which weights in rows of all hosts would leave out."""
    for name, weight in module.named_parameters():
        if weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"parameter {name!r} of {type(module).__name__} has a gradient hook (register_hook or "
                "register_post_accumulate_grad_hook), which would not run; write what it does into the forward pass, "
                "e.g. (w * mask + (w * (1 - mask)).detach()) for a gradient that is masked."
            )


def refuse_counters(of: str, module: nn.Module, run: Callable[[], object]) -> None:
    """Raise ConfigError if a number or text that a layer has as an attribute changes in a pass, `run`.

    Let one pass come first: what it alone sets, as a length that is cached, does no harm.
    """
    before = _attributes(module)
    run()
    for path, attribute in (key for key, value in _attributes(module).items() if value != before.get(key)):
        raise ConfigError(
            f"attribute {attribute!r} of {path or of} changes in every forward pass in training, but what is beside "
            "weights and buffers is not kept for each host; make it a buffer of floats that is written in place."
        )


def _attributes(module: nn.Module) -> dict[tuple[str, str], str]:
    """The numbers and texts that layers have as attributes, by path and name."""
    return {
        (path, name): repr(value)
        for path, layer in module.named_modules()
        for name, value in vars(layer).items()
        if isinstance(value, int | float | str) and name != "training"
    }


def refuse_frozen(of: str, module: nn.Module) -> None:
    """Raise ConfigError if a parameter is frozen."""
    for name in frozen_parameters(module):
        raise ConfigError(f"parameter {name!r} of {of} is frozen (requires_grad=False), and seeds are trained as a "
                          "whole; register constants as buffers.")  # fmt: skip
