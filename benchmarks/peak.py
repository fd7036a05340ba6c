"""Arithmetic of a training pass, and the peak of this machine."""

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from esper.cpp import load
from paired import cpu_ms

GEMM = 1024
"""Rows and columns of the matrices whose product gives the peak."""


def flop_of_training(train: Callable[[], object]) -> int:
    """Operations of `train`, which PyTorch runs: 2 per multiply-add of convolutions and matrix products.

    Products with the zeros of a padded border are counted; norms, activations and pooling are not.
    """
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: backward_flop}) as counter:
        train()
    return counter.get_total_flops()


def backward_flop(
    grad: Sequence[int], x: Sequence[int], weight: Sequence[int], *rest: Any, out_shape: Any, **_: Any
) -> int:
    """Each gradient of a convolution costs as much as the forward pass; PyTorch's own formula ignores groups."""
    wanted = rest[-1]
    return 2 * grad[0] * math.prod(grad[2:]) * math.prod(weight) * sum(wanted[:2])


def gemm_peak() -> float:
    """Best GFLOP/s of a float32 matrix product of 1024 x 1024 x 1024, in CPU time of one thread."""
    a, b = torch.randn(GEMM, GEMM), torch.randn(GEMM, GEMM)
    out = torch.empty(GEMM, GEMM)
    best = min(cpu_ms(lambda: torch.mm(a, b, out=out)) for _ in range(20))
    return 2 * GEMM**3 / best / 1e6


def fma_peak() -> float:
    """Best GFLOP/s of independent multiply-adds in the registers of one core, compiled as esper's kernels are."""
    source = Path(__file__).parent / "fma" / "fma.cpp"
    run = load(source, lambda path: ctypes.CDLL(str(path)), what="the peak", alternative="leave it out").esper_fma
    run.restype, run.argtypes = ctypes.c_double, [ctypes.c_long, ctypes.c_float, ctypes.POINTER(ctypes.c_float)]
    sum_, rounds = ctypes.c_float(), 2_000_000
    operations = run(rounds, 0.5, sum_)
    return operations / min(cpu_ms(lambda: run(rounds, 0.5, sum_)) for _ in range(20)) / 1e6
