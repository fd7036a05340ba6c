"""The optimizer of a task, by the names and values of `torch.optim`."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias

import torch

from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError

AnyOptimizer: TypeAlias = str | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer]
"""A name, a class of `torch.optim`, or `functools.partial` of one with some values."""
_CLASSES: Mapping[Literal["adamw", "adam", "sgd"], type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD
}  # fmt: skip
_OF_A_NAME: Mapping[str, Mapping[str, float]] = {"sgd": {"lr": 0.02, "momentum": 0.9}}
"""Where the defaults of a name are not those of the class."""
_NUMBERS = ("lr", "momentum", "weight_decay", "eps")
_UNUSED = {"momentum": 0.0, "eps": 1e-8, "betas": (0.0, 0.0)}


def optimizer_of(optimizer: AnyOptimizer, given: Mapping[str, Any], clip: float | None) -> OptimizerSpec:
    """The specification that trains a host as this optimizer does: all parameters are decayed.

    Args:
        optimizer: what the user named.
        given: values by the names of `torch.optim`, which replace those of `optimizer`; None means not given.
        clip: limit of the L2 norm of the gradient of the network, and of each seed; None for no clipping.

    Raises:
        ConfigError: an optimizer or a value that cannot be had exactly.
    """
    name = optimizer if isinstance(optimizer, str) else None
    found, own = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    kind = next((known for known, of in _CLASSES.items() if name == known or found is of), None)
    if kind is None or (isinstance(optimizer, partial) and optimizer.args):
        raise ConfigError(
            f"optimizer is {optimizer!r}; give one of {', '.join(map(repr, _CLASSES))}, the class in torch.optim, or "
            "functools.partial of the class with values by name."
        )
    parameters = inspect.signature(_CLASSES[kind]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    changed = {**own, **{key: value for key, value in given.items() if value is not None}}
    for key, value in changed.items():
        if key not in defaults:
            raise ConfigError(f"{key} is given, but {kind} has no {key}; leave it out, or use another optimizer.")
        if key not in (*_NUMBERS, "betas") and value != defaults[key]:
            raise ConfigError(f"{kind} with {key}={value!r} is not available here; leave {key} out.")
    values = {**_UNUSED, **defaults, **_OF_A_NAME.get(name or "", {}), **changed}
    lr, momentum, decay, eps = (_number(key, values[key]) for key in _NUMBERS)
    if not lr > 0.0:
        raise ConfigError(f"lr is {lr}; it must be above 0.")
    betas = values["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}; give two numbers, such as (0.9, 0.999).")
    return OptimizerSpec(
        kind=kind,
        host_lr=lr,
        seed_lr=lr,
        momentum=momentum,
        sgd_weight_decay=decay if kind == "sgd" else 0.0,
        betas=(_number("betas[0]", betas[0]), _number("betas[1]", betas[1])),
        eps=eps,
        adamw_weight_decay=0.0 if kind == "sgd" else decay,
        decay_vectors=True,
        grad_clip=math.inf if clip is None else _number("clip", clip),
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} of the optimizer is {value!r}; it must be a number.")
    return float(value)
