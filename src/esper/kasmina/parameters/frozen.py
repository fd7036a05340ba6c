"""Frozen parameters (`requires_grad=False`) of a host: they have no gradient, no optimizer state and no decay.

equal in builds under two seeds               shared: one tensor for all hosts, a parameter of the module that runs
drawn at random                               each host's own: registered as buffers, which have a row per host
beside trained weights or running statistics  each host's own as well: a stacked layer has rows alone
"""

from collections.abc import Iterable
from hashlib import sha256

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from esper.leyline.errors import ConfigError


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
    for layer, leaf in _places(module, paths):
        value = layer._parameters.pop(leaf)
        assert value is not None
        layer._buffers[leaf] = value.detach()


def _places(module: nn.Module, paths: Iterable[str]) -> Iterable[tuple[nn.Module, str]]:
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        yield module.get_submodule(owner), leaf


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


def refuse_frozen(of: str, module: nn.Module) -> None:
    """Raise ConfigError if a parameter is frozen."""
    for name in frozen_parameters(module):
        raise ConfigError(f"parameter {name!r} of {of} is frozen (requires_grad=False), and seeds are trained as a "
                          "whole; register constants as buffers.")  # fmt: skip
