"""Layers as instructions: what each kind of layer does to features on the way forward and to gradients on the backward pass.

A rule writes the way forward at once and returns the features with a function that writes the backward pass:

    features, backward = rule(assembler, layer, weights, features)
    gradient of the input = backward(gradient of the output, input_grad)

Rows that a rule makes belong to it: it releases them in `backward`, when nobody reads them any more. Where nothing is
learned there is no backward pass, and `chain` releases what lies between its layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.parameters.flat_layout import FlatLayout, TensorSpec
from esper.tolaria.executors.native.assembler import Activation, Assembler, Operation, Place, Rows, expect

Backward = Callable[[Rows, bool], Rows | None]
"""(gradient of the output, whether the input's is input_grad) -> that of the input. The rows it was given are consumed."""

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

    def like(self, rows: Rows) -> "Features":
        """Other values of the same shape."""
        return Features(rows, self.channels, self.height, self.width)


@dataclass(frozen=True)
class Weights:
    """Where a module's tensors lie: spaces of values, gradients (None: it does not learn) and buffers."""

    layout: FlatLayout
    values: int
    grads: int | None = None
    buffer_layout: FlatLayout | None = None
    buffers: int = 0
    prefix: str = ""

    def of(self, name: str) -> "Weights":
        """Those of a child."""
        return Weights(self.layout, self.values, self.grads, self.buffer_layout, self.buffers, f"{self.prefix}{name}.")

    def value(self, name: str, *shape: int) -> Place:
        """A tensor; raises ShapeError where it has another shape."""
        return Place(self.values, _offset(self.layout, self.prefix + name, shape))

    def grad(self, name: str) -> Place:
        """Where its gradient belongs."""
        assert self.grads is not None, "a backward pass of weights that do not learn"
        return Place(self.grads, _offset(self.layout, self.prefix + name))

    def buffer(self, name: str, *shape: int) -> Place:
        """A buffer; raises ShapeError where it has another shape."""
        assert self.buffer_layout is not None
        return Place(self.buffers, _offset(self.buffer_layout, self.prefix + name, shape))


def _offset(layout: FlatLayout, name: str, shape: tuple[int, ...] | None = None) -> int:
    spec = _specs(layout.tensors)[name]
    expect(f"shape of {name}", spec.shape, spec.shape if shape is None else shape)
    return spec.offset


@lru_cache(maxsize=256)
def _specs(tensors: tuple[TensorSpec, ...]) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in tensors}


Rule = Callable[[Assembler, Any, Weights, Features], tuple[Features, Backward]]


# -- layers ------------------------------------------------------------------------------------------------------------


def convolution(a: Assembler, conv: nn.Conv2d, weights: Weights, x: Features) -> tuple[Features, Backward]:
    """`nn.Conv2d` of kernel 1 or 3, stride 1 and zero border; all channels together, or each by itself."""
    if conv.groups > 1:
        return _depthwise(a, conv, weights, x)
    outputs = conv.out_channels
    return _product(a, weights, x, outputs, conv.kernel_size, bias=conv.bias is not None)


def linear(a: Assembler, layer: nn.Linear, weights: Weights, x: Features) -> tuple[Features, Backward]:
    """`nn.Linear` on features of one position."""
    expect("positions before a linear layer", x.space, 1)
    return _product(a, weights, x, layer.out_features, (), bias=layer.bias is not None)


def _product(
    a: Assembler, weights: Weights, x: Features, outputs: int, kernel: tuple[int, ...], *, bias: bool
) -> tuple[Features, Backward]:
    side = kernel[0] if kernel else 1
    weight = weights.value("weight", outputs, x.channels, *kernel)
    sizes = (x.channels, outputs, x.height, x.width, side)
    y = Features(a.rows(outputs * x.space), outputs, x.height, x.width)
    for n, m in ((x.channels, outputs), (outputs, x.channels)):
        a.scratch(-(-m // _OUTPUTS) * _OUTPUTS * n * side**2)
    a.emit(Operation.CONVOLVE, x.rows, weight, y.rows, sizes=sizes)
    if bias:
        a.emit(Operation.ADD_BIAS, weights.value("bias", outputs), y.rows, sizes=(outputs, x.space))

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        if bias:
            a.emit(Operation.ADD_BIAS_BACKWARD, g, weights.grad("bias"), sizes=(outputs, x.space))
        a.emit(Operation.CONVOLVE_WEIGHT_GRAD, x.rows, g, weights.grad("weight"), sizes=sizes)
        into = a.rows(x.rows.size) if input_grad else None
        if into is not None:
            a.emit(Operation.CONVOLVE_INPUT_GRAD, g, weight, into, sizes=sizes)
        a.release(g, y.rows)
        return into

    return y, backward


def _depthwise(a: Assembler, conv: nn.Conv2d, weights: Weights, x: Features) -> tuple[Features, Backward]:
    weight = weights.value("weight", x.channels, 1, *conv.kernel_size)
    sizes = (x.channels, x.channels, x.height, x.width, conv.kernel_size[0])
    y = x.like(a.rows(x.rows.size))
    a.emit(Operation.DEPTHWISE, x.rows, weight, y.rows, sizes=sizes)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        a.emit(Operation.DEPTHWISE_WEIGHT_GRAD, x.rows, g, weights.grad("weight"), sizes=sizes)
        into = a.rows(x.rows.size) if input_grad else None
        if into is not None:
            a.emit(Operation.DEPTHWISE_INPUT_GRAD, g, weight, into, sizes=sizes)
        a.release(g, y.rows)
        return into

    return y, backward


def batch_norm(
    a: Assembler, norm: nn.BatchNorm2d, weights: Weights, x: Features, *, relu: bool = False
) -> tuple[Features, Backward]:
    """Batch normalization with ReLU or without: with the statistics of the batch where the pass learns."""
    y = x.like(a.rows(x.rows.size))
    affine = (weights.value("weight", x.channels), weights.value("bias", x.channels))
    running = (weights.buffer("running_mean", x.channels), weights.buffer("running_var", x.channels))
    sizes = (x.channels, x.space)
    if not a.trainable:
        a.emit(
            Operation.BATCH_NORM_FIXED, x.rows, *affine, *running, y.rows, sizes=sizes, flag=relu, numbers=(norm.eps,)
        )
        return y, _no_way_back
    assert norm.momentum is not None
    a.normalizes(x.shape, groups=x.channels)
    mean, rstd = a.numbers(x.channels), a.numbers(x.channels)
    a.emit(
        Operation.BATCH_NORM, x.rows, *affine, *running, mean, rstd, y.rows,
        sizes=sizes, flag=relu, numbers=(norm.eps, norm.momentum),
    )  # fmt: skip

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        grads = (weights.grad("weight"), weights.grad("bias"))
        a.emit(
            Operation.BATCH_NORM_BACKWARD, x.rows, *affine, mean, rstd, *grads, y.rows, g, sizes=sizes, flag=relu
        )  # fmt: skip
        a.release(y.rows)
        return _handed_on(a, g, input_grad)

    return y, backward


def group_norm(
    a: Assembler,
    norm: nn.GroupNorm,
    weights: Weights,
    x: Features,
    *,
    relu: bool = False,
    scale: Weights | None = None,
) -> tuple[Features, Backward]:
    """Group normalization, then ReLU and a layer scale where they follow."""
    expect("channels beyond whole groups", x.channels % norm.num_groups, 0)
    a.normalizes(x.shape, groups=norm.num_groups)
    y = x.like(a.rows(x.rows.size))
    affine = (weights.value("weight", x.channels), weights.value("bias", x.channels))
    gamma = None if scale is None else scale.value("gamma", x.channels)
    sizes = (x.channels, x.space, norm.num_groups)
    mean, rstd = a.rows(norm.num_groups), a.rows(norm.num_groups)
    a.emit(
        Operation.GROUP_NORM, x.rows, *affine, gamma, mean, rstd, y.rows, sizes=sizes, flag=relu, numbers=(norm.eps,)
    )
    if not a.trainable:
        a.release(mean, rstd)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        grads = (weights.grad("weight"), weights.grad("bias"), None if scale is None else scale.grad("gamma"))
        a.emit(Operation.GROUP_NORM_BACKWARD, x.rows, *affine, gamma, mean, rstd, g, *grads, sizes=sizes, flag=relu)
        a.release(mean, rstd, y.rows)
        return _handed_on(a, g, input_grad)

    return y, backward


def layer_scale(a: Assembler, layer: LayerScale, weights: Weights, x: Features) -> tuple[Features, Backward]:
    """One factor per channel."""
    y, gamma, sizes = x.like(a.rows(x.rows.size)), weights.value("gamma", x.channels), (x.channels, x.space)
    a.emit(Operation.SCALE, gamma, x.rows, y.rows, sizes=sizes)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        a.emit(Operation.SCALE_BACKWARD, gamma, x.rows, g, weights.grad("gamma"), sizes=sizes)
        a.release(y.rows)
        return _handed_on(a, g, input_grad)

    return y, backward


def activation(kind: Activation) -> Rule:
    """The rule of an activation."""

    def rule(a: Assembler, layer: nn.Module, weights: Weights, x: Features) -> tuple[Features, Backward]:
        y, sizes = x.like(a.rows(x.rows.size)), (x.rows.size,)
        a.emit(Operation.ACTIVATE, x.rows, y.rows, sizes=sizes, flag=kind)

        def backward(g: Rows, input_grad: bool) -> Rows | None:
            if input_grad:
                a.emit(Operation.ACTIVATE_BACKWARD, x.rows, y.rows, g, sizes=sizes, flag=kind)
            a.release(y.rows)
            return _handed_on(a, g, input_grad)

        return y, backward

    return rule


def mean_space(a: Assembler, x: Features) -> tuple[Features, Backward]:
    """[channels][height][width] -> [channels][1][1]."""
    y, sizes = Features(a.rows(x.channels), x.channels, 1, 1), (x.channels, x.space)
    a.emit(Operation.MEAN, x.rows, y.rows, sizes=sizes)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        into = a.rows(x.rows.size) if input_grad else None
        if into is not None:
            a.emit(Operation.MEAN_BACKWARD, g, into, sizes=sizes)
        a.release(g, y.rows)
        return into

    return y, backward


def max_pool(a: Assembler, x: Features) -> tuple[Features, Backward]:
    """2x2 max pooling; an odd last row or column is left out."""
    y = Features(a.rows(x.channels * (x.height // 2) * (x.width // 2)), x.channels, x.height // 2, x.width // 2)
    sizes = (x.channels, x.height, x.width)
    a.emit(Operation.MAX_POOL, x.rows, y.rows, sizes=sizes)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        into = a.rows(x.rows.size) if input_grad else None
        if into is not None:
            a.emit(Operation.MAX_POOL_BACKWARD, x.rows, g, into, sizes=sizes)
        a.release(g, y.rows)
        return into

    return y, backward


def chain(
    a: Assembler, x: Features, *steps: Callable[[Features], tuple[Features, Backward]]
) -> tuple[Features, Backward]:
    """One step after another; the input of all belongs to somebody else."""
    h, backwards = x, []
    for step in steps:
        before = h
        h, step_backward = step(before)
        backwards.append(step_backward)
        if not a.trainable and before is not x:
            a.release(before.rows)

    def backward(g: Rows, input_grad: bool) -> Rows | None:
        grad: Rows | None = g
        for i, step_backward in reversed(list(enumerate(backwards))):
            assert grad is not None
            grad = step_backward(grad, input_grad or i > 0)
        return grad

    return h, backward


def _handed_on(a: Assembler, g: Rows, input_grad: bool) -> Rows | None:
    """A gradient that was worked on in place."""
    if input_grad:
        return g
    a.release(g)
    return None


def _no_way_back(g: Rows, input_grad: bool) -> Rows | None:
    raise AssertionError("nothing is learned in this pass")
