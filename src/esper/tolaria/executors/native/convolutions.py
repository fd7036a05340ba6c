"""Rules of convolutions and linear layers, whose kernels are in convolution.h."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from esper.tolaria.executors.native.lowering import ADDED, RULES, Lowering, Value, Weight, rule
from esper.tolaria.executors.native.program import Operation, Rows
from esper.tolaria.executors.native.rules import combine, reshaped
from esper.tolaria.executors.native.trace import aten


class Geometry(NamedTuple):
    """Sizes of a convolution, in the order of `Shape` in convolution.h; a linear layer is one of height `positions`."""

    inputs: int
    outputs: int
    groups: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_h: int
    kernel_w: int
    stride_h: int
    stride_w: int
    pad_top: int
    pad_left: int
    dilation_h: int
    dilation_w: int


def _pair(x: int | Sequence[int]) -> tuple[int, int]:
    """Of both axes of an image; a sequence is an image of height 1."""
    numbers = (x, x) if isinstance(x, int) else tuple(int(number) for number in x)
    return (numbers[0], numbers[-1]) if len(numbers) > 1 else (1, numbers[0])


def _padding(padding: Any, reach: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Before an image, and in all."""
    if padding == "same":
        return (reach[0] // 2, reach[1] // 2), reach
    before = (0, 0) if padding == "valid" else _pair(padding)
    return before, (2 * before[0], 2 * before[1])


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
    before, padded = _padding(padding, reach)
    out = (height + padded[0] - reach[0] - 1) // sh + 1, (width + padded[1] - reach[1] - 1) // sw + 1
    sizes = Geometry(channels, outputs, groups, height, width, *out, kernel_h, kernel_w, sh, sw, *before, dh, dw)
    y = low.make(outputs, *out)
    low.emit(Operation.CONVOLVE, x.rows, w.place, b and b.place, y.rows, sizes=sizes)

    def backward(g: Rows) -> None:
        weight_grad(low, x.rows, g, w, b, sizes)
        low.into(x, lambda grad: low.emit(Operation.CONVOLVE_INPUT_GRAD, g, w.place, grad, sizes=sizes))

    return low.result(y, backward, x, w, b)


def _weight_grad(low: Lowering, operation: Operation, x: Rows, g: Rows, weights: tuple[Weight, Weight | None],
                 sizes: tuple[int, ...], scratch: Place) -> None:  # fmt: skip
    if low.trains(*weights):
        w, b = weights
        # a frozen weight with a trained bias: the gradient of the weight goes where nobody reads it
        place = low.grad_of(w) or low.a.numbers(w.size)
        low.emit(operation, x, g, place, low.grad_of(b), scratch, sizes=sizes)


@rule("conv1d.default", "conv1d.padding")
def conv1d(low: Lowering, x: Any, weight: Any, bias: Any = None, stride: Any = (1,), padding: Any = (0,),
           dilation: Any = (1,), groups: int = 1) -> Value:  # fmt: skip
    """[B, C, L], as images of height 1."""
    x = low.value(x)
    outputs, inputs, kernel = weight.shape
    image = reshaped(low, x, (*x.shape[:-1], 1, x.shape[-1]))
    pads = padding if isinstance(padding, str) else (0, padding if isinstance(padding, int) else padding[0])
    w = reshaped(low, low.weight(weight, outputs, inputs, kernel), (outputs, inputs, 1, kernel))
    (step,), (dilated,) = ((n,) if isinstance(n, int) else tuple(n) for n in (stride, dilation))
    y = conv2d(low, image, w, bias, (1, step), pads, (1, dilated), groups)
    found: Value = reshaped(low, y, (*y.shape[:-2], y.shape[-1]))
    return found


@rule("conv_transpose2d.input")
def conv_transpose2d(low: Lowering, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Value:  # fmt: skip
    """[B, C, H, W]: the gradient of the input of a convolution that goes the other way."""
    x = low.leading(x)
    if len(x.features) != 3:
        raise low.refuse(f"images of shape {x.features}")
    channels, height, width = x.features
    _, per_group, kernel_h, kernel_w = weight.shape
    w = low.weight(weight, channels, per_group, kernel_h, kernel_w)
    (sh, sw), (ph, pw), (eh, ew), (dh, dw) = (_pair(n) for n in (stride, padding, output_padding, dilation))
    out = (
        (height - 1) * sh - 2 * ph + dh * (kernel_h - 1) + eh + 1,
        (width - 1) * sw - 2 * pw + dw * (kernel_w - 1) + ew + 1,
    )
    sizes = Geometry(
        per_group * groups, channels, groups, *out, height, width, kernel_h, kernel_w, sh, sw, ph, pw, dh, dw
    )
    y, scratch = low.make(per_group * groups, *out), low.a.scratch(low.scratch(sizes, False))
    low.emit(Operation.CONVOLVE_INPUT_GRAD, x.rows, w.place, y.rows, scratch, sizes=sizes)

    def backward(g: Rows) -> None:
        _weight_grad(low, Operation.CONVOLVE_WEIGHT_GRAD, g, x.rows, (w, None), sizes, scratch)
        low.into(x, lambda grad: low.emit(Operation.CONVOLVE, g, w.place, None, grad, scratch, sizes=sizes))

    found = low.result(y, backward, x, w)
    if bias is None:
        return found
    return combine(low, found, reshaped(low, low.weight(bias, per_group * groups), (per_group * groups, 1, 1)), ADDED)


@rule("linear.default")
def linear(low: Lowering, x: Any, weight: Any, bias: Any = None) -> Value:
    """[..., I] -> [..., O], with the axis of the examples anywhere but last."""
    x = low.value(x)
    if isinstance(weight, Value):  # computed in the forward pass
        y = RULES[aten.matmul.default](low, x, RULES[aten.t.default](low, weight))
        return y if bias is None else combine(low, y, bias, ADDED)
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
        _weight_grad(low, Operation.MULTIPLY_WEIGHT_GRAD, x.rows, g, (w, b), sizes, scratch)
        low.into(x, lambda grad: low.emit(Operation.MULTIPLY_INPUT_GRAD, g, w.place, grad, scratch, sizes=sizes))

    return low.result(y, backward, x, w, b)
