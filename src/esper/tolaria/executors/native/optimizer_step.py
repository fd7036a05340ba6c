"""One optimizer step of some weights as instructions. Gradients are not changed, so statistics can be taken later.

Five spaces follow each other: the weights, their gradients, and three of the optimizer's state. SGD keeps its momentum
in the first of these and has no other state; AdamW has two moments and the number of steps.
"""

from collections.abc import Sequence

from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.tolaria.executors.native.assembler import Assembler, Operation, Place


def clipped_step(
    a: Assembler,
    spec: OptimizerSpec,
    rate: float,
    rate_factor: Place,
    rows: Sequence[tuple[int, int]],
    mask: Place | None,
) -> None:
    """Step rows (space, number of weights) that are clipped together by the norm of their gradient.

    The number at `rate_factor` multiplies the learning rate. `mask` marks the weights that decay; without one none do.
    """
    factor = a.numbers(1)
    for k, (space, count) in enumerate(rows):
        a.emit(Operation.SQUARE_NORM, Place(space + 1, 0), factor, sizes=(count,), flag=k > 0)
    a.emit(Operation.CLIP, factor, numbers=(spec.grad_clip,))
    for space, count in rows:
        weights, gradient, *moments = (Place(space + k, 0) for k in range(5))
        operands = rate_factor, factor, gradient, mask, weights
        if spec.kind == "sgd":
            rates: tuple[float, ...] = (rate, spec.sgd_weight_decay, spec.momentum)
            a.emit(Operation.SGD, *operands, moments[0], sizes=(count,), numbers=rates)
        else:
            rates = (rate, spec.adamw_weight_decay, *spec.betas, spec.eps)
            a.emit(Operation.ADAMW, *operands, *moments, sizes=(count,), numbers=rates, flag=spec.kind == "adam")
