"""Rules of convolutions and linear layers, whose kernels are in convolution.h."""

from collections.abc import Sequence
from typing import Any

from esper.tolaria.executors.native.lowering import Lowering, Value, rule
from esper.tolaria.executors.native.program import Operation, Rows


def _pair(x: int | Sequence[int]) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else (int(x[0]), int(x[-1]))


@rule("conv2d.default", "conv2d.padding")
def conv2d(low: Lowering, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
           groups: int = 1) -> Value:  # fmt: skip
    """[B, C, H, W]."""
    x = low.leading(x)
    if len(x.features) != 3:
        raise low.refuse(f"images of shape {x.features}")
    channels, height, width = x.features
    outputs, _, kernel_h, kernel_w = weight.shape
    w = low.weight(weight, outputs, channels // groups, kernel_h, kernel_w)
    b = None if bias is None else low.weight(bias, outputs)
    (sh, sw), (dh, dw) = _pair(stride), _pair(dilation)
    reach = dh * (kernel_h - 1), dw * (kernel_w - 1)
    if padding == "same":
        before, every = (reach[0] // 2, reach[1] // 2), reach
    else:
        before = (0, 0) if padding == "valid" else _pair(padding)
        every = 2 * before[0], 2 * before[1]
    out = (height + every[0] - reach[0] - 1) // sh + 1, (width + every[1] - reach[1] - 1) // sw + 1
    sizes = (channels, outputs, groups, height, width, *out, kernel_h, kernel_w, sh, sw, *before, dh, dw)
    y = low.make(outputs, *out)
    scratch = low.a.scratch(low.scratch(sizes, False))
    low.emit(Operation.CONVOLVE, x.rows, w.place, b and b.place, y.rows, scratch, sizes=sizes)

    def backward(g: Rows) -> None:
        if low.trains(w, b):
            grads = low.grad_of(w), low.grad_of(b)
            low.emit(Operation.CONVOLVE_WEIGHT_GRAD, x.rows, g, *grads, scratch, sizes=sizes)
        low.into(x, lambda grad: low.emit(Operation.CONVOLVE_INPUT_GRAD, g, w.place, grad, scratch, sizes=sizes))

    return low.result(y, backward, x, w, b)


@rule("linear.default")
def linear(low: Lowering, x: Any, weight: Any, bias: Any = None) -> Value:
    """[..., I] -> [..., O], with the axis of the examples anywhere but last."""
    x = low.value(x)
    outputs, inputs = weight.shape
    if x.axis == len(x.shape) - 1:
        raise low.refuse("features of examples that lie along the last axis")
    w = low.weight(weight, outputs, inputs)
    b = None if bias is None else low.weight(bias, outputs)
    sizes = (x.size // inputs, inputs, outputs)
    y = Value(low.rows(sizes[0] * outputs), (*x.shape[:-1], outputs), x.axis, x.outer)
    scratch = low.a.scratch(low.scratch(sizes, True))
    low.emit(Operation.MULTIPLY, x.rows, w.place, b and b.place, y.rows, scratch, sizes=sizes)

    def backward(g: Rows) -> None:
        if low.trains(w, b):
            grads = low.grad_of(w), low.grad_of(b)
            low.emit(Operation.MULTIPLY_WEIGHT_GRAD, x.rows, g, *grads, scratch, sizes=sizes)
        low.into(x, lambda grad: low.emit(Operation.MULTIPLY_INPUT_GRAD, g, w.place, grad, scratch, sizes=sizes))

    return low.result(y, backward, x, w, b)
