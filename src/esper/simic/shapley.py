"""Shapley values of the seeds of N hosts, exactly, from the accuracy of every subset.

    phi_i = sum over A without i of |A|! (n - |A| - 1)! / n! * (f(A + i) - f(A))

Collected by subset, phi is a linear map of f: subset A counts +(|A| - 1)! (n - |A|)! / n! for its members and
-|A|! (n - |A| - 1)! / n! for the others. The map depends on n alone; one table holds it for every n.

Shape legend: N = hosts, S = slots, J = 2**R subsets of up to R seeds.
"""

from functools import lru_cache
from math import factorial

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def shapley_values(subset_acc: Float[Tensor, "N J"], live: Bool[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """Mean marginal accuracy of each seed over all orders, in the unit of `subset_acc`.

    Args:
        subset_acc: accuracy of each subset of the active seeds; bit r of the column number is the r-th of them.
        live: which slots hold those seeds.

    Returns:
        Values that sum to f(all) - f(none) on each host; computed in float64. NaN for slots without such a seed, and
        for hosts with more seeds than the columns cover or with a subset that was not measured.
    """
    num_slots, num_subsets = live.shape[1], subset_acc.shape[1]
    if num_subsets < 2:  # no subset, or the empty one alone
        return torch.full_like(live, torch.nan, dtype=subset_acc.dtype)
    width = num_subsets.bit_length() - 1
    assert num_subsets == 2**width, f"{num_subsets} columns are not all subsets of any number of seeds"
    weights, used = _weights(width, num_slots, subset_acc.device)
    count_NS = live.cumsum(dim=1)
    num_seeds_N = count_NS[:, -1]
    known_NJ = torch.where(used[num_seeds_N], subset_acc.to(torch.float64), 0.0)
    value_NR = (weights[num_seeds_N] @ known_NJ[:, :, None]).squeeze(2)
    by_slot_NS = value_NR.gather(1, (count_NS - 1).clamp(min=0, max=width - 1))
    return torch.where(live, by_slot_NS, torch.nan).to(subset_acc.dtype)


@lru_cache(maxsize=16)
def _weights(width: int, num_slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """`weights[n, r, j]`: weight of subset j for the r-th of n seeds; `used[n, j]`: is j a subset of n seeds?

    Rows of more seeds than `width` are NaN: their subsets were not all evaluated.
    """
    weights = torch.zeros(num_slots + 1, width, 2**width, dtype=torch.float64)
    used = torch.zeros(num_slots + 1, 2**width, dtype=torch.bool)
    weights[width + 1 :] = torch.nan
    for n in range(1, min(width, num_slots) + 1):
        used[n, : 2**n] = True
        for subset in range(2**n):
            size = subset.bit_count()
            for rank in range(n):
                member = subset >> rank & 1
                before = size - member
                share = factorial(before) * factorial(n - before - 1) / factorial(n)
                weights[n, rank, subset] = share if member else -share
    return weights.to(device), used.to(device)
