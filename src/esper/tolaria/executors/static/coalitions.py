"""Coalitions of all hosts by masks: the states of the network that are computed, whatever the hosts' sets are.

With few slots every subset is a state, and the subsets of earlier slots share the work of earlier layers:

    before slot 0      x                       1 state
    after slot 0       x   x+0                 2 states: without the seed, and with it
    after slot 1       x   x+0  x+1  x+0+1     4 states; subset j has the bits of j

If a doubling would give more states than there are coalitions, each coalition gets a state of its own from there on.
Only the contents of index tensors depend on the structures of the hosts.

Shape legend: B = examples, N = hosts, P = states, K = coalitions.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor


@final
@dataclass(frozen=True)
class StaticStates:
    """The states of K coalitions at each slot. `on[i]` [K, N]: is the seed of the i-th slot in the set?

    Up to slot `doublings` states are the subsets of the slots so far, later they are the coalitions; `parent` [K, N] is
    the last subset of each coalition.
    """

    on: tuple[Tensor, ...]
    parent: Tensor
    doublings: int
    num_states: int
    final: Int[Tensor, "N K"]
    """The state of each coalition at the end."""
    column: Int[Tensor, " N"]

    def branch(self, i: int, h: Tensor, active: Tensor) -> Tensor:
        """The states after the i-th slot, from those before it [B, P, N, ...] and the same with the seed active."""
        if i < self.doublings:
            return torch.cat((h, active), dim=1)
        if i == self.doublings:
            h, active = h[:, self.parent, self.column], active[:, self.parent, self.column]
        on = self.on[i]
        return torch.where(on.view(*on.shape, *(1,) * (h.dim() - 3)), active, h)


def static_states(sets: Bool[Tensor, "N K S"], execution_order: tuple[int, ...]) -> StaticStates:
    """The states of these coalitions; `execution_order` are the slots in the order in which the network runs them."""
    num_hosts, num_sets, num_slots = sets.shape
    on = tuple(sets[:, :, s].t() for s in execution_order)
    doublings = min(num_slots, num_sets.bit_length() - 1)
    parent = torch.zeros_like(on[0], dtype=torch.int64)
    for i, active in enumerate(on[:doublings]):
        parent = parent + 2**i * active
    complete = doublings == num_slots
    return StaticStates(
        on=on,
        parent=parent,
        doublings=doublings,
        num_states=2**num_slots if complete else num_sets,
        final=parent.t() if complete else torch.arange(num_sets, device=sets.device).expand(num_hosts, -1),
        column=torch.arange(num_hosts, device=sets.device),
    )
