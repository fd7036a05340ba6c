"""How new weights start, as data: a centre and a bound per flat element.

    fresh = centre + bound * (2u - 1),   u uniform in [0, 1) from the counter-based stream

Data instead of code, so that the weights of any subset of hosts are drawn by one batched call, and those of one host do
not depend on which others are drawn with it.
"""

import math
from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from esper.kasmina.stacking import FlatLayout
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.random import to_uniform, word_rows
from esper.leyline.record import record

_BUILD_SEED = 0


@record
class InitTable:
    """Start of each flat element: uniform in [centre - bound, centre + bound); padding starts (and stays) at 0."""

    bound: Float[Tensor, "*R P"]
    centre: Float[Tensor, "*R P"]


def deterministic_build(build: Callable[[], nn.Module]) -> nn.Module:
    """Build the same module on the CPU each time, and leave the global generators as they were."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would also seed the generators of accelerators, which are not forked here.
        torch.default_generator.manual_seed(_BUILD_SEED)
        return build()


def init_table(module: nn.Module, layout: FlatLayout, birth: Mapping[str, float]) -> InitTable:
    """The table of a module built by `deterministic_build`, in the order of `layout` (P = layout.total).

    Parameters named in `birth` start at that constant; weights and biases of `nn.Linear` and `nn.Conv2d` are drawn from
    U(-1/sqrt(fan_in), 1/sqrt(fan_in)); all others (norms, scales, layers of other kinds) start as `module` has them.

    Raises:
        ConfigError: `birth` names a parameter that the module does not have.
    """
    values = {spec.name: module.get_parameter(spec.name).detach() for spec in layout.tensors}
    for name in birth:
        if name not in values:
            raise ConfigError(
                f"birth names {name!r}, which is no parameter of {type(module).__name__}; {nearest(name, values)}"
            )
    constant = {name: (0.0, centre) for name, centre in birth.items()}
    drawn = {name: (bound, 0.0) for name, bound in _uniform_bounds(module).items()}
    bounds, centres = {}, {}
    for name, value in values.items():
        rule = constant.get(name) or drawn.get(name)
        bounds[name] = torch.full_like(value, rule[0]) if rule else torch.zeros_like(value)
        centres[name] = torch.full_like(value, rule[1]) if rule else value
    return InitTable(bound=layout.pack(bounds), centre=layout.pack(centres))


def _uniform_bounds(module: nn.Module) -> dict[str, float]:
    """1/sqrt(fan_in) of every parameter that belongs to a linear or a 2d convolution layer."""
    bounds: dict[str, float] = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            fan_in = math.prod(layer.weight.shape[1:])
            prefix = f"{path}." if path else ""
            bounds |= {prefix + name: 1.0 / math.sqrt(fan_in) for name, _ in layer.named_parameters(recurse=False)}
    return bounds


def fresh(table: InitTable, words: Int[Tensor, "*R P"]) -> Float[Tensor, "*R P"]:
    """Weights from 32-bit words, one per flat element; a table without leading axes serves all rows."""
    return torch.addcmul(table.centre, table.bound, to_uniform(words).mul_(2.0).sub_(1.0))


def fresh_rows(
    table: InitTable,
    run_seed: int,
    stream: int,
    host: Int[Tensor, " N"],
    *,
    episode: int | Tensor = 0,
    t: int | Tensor = 0,
    slot: int | Tensor = 0,
) -> Float[Tensor, "N P"]:
    """New weights [N, P] of the hosts with the global numbers `host`; the other arguments are ints or [N]."""
    length = table.bound.shape[-1]
    return fresh(table, word_rows(run_seed, stream, host, length, episode=episode, t=t, slot=slot))
