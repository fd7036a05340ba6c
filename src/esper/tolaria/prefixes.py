"""Prefix sharing: coalitions of one host that agree on the first slots share the computation up to there.

The network runs on distinct states instead of whole sets. The children of a state at a slot are the state itself (slot
off) and the state with the seed's output added (slot on); the seed runs once per parent that has an `on` child.

    coalitions   {0,1}  {1}  {0}  {}          execution order 0, 1

    before slot 0      x                      1 state
    slot 0             x ───────── x+0        off (0,)    on (0,)      seed 0 runs once, not twice
    slot 1             x   x+0   x+1  x+0+1   off (0, 1)  on (0, 1)    seed 1 runs twice
    states of the coalitions                  (3, 2, 1, 0)

Where the input of a slot is used again later (a residual connection around the slot), rows may not be added or moved:
then each distinct coalition is a state from the start and keeps its place (`shared` False).

Plans are plain Python; the executors turn them into index tensors.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool


@dataclass(frozen=True)
class PrefixStep:
    """One slot: the new states are `cat(x[off], x[on] + seed(x[on]))`; without sharing they keep their places.

    `off` and `on` are ascending numbers of the `num_parents` states before the slot.
    """

    slot: int
    num_parents: int
    off: tuple[int, ...]
    on: tuple[int, ...]


@dataclass(frozen=True)
class PrefixPlan:
    """The steps of one host in execution order, without slots that are off in every coalition.

    `state_of_coalition[k]` is the number of the final state that is coalition k.
    """

    steps: tuple[PrefixStep, ...]
    state_of_coalition: tuple[int, ...]
    num_states: int
    shared: bool = True

    @property
    def num_first(self) -> int:
        """States before the first slot."""
        return 1 if self.shared else self.num_states


def plan_prefixes(
    sets: Bool[np.ndarray, "K S"], execution_order: tuple[int, ...], *, shared: bool = True
) -> PrefixPlan:
    """The plan with the fewest states for the coalitions of one host (valid rows only; equal rows are allowed).

    Args:
        sets: which slots are on in each coalition.
        execution_order: the slots in the order in which the network passes them; must name each slot that is on.
        shared: whether states may be added and moved at a slot.
    """
    return _plan(sets.tobytes(), sets.shape, execution_order, shared)


@lru_cache(maxsize=4096)
def _plan(packed: bytes, shape: tuple[int, int], execution_order: tuple[int, ...], shared: bool) -> PrefixPlan:
    rows = np.frombuffer(packed, dtype=np.bool_).reshape(shape).tolist()
    named = set(execution_order)
    missing = {slot for row in rows for slot, is_on in enumerate(row) if is_on} - named
    assert not missing, f"slots {sorted(missing)} are on but the execution order {execution_order} does not pass them"
    if not shared:
        return _separate(rows, execution_order)
    state_of_row = [0] * len(rows)
    num_states, steps = 1, []
    for slot in execution_order:
        parents_on = sorted({state for state, row in zip(state_of_row, rows, strict=True) if row[slot]})
        if not parents_on:
            continue
        parents_off = sorted({state for state, row in zip(state_of_row, rows, strict=True) if not row[slot]})
        steps.append(PrefixStep(slot=slot, num_parents=num_states, off=tuple(parents_off), on=tuple(parents_on)))
        child = {(parent, False): number for number, parent in enumerate(parents_off)}
        child |= {(parent, True): number for number, parent in enumerate(parents_on, len(parents_off))}
        state_of_row = [child[state, row[slot]] for state, row in zip(state_of_row, rows, strict=True)]
        num_states = len(child)
    return PrefixPlan(steps=tuple(steps), state_of_coalition=tuple(state_of_row), num_states=num_states)


def _separate(rows: list[list[bool]], execution_order: tuple[int, ...]) -> PrefixPlan:
    """The plan without sharing: one state per distinct coalition."""
    distinct = sorted({tuple(row) for row in rows})
    states = range(len(distinct))
    steps = tuple(
        PrefixStep(slot=slot, num_parents=len(distinct), off=tuple(i for i in states if not distinct[i][slot]), on=on)
        for slot in execution_order
        if (on := tuple(i for i in states if distinct[i][slot]))
    )
    of_rows = tuple(distinct.index(tuple(row)) for row in rows)
    return PrefixPlan(steps=steps, state_of_coalition=of_rows, num_states=len(distinct), shared=False)
