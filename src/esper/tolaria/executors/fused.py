"""The fused executor: all hosts in one forward and one backward, whatever grows in them.

    train      rows of all hosts are one batch (host = fastest index); the gradient of the *sum* of the hosts' losses
               with respect to stacked weights is each host's own gradient
    evaluate   all coalitions of all hosts; hosts with the same number of distinct states (a bucket) share a pass

Its results equal those of the streamed executor, its reference, up to rounding. In each slot the hosts are grouped by
blueprint, and each group runs once:

    slot 0     host 0   host 1   host 2   host 3   host 4
    grows      conv     norm     conv     -        conv (frozen)
    groups     {0, 2}, {1}, {4}                             three calls, whatever the number of hosts

Within a group the hosts are sorted by how they blend (`blend_order`), so that hosts that blend alike are one slice.
Each host shares prefixes as in `tolaria.coalitions`. At each slot the states of a bucket are padded to the most that
any of its hosts has, so that they are one batch. Padding repeats the host's state 0 and is never read.

Shape legend: B = examples per host, N = hosts, g = hosts of a group or bucket, k = hosts of a slice, P = states before
a slot, Pnext = states after it, K = coalitions.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from esper.kasmina.blending import delta_grad, factor_grad, seed_input, signal_of, weight_of
from esper.kasmina.parameters.dropout import Draws, draw_for
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import StackedTemplate, drop_batch_counters
from esper.kasmina.parameters.population import Features, Kind, Population, TrainingCopy, once
from esper.kasmina.parameters.stacking import HOST_EXAMPLES, stacked_host, vmapped, way_to_stack
from esper.leyline.errors import StackingError
from esper.leyline.lifecycle import Algorithm
from esper.leyline.messages import Objective, Scores, SlotState
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import PrefixPlan
from esper.tolaria.executors import streamed
from esper.tolaria.executors.network import HostData, NetworkExecutor, SummedScores, examples, mean_factor
from esper.tolaria.executors.protocol import Structure, TrainPass
from esper.tolaria.executors.training import (
    TrainedRows,
    begin_hosts,
    begin_training,
    blend_of_rank,
    blend_order,
    isolated_mask,
    trained_mask,
)


@final
class StackedModules:
    """Host, seeds and gates of a population for many hosts at once.

    One template serves all seeds of a blueprint and width: it is bound to its rows right before each call. `examples`
    [HOST_EXAMPLES, ...] are inputs of the host.

    Raises:
        StackingError: the host or a blueprint computes something else when stacked, or draws random numbers.
    """

    def __init__(self, population: Population, examples: Tensor) -> None:
        device, host = population.device, population.host_kind
        for kind in (host, *population.seed_kinds.values()):
            if kind.global_rng:
                of = "the host" if kind is host else f"blueprint {kind.name!r}"
                raise StackingError(
                    f"{of} draws from the global random generators in its forward pass, which are seeded for one host "
                    "at a time; use executor 'streamed', or nn.Dropout, whose masks are drawn for many hosts."
                )
        self.host = StackedTemplate(
            stacked_host(host.build, examples).to(device), host.template.parameters, host.template.buffers
        )
        self.host.share(host.template.shared)
        self.seeds = {
            (channels, index): _stacked(kind, population.features[channels], device)
            for (channels, index), kind in population.seed_kinds.items()
        }
        self.gates = {
            channels: _stacked(kind, population.features[channels], device)
            for channels, kind in population.gate_kinds.items()
        }

    def train(self, mode: bool) -> None:
        """Set train or eval mode everywhere."""
        for template in (self.host, *self.seeds.values(), *self.gates.values()):
            template.train(mode)


def _stacked(kind: Kind, shapes: tuple[Features, ...], device: torch.device) -> StackedTemplate:
    module = deterministic_build(kind.build)
    drop_batch_counters(module)
    ways = [
        once(kind.source, shape, "way", lambda shape=shape: way_to_stack(kind.name, module, torch.zeros(1, *shape)))  # type: ignore[misc]
        for shape in shapes
    ]
    stack = vmapped if vmapped in ways else ways[0]  # what one shape needs works for the others
    return StackedTemplate(stack(module).to(device), kind.start.parameters, kind.start.buffer_layout)


class BlendSlice(NamedTuple):
    """Hosts `first` to `last` (exclusive) of a group: they blend by the same algorithm, with all seeds active or none.

    `hosts` [k] are their rows among all hosts, `alpha` [k, 1, ..., 1] their blend weights.
    """

    algorithm: Algorithm
    active: bool
    first: int
    last: int
    hosts: Int[Tensor, " k"]
    alpha: Tensor

    def of(self, x_Bg: Tensor) -> Tensor:
        """The slice's part of a tensor of the group."""
        return x_Bg[:, self.first : self.last]

    def alpha_of(self, dtype: torch.dtype) -> Tensor | None:
        """The blend weights, None where the seeds are hidden."""
        return self.alpha.to(dtype) if self.active else None


class GroupOutputs(NamedTuple):
    """Outputs of the seeds of one group: `own` [B, g, ...] is h at their hosts, `gate` covers the last slices' hosts.

    `hosts` [g] are the group's rows among all hosts, None if the group is all of them in order.
    """

    slices: tuple[BlendSlice, ...]
    hosts: Int[Tensor, " g"] | None
    own: Tensor
    delta: Tensor
    gate: Tensor | None


def blend_groups(h: Float[Tensor, "B N *F"], groups: list[GroupOutputs]) -> Float[Tensor, "B N *F"]:
    """Features of all hosts after a slot."""
    plans = tuple((group.slices, group.hosts) for group in groups)
    parts = (part for group in groups for part in (group.own.detach(), group.delta, group.gate))
    blended: Tensor = _Blend.apply(h, plans, *parts)  # type: ignore[no-untyped-call]
    return blended


_Plans = tuple[tuple[tuple[BlendSlice, ...], Tensor | None], ...]


@final
class _Blend(torch.autograd.Function):
    """The output of a hidden seed is not read: infinite or NaN, it does not reach the host."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, plans: _Plans, *parts: Tensor | None) -> Tensor:  # noqa: ANN401
        """The blended features."""
        total = h.clone()
        signals: list[Tensor] = []
        weights: list[Tensor | None] = []
        for (slices, _), (own, delta, gate) in zip(plans, _triples(parts), strict=True):
            for part in slices:
                alpha, gate_k = part.alpha_of(h.dtype), _of_gate(part, slices, gate)
                signal = signal_of(part.algorithm, part.of(delta))
                weight = weight_of(part.algorithm, alpha, part.of(own), gate_k)
                if alpha is not None and weight is not None:
                    total.index_add_(1, part.hosts, signal * weight)
                signals.append(signal)
                weights.append(weight)
        ctx.plans = plans
        ctx.save_for_backward(*(part for _, *rest in _triples(parts) for part in rest), *signals, *weights)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradient of h, then (nothing, that of delta, that of the gate) of each group."""
        grad = grad.contiguous()  # once, instead of in every selection below
        found: list[Tensor | None] = []
        saved, num_parts = ctx.saved_tensors, 2 * len(ctx.plans)
        num_slices = (len(saved) - num_parts) // 2
        computed = iter(zip(saved[num_parts:-num_slices], saved[-num_slices:], strict=True))
        to_host, needed = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        multiplies = any(_scales_host(part) for slices, _ in ctx.plans for part in slices)
        grad_h = grad.clone() if multiplies and to_host else grad
        for i, (slices, hosts) in enumerate(ctx.plans):
            delta, gate = saved[2 * i : 2 * i + 2]
            grad_group = grad if hosts is None else grad.index_select(1, hosts)
            grad_delta = torch.empty_like(delta) if needed[3 * i + 1] else None
            grad_gate = torch.empty_like(gate) if gate is not None and needed[3 * i + 2] else None
            for part in slices:
                (signal, weight), of_value, alpha = next(computed), part.of(grad_group), part.alpha_of(grad.dtype)
                if _scales_host(part) and to_host:
                    of_host = factor_grad(of_value, signal, alpha, signal)
                    grad_h.index_add_(1, part.hosts, of_host)
                if grad_delta is not None:
                    delta_grad(part.algorithm, of_value, signal, weight, out=part.of(grad_delta))
                if (into := _of_gate(part, slices, grad_gate)) is not None:
                    into.copy_(factor_grad(of_value, signal, alpha, into))
            found += [None, grad_delta, grad_gate]
        return grad_h, None, *found


def _scales_host(part: BlendSlice) -> bool:
    return part.active and part.algorithm is Algorithm.MULTIPLY


def _of_gate(part: BlendSlice, slices: tuple[BlendSlice, ...], gate: Tensor | None) -> Tensor | None:
    """The slice's part of the gates, which begin at the group's first GATE part; None for other slices."""
    if gate is None or part.algorithm is not Algorithm.GATE:
        return None
    begin = next(other.first for other in slices if other.algorithm is Algorithm.GATE)
    return gate[:, part.first - begin : part.last - begin]


def _triples(parts: tuple[Any, ...]) -> list[tuple[Any, Any, Any]]:
    return list(zip(parts[::3], parts[1::3], parts[2::3], strict=True))


@final
@dataclass(frozen=True)
class BucketStep:
    """One slot: state p' of host n is its state `parent[p', n]`, with the seed active where `on[p', n]`.

    `common` are the parents of the states that are off and on, in order, if all hosts branch alike, and `place` holds
    the latter on the device; None otherwise. `moves` says whether states are added or moved; otherwise state p' is
    state p.
    """

    parent: Int[Tensor, "Pnext g"]
    on: Bool[Tensor, "Pnext g"]
    common: tuple[tuple[int, ...], tuple[int, ...]] | None
    place: Int[Tensor, " on"] | None
    moves: bool

    def branch(self, h_BPg: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        """The states after the slot, from the features before it; `run` gives those of some states with the seeds."""
        if self.common is not None:  # no gathering host by host, and the seeds run only where they are on
            off_p, on_p = self.common
            active = run(_states(h_BPg, on_p))
            if self.moves:
                return torch.cat((_states(h_BPg, off_p), active), dim=1)
            assert self.place is not None
            return h_BPg.index_copy(1, self.place, active)
        active_BPg, on = run(h_BPg), self.on.view(*self.on.shape, *(1,) * (h_BPg.dim() - 3))
        if not self.moves:
            return torch.where(on, active_BPg, h_BPg)
        column = torch.arange(self.on.shape[1], device=self.on.device)
        return torch.where(on, active_BPg[:, self.parent, column], h_BPg[:, self.parent, column])


@final
@dataclass(frozen=True)
class Bucket:
    """Hosts with the same number of final states.

    `hosts` are their numbers, `index` the same on the device; `steps` by slot; `state_of` is the final state of each
    coalition; `num_first` is the number of states before the first slot.
    """

    hosts: np.ndarray
    index: Int[Tensor, " g"]
    steps: dict[int, BucketStep]
    num_first: int
    num_states: int
    state_of: Int[Tensor, "g K"]


def buckets(
    plans: Mapping[int, PrefixPlan], execution_order: tuple[int, ...], num_columns: int, device: torch.device
) -> list[Bucket]:
    """Hosts by their number of final states, which needs little padding; K is `num_columns`."""
    hosts, states = np.array([*plans]), np.array([plan.num_states for plan in plans.values()])
    hosts_of_buckets = [hosts[states == count] for count in np.unique(states)]
    return [_bucket(plans, hosts, execution_order, num_columns, device) for hosts in hosts_of_buckets]


def _bucket(
    plans: Mapping[int, PrefixPlan],
    hosts: np.ndarray,
    execution_order: tuple[int, ...],
    num_columns: int,
    device: torch.device,
) -> Bucket:
    passed = {step.slot for n in hosts for step in plans[n].steps}
    shared, num_first = plans[hosts[0]].shared, plans[hosts[0]].num_first
    count = [num_first] * len(hosts)
    steps: dict[int, BucketStep] = {}
    for slot in (s for s in execution_order if s in passed):
        children: list[list[tuple[int, bool]]] = []
        for i, n in enumerate(hosts):
            step = next((step for step in plans[n].steps if step.slot == slot), None)
            off, on = (range(count[i]), ()) if step is None else (step.off, step.on)
            of_host = [(p, False) for p in off] + [(p, True) for p in on]
            children.append(of_host if shared else sorted(of_host))
        count = [len(c) for c in children]
        steps[slot] = _step(children, shared, device)
    state_of = np.zeros((len(hosts), num_columns), dtype=np.int64)
    for i, n in enumerate(hosts):
        states = plans[n].state_of_coalition
        state_of[i, : len(states)] = states
    index, states_KN = (torch.from_numpy(x).to(device, non_blocking=True) for x in (hosts, state_of))
    return Bucket(hosts=hosts, index=index, steps=steps, num_first=num_first, num_states=max(count), state_of=states_KN)


def _step(children: list[list[tuple[int, bool]]], shared: bool, device: torch.device) -> BucketStep:
    """One slot from the (parent, on) of each state after it, by host."""
    shape = (max(len(c) for c in children), len(children))
    parent, on = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
    for i, of_host in enumerate(children):
        parent[: len(of_host), i] = [p for p, _ in of_host]
        on[: len(of_host), i] = [is_on for _, is_on in of_host]
    parent_PN, on_PN = (torch.from_numpy(x).to(device, non_blocking=True) for x in (parent, on))
    if (parent != parent[:, :1]).any() or (on != on[:, :1]).any():
        return BucketStep(parent_PN, on_PN, None, None, shared)
    common = tuple(parent[~on[:, 0], 0].tolist()), tuple(parent[on[:, 0], 0].tolist())
    place = torch.from_numpy(parent[on[:, 0], 0]).to(device, non_blocking=True)
    return BucketStep(parent_PN, on_PN, common, place, shared)


def _states(h_BPg: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """Some of the states; a view where they are consecutive."""
    first, last = (wanted[0], wanted[-1] + 1) if wanted else (0, 0)
    if wanted == tuple(range(first, last)):
        return h_BPg[:, first:last]
    return torch.cat([h_BPg[:, p : p + 1] for p in wanted], dim=1)


class Rows(NamedTuple):
    """A stacked module and what it runs on: parameters and buffers [g, ...], made once for a pass.

    `grads` receive the gradients of the parameters, empty where nothing is trained; `draws` are the dropout masks.
    """

    stacked: StackedTemplate
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    grads: tuple[Tensor, ...] = ()
    draws: Draws | None = None

    def __call__(self, *args: Any) -> Tensor:  # noqa: ANN401 -- whatever the module takes
        """Run on x [B * g, ...]."""
        self.stacked.assign(self.parameters, self.buffers)
        draw_for(self.stacked.dropouts, self.draws)
        return self.stacked(*args)


def frozen_rows(stacked: StackedTemplate, params: Tensor, buffers: Tensor) -> Rows:
    """Rows that are not trained."""
    return Rows(stacked, stacked.views(params), stacked.buffer_views(buffers))


def trainable_rows(stacked: StackedTemplate, working: TrainingCopy, first: int, last: int, buffers: Tensor) -> Rows:
    """Rows `first` to `last` (exclusive) of a working copy, as views: they see its optimizer steps."""
    width = stacked.parameters.total
    leaves = tuple(view.requires_grad_() for view in stacked.views(working.params[first:last, :width]))
    return Rows(stacked, leaves, stacked.buffer_views(buffers), stacked.views(working.grad[first:last, :width]))


@final
@dataclass(frozen=True, kw_only=True)
class SlotGroup:
    """Hosts in whose slot the same blueprint runs, in the order of `slices`.

    Attributes:
        index: their rows among the hosts of the pass, None if they are all hosts in order.
        seed: the seeds. gate: the gates of the last slices, None without one. rows: of the seeds in the population.
        slices: hosts that blend alike. isolated: whether seeds send no gradient upstream through their input.
        running: the running statistics that a train pass updates.
    """

    index: Int[Tensor, " g"] | None
    seed: Rows
    gate: Rows | None
    rows: Int[Tensor, " g"]
    slices: tuple[BlendSlice, ...]
    isolated: bool
    running: Tensor

    def outputs(self, h_BN: Tensor) -> GroupOutputs:
        """Outputs of the seeds of these hosts for the features [B, N, ...] of all hosts."""
        num, x_BN = len(self.rows), seed_input(h_BN, isolated=self.isolated)
        x_Bg = x_BN if self.index is None else x_BN.index_select(1, self.index)
        delta_Bg = self.seed(x_Bg.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num))
        gate_Bg = None
        if self.gate is not None:
            first = _first_gated(self.slices, num)
            gated = x_Bg if first == 0 else x_Bg[:, first:]
            gate_Bg = self.gate(gated.flatten(0, 1)).to(h_BN.dtype).unflatten(0, (-1, num - first))
        return GroupOutputs(self.slices, self.index, x_Bg, delta_Bg, gate_Bg)


def _first_gated(slices: tuple[BlendSlice, ...], num_hosts: int) -> int:
    """The first host of a group with a gate; they are its last hosts."""
    return next((part.first for part in slices if part.algorithm is Algorithm.GATE), num_hosts)


def apply_groups(groups: list[SlotGroup], h: Tensor, num_hosts: int) -> Tensor:
    """Features [B * N, ...] of all hosts after a slot."""
    h_BN = h.unflatten(0, (-1, num_hosts))
    blended: Tensor = blend_groups(h_BN, [group.outputs(h_BN) for group in groups]).flatten(0, 1)
    return blended


def slot_groups(
    population: Population,
    stacked_modules: StackedModules,
    structure: Structure,
    alpha: Tensor,
    rows: TrainedRows | None,
    hosts: np.ndarray,
) -> dict[str, list[SlotGroup]]:
    """The groups of each slot among `hosts` (ascending numbers); empty slots are left out.

    With `rows` (a train pass, all hosts) the trained seeds run on the working copies.
    """
    trainable = trained_mask(structure) if rows is not None else np.zeros_like(structure.stage, dtype=np.bool_)
    runs = (structure.alpha > 0.0) | trainable
    order, isolated = blend_order(structure), isolated_mask(population, structure)
    builder = _GroupBuilder(population, stacked_modules, structure, alpha, hosts)
    found: dict[str, list[SlotGroup]] = {}
    for s, point in enumerate(population.points):
        places = np.flatnonzero(runs[hosts, s])
        places = places[np.argsort(order[hosts[places], s], kind="stable")]
        here = hosts[places]
        keys = structure.blueprint[here, s] * 4 + isolated[here, s] * 2 + trainable[here, s]
        groups = [builder.group(s, places[keys == key], rows if key % 2 else None) for key in np.unique(keys)]
        if groups:
            found[point.slot_id] = groups
    return found


class _GroupBuilder(NamedTuple):
    """What all groups of a pass have in common; see `slot_groups`."""

    population: Population
    stacked_modules: StackedModules
    structure: Structure
    alpha: Tensor
    hosts: np.ndarray

    def group(self, s: int, places: np.ndarray, rows: TrainedRows | None) -> SlotGroup:
        """The group of the hosts at `places` of `hosts`, in the order of `blend_order`; `rows` if they are trained."""
        p, who = self.population, self.hosts[places]
        channels = p.points[s].channels
        flat = p.index(who * p.num_slots + s)
        stacked = self.stacked_modules.seeds[channels, int(self.structure.blueprint[who[0], s])]
        running = p.seeds.buffers[flat, : stacked.buffers.total]
        if rows is None:
            seed = frozen_rows(stacked, p.seeds.params[flat, : stacked.parameters.total], running)
        else:
            start = _row_of(rows, int(who[0]), s)
            seed = trainable_rows(stacked, rows.seeds, start, start + len(who), running)
        seed = seed._replace(draws=p.draws(p.index(who), s) if stacked.dropouts else None)
        in_order = len(places) == len(self.hosts) and bool((np.diff(places) > 0).all())
        index = p.index(places)
        slices = self._slices(s, who, index)
        gated = _first_gated(slices, len(who))
        return SlotGroup(
            index=None if in_order else index,
            seed=seed,
            gate=self._gates(s, who[gated:], flat[gated:], rows),
            rows=flat,
            slices=slices,
            isolated=bool(isolated_mask(p, self.structure)[who[0], s]),
            running=running,
        )

    def _slices(self, s: int, who: np.ndarray, index: Tensor) -> tuple[BlendSlice, ...]:
        """The slices of hosts that blend alike."""
        order = blend_order(self.structure)[who, s]
        rank = len(self.population.features[self.population.points[s].channels][0])
        alpha = self.alpha[self.population.index(who), s].view(-1, *(1,) * rank)
        found = []
        for rank in np.unique(order):
            first, last = (int(i) for i in np.searchsorted(order, (rank, rank + 1)))
            algorithm, active = blend_of_rank(int(rank))
            found.append(BlendSlice(algorithm, active, first, last, index[first:last], alpha[first:last]))
        return tuple(found)

    def _gates(self, s: int, who: np.ndarray, flat: Tensor, rows: TrainedRows | None) -> Rows | None:
        """The gates of the hosts `who`, whose seeds are the rows `flat`; None without hosts."""
        if not len(who):
            return None
        gates, stacked = self.population.gates, self.stacked_modules.gates[self.population.points[s].channels]
        buffers = gates.buffers[flat, : stacked.buffers.total]
        if rows is None:
            return frozen_rows(stacked, gates.params[flat, : stacked.parameters.total], buffers)
        first = int(np.flatnonzero(rows.gate_of == _row_of(rows, int(who[0]), s))[0])
        return trainable_rows(stacked, rows.gates, first, first + len(who), buffers)


def _row_of(rows: TrainedRows, host: int, slot: int) -> int:
    """The row of a trained seed."""
    return int(np.flatnonzero((rows.seed_host == host) & (rows.seed_slot == slot))[0])


@final
class FusedExecutor(NetworkExecutor):
    """N hosts at once.

    `measures_together` says whether it also measures all hosts at once. By default it does on a GPU; on a CPU it
    measures host by host, because the states of one host just fit into the cache and those of many hosts do not.
    """

    def __init__(self, data: HostData, *, measures_together: bool | None = None) -> None:
        super().__init__(data)
        on_cpu = self.population.device.type == "cpu"
        self.measures_together = not on_cpu if measures_together is None else measures_together
        self.stacked_modules = StackedModules(self.population, examples(data.dataset, HOST_EXAMPLES)[0])
        self._all_hosts = np.arange(self.population.num_envs)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        hosts, rows = begin_hosts(p), begin_training(p, data.structure)
        # stopped hosts run with the others; their learning rates are 0, and their running statistics are put back
        stopped = p.index(np.flatnonzero(data.structure.stopped))
        kept = [(flat, of, flat.buffers[of]) for flat, of in ((p.host, stopped), (p.seeds, p.rows_of_seeds(stopped)))]
        host = trainable_rows(self.stacked_modules.host, hosts, 0, p.num_envs, p.host.buffers)
        host = host._replace(draws=p.host_draws(slice(None)))
        of_slots = slot_groups(p, self.stacked_modules, data.structure, slots.alpha, rows, self._all_hosts)
        groups = [group for of_slot in of_slots.values() for group in of_slot]
        trained = [host, *(rows for group in groups for rows in (group.seed, group.gate) if rows and rows.grads)]
        self.stacked_modules.train(True)
        outputs = streamed.run_epoch(data, t, hosts, rows, partial(self._train_batch, trained, of_slots))
        for group in groups:
            if group.running.shape[1]:
                p.seeds.buffers[group.rows, : group.running.shape[1]] = group.running
        for flat, of, buffers in kept:
            flat.buffers[of] = buffers
        return outputs

    def _train_batch(
        self, trained: list[Rows], of_slots: dict[str, list[SlotGroup]], x_NB: Tensor, y_NB: Tensor
    ) -> Scores:
        """One forward and one backward of all hosts; `trained[0]` are the hosts. Returns scores [N], float64."""
        num_hosts, batch = y_NB.shape[:2]
        x, y = (of_NB.transpose(0, 1).flatten(0, 1) for of_NB in (x_NB, y_NB))

        def apply(slot_id: str, h: Tensor) -> Tensor:
            groups = of_slots.get(slot_id)
            return h if groups is None else apply_groups(groups, h, num_hosts)

        with self.data.scaler.autocast():
            outputs = trained[0](x, apply)
        rows = self.data.objective.scores(outputs.float(), y)
        loss_BN, score_BN, weight_BN = (of_rows.view(batch, num_hosts) for of_rows in rows)
        factor_N = mean_factor(weight_BN.sum(dim=0)) * self.data.scaler.scale
        leaves = [leaf for of_kind in trained for leaf in of_kind.parameters]
        if leaves:  # none where the whole host is frozen and nothing grows in it
            # a blueprint may have parameters that it does not use
            grads = torch.autograd.grad(loss_BN, leaves, factor_N.expand_as(loss_BN), materialize_grads=True)
            torch._foreach_copy_([grad for of_kind in trained for grad in of_kind.grads], grads)
        return Scores(*(of_BN.sum(dim=0, dtype=torch.float64) for of_BN in (loss_BN.detach(), score_BN, weight_BN)))

    def sum_scores(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> SummedScores:
        """See `NetworkExecutor`."""
        if not self.measures_together:
            return streamed.sum_scores(self.data, self._all_hosts.tolist(), batches, alpha, sets, num_columns)
        p, data = self.population, self.data
        score = torch.zeros(p.num_envs, num_columns, dtype=torch.float64, device=p.device)
        loss = torch.zeros(p.num_envs, dtype=torch.float64, device=p.device)
        weight = torch.zeros_like(loss)
        self.stacked_modules.train(False)
        runs = []
        plans = {n: data.plan(rows) for n, rows in enumerate(sets) if len(rows)}
        for bucket in buckets(plans, data.execution_order, num_columns, p.device):
            groups = slot_groups(p, self.stacked_modules, data.structure, alpha, None, bucket.hosts)
            host = frozen_rows(self.stacked_modules.host, p.host.params[bucket.index], p.host.buffers[bucket.index])
            runs.append((bucket, host, groups))
        objective, own = data.objectives[batches.split], batches.chosen is not None
        for x, y in batches:
            for bucket, host, groups in runs:
                some_x, some_y = (of[bucket.index] if own else of for of in (x, y))
                for part in self._measure(objective, bucket, host, groups, some_x, some_y, own=own):
                    score[bucket.index] += part.score
                    loss[bucket.index] += part.loss
                    weight[bucket.index] += part.weight
        return SummedScores(score, loss, weight)

    def _measure(
        self,
        objective: Objective,
        bucket: Bucket,
        host: Rows,
        groups: dict[str, list[SlotGroup]],
        x: Tensor,
        y: Tensor,
        *,
        own: bool,
    ) -> Iterator[SummedScores]:
        """Scores of each coalition of a bucket, for one part of the examples after another, all states in one pass.

        The examples are x [B, ...] and y [B, ...], or [g, B, ...] with `own`, where each host has its own.
        """
        num_hosts, num_states = len(bucket.hosts), bucket.num_states
        size = self.data.examples_at_once(num_hosts * num_states)
        column = torch.arange(num_hosts, device=x.device)
        x_B1g, y_B1g = (of.transpose(0, 1)[:, None] if own else of[:, None, None] for of in (x, y))
        for part_x, part_y in zip(x_B1g.split(size), y_B1g.split(size), strict=True):
            batch = len(part_y)
            rows = part_x.expand(batch, bucket.num_first, num_hosts, *x_B1g.shape[3:]).flatten(0, 2)
            with self.data.scaler.autocast():
                outputs = host(rows, partial(self._branch, bucket, groups, batch))
            targets = part_y.expand(batch, num_states, num_hosts, *y_B1g.shape[3:]).flatten(0, 2)
            of_rows = objective.scores(outputs.float(), targets)
            loss_Pg, score_Pg, weight_Pg = (
                of.view(batch, num_states, num_hosts).sum(dim=0, dtype=torch.float64) for of in of_rows
            )
            score_gK = score_Pg.t().gather(1, bucket.state_of)
            yield SummedScores(score_gK, loss_Pg[bucket.state_of[:, 0], column], weight_Pg[0])

    def _branch(
        self, bucket: Bucket, groups: dict[str, list[SlotGroup]], batch: int, slot_id: str, h: Tensor
    ) -> Tensor:
        """Features [B * P * g, ...] before a slot --> [B * Pnext * g, ...] after it."""
        step, num_hosts = bucket.steps.get(self.data.column[slot_id]), len(bucket.hosts)
        if step is None:
            return h

        def run(h_BPg: Tensor) -> Tensor:
            active = apply_groups(groups.get(slot_id, []), h_BPg.flatten(0, 2), num_hosts)
            return active.view(h_BPg.shape)

        return step.branch(h.view(batch, -1, num_hosts, *h.shape[1:]), run).flatten(0, 2)
