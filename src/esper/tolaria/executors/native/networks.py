"""A whole host with its seeds as instructions: one program trains it on a batch, another measures its coalitions.

    training     images --> block --> slot --> pool --> slot --> ... --> loss     and the same way back to all gradients
    measuring    the same way forward for several states of the network, which part where their coalitions differ

A program depends on the structure of a host alone. Whose weights and which batch it works on is said when it is run, by
the addresses of the host's spaces.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum

from torch import nn

from esper.kasmina.hosts.cnn import Block, CNNHost
from esper.kasmina.parameters.flat_layout import FlatLayout
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.native.assembler import NUM_WORKING, Assembler, Operation, Place, Program, Rows, expect
from esper.tolaria.executors.native.layer_rules import (
    Backward,
    Features,
    Weights,
    batch_norm,
    convolution,
    linear,
    max_pool,
    mean_space,
)
from esper.tolaria.executors.native.seed_rules import RULES, altered


class Space(IntEnum):
    """Spaces of a host beside the working memory; each slot adds those of `SlotSpace`."""

    IMAGES = NUM_WORKING
    LABELS = NUM_WORKING + 1
    TOTALS = NUM_WORKING + 2
    """Sum of losses and number of correct answers, float64; a pair for each state of the network."""
    HOST = NUM_WORKING + 3
    HOST_GRADS = NUM_WORKING + 4
    HOST_BUFFERS = NUM_WORKING + 5


class SlotSpace(IntEnum):
    """Spaces of each slot."""

    SEED = 0
    SEED_GRADS = 1
    GATE = 2
    GATE_GRADS = 3
    ALPHA = 4


def num_spaces(num_slots: int) -> int:
    """Spaces of a host with so many slots."""
    return NUM_WORKING + len(Space) + num_slots * len(SlotSpace)


def slot_space(s: int, kind: SlotSpace) -> int:
    """The number of a slot's space."""
    return NUM_WORKING + len(Space) + s * len(SlotSpace) + kind


@dataclass(frozen=True)
class Module:
    """A seed or gate as it was built, and where its tensors lie in a row."""

    module: nn.Module
    layout: FlatLayout


@dataclass(frozen=True)
class ActiveSeed:
    """What runs in slot `s`: the seed, its gate (GATE), whether the host hears it, and what of it learns."""

    s: int
    seed: Module
    gate: Module | None
    algorithm: Algorithm
    active: bool
    trainable: bool = False
    gate_trainable: bool = False


_BLEND_CODES = {Algorithm.ADD: 0, Algorithm.MULTIPLY: 1, Algorithm.GATE: 2}
"""As in layers.h."""


@dataclass(frozen=True)
class HostLayout:
    """A host as it was built, where its tensors lie in a row, and what size its images have."""

    host: CNNHost
    layout: FlatLayout
    buffers: FlatLayout
    height: int
    width: int

    def weights(self, *, trainable: bool) -> Weights:
        """The spaces of its tensors."""
        grads = int(Space.HOST_GRADS) if trainable else None
        return Weights(self.layout, Space.HOST, grads, self.buffers, Space.HOST_BUFFERS)


def host_problem(host: nn.Module) -> str | None:
    """Why a host cannot be written as instructions; None where it can."""
    return altered(host, {CNNHost, nn.ModuleList, Block, nn.Conv2d, nn.BatchNorm2d, nn.Linear})


def training_program(host_layout: HostLayout, seeds: Mapping[str, ActiveSeed]) -> Program:
    """Forward and backward of one batch of a host; `seeds` is what runs, by slot id."""
    a, host = Assembler(trainable=True), host_layout.host
    weights = host_layout.weights(trainable=True)
    h = _images(a, host_layout)
    backwards: list[Backward] = []

    def follow(step: tuple[Features, Backward]) -> Features:
        backwards.append(step[1])
        return step[0]

    for i, (conv, norm) in enumerate(_blocks(host)):
        own = weights.of(f"blocks.{i}")
        h = follow(convolution(a, conv, own.of("conv"), h))
        h = follow(batch_norm(a, norm, own.of("norm"), h, relu=True))
        if f"r0c{i}" in seeds:
            h = follow(_blended(a, seeds[f"r0c{i}"], h))
        if i < host.spec.pools:
            h = follow(max_pool(a, h))
            if f"r1c{i}" in seeds:
                h = follow(_blended(a, seeds[f"r1c{i}"], h))
    h = follow(mean_space(a, h))
    logits = follow(linear(a, host.head, weights.of("head"), h))
    grad: Rows | None = a.rows(logits.channels)
    _loss(a, logits, 0, grad)
    for i, backward in reversed(list(enumerate(backwards))):
        assert grad is not None
        grad = backward(grad, i > 0)
    return a.program()


def measuring_program(
    host_layout: HostLayout,
    seeds: Mapping[str, ActiveSeed],
    steps: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> Program:
    """Losses and hits of all states of a host on some examples.

    `steps[slot_id]` says which states go on without the seed and which with it; first those without (`prefixes`).
    """
    a, host = Assembler(trainable=False), host_layout.host
    weights = host_layout.weights(trainable=False)
    states = [_images(a, host_layout)]

    def part(slot_id: str) -> None:
        nonlocal states
        if slot_id not in steps:
            return
        off, on = steps[slot_id]
        active = [_blended(a, seeds[slot_id], states[i])[0] for i in on]
        for i in set(on) - set(off):
            a.release(states[i].rows)
        states = [states[i] for i in off] + active

    for i, (conv, norm) in enumerate(_blocks(host)):
        own = weights.of(f"blocks.{i}")
        for k, h in enumerate(states):
            y, _ = convolution(a, conv, own.of("conv"), h)
            a.release(h.rows)
            states[k], _ = batch_norm(a, norm, own.of("norm"), y, relu=True)
            a.release(y.rows)
        part(f"r0c{i}")
        if i < host.spec.pools:
            for k, h in enumerate(states):
                states[k], _ = max_pool(a, h)
                a.release(h.rows)
            part(f"r1c{i}")
    for k, h in enumerate(states):
        mean, _ = mean_space(a, h)
        logits, _ = linear(a, host.head, weights.of("head"), mean)
        _loss(a, logits, k, None)
        a.release(h.rows, mean.rows, logits.rows)
    return a.program()


def _blocks(host: CNNHost) -> Iterator[tuple[nn.Conv2d, nn.BatchNorm2d]]:
    for block in host.blocks:
        conv, norm = block.get_submodule("conv"), block.get_submodule("norm")
        assert isinstance(conv, nn.Conv2d)
        assert isinstance(norm, nn.BatchNorm2d)
        yield conv, norm


def _images(a: Assembler, host_layout: HostLayout) -> Features:
    channels = host_layout.host.spec.in_channels
    count = channels * host_layout.height * host_layout.width
    x = Features(a.rows(count), channels, host_layout.height, host_layout.width)
    a.emit(Operation.TRANSPOSE, Place(Space.IMAGES, 0), x.rows, sizes=(count,))
    return x


def _loss(a: Assembler, logits: Features, state: int, grad: Rows | None) -> None:
    totals = Place(Space.TOTALS, 2 * state)
    a.emit(
        Operation.CROSS_ENTROPY, logits.rows, Place(Space.LABELS, 0), totals, grad, sizes=(logits.channels,)
    )  # fmt: skip


def _blended(a: Assembler, seeds: ActiveSeed, h: Features) -> tuple[Features, Backward]:
    """The features after a slot (`kasmina.blending`). A seed sees them, and sends nothing upstream through them."""
    delta, seed_backward = _run(a, seeds.seed, _weights(seeds, seeds.seed, SlotSpace.SEED, seeds.trainable), h)
    expect("shape of a seed's output", delta.shape, h.shape)
    gate: Features | None = None
    if seeds.algorithm is Algorithm.GATE:
        assert seeds.gate is not None
        gate, gate_backward = _run(a, seeds.gate, _weights(seeds, seeds.gate, SlotSpace.GATE, seeds.gate_trainable), h)
        expect("shape of a gate's output", gate.shape, (1, 1, 1))
    opened = None if gate is None else gate.rows
    alpha = Place(slot_space(seeds.s, SlotSpace.ALPHA), 0)
    sizes = (h.rows.size, _BLEND_CODES[seeds.algorithm])
    y = h
    if seeds.active:
        y = h.like(a.rows(h.rows.size))
        a.emit(Operation.BLEND, h.rows, delta.rows, opened, alpha, y.rows, sizes=sizes)
    if not a.trainable:
        a.release(delta.rows, *([] if opened is None else [opened]))

    def backward(g: Rows, input_grad: bool) -> Rows:
        of_delta = a.rows(h.rows.size) if seeds.trainable else None
        of_gate = a.rows(1) if seeds.gate_trainable else None
        if seeds.trainable or (seeds.active and seeds.algorithm is Algorithm.MULTIPLY):
            a.emit(
                Operation.BLEND_BACKWARD, h.rows, delta.rows, opened, alpha, g, of_delta, of_gate,
                sizes=sizes, flag=seeds.active,
            )  # fmt: skip
        if seeds.active:
            a.release(y.rows)
        if of_delta is not None:
            seed_backward(of_delta, False)
        if of_gate is not None:
            gate_backward(of_gate, False)
        return g

    return y, backward


def _weights(seeds: ActiveSeed, module: Module, kind: SlotSpace, trainable: bool) -> Weights:
    grads = slot_space(seeds.s, SlotSpace(kind + 1)) if trainable else None
    return Weights(module.layout, slot_space(seeds.s, kind), grads)


def _run(a: Assembler, module: Module, weights: Weights, h: Features) -> tuple[Features, Backward]:
    return RULES[type(module.module)](a, module.module, weights, h)
