"""Prefix plans of several hosts as one: all hosts of a bucket travel with the same number of states.

Each host shares prefixes as `tolaria.prefixes` says; here the states of a bucket of hosts are padded to the most that
any of them has, so that they are one batch. Padding repeats the host's state 0 and is read by nobody.

Shape legend: P = states before a slot, P' = states after it, g = hosts of the bucket, K = coalitions.
"""

from dataclasses import dataclass
from typing import final

import numpy as np

from esper.tolaria.prefixes import PrefixPlan


@final
@dataclass(frozen=True)
class BucketStep:
    """One slot: state p' of host n is its state `parent[p', n]`, with the seed heard where `on[p', n]`."""

    parent: np.ndarray
    on: np.ndarray

    def common(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Parents of the states that are off and on, in order, where all hosts part alike; None otherwise."""
        alike = (self.parent == self.parent[:, :1]).all() and (self.on == self.on[:, :1]).all()
        if not alike:
            return None
        parent, on = self.parent[:, 0], self.on[:, 0]
        return tuple(parent[~on].tolist()), tuple(parent[on].tolist())


@final
@dataclass(frozen=True)
class Bucket:
    """Hosts with the same number of final states. `hosts` are their numbers; `steps` by slot."""

    hosts: np.ndarray
    steps: dict[int, BucketStep]
    num_states: int


def buckets(plans: list[PrefixPlan], execution_order: tuple[int, ...]) -> list[Bucket]:
    """Hosts by their number of final states, so that little is padded."""
    states = np.array([plan.num_states for plan in plans])
    return [_bucket(plans, np.flatnonzero(states == count), execution_order) for count in np.unique(states)]


def _bucket(plans: list[PrefixPlan], hosts: np.ndarray, execution_order: tuple[int, ...]) -> Bucket:
    passed = {step.slot for n in hosts for step in plans[n].steps}
    count = [1] * len(hosts)
    steps: dict[int, BucketStep] = {}
    for slot in (s for s in execution_order if s in passed):
        children: list[list[tuple[int, bool]]] = []
        for i, n in enumerate(hosts):
            step = next((step for step in plans[n].steps if step.slot == slot), None)
            if step is None:
                children.append([(p, False) for p in range(count[i])])
            else:
                children.append([(p, False) for p in step.off] + [(p, True) for p in step.on])
        count = [len(c) for c in children]
        parent = np.zeros((max(count), len(hosts)), dtype=np.int64)
        on = np.zeros((max(count), len(hosts)), dtype=np.bool_)
        for i, of_host in enumerate(children):
            parent[: count[i], i] = [p for p, _ in of_host]
            on[: count[i], i] = [is_on for _, is_on in of_host]
        steps[slot] = BucketStep(parent=parent, on=on)
    return Bucket(hosts=hosts, steps=steps, num_states=max(count))
