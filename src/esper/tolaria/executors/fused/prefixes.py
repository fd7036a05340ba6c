"""Prefix plans of several hosts as one: the hosts of a bucket have the same number of final states.

Each host shares prefixes as in `tolaria.prefixes`. At each slot the states of a bucket are padded to the most that any
of its hosts has, so that they are one batch. Padding repeats the host's state 0 and is never read.

Shape legend: B = examples, P = states before a slot, Pnext = states after it, g = hosts of the bucket, K = coalitions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from esper.tolaria.prefixes import PrefixPlan


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
    plans: list[PrefixPlan], execution_order: tuple[int, ...], num_columns: int, device: torch.device
) -> list[Bucket]:
    """Hosts by their number of final states, which needs little padding; K is `num_columns`."""
    states = np.array([plan.num_states for plan in plans])
    hosts_of_buckets = [np.flatnonzero(states == count) for count in np.unique(states)]
    return [_bucket(plans, hosts, execution_order, num_columns, device) for hosts in hosts_of_buckets]


def _bucket(
    plans: list[PrefixPlan],
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
