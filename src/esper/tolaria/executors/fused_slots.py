"""Different seeds in different hosts: in each slot the hosts are grouped by blueprint, and each group runs once.

    slot 0     host 0   host 1   host 2   host 3   host 4
    grows      conv     norm     conv     -        conv (frozen)
    groups     {0, 2}, {1}, {4}                             three calls, whatever the number of hosts

Within a group the hosts are ordered by how the seed's output joins the host's, so that each way is one slice:

    ADD | MULTIPLY, hidden | MULTIPLY, heard | GATE

Examples of all hosts are one batch whose rows have the host as the fastest index (see `kasmina.lowering`).

Shape legend: B = examples per host, N = hosts, g = hosts of a group.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from esper.kasmina.population import Population
from esper.kasmina.slab import Working
from esper.kasmina.stacking import StackedTemplate
from esper.leyline.stages import Topology
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running import TrainedRows, join_order, trained_mask
from esper.tolaria.executors.twins import Twins


class Rows(NamedTuple):
    """A stacked skeleton and what it runs on: parameters and buffers [g, ...], made once for a pass.

    `slopes` are where the gradients of the parameters belong, empty where nothing is learned.
    """

    twin: StackedTemplate
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...] = ()

    def __call__(self, *args: Any) -> Tensor:  # noqa: ANN401 -- whatever the module takes
        """Run on x [B * g, ...]."""
        self.twin.bind(self.parameters, self.buffers)
        return self.twin(*args)


def fixed(twin: StackedTemplate, params: Tensor, buffers: Tensor) -> Rows:
    """Rows that do not learn."""
    return Rows(twin, twin.views(params), twin.buffer_views(buffers))


def learning(twin: StackedTemplate, working: Working, first: int, last: int, buffers: Tensor) -> Rows:
    """Rows `first` to `last` (exclusive) of a working copy; what an optimizer does to them is seen here."""
    width = twin.parameters.total
    leaves = tuple(view.requires_grad_() for view in twin.views(working.params[first:last, :width]))
    return Rows(twin, leaves, twin.buffer_views(buffers), twin.views(working.grad[first:last, :width]))


class Joins(NamedTuple):
    """Ends of the slices of a group's hosts: ADD up to `add`, hidden MULTIPLY up to `hidden`, MULTIPLY, then GATE."""

    add: int
    hidden: int
    multiply: int


@final
@dataclass(frozen=True, kw_only=True)
class SlotGroup:
    """Hosts in whose slot the same blueprint runs, in the order of `Joins`.

    Attributes:
        hosts: their numbers. index: the same on the device, None where it is every host in order.
        seed: the seeds. gate: the gates of the last slice, None without one. rows: of the seeds in the population.
        heard: weight [g] of each seed's output in the value, alpha. learned: in the gradient, 1 where it is hidden.
        any_hidden: whether a seed learns by a straight-through gradient only.
        isolated: whether seeds send no gradient upstream through their input.
    """

    hosts: np.ndarray
    index: Int[Tensor, " g"] | None
    seed: Rows
    gate: Rows | None
    rows: Int[Tensor, " g"]
    joins: Joins
    heard: Float[Tensor, " g"]
    learned: Float[Tensor, " g"]
    any_hidden: bool
    isolated: bool
    running: Tensor

    def trained_rows(self) -> list[Rows]:
        """What the group trains."""
        return [rows for rows in (self.seed, self.gate) if rows is not None and rows.slopes]

    def keep_buffers(self, population: Population) -> None:
        """Write running statistics that a train pass moved back into the population."""
        if self.running.shape[1]:
            population.seeds.buffers[self.rows, : self.running.shape[1]] = self.running

    def take(self, h: Tensor, num_hosts: int) -> Tensor:
        """The rows of this group's hosts: [B * N, ...] -> [B * g, ...]."""
        if self.index is None:
            return h
        taken: Tensor = h.unflatten(0, (-1, num_hosts)).index_select(1, self.index).flatten(0, 1)
        return taken

    def correction(self, h: Tensor, num_hosts: int) -> Tensor:
        """What the seeds of these hosts add to their features: [B * N, ...] -> [B, g, ...]."""
        own = self.take(h, num_hosts)
        x = own.detach() if self.isolated else own
        delta = self.seed(x).to(h.dtype)
        u = self._joined(delta, own, x)
        weight = (len(self.hosts), *(1,) * (u.dim() - 2))
        heard, learned = self.heard.to(u.dtype).view(weight), self.learned.to(u.dtype).view(weight)
        if self.any_hidden:
            weighted: Tensor = _HeardAndLearned.apply(u, heard, learned)  # type: ignore[no-untyped-call]
            return weighted
        spoken: Tensor = u * heard
        return spoken

    def _joined(self, delta: Tensor, own: Tensor, x: Tensor) -> Tensor:
        """Each host's output in the way it joins, still without its weight: [B, g, ...]."""
        num = len(self.hosts)
        delta_Bg = delta.unflatten(0, (-1, num))
        add, hidden, multiply = self.joins
        if add == num:
            return delta_Bg  # type: ignore[no-any-return]
        own_Bg = own.unflatten(0, (-1, num))
        slices = [delta_Bg[:, :add]]
        if hidden > add:
            slices.append(own_Bg[:, add:hidden].detach() * torch.tanh(delta_Bg[:, add:hidden]))
        if multiply > hidden:
            slices.append(own_Bg[:, hidden:multiply] * torch.tanh(delta_Bg[:, hidden:multiply]))
        if multiply < num:
            assert self.gate is not None
            gated = x.unflatten(0, (-1, num))[:, multiply:].flatten(0, 1)
            gate_Bg = self.gate(gated).to(delta.dtype).unflatten(0, (-1, num - multiply))
            slices.append(delta_Bg[:, multiply:] * gate_Bg)
        return torch.cat(slices, dim=1)


@final
class _HeardAndLearned(torch.autograd.Function):
    """u [B, g, ...] with one weight per host in the value and another in the gradient.

    A hidden seed (value 0, gradient 1) learns as if it were heard; whatever it puts out, infinite or NaN, the value is
    exactly 0.
    """

    @staticmethod
    def forward(u: Tensor, heard: Tensor, learned: Tensor) -> Tensor:
        """The weighted value."""
        return torch.where(heard == 0.0, 0.0, u * heard)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401
        """The gradient's weight is all that is needed."""
        ctx.learned = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """The gradient with its own weight."""
        return grad * ctx.learned, None, None


@final
class _AddAtHosts(torch.autograd.Function):
    """h [B, N, ...] plus corrections [B, g, ...] at the hosts of each index; one copy for any number of groups."""

    @staticmethod
    def forward(h: Tensor, indices: tuple[Tensor, ...], *parts: Tensor) -> Tensor:
        """The sum."""
        total = h.clone()
        for index, part in zip(indices, parts, strict=True):
            total.index_add_(1, index, part)
        return total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ANN401
        """The indices are all that the gradient needs."""
        ctx.indices = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient itself, and its rows at each index."""
        wanted = zip(ctx.indices, ctx.needs_input_grad[2:], strict=True)
        return grad, None, *(grad.index_select(1, index) if needed else None for index, needed in wanted)


def apply_groups(groups: list[SlotGroup], h: Tensor, num_hosts: int) -> Tensor:
    """Features [B * N, ...] of all hosts after a slot: h plus what the seeds of each group add."""
    parts = [group.correction(h, num_hosts) for group in groups]
    h_BN = h.unflatten(0, (-1, num_hosts))
    if len(groups) == 1 and groups[0].index is None:
        total: Tensor = h_BN + parts[0]
    else:
        total = _AddAtHosts.apply(h_BN, tuple(group.index for group in groups), *parts)  # type: ignore[no-untyped-call]
    joined: Tensor = total.flatten(0, 1)
    return joined


def slot_groups(
    population: Population,
    twins: Twins,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
) -> dict[str, list[SlotGroup]]:
    """The groups of each slot among `hosts` (ascending numbers); empty slots are left out.

    With `rows` (a train pass, all hosts) the seeds that learn run on the working copies.
    """
    learns = trained_mask(structure) if rows is not None else np.zeros_like(structure.stage, dtype=np.bool_)
    runs = (structure.alpha > 0.0) | learns
    order = join_order(structure)
    found: dict[str, list[SlotGroup]] = {}
    for s, point in enumerate(population.points):
        places = np.flatnonzero(runs[hosts, s])
        places = places[np.argsort(order[hosts[places], s], kind="stable")]
        keys = structure.blueprint[hosts[places], s] * 2 + learns[hosts[places], s]
        groups = [
            _group(population, twins, structure, alpha, rows if key % 2 else None, hosts, places[keys == key], s)
            for key in np.unique(keys)
        ]
        if groups:
            found[point.slot_id] = groups
    return found


def _group(
    population: Population,
    twins: Twins,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
    places: np.ndarray,
    s: int,
) -> SlotGroup:
    """The group of the hosts at `places` of `hosts`, ordered by how they join; `rows` if they learn."""
    who = hosts[places]
    channels = population.points[s].channels
    hidden, order = structure.alpha[who, s] == 0.0, join_order(structure)[who, s]
    joins = Joins(*(int((order <= last).sum()) for last in range(3)))
    flat = population.index(who * population.num_slots + s)
    twin = twins.seeds[channels, int(structure.blueprint[who[0], s])]
    running = population.seeds.buffers[flat, : twin.buffers.total]
    if rows is None:
        seed = fixed(twin, population.seeds.params[flat, : twin.parameters.total], running)
    else:
        start = int(np.flatnonzero((rows.seed_host == who[0]) & (rows.seed_slot == s))[0])
        seed = learning(twin, rows.seeds, start, start + len(who), running)
    in_order = len(places) == len(hosts) and bool((np.diff(places) > 0).all())
    heard = alpha[population.index(who), s]
    straight = torch.from_numpy(hidden).to(population.device)
    return SlotGroup(
        hosts=who,
        index=None if in_order else population.index(places),
        seed=seed,
        gate=_gates(population, twins.gates[channels], rows, who, s, flat, joins),
        rows=flat,
        joins=joins,
        heard=heard,
        learned=torch.where(straight, 1.0, heard),
        any_hidden=bool(hidden.any()),
        isolated=population.topology is Topology.CNN,
        running=running,
    )


def _gates(
    population: Population,
    twin: StackedTemplate,
    rows: TrainedRows | None,
    who: np.ndarray,
    s: int,
    flat: Tensor,
    joins: Joins,
) -> Rows | None:
    """The gates of the last slice of a group; None without one."""
    count = len(who) - joins.multiply
    if not count:
        return None
    gated = flat[joins.multiply :]
    buffers = population.gates.buffers[gated, : twin.buffers.total]
    if rows is None:
        return fixed(twin, population.gates.params[gated, : twin.parameters.total], buffers)
    first_gated = np.flatnonzero((rows.seed_host == who[joins.multiply]) & (rows.seed_slot == s))[0]
    first = int(np.flatnonzero(rows.gate_of == first_gated)[0])
    return learning(twin, rows.gates, first, first + count, buffers)
