"""Stratified splits: every part has the classes in the proportions of the whole."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.random import Stream, permutation


def largest_remainder(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers that add up to `total` in proportion to `weights` (Hamilton's method).

    Each gets the floor of its exact share; what is left goes to the largest fractions, the earlier one on ties.
    Integer arithmetic, so that shares do not depend on rounding: share_i = total * w_i / sum(w).
    """
    whole = sum(weights)
    shares = [total * weight // whole for weight in weights]
    fractions = [total * weight % whole for weight in weights]
    by_fraction = sorted(range(len(weights)), key=lambda i: (-fractions[i], i))
    for i in by_fraction[: total - sum(shares)]:
        shares[i] += 1
    return tuple(shares)


def stratified_split(
    labels: Int[Tensor, " n"], sizes: Sequence[int], num_classes: int, run_seed: int
) -> tuple[Int[Tensor, " _"], ...]:
    """Indices of `len(sizes)` disjoint parts and, as the last part, of the rest; each ascending.

    The examples of a class are dealt in the order of one random permutation, which depends on the run seed alone:
    all hosts and episodes of a run share the split.

    Args:
        labels: class of each example, 0 .. num_classes - 1.
        sizes: examples of each part; every class gives its largest-remainder share of what is left.
        num_classes: number of classes.
        run_seed: key of the permutation.

    Raises:
        DataError: the parts would leave no example over.
    """
    if sum(sizes) >= len(labels):
        raise DataError(
            f"{len(labels)} examples cannot be split into parts of {', '.join(map(str, sizes))} with a rest; "
            "use a complete data set."
        )
    order = permutation(run_seed, Stream.SPLIT, torch.zeros(1, dtype=torch.int64), len(labels))[0]
    order = order.to(labels.device)
    left = [order[labels[order] == c] for c in range(num_classes)]
    parts = []
    for size in sizes:
        shares = largest_remainder(size, [len(indices) for indices in left])
        parts.append(torch.cat([indices[:share] for indices, share in zip(left, shares, strict=True)]))
        left = [indices[share:] for indices, share in zip(left, shares, strict=True)]
    parts.append(torch.cat(left))
    return tuple(part.sort().values for part in parts)
