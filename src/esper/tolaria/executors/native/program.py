"""Instructions for the C++ kernels, the working memory that they share, and how layers and seeds become instructions.

esper/cpp/native/program.cpp executes them; it lists the same operations in the same order. An operand is a place in one
of a host's spaces. Spaces get their addresses when a program runs, so hosts of equal structure share a program.

    ROWS      activations and their gradients [rows][lanes] of each chunk of a batch; the next host reuses them
    LOCAL     those that no other chunk's turn separates, so that all chunks use the same memory
    NUMBERS   single numbers, such as the statistics of a batch norm
    others    weights, gradients, buffers, a batch: see `networks.Space`

A rule of a layer emits the forward pass and returns the features with a function that emits the backward pass; seeds of
modules without a rule are run by PyTorch:

    features, backward = rule(assembler, layer, weights, features)
    gradient of the input = backward(gradient of the output, needs_input_grad)
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple, final

import numpy as np
from torch import nn

from esper.kasmina.blueprints.cnn import ChannelAttention, NormShift
from esper.kasmina.blueprints.layers import GateNetwork, LayerScale, TanhScale
from esper.kasmina.parameters.layout import FlatLayout

LANES: Final = 16
"""Rows are padded to a multiple of this many examples."""
_SIZES, _NUMBERS, _OPERANDS = 6, 5, 10

INSTRUCTION: Final = np.dtype(
    [
        ("operation", np.int32), ("flag", np.int32), ("size", np.int32, _SIZES), ("number", np.float64, _NUMBERS),
        ("space", np.int32, _OPERANDS), ("offset", np.int64, _OPERANDS),
    ],
    align=True,
)  # fmt: skip

Operation = IntEnum(
    "Operation",
    "TRANSPOSE CONVOLVE CONVOLVE_INPUT_GRAD CONVOLVE_WEIGHT_GRAD DEPTHWISE DEPTHWISE_INPUT_GRAD DEPTHWISE_WEIGHT_GRAD "
    "BATCH_NORM BATCH_NORM_BACKWARD BATCH_NORM_FIXED GROUP_NORM GROUP_NORM_BACKWARD MAX_POOL MAX_POOL_BACKWARD MEAN "
    "MEAN_BACKWARD ADD_BIAS ADD_BIAS_BACKWARD SCALE SCALE_BACKWARD MODULATE MODULATE_BACKWARD SHIFT SHIFT_BACKWARD "
    "ACTIVATE ACTIVATE_BACKWARD BLEND BLEND_BACKWARD CROSS_ENTROPY SQUARE_NORM CLIP SGD ADAMW",
    start=0,
)
Activation = IntEnum("Activation", "RELU SILU TANH SIGMOID", start=0)
"""`flag` of ACTIVATE."""


class Place(NamedTuple):
    """An operand: an offset into a space, in rows for ROWS and in elements elsewhere."""

    space: int
    offset: int


class Rows(NamedTuple):
    """Consecutive rows of lanes, counted as if none were used twice; `Assembler.program` gives them their places."""

    first: int
    size: int


ROWS, LOCAL, NUMBERS, NUM_WORKING = range(4)
_HALVED = (Operation.BATCH_NORM, Operation.BATCH_NORM_BACKWARD)
"""Operations that a chunk begins, and ends only when all chunks have begun it."""
SCRATCH_ROWS: Final = 3
"""Rows of scratch that every program may use; the loss does."""
_CACHED_NUMBERS = 2**20
"""Numbers of the features of a chunk."""


@dataclass(frozen=True)
class Program:
    """Instructions, and the working memory they need: rows of lanes (of all chunks, of one), numbers, scratch numbers.

    `single` is the shape [C, H, W] of features of which one example gives a normalization a single value; else None.
    """

    code: np.ndarray
    rows: int
    local: int
    numbers: int
    scratch: int
    single: tuple[int, int, int] | None = None

    @cached_property
    def cost(self) -> int:
        """Roughly in proportion to its time: the product of the sizes of each instruction, summed."""
        return int(np.maximum(self.code["size"], 1).astype(np.int64).prod(axis=1).sum())

    @property
    def chunk(self) -> int:
        """Examples of a batch that pass through the layers together, so that their features stay in a core's cache."""
        return max(_CACHED_NUMBERS // max(self.rows + self.local, 1) // LANES, 1) * LANES

    def check_batch(self, examples: int) -> None:
        """Raise ValueError, as PyTorch does, where a normalization would see a single value."""
        if examples == 1 and self.single is not None:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list((1, *self.single))}; choose a batch size that leaves no batch of one example."
            )


class ShapeError(ValueError):
    """Layers do not fit each other or their weights."""


def expect(what: str, found: object, expected: object) -> None:
    """Raise ShapeError unless the two are equal."""
    if found != expected:
        raise ShapeError(f"{what}: found {found}, expected {expected}")


@final
@dataclass
class Assembler:
    """Writes a program. `trainable`: a backward pass will follow."""

    trainable: bool
    _code: list[tuple[object, ...]] = field(default_factory=list)
    _begins: list[int] = field(default_factory=lambda: [0])
    _numbers: int = 0
    _scratch: int = 0
    _single: tuple[int, int, int] | None = None

    def emit(
        self,
        operation: Operation,
        *operands: Rows | Place | None,
        sizes: tuple[int, ...] = (),
        flag: int = 0,
        numbers: tuple[float, ...] = (),
    ) -> None:
        """Append an instruction; an operand that is None becomes a null pointer."""
        spaces, offsets = [-1] * _OPERANDS, [0] * _OPERANDS
        for k, operand in enumerate(operands):
            if isinstance(operand, Rows):
                spaces[k], offsets[k] = ROWS, operand.first
            elif operand is not None:
                spaces[k], offsets[k] = operand
        self._code.append((
            int(operation), flag, sizes + (0,) * (_SIZES - len(sizes)), numbers + (0.0,) * (_NUMBERS - len(numbers)),
            spaces, offsets,
        ))  # fmt: skip

    def rows(self, count: int) -> Rows:
        """Rows that keep what is written to them until the last instruction that names them."""
        self._begins.append(self._begins[-1] + count)
        return Rows(self._begins[-2], count)

    def numbers(self, count: int) -> Place:
        """Single numbers, reserved for the whole program."""
        self._numbers += count
        return Place(NUMBERS, self._numbers - count)

    def scratch(self, count: int) -> None:
        """Reserve at least this many scratch numbers."""
        self._scratch = max(self._scratch, count)

    def normalizes(self, shape: tuple[int, int, int], groups: int) -> None:
        """Note that features [C, H, W] are normalized over each group of their channels."""
        if math.prod(shape) == groups:
            self._single = shape

    def program(self) -> Program:
        """The program written so far."""
        code = np.array(self._code, dtype=INSTRUCTION)
        rows, local = place_rows(code, np.array(self._begins))
        return Program(code, rows, local, self._numbers, self._scratch, self._single)


@final
class Pool:
    """Rows that are taken and given back; `size` are enough for all."""

    def __init__(self) -> None:
        self.size, self._free = 0, list[Rows]()

    def take(self, count: int) -> Rows:
        """Rows that nobody has taken."""
        for i, hole in enumerate(self._free):
            if hole.size >= count:
                rest = Rows(hole.first + count, hole.size - count)
                self._free[i : i + 1] = [rest] if rest.size else []
                return Rows(hole.first, count)
        self.size += count
        return Rows(self.size - count, count)

    def give_back(self, rows: Rows) -> None:
        """Allow these rows to be taken again; adjacent holes are merged."""
        merged: list[Rows] = []
        for hole in sorted([*self._free, rows]):
            if merged and merged[-1].first + merged[-1].size == hole.first:
                merged[-1] = Rows(merged[-1].first, merged[-1].size + hole.size)
            else:
                assert not merged or merged[-1].first + merged[-1].size < hole.first, "given back twice"
                merged.append(hole)
        self._free = merged


def place_rows(code: np.ndarray, begins: np.ndarray) -> tuple[int, int]:
    """Give all operands in ROWS their places there or in LOCAL; how many rows there are in both.

    Rows from each of `begins` to the next are in use from the first to the last instruction that names some of them.
    They lie in LOCAL if other chunks do not take their turn in between.
    """
    in_rows = code["space"] == ROWS
    which = np.searchsorted(begins, code["offset"], side="right") - 1
    turns = np.cumsum(np.isin(code["operation"], _HALVED))
    spans: dict[int, tuple[int, int]] = {}
    for i, k in np.argwhere(in_rows).tolist():
        spans[which[i, k]] = spans.get(which[i, k], (i, i))[0], i
    pools, taken = {ROWS: Pool(), LOCAL: Pool()}, list[tuple[int, int, Rows]]()
    spaces, shifts = np.zeros(len(begins), dtype=np.int32), np.zeros(len(begins), dtype=np.int64)
    for k, (first, last) in spans.items():
        for ended in [use for use in taken if use[0] < first]:
            pools[ended[1]].give_back(ended[2])
            taken.remove(ended)
        space = ROWS if turns[last] > turns[first] else LOCAL
        rows = pools[space].take(int(begins[k + 1] - begins[k]))
        taken.append((last, space, rows))
        spaces[k], shifts[k] = space, rows.first - begins[k]
    code["space"][in_rows] = spaces[which[in_rows]]
    code["offset"][in_rows] += shifts[which[in_rows]]
    return pools[ROWS].size, pools[LOCAL].size


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


def sequential(a: Assembler, module: nn.Sequential, weights: Weights, x: Features) -> Layer:
    """Layer by layer; a normalization is fused with the ReLU and layer scale after it."""
    layers = [(layer, weights.of(name)) for name, layer in module._modules.items()]  # a layer may occur twice
    steps: list[Callable[[Features], Layer]] = []
    while layers:
        layer, own = layers.pop(0)
        if isinstance(layer, nn.GroupNorm):
            relu = bool(layers) and isinstance(layers[0][0], nn.ReLU)
            if relu:
                layers.pop(0)
            scale = layers.pop(0)[1] if layers and isinstance(layers[0][0], LayerScale) else None
            steps.append(lambda h, n=layer, w=own, r=relu, s=scale: group_norm(a, n, w, h, relu=r, scale=s))  # type: ignore[misc]
        else:
            steps.append(lambda h, m=layer, w=own: RULES[type(m)](a, m, w, h))  # type: ignore[misc]
    return chain(x, *steps)


def attention(a: Assembler, module: ChannelAttention, weights: Weights, x: Features) -> Layer:
    """One factor per channel, from the means of all channels; for an isolated seed, which needs no input gradient."""
    sizes = (x.channels, x.space)

    def modulate(factor: Features) -> Layer:
        expect("factors of a channel attention", factor.channels, x.channels)
        y = like(a, x)
        a.emit(Operation.MODULATE, x.rows, factor.rows, y.rows, sizes=sizes)
        return y, backward_of(
            a, factor,
            input_grad=lambda g, grad: a.emit(Operation.MODULATE_BACKWARD, x.rows, g, grad, sizes=sizes),
        )  # fmt: skip

    mlp = (weights, Activation.TANH, module.squeeze, module.excite, ["squeeze", "excite"])
    return chain(x, lambda h: _mlp(a, h, *mlp), modulate)


def norm_shift(a: Assembler, module: NormShift, weights: Weights, x: Features) -> Layer:
    """A step from the features towards their normalization; for an isolated seed, which needs no input gradient."""
    gain, sizes = weights.of("gain"), (x.rows.size,)
    strength = gain.value("strength")

    def shift(z: Features) -> Layer:
        y = like(a, x)
        a.emit(Operation.SHIFT, strength, z.rows, x.rows, y.rows, sizes=sizes)
        operands = (strength, z.rows, x.rows)
        return y, backward_of(
            a, z, lambda g: a.emit(Operation.SHIFT_BACKWARD, *operands, g, gain.grad("strength"), sizes=sizes)
        )  # fmt: skip

    return chain(x, lambda h: group_norm(a, module.norm, weights.of("norm"), h), shift)


def gate(a: Assembler, module: GateNetwork, weights: Weights, x: Features) -> Layer:
    """One number in (0, 1) per example."""
    return _mlp(a, x, weights, Activation.SIGMOID, module.hidden, module.out, ["hidden", "out"])


def _mlp(
    a: Assembler, x: Features, weights: Weights, last: Activation, first: nn.Linear, second: nn.Linear, names: list[str]
) -> Layer:
    """Mean over space, linear, SiLU, linear, `last`; `names` are those of the linear layers."""
    return chain(
        x,
        lambda h: mean_space(a, h),
        lambda h: linear(a, first, weights.of(names[0]), h),
        lambda h: activate(a, Activation.SILU, h),
        lambda h: linear(a, second, weights.of(names[1]), h),
        lambda h: activate(a, last, h),
    )


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.ReLU: activation(Activation.RELU),
    nn.SiLU: activation(Activation.SILU),
    nn.Tanh: activation(Activation.TANH),
    nn.Sigmoid: activation(Activation.SIGMOID),
    LayerScale: layer_scale,
    nn.Sequential: sequential,
    ChannelAttention: attention,
    NormShift: norm_shift,
    GateNetwork: gate,
}
"""The rules, by the type of a seed or of a layer in a sequence."""

_PARTS: Mapping[type[nn.Module], Mapping[str, type[nn.Module]]] = {
    ChannelAttention: {"squeeze": nn.Linear, "act": nn.SiLU, "excite": nn.Linear},
    NormShift: {"norm": nn.GroupNorm, "gain": TanhScale},
    GateNetwork: {"hidden": nn.Linear, "act": nn.SiLU, "out": nn.Linear},
}
"""The children of modules that have a rule as a whole."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def problem(module: nn.Module) -> str | None:
    """Why a seed has no rule; None if it has one."""
    return altered(module, {*RULES, nn.Linear, TanhScale}) or _unknown(module)


def altered(module: nn.Module, kinds: Container[type[nn.Module]]) -> str | None:
    """Why a module does something else than its layers' types say; None if it does not.

    All types must be in `kinds`, compared exactly: a subclass or a parametrized layer is refused.
    """
    for path, layer in module.named_modules(remove_duplicate=False):
        name = f"{path or 'it'} ({type(layer).__name__})"
        if type(layer) not in kinds:
            return f"there is no rule for {name}"
        if any(getattr(layer, hooks) for hooks in _HOOKS):
            return f"{name} has hooks"
        if "forward" in vars(layer):
            return f"{name} has a forward pass of its own"
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tied = sorted({*names} - {name for name, _ in module.named_parameters()})
    return f"{tied[0]} is the same parameter as another" if tied else None


def _unknown(module: nn.Module) -> str | None:
    """Why a module of known layers has no rule; None if it has one."""
    kind = type(module)
    parts = {name: type(part) for name, part in module.named_children()}
    if isinstance(module, nn.Sequential):
        inside = [f"{type(m).__name__} as a part" if type(m) in _PARTS else _unknown(m) for m in module]
        return next(filter(None, inside), None) if inside else "it has no layers"
    if kind in _PARTS and parts != _PARTS[kind]:
        return f"{kind.__name__} is not made of {', '.join(_PARTS[kind])}"
    if isinstance(module, NormShift):
        return _unknown(module.norm)
    if isinstance(module, nn.Conv2d) and not _plain(module):
        return f"there is no rule for {module}"
    if isinstance(module, nn.GroupNorm) and module.weight is None:
        return "there is no rule for group norms without weights"
    return None if kind in RULES else f"there is no rule for {kind.__name__} as a seed or in a sequence"


def _plain(conv: nn.Conv2d) -> bool:
    """Whether a convolution keeps the image size and is dense, or depthwise without bias."""
    kernel = conv.kernel_size[0]
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.bias is None
    return (
        conv.kernel_size in ((1, 1), (3, 3))
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.padding_mode == "zeros"
        and (conv.groups == 1 or depthwise)
    )
