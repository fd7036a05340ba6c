"""Shapley values, exactly, from the worth of every coalition."""

from collections.abc import Sequence
from math import factorial


def shapley_values(worth: Sequence[float]) -> list[float]:
    """What each of n players adds, averaged over all orders in which they could join; they sum to the whole gain.

        phi_i = sum over A without i of |A|! (n - |A| - 1)! / n! * (f(A + i) - f(A))

    Args:
        worth: f of all 2^n coalitions; bit i of the index says whether player i is a member. NaN where one was not
            measured, which makes values NaN.
    """
    n = len(worth).bit_length() - 1
    assert len(worth) == 2**n, f"{len(worth)} numbers are not the worth of all coalitions of any number of players"
    share = [factorial(size) * factorial(n - size - 1) / factorial(n) for size in range(n)]
    return [
        sum(share[a.bit_count()] * (worth[a | 1 << i] - worth[a]) for a in range(2**n) if not a >> i & 1)
        for i in range(n)
    ]
