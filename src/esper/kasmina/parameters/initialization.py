"""The initial distribution of weights, as a table: a centre and a bound per flat element.

    fresh = centre + bound * (2u - 1),   u uniform in [0, 1) from the counter-based stream

One batched call draws the weights of any hosts, and those of a host do not depend on the others. The table is derived
from two builds of the module, under two seeds:

    equal in both                 a constant of the author               bound 0
    drawn by `uniform_`           linear, convolution, attention ...     the interval of the draw
    otherwise                     e.g. an embedding, `torch.randn`       the module is built again for each host, under
                                                                         a seed of its own (`rebuilt`)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from esper.kasmina.parameters.flat_layout import FlatLayout
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.random import to_uniform, word_rows
from esper.leyline.tensor_dataclass import tensor_dataclass


@tensor_dataclass
class InitTable:
    """Each flat element is uniform in [centre - bound, centre + bound); padding is 0.

    `rebuilt` marks elements that are taken from a module built for one host instead.
    """

    bound: Float[Tensor, " P"]
    centre: Float[Tensor, " P"]
    rebuilt: Bool[Tensor, " P"]


def deterministic_build(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a module on the CPU, without a change of the global generators."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would also seed the generators of accelerators, which are not forked here.
        torch.default_generator.manual_seed(seed)
        return build()


class _Draw(NamedTuple):
    low: float
    high: float
    values: Tensor


@contextmanager
def _uniform_draws() -> Iterator[list[_Draw]]:
    """Collects the results of `Tensor.uniform_`, with which layers of PyTorch initialize their weights.

    A method is replaced, because a dispatch mode imports the compiler of PyTorch: a second in each process.
    """
    draws: list[_Draw] = []
    inherited = Tensor.uniform_

    def uniform_(tensor: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: Any) -> Tensor:  # noqa: ANN401
        out = inherited(tensor, low, high, **kwargs)
        draws.append(_Draw(low, high, out.detach().clone()))
        return out

    Tensor.uniform_ = uniform_  # type: ignore[assignment]
    try:
        yield draws
    finally:
        del Tensor.uniform_


class Builds(NamedTuple):
    """The same module built under two seeds, and the draws of the first build."""

    module: nn.Module
    other: nn.Module
    draws: list[_Draw]


def build_twice(build: Callable[[], nn.Module]) -> Builds:
    """The input of `init_table`."""
    with _uniform_draws() as draws:
        module = deterministic_build(build)
    return Builds(module, deterministic_build(build, seed=1), draws)


def init_table(builds: Builds, layout: FlatLayout, birth: Mapping[str, float]) -> InitTable:
    """The table of a module, in the order of `layout` (P = layout.total); `birth` are constants by name.

    Raises:
        ConfigError: `birth` names a parameter that the module does not have.
    """
    values, others = (
        {spec.name: module.get_parameter(spec.name).detach() for spec in layout.tensors} for module in builds[:2]
    )
    for name in birth:
        if name not in values:
            kind = type(builds.module).__name__
            raise ConfigError(f"birth names {name!r}, which is no parameter of {kind}; {nearest(name, values)}")
    starts = {name: _start(value, others[name], builds.draws) for name, value in values.items()}
    starts |= {name: (constant, 0.0, False) for name, constant in birth.items()}
    centre, bound, rebuilt = (
        layout.pack({name: torch.zeros_like(value) + starts[name][part] for name, value in values.items()})
        for part in range(3)
    )
    return InitTable(bound=bound, centre=centre, rebuilt=rebuilt > 0.0)


def _start(value: Tensor, other: Tensor, draws: list[_Draw]) -> tuple[float | Tensor, float, bool]:
    """Centre, bound, and whether the parameter is rebuilt."""
    if torch.equal(value, other):
        return value, 0.0, False
    for draw in draws:
        if torch.equal(draw.values, value):
            return 0.5 * (draw.low + draw.high), 0.5 * (draw.high - draw.low), False
    return 0.0, 0.0, True


def fresh(table: InitTable, words: Int[Tensor, "N P"]) -> Float[Tensor, "N P"]:
    """Weights from 32-bit words, one per flat element."""
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
    first_block: int = 0,
) -> Float[Tensor, "N P"]:
    """New weights [N, P] of the hosts with the global numbers `host`; the other arguments are ints or [N]."""
    length = table.bound.shape[-1]
    drawn = word_rows(run_seed, stream, host, length, episode=episode, t=t, slot=slot, first_block=first_block)
    return fresh(table, drawn)
