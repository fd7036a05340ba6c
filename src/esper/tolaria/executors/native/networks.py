"""A whole host with its seeds as instructions: one program trains it on a batch, another measures its coalitions.

    training     images --> block --> slot --> pool --> slot --> ... --> loss, backward to all gradients, optimizer step
    measuring    the forward pass alone, for several states of the network that share a prefix (`tolaria.prefixes`)

A program depends on the structure of a host alone; the addresses of its weights and batch are supplied when it runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from torch import nn

from esper.kasmina.hosts.cnn import Block, CNNHost
from esper.kasmina.parameters.layout import FlatLayout
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.native.assembler import NUM_WORKING, Assembler, Operation, Place, Program, Rows, expect
from esper.tolaria.executors.native.layer_rules import (
    Backward,
    Features,
    Layer,
    Weights,
    batch_norm_relu,
    chain,
    convolution,
    images,
    in_reverse,
    linear,
    max_pool,
    mean_space,
)
from esper.tolaria.executors.native.seed_rules import RULES, altered

Space = IntEnum(
    "Space",
    "IMAGES LABELS TOTALS HOST HOST_GRADS HOST_FIRST HOST_SECOND HOST_STEPS HOST_BUFFERS DECAY RATE",
    start=NUM_WORKING,
)
"""Spaces of a host besides the working memory. TOTALS: for each state of the network a pair of float64, the sum of the
losses and the number of correct answers. DECAY: mask of the host's weights that decay. RATE: factor of the learning
rates."""
SlotSpace = IntEnum(
    "SlotSpace",
    "SEED SEED_GRADS SEED_FIRST SEED_SECOND SEED_STEPS GATE GATE_GRADS GATE_FIRST GATE_SECOND GATE_STEPS ALPHA",
    start=0,
)
"""Spaces of each slot, after those of `Space`."""

Steps = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
"""By slot id: the states that go on without the seed, and those that go on with it."""
_BLEND_CODES = {Algorithm.ADD: 0, Algorithm.MULTIPLY: 1, Algorithm.GATE: 2}
"""As in layers.h."""


def num_spaces(num_slots: int) -> int:
    """Spaces of a host with this many slots."""
    return slot_space(num_slots, SlotSpace.SEED)


def slot_space(s: int, kind: SlotSpace) -> int:
    """The number of a slot's space."""
    return NUM_WORKING + len(Space) + s * len(SlotSpace) + kind


@dataclass(frozen=True)
class Module:
    """A seed or gate, and where its tensors lie in a row."""

    module: nn.Module
    layout: FlatLayout


@dataclass(frozen=True)
class ActiveSeed:
    """The seed that runs in slot `s`. `active`: it changes the host's features; else it is only trained."""

    s: int
    seed: Module
    gate: Module | None
    algorithm: Algorithm
    active: bool
    trainable: bool = False
    gate_trainable: bool = False

    def run(self, a: Assembler, module: Module, kind: SlotSpace, trainable: bool, h: Features) -> Layer:
        """The seed or the gate (`kind`) on features."""
        grads = slot_space(self.s, SlotSpace(kind + 1)) if trainable else None
        weights = Weights(module.layout, slot_space(self.s, kind), grads)
        return RULES[type(module.module)](a, module.module, weights, h)


@dataclass(frozen=True)
class HostLayout:
    """A host, where its tensors lie in a row, and the size of its images."""

    host: CNNHost
    layout: FlatLayout
    buffers: FlatLayout
    height: int
    width: int


def host_problem(host: nn.Module) -> str | None:
    """Why a host has no rule; None if it has one."""
    return altered(host, {CNNHost, nn.ModuleList, Block, nn.Conv2d, nn.BatchNorm2d, nn.Linear})


def training_program(
    layout: HostLayout, seeds: Mapping[str, ActiveSeed], optimizer: OptimizerSpec | None = None
) -> Program:
    """Forward and backward of one batch of a host with these seeds, by slot id, and a step of the optimizer, if any."""
    a = Assembler(trainable=True)
    (logits,), backward = _forward(a, layout, seeds, {slot_id: ((), (0,)) for slot_id in seeds})
    grad = a.rows(logits.channels)
    _loss(a, logits, 0, grad)
    backward(grad, False)
    if optimizer is not None:
        _step(a, layout, seeds, optimizer)
    return a.program()


def step_program(layout: HostLayout, seeds: Mapping[str, ActiveSeed], optimizer: OptimizerSpec) -> Program:
    """The optimizer step alone, for a host whose gradients PyTorch has computed."""
    a = Assembler(trainable=True)
    _step(a, layout, seeds, optimizer)
    return a.program()


def measuring_program(layout: HostLayout, seeds: Mapping[str, ActiveSeed], steps: Steps) -> Program:
    """Losses and correct answers of all states of a host on some examples."""
    a = Assembler(trainable=False)
    logits, _ = _forward(a, layout, seeds, steps)
    for k, own in enumerate(logits):
        _loss(a, own, k, None)
    return a.program()


def _forward(
    a: Assembler, layout: HostLayout, seeds: Mapping[str, ActiveSeed], steps: Steps
) -> tuple[list[Features], Backward]:
    """The logits of all states, and the backward pass of the single state that training has."""
    host, grads = layout.host, int(Space.HOST_GRADS) if a.trainable else None
    weights = Weights(layout.layout, Space.HOST, grads, layout.buffers, Space.HOST_BUFFERS)
    shape = (host.spec.in_channels, layout.height, layout.width)
    states, backwards = [images(a, Place(Space.IMAGES, 0), shape, host.spec.unshuffle)], list[Backward]()

    def apply(layer: Callable[[Features], Layer]) -> None:
        for k, x in enumerate(states):
            states[k], backward = layer(x)
            backwards.append(backward)

    def pass_slot(slot_id: str) -> None:
        if slot_id not in steps:
            return
        off, on = steps[slot_id]
        blended = [_blended(a, seeds[slot_id], states[i]) for i in on]
        states[:] = [states[i] for i in off] + [y for y, _ in blended]
        backwards.extend(backward for _, backward in blended)

    for i, block in enumerate(host.blocks):
        apply(_block(a, block, weights.of(f"blocks.{i}")))
        pass_slot(f"r0c{i}")
        if i < host.spec.pools:
            apply(lambda x: max_pool(a, x))
            pass_slot(f"r1c{i}")
    apply(lambda x: chain(x, lambda h: mean_space(a, h), lambda h: linear(a, host.head, weights.of("head"), h)))
    return states, in_reverse(backwards)


def _block(a: Assembler, block: nn.Module, weights: Weights) -> Callable[[Features], Layer]:
    conv, norm = block.get_submodule("conv"), block.get_submodule("norm")
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    return lambda x: chain(
        x,
        lambda h: convolution(a, conv, weights.of("conv"), h),
        lambda h: batch_norm_relu(a, norm, weights.of("norm"), h),
    )


def _loss(a: Assembler, logits: Features, state: int, grad: Rows | None) -> None:
    labels, totals = Place(Space.LABELS, 0), Place(Space.TOTALS, 2 * state)
    a.emit(Operation.CROSS_ENTROPY, logits.rows, labels, totals, grad, sizes=(logits.channels,))


def _step(a: Assembler, layout: HostLayout, seeds: Mapping[str, ActiveSeed], optimizer: OptimizerSpec) -> None:
    """A host is clipped by the norm of its gradient, a seed together with its gate."""
    rate = Place(Space.RATE, 0)
    clipped_step(a, optimizer, optimizer.host_lr, rate, [(Space.HOST, layout.layout.total)], Place(Space.DECAY, 0))
    for seed in seeds.values():
        if seed.trainable:
            rows = [(slot_space(seed.s, SlotSpace.SEED), seed.seed.layout.total)]
            if seed.gate_trainable and seed.gate is not None:
                rows.append((slot_space(seed.s, SlotSpace.GATE), seed.gate.layout.total))
            clipped_step(a, optimizer, optimizer.seed_lr, rate, rows, None)


def _blended(a: Assembler, seed: ActiveSeed, h: Features) -> Layer:
    """The features after a slot (`kasmina.blending`). A seed reads them but sends no gradient upstream through them."""
    delta, seed_backward = seed.run(a, seed.seed, SlotSpace.SEED, seed.trainable, h)
    expect("shape of a seed's output", delta.shape, h.shape)
    gate: Rows | None = None
    if seed.algorithm is Algorithm.GATE:
        assert seed.gate is not None
        gated, gate_backward = seed.run(a, seed.gate, SlotSpace.GATE, seed.gate_trainable, h)
        expect("shape of a gate's output", gated.shape, (1, 1, 1))
        gate = gated.rows
    alpha, sizes = Place(slot_space(seed.s, SlotSpace.ALPHA), 0), (h.rows.size, _BLEND_CODES[seed.algorithm])
    y = h
    if seed.active:
        y = replace(h, rows=a.rows(h.rows.size))
        a.emit(Operation.BLEND, h.rows, delta.rows, gate, alpha, y.rows, sizes=sizes)

    def backward(g: Rows, needs_input_grad: bool) -> Rows:
        delta_grad = a.rows(h.rows.size) if seed.trainable else None
        gate_grad = a.rows(1) if seed.gate_trainable else None
        if seed.trainable or (seed.active and seed.algorithm is Algorithm.MULTIPLY):
            factors = seed.algorithm is Algorithm.MULTIPLY
            own, change = h.rows if factors else None, delta.rows if factors or seed.gate_trainable else None
            a.emit(
                Operation.BLEND_BACKWARD, own, change, gate, alpha, g, delta_grad, gate_grad,
                sizes=sizes, flag=seed.active,
            )  # fmt: skip
        if delta_grad is not None:
            seed_backward(delta_grad, False)
        if gate_grad is not None:
            gate_backward(gate_grad, False)
        return g

    return y, backward


def clipped_step(
    a: Assembler,
    spec: OptimizerSpec,
    rate: float,
    rate_factor: Place,
    rows: Sequence[tuple[int, int]],
    mask: Place | None,
) -> None:
    """Step rows (space, number of weights) that are clipped together by the norm of their gradient.

    Five spaces follow each other: the weights, their gradients, which are not changed, and three of the optimizer's
    state. SGD keeps its momentum in the first of these; AdamW has two moments and the number of steps.

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
