"""Layers as instructions: how each kind of layer computes its features, and gradients in the backward pass.

A rule emits the forward pass and returns the features with a function that emits the backward pass:

    features, backward = rule(assembler, layer, weights, features)
    gradient of the input = backward(gradient of the output, needs_input_grad)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.parameters.layout import FlatLayout
from esper.tolaria.executors.native.assembler import Activation, Assembler, Operation, Place, Rows, expect

Backward = Callable[[Rows, bool], Rows | None]
"""(gradient of the output, whether the input's is needed) -> that of the input. It may overwrite its argument."""

_OUTPUTS = 8
"""Outputs that a convolution packs together, as in convolution.h."""


@dataclass(frozen=True)
class Features:
    """Activations [channels][height][width][lanes]."""

    rows: Rows
    channels: int
    height: int
    width: int

    @property
    def space(self) -> int:
        """Positions of a channel."""
        return self.height * self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W]."""
        return self.channels, self.height, self.width


@dataclass(frozen=True)
class Weights:
    """Where a module's tensors lie: spaces of values, gradients (None: it is not trained) and buffers."""

    layout: FlatLayout
    values: int
    grads: int | None = None
    buffer_layout: FlatLayout | None = None
    buffers: int = 0
    prefix: str = ""

    def of(self, name: str) -> "Weights":
        """Those of a child."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def value(self, name: str, *shape: int) -> Place:
        """A tensor; raises ShapeError where it has another shape."""
        return Place(self.values, _offset(self.layout, self.prefix + name, shape))

    def grad(self, name: str) -> Place:
        """Where its gradient belongs."""
        assert self.grads is not None, "a backward pass of weights that are not trained"
        return Place(self.grads, _offset(self.layout, self.prefix + name))

    def buffer(self, name: str, *shape: int) -> Place:
        """A buffer; raises ShapeError where it has another shape."""
        assert self.buffer_layout is not None
        return Place(self.buffers, _offset(self.buffer_layout, self.prefix + name, shape))


def _offset(layout: FlatLayout, name: str, shape: tuple[int, ...] | None = None) -> int:
    spec = next(spec for spec in layout.tensors if spec.name == name)
    expect(f"shape of {name}", spec.shape, spec.shape if shape is None else shape)
    return spec.offset


Layer = tuple[Features, Backward]
Rule = Callable[[Assembler, Any, Weights, Features], Layer]


def images(a: Assembler, place: Place, shape: tuple[int, int, int], unshuffle: int = 1) -> Features:
    """A batch of images [B, C, H, W] at `place` as features, unshuffled as by `nn.PixelUnshuffle`.

    The copy is made anyway, so that another order of the rows costs nothing.

    Raises:
        ShapeError: squares of `unshuffle` x `unshuffle` pixels do not fill an image.
    """
    channels, height, width = shape
    expect("pixels beyond whole squares", (height % unshuffle, width % unshuffle), (0, 0))
    rows = a.rows(channels * height * width)
    a.emit(Operation.TRANSPOSE, place, rows, sizes=(*shape, unshuffle))
    return Features(rows, channels * unshuffle**2, height // unshuffle, width // unshuffle)


# -- layers ------------------------------------------------------------------------------------------------------------


_DENSE = (Operation.CONVOLVE, Operation.CONVOLVE_WEIGHT_GRAD, Operation.CONVOLVE_INPUT_GRAD)
_DEPTHWISE = (Operation.DEPTHWISE, Operation.DEPTHWISE_WEIGHT_GRAD, Operation.DEPTHWISE_INPUT_GRAD)


def convolution(a: Assembler, conv: nn.Conv2d, weights: Weights, x: Features) -> Layer:
    """`nn.Conv2d` of kernel 1 or 3, stride 1 and zero padding; dense, or depthwise without bias."""
    if conv.groups == 1:
        return _product(a, conv, weights, x, (conv.out_channels, x.channels, *conv.kernel_size), _DENSE)
    return _product(a, conv, weights, x, (x.channels, 1, *conv.kernel_size), _DEPTHWISE)


def linear(a: Assembler, layer: nn.Linear, weights: Weights, x: Features) -> Layer:
    """`nn.Linear` on features of one position."""
    expect("positions before a linear layer", x.space, 1)
    return _product(a, layer, weights, x, (layer.out_features, x.channels), _DENSE)


def _product(
    a: Assembler, layer: nn.Conv2d | nn.Linear, weights: Weights, x: Features, shape: tuple[int, ...],
    operations: tuple[Operation, Operation, Operation],
) -> Layer:  # fmt: skip
    """Features times a weight of this shape, plus the layer's bias."""
    forward, weight_grad, input_grad = operations
    weight, outputs, side = weights.value("weight", *shape), shape[0], shape[2] if len(shape) > 2 else 1
    sizes = (x.channels, outputs, x.height, x.width, side)
    y = Features(a.rows(outputs * x.space), outputs, x.height, x.width)
    for n, m in ((x.channels, outputs), (outputs, x.channels)):
        a.scratch(-(-m // _OUTPUTS) * _OUTPUTS * n * side**2)
    a.emit(forward, x.rows, weight, y.rows, sizes=sizes)
    if layer.bias is not None:
        a.emit(Operation.ADD_BIAS, weights.value("bias", outputs), y.rows, sizes=(outputs, x.space))

    def emit(g: Rows) -> None:
        if layer.bias is not None:
            a.emit(Operation.ADD_BIAS_BACKWARD, g, weights.grad("bias"), sizes=(outputs, x.space))
        a.emit(weight_grad, x.rows, g, weights.grad("weight"), sizes=sizes)

    return y, backward_of(a, x, emit, lambda g, grad: a.emit(input_grad, g, weight, grad, sizes=sizes))


def batch_norm_relu(a: Assembler, norm: nn.BatchNorm2d, weights: Weights, x: Features) -> Layer:
    """Batch normalization, then ReLU; it uses the batch's statistics in training, the running ones in evaluation."""
    y, sizes = like(a, x), (x.channels, x.space)
    affine = (weights.value("weight", x.channels), weights.value("bias", x.channels))
    running = (weights.buffer("running_mean", x.channels), weights.buffer("running_var", x.channels))
    if not a.trainable:
        a.emit(Operation.BATCH_NORM_FIXED, x.rows, *affine, *running, y.rows, sizes=sizes, numbers=(norm.eps,))
        return y, backward_of(a, x)
    assert norm.momentum is not None
    a.normalizes(x.shape, groups=x.channels)
    stats = (a.numbers(x.channels), a.numbers(x.channels))
    numbers = (norm.eps, norm.momentum)
    a.emit(Operation.BATCH_NORM, x.rows, *affine, *running, *stats, y.rows, sizes=sizes, numbers=numbers)

    def emit(g: Rows) -> None:
        grads = (weights.grad("weight"), weights.grad("bias"))
        a.emit(Operation.BATCH_NORM_BACKWARD, x.rows, *affine, *stats, *grads, g, sizes=sizes)

    return y, backward_of(a, x, emit)


def group_norm(
    a: Assembler, norm: nn.GroupNorm, weights: Weights, x: Features, *, relu: bool = False, scale: Weights | None = None
) -> Layer:
    """Group normalization, fused with the ReLU and the layer scale that follow it."""
    expect("channels beyond whole groups", x.channels % norm.num_groups, 0)
    a.normalizes(x.shape, groups=norm.num_groups)
    y, sizes = like(a, x), (x.channels, x.space, norm.num_groups)
    affine = (weights.value("weight", x.channels), weights.value("bias", x.channels))
    gamma = None if scale is None else scale.value("gamma", x.channels)
    stats = (a.rows(norm.num_groups), a.rows(norm.num_groups))
    operands = (x.rows, *affine, gamma, *stats)
    a.emit(Operation.GROUP_NORM, *operands, y.rows, sizes=sizes, flag=relu, numbers=(norm.eps,))

    def emit(g: Rows) -> None:
        grads = (weights.grad("weight"), weights.grad("bias"), None if scale is None else scale.grad("gamma"))
        a.emit(Operation.GROUP_NORM_BACKWARD, *operands, g, *grads, sizes=sizes, flag=relu)

    return y, backward_of(a, x, emit)


def layer_scale(a: Assembler, layer: LayerScale, weights: Weights, x: Features) -> Layer:
    """One factor per channel."""
    y, sizes, gamma = like(a, x), (x.channels, x.space), weights.value("gamma", x.channels)
    a.emit(Operation.SCALE, gamma, x.rows, y.rows, sizes=sizes)
    return y, backward_of(
        a, x, lambda g: a.emit(Operation.SCALE_BACKWARD, gamma, x.rows, g, weights.grad("gamma"), sizes=sizes)
    )  # fmt: skip


def activate(a: Assembler, kind: Activation, x: Features) -> Layer:
    """An activation function."""
    y, sizes = like(a, x), (x.rows.size,)
    a.emit(Operation.ACTIVATE, x.rows, y.rows, sizes=sizes, flag=kind)
    saved = x if kind == Activation.SILU else y
    return y, backward_of(
        a, x, lambda g: a.emit(Operation.ACTIVATE_BACKWARD, saved.rows, g, sizes=sizes, flag=kind)
    )  # fmt: skip


def activation(kind: Activation) -> Rule:
    """The rule of a module that is an activation function."""
    return lambda a, layer, weights, x: activate(a, kind, x)


def mean_space(a: Assembler, x: Features) -> Layer:
    """[channels][height][width] -> [channels][1][1]."""
    y, sizes = Features(a.rows(x.channels), x.channels, 1, 1), (x.channels, x.space)
    a.emit(Operation.MEAN, x.rows, y.rows, sizes=sizes)
    return y, backward_of(
        a, x, input_grad=lambda g, grad: a.emit(Operation.MEAN_BACKWARD, g, grad, sizes=sizes)
    )  # fmt: skip


def max_pool(a: Assembler, x: Features) -> Layer:
    """2x2 max pooling; an odd last row or column is left out."""
    y = Features(a.rows(x.channels * (x.height // 2) * (x.width // 2)), x.channels, x.height // 2, x.width // 2)
    winners = like(a, y).rows
    a.emit(Operation.MAX_POOL, x.rows, y.rows, winners, sizes=x.shape)
    return y, backward_of(
        a, x, input_grad=lambda g, grad: a.emit(Operation.MAX_POOL_BACKWARD, winners, g, grad, sizes=x.shape)
    )  # fmt: skip


def chain(x: Features, *steps: Callable[[Features], Layer]) -> Layer:
    """One step after another."""
    h, backwards = x, []
    for step in steps:
        h, backward = step(h)
        backwards.append(backward)
    return h, in_reverse(backwards)


def in_reverse(backwards: Sequence[Backward]) -> Backward:
    """The backward pass of layers that ran one after another."""

    def backward(g: Rows, needs_input_grad: bool) -> Rows | None:
        grad: Rows | None = g
        for i in reversed(range(len(backwards))):
            assert grad is not None
            grad = backwards[i](grad, needs_input_grad or i > 0)
        return grad

    return backward


def like(a: Assembler, x: Features) -> Features:
    """New features of the same shape."""
    return replace(x, rows=a.rows(x.rows.size))


def backward_of(
    a: Assembler,
    x: Features,
    emit: Callable[[Rows], None] | None = None,
    input_grad: Callable[[Rows, Rows], None] | None = None,
) -> Backward:
    """The backward pass of a layer with input `x`.

    `emit(g)` emits the gradients of the weights. `input_grad(g, grad)` emits that of `x` into new rows; without it,
    `emit` replaces `g` by the gradient of `x`.
    """

    def backward(g: Rows, needs_input_grad: bool) -> Rows | None:
        if emit is not None:
            emit(g)
        if not needs_input_grad or input_grad is None:
            return g if needs_input_grad else None
        grad = a.rows(x.rows.size)
        input_grad(g, grad)
        return grad

    return backward
