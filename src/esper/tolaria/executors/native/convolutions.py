"""Rules of convolutions and linear layers, whose kernels are in convolution.h."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from esper.tolaria.executors.native.lowering import ADDED, RULES, Lowering, Value, Weight, rule
from esper.tolaria.executors.native.program import Operation, Rows
from esper.tolaria.executors.native.rules import combine, reshaped
from esper.tolaria.executors.native.trace import aten


class Geometry(NamedTuple):
    """Sizes of a convolution, in the order of `Shape` in convolution.h; positions of a linear layer are rows."""

    inputs: int
    outputs: int
    groups: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel_h: int = 1
    kernel_w: int = 1
    stride_h: int = 1
    stride_w: int = 1
    pad_top: int = 0
    pad_left: int = 0
    dilation_h: int = 1
    dilation_w: int = 1


def _convolve(low: Lowering, x: Value, w: Weight, b: Weight | None, y: Value, sizes: Geometry, *, back: bool = False,
              linear: bool = False) -> Value:  # fmt: skip
    """Fill `y`, and register its backward pass.

    `back`: as the gradient of the input of a convolution of these sizes. `linear`: channels follow each other.
    """

    def emit(back: bool, x: Rows, b: Weight | None, y: Rows) -> None:
        operands = (x, w.place, y) if back else (x, w.place, None if b is None else b.place, y)
        operation = Operation.CONVOLVE_INPUT_GRAD if back else Operation.CONVOLVE
        low.emit(operation, *operands, sizes=sizes, flag=linear)

    emit(back, x.rows, b, y.rows)

    def backward(g: Rows) -> None:
        if low.trains(w, b):
            # a frozen weight with a trained bias: the gradient of the weight goes where nobody reads it
            place, operands = low.grad_of(w) or low.numbers(w.size), (g, x.rows) if back else (x.rows, g)
            low.emit(Operation.CONVOLVE_WEIGHT_GRAD, *operands, place, low.grad_of(b), sizes=sizes, flag=linear)
        low.into(x, lambda grad: emit(not back, g, None, grad))

    return low.result(y, backward, x, w, b)


def _images(low: Lowering, x: Any) -> Value:
    x = low.leading(x)
    if len(x.features) != 3:
        raise low.refuse(f"images of shape {x.features}")
    found: Value = x
    return found


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
    x = _images(low, x)
    channels, height, width = x.features
    outputs, _, kernel_h, kernel_w = weight.shape
    w = low.weight(weight, outputs, channels // groups, kernel_h, kernel_w)
    b = None if bias is None else low.weight(bias, outputs)
    (sh, sw), (dh, dw) = _pair(stride), _pair(dilation)
    reach = dh * (kernel_h - 1), dw * (kernel_w - 1)
    before, padded = _padding(padding, reach)
    out = (height + padded[0] - reach[0] - 1) // sh + 1, (width + padded[1] - reach[1] - 1) // sw + 1
    sizes = Geometry(channels, outputs, groups, height, width, *out, kernel_h, kernel_w, sh, sw, *before, dh, dw)
    return _convolve(low, x, w, b, low.make(outputs, *out), sizes)


@rule("conv1d.default", "conv1d.padding")
def conv1d(low: Lowering, x: Any, weight: Any, bias: Any = None, stride: Any = (1,), padding: Any = (0,),
           dilation: Any = (1,), groups: int = 1) -> Value:  # fmt: skip
    """[B, C, L], as images of height 1."""
    x = low.value(x)
    outputs, inputs, kernel = weight.shape
    image = low.value(reshaped(low, x, (*x.shape[:-1], 1, x.shape[-1])))
    pads = padding if isinstance(padding, str) else (0, padding if isinstance(padding, int) else padding[0])
    w = replace(low.weight(weight, outputs, inputs, kernel), shape=(outputs, inputs, 1, kernel))
    (step,), (dilated,) = ((n,) if isinstance(n, int) else tuple(n) for n in (stride, dilation))
    y = conv2d(low, image, w, bias, (1, step), pads, (1, dilated), groups)
    return low.value(reshaped(low, y, (*y.shape[:-2], y.shape[-1])))


@rule("conv_transpose2d.input")
def conv_transpose2d(low: Lowering, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
                     output_padding: Any = 0, groups: int = 1, dilation: Any = 1) -> Value:  # fmt: skip
    """[B, C, H, W]: the gradient of the input of a convolution that goes the other way."""
    x = _images(low, x)
    channels, height, width = x.features
    _, per_group, kernel_h, kernel_w = weight.shape
    w, outputs = low.weight(weight, channels, per_group, kernel_h, kernel_w), per_group * groups
    (sh, sw), (ph, pw), (eh, ew), (dh, dw) = (_pair(n) for n in (stride, padding, output_padding, dilation))
    out = (
        (height - 1) * sh - 2 * ph + dh * (kernel_h - 1) + eh + 1,
        (width - 1) * sw - 2 * pw + dw * (kernel_w - 1) + ew + 1,
    )
    sizes = Geometry(outputs, channels, groups, *out, height, width, kernel_h, kernel_w, sh, sw, ph, pw, dh, dw)
    y = _convolve(low, x, w, None, low.make(outputs, *out), sizes, back=True)
    return y if bias is None else combine(low, y, reshaped(low, low.weight(bias, outputs), (outputs, 1, 1)), ADDED)


@rule("linear.default")
def linear(low: Lowering, x: Any, weight: Any, bias: Any = None) -> Value:
    """[..., I] -> [..., O], with the axis of the examples anywhere but last."""
    x = low.value(x)
    if isinstance(weight, Value):  # computed in the forward pass
        y = RULES[aten.matmul.default](low, x, RULES[aten.t.default](low, weight))
        return y if bias is None else combine(low, y, bias, ADDED)
    return by_weight(low, x, weight, bias, transposed=True)


def by_weight(low: Lowering, x: Value, weight: Any, bias: Any = None, *, transposed: bool = False) -> Value:
    """X W with W [I, O], or (`transposed`) x W^T with W [O, I]."""
    outputs, inputs = weight.shape if transposed else reversed(weight.shape)
    if x.axis == len(x.shape) - 1 or x.shape[-1] != inputs:
        raise low.refuse(f"a product of {x.shape} and weights {tuple(weight.shape)}")
    positions = x.size // inputs
    w, b = low.weight(weight, *weight.shape), None if bias is None else low.weight(bias, outputs)
    y = Value(low.rows(positions * outputs), (*x.shape[:-1], outputs), x.axis, x.outer)
    sizes = Geometry(*((inputs, outputs) if transposed else (outputs, inputs)), 1, positions, 1, positions, 1)
    return _convolve(low, x, w, b, y, sizes, back=not transposed, linear=True)
