"""The initial distribution of weights, as a table: a centre and a spread per flat element.

    fresh = centre + spread * (2u - 1),   u uniform in [0, 1) from the counter-based stream
    fresh = centre + spread * z,          z standard normal, from the same u

One batched call draws the weights of any hosts, and those of a host do not depend on the others. The table is derived
from two builds of the module, under two seeds:

    equal in both                 a constant of the author               spread 0
    drawn by `uniform_`           linear, convolution, attention ...     half the interval of the draw
    drawn by `normal_`            an embedding, a transformer ...        the standard deviation of the draw
    otherwise                     e.g. `trunc_normal_`                   the module is built again for each host, under
                                                                         a seed of its own (`rebuilt`)

A constructor that draws other numbers (`if torch.rand(()) < 0.4:`, `torch.randn`, `random`, NumPy) may do anything with
them: then all weights are `rebuilt`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from esper.kasmina.parameters.layout import FlatLayout
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.random import generator_states, seeded_generators, to_uniform, word_rows
from esper.leyline.tensor_dataclass import tensor_dataclass, tree_map


@tensor_dataclass
class InitTable:
    """Each flat element is uniform in [centre - spread, centre + spread); padding is 0.

    Where `normal` is given, the elements that it marks are normal with standard deviation `spread`. `rebuilt` marks
    elements that are taken from a module built for one host instead.
    """

    spread: Float[Tensor, " P"]
    centre: Float[Tensor, " P"]
    rebuilt: Bool[Tensor, " P"]
    normal: Bool[Tensor, " P"] | None = None


def deterministic_build(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a module on the CPU, without a change of the global generators."""
    with seeded_generators(seed), torch.device("cpu"):
        return build()


class _Draw(NamedTuple):
    centre: float
    spread: float
    normal: bool
    values: Tensor
    of: Tensor


@contextmanager
def _recorded_draws() -> Iterator[list[_Draw]]:
    """Collects the results of `Tensor.uniform_` and `Tensor.normal_`, with which PyTorch initializes weights.

    Methods are replaced, because a dispatch mode imports the compiler of PyTorch: a second in each process.
    """
    draws: list[_Draw] = []
    inherited_uniform, inherited_normal = Tensor.uniform_, Tensor.normal_

    def record(draw: _Draw) -> None:
        # functions of `nn.init` may arrive twice, through the mode of `torch.device`
        if not draws or draws[-1].of is not draw.of or not torch.equal(draws[-1].values, draw.values):
            draws.append(draw)

    def uniform_(tensor: Tensor, low: float | int = 0.0, high: float | int = 1.0, **kwargs: Any) -> Tensor:  # noqa: ANN401
        out = inherited_uniform(tensor, low, high, **kwargs)
        record(_Draw(0.5 * (low + high), 0.5 * (high - low), False, out.detach().clone(), tensor))
        return out

    def normal_(tensor: Tensor, mean: float | int = 0.0, std: float | int = 1.0, **kwargs: Any) -> Tensor:  # noqa: ANN401
        out = inherited_normal(tensor, mean, std, **kwargs)
        record(_Draw(mean, std, True, out.detach().clone(), tensor))
        return out

    Tensor.uniform_, Tensor.normal_ = uniform_, normal_  # type: ignore[assignment, method-assign]
    try:
        yield draws
    finally:
        del Tensor.uniform_, Tensor.normal_


class Builds(NamedTuple):
    """The same module built under two seeds, and the draws of the first build.

    `hidden`: it has drawn numbers that are not the weights of a layer, on which anything may depend.
    """

    module: nn.Module
    other: nn.Module
    draws: list[_Draw]
    hidden: bool


def build_twice(build: Callable[[], nn.Module]) -> Builds:
    """The input of `init_table`."""
    with seeded_generators(0), torch.device("cpu"):
        with _recorded_draws() as draws:
            module = build()
        ended = generator_states()
    with seeded_generators(0):
        for draw in draws:
            again = torch.empty_like(draw.values)
            again.normal_() if draw.normal else again.uniform_()
        hidden = generator_states() != ended
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    hidden |= any(not isinstance(d.of, nn.Parameter) and d.of.untyped_storage().data_ptr() not in own for d in draws)
    return Builds(module, deterministic_build(build, seed=1), draws, hidden)


def init_table(builds: Builds, layout: FlatLayout, init: Mapping[str, float]) -> InitTable:
    """The table of a module, in the order of `layout` (P = layout.total); `init` are constants by name.

    Raises ConfigError if `init` names a parameter that the module does not have.
    """
    values, others = (
        {spec.name: module.get_parameter(spec.name).detach() for spec in layout.tensors} for module in builds[:2]
    )
    for name in init:
        if name not in values:
            kind = type(builds.module).__name__
            raise ConfigError(f"init names {name!r}, which is not a parameter of {kind}; {nearest(name, values)}")
    starts = {
        name: _Start(0.0, rebuilt=True) if builds.hidden else _start(value, others[name], builds.draws)
        for name, value in values.items()
    }
    starts |= {name: _Start(constant) for name, constant in init.items()}
    centre, spread, normal, rebuilt = (
        layout.pack({name: torch.zeros_like(value) + starts[name][part] for name, value in values.items()})
        for part in range(4)
    )
    any_normal = any(start.normal for start in starts.values())
    return InitTable(spread=spread, centre=centre, rebuilt=rebuilt > 0.0, normal=normal > 0.0 if any_normal else None)


class _Start(NamedTuple):
    """How one parameter starts."""

    centre: float | Tensor
    spread: float = 0.0
    normal: bool = False
    rebuilt: bool = False


def _start(value: Tensor, other: Tensor, draws: list[_Draw]) -> _Start:
    if torch.equal(value, other):
        return _Start(value)
    for draw in draws:
        if torch.equal(draw.values, value):
            return _Start(draw.centre, draw.spread, draw.normal)
    return _Start(0.0, rebuilt=True)


def fresh(table: InitTable, words: Int[Tensor, "N P"]) -> Float[Tensor, "N P"]:
    """Weights from 32-bit words, one per flat element."""
    drawn = to_uniform(words).mul_(2.0).sub_(1.0)
    if table.normal is not None:
        # the middles of the intervals of u, exact in float32, so that z is finite: at most 5.42
        normal = (drawn + 2.0**-24).erfinv_().mul_(math.sqrt(2.0))
        drawn = torch.where(table.normal, normal, drawn)
    return torch.addcmul(table.centre, table.spread, drawn)


_WORDS_AT_ONCE = 2**17
"""Weights are drawn in pieces of this many: words are int64, as much again is needed on the way to them, and all of it
should stay in the cache."""


def fresh_rows(
    table: InitTable,
    run_seed: int,
    stream: int,
    host: Int[Tensor, " N"],
    *,
    episode: int | Tensor = 0,
    t: int | Tensor = 0,
    slot: int | Tensor = 0,
    first_block: int = 0,
) -> Float[Tensor, "N P"]:
    """New weights [N, P] of the hosts with the global numbers `host`; the other arguments are ints or [N]."""
    length = table.centre.shape[-1]
    piece = max(_WORDS_AT_ONCE // len(host) // 4 * 4, 4)
    rows = table.centre.new_empty(len(host), length)
    for start in range(0, length, piece):
        block, end = first_block + start // 4, min(start + piece, length)
        words = word_rows(run_seed, stream, host, end - start, episode=episode, t=t, slot=slot, first_block=block)
        rows[:, start:end] = fresh(tree_map(lambda x, a=start, b=end: x[a:b], table), words)
    return rows
