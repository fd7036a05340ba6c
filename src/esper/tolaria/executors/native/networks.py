"""Whole hosts as instructions: one program trains a host on a batch, another measures its coalitions.

    training     images --> block --> slot --> pool --> slot --> ... --> loss, backward to all gradients, optimizer step
    measuring    the forward pass alone, for several states of the network that share a prefix (`tolaria.coalitions`)

A program depends on the structure of a host alone; the addresses of its weights and batch are supplied when it runs.
The rule of each seed and gate is compared with PyTorch once, on the same random weights and features in float64. A
module whose results differ has no rule: PyTorch runs the hosts that grow it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Final, final

import numpy as np
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.hosts.cnn import Block, CNNHost
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import FlatLayout, buffer_layout, parameter_layout
from esper.kasmina.parameters.optimizers import OptimizerSpec, SGDState
from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm
from esper.tolaria.coalitions import PrefixStep
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload, stride_of
from esper.tolaria.executors.native.program import (
    NUM_WORKING,
    RULES,
    Assembler,
    Backward,
    Features,
    Layer,
    Operation,
    Place,
    Program,
    Rows,
    Rule,
    ShapeError,
    Weights,
    altered,
    batch_norm_relu,
    chain,
    convolution,
    expect,
    images,
    in_reverse,
    linear,
    max_pool,
    mean_space,
    problem,
)
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.training import TrainedRows, trained_mask

_SHAPES = ((3, 5, 4), (17, 1, 1))
"""Examples, height and width: partly filled rows, a map that is not square, and a single position."""
_TOLERANCE = 1e-8
_IMAGES, _VALUES, _GRADS, _BUFFERS, _ONES, _GRAD_OUT, _OUT, _GRAD_IN = range(NUM_WORKING, NUM_WORKING + 8)


@dataclass(frozen=True)
class Outcome:
    """Output [B, C, H, W], gradient of the input (None: not asked for), gradient of the weights (None: no backward)."""

    y: Tensor
    grad_input: Tensor | None
    grad_weights: Tensor | None


def disagreement(module: nn.Module, channels: int) -> str | None:
    """How a seed or gate differs as instructions from PyTorch, for features of this many channels; None if it does not.

    Compared are outputs in training and evaluation mode, all gradients, and a seed's output shape with its input's.
    """
    generator = torch.Generator().manual_seed(0)
    layout, rule = parameter_layout(module), RULES[type(module)]
    for batch, height, width in _SHAPES:
        row = torch.randn(layout.total, generator=generator, dtype=torch.float64) * 0.5 + 0.1
        x = torch.randn(batch, channels, height, width, generator=generator, dtype=torch.float64)
        for trainable in (True, False):
            try:
                want = by_torch(module, layout, row, x, trainable=trainable)
            except (RuntimeError, ValueError) as error:
                return f"PyTorch refuses features {tuple(x.shape)}: {error}"
            if not isinstance(module, GateNetwork) and want.y.shape != x.shape:
                return f"it makes {tuple(want.y.shape)} of features {tuple(x.shape)}"
            try:
                found = by_instructions(rule, module, layout, row, x, trainable=trainable)
            except ShapeError as error:
                return str(error)
            if not _same(found.y, want.y):
                return f"its output differs from PyTorch's in {'training' if trainable else 'evaluation'} mode"
            if not _same(found.grad_weights, want.grad_weights):
                return "its gradients differ from PyTorch's"
    return None


def by_torch(
    module: nn.Module, layout: FlatLayout, row: Tensor, x: Tensor, *, trainable: bool = True, input_grad: bool = False
) -> Outcome:
    """A module with these weights in PyTorch; the gradient of its output is `_grad_like` it.

    Raises:
        ValueError: it writes into its input.
    """
    reference = copy.deepcopy(module).double().train(trainable)
    row, leaf = row.clone().requires_grad_(trainable), x.clone().requires_grad_(trainable)
    given = leaf.clone()
    y: Tensor = torch.func.functional_call(reference, layout.unpack(row), (given,))
    if not torch.equal(given, x):
        raise ValueError("it writes into its input")
    if not trainable:
        return Outcome(y, None, None)
    grad_row, grad_x = torch.autograd.grad(y, (row, leaf), _grad_like(y), materialize_grads=True)
    return Outcome(y.detach(), grad_x if input_grad else None, grad_row)


def by_instructions(
    rule: Rule,
    module: nn.Module,
    layout: FlatLayout,
    row: Tensor,
    x: Tensor,
    *,
    trainable: bool = True,
    input_grad: bool = False,
    buffers: Tensor | None = None,
) -> Outcome:
    """The same by instructions; running statistics in `buffers` are updated.

    Raises:
        ShapeError: layers do not fit each other.
    """
    batch, channels, height, width = x.shape
    a, one = Assembler(trainable=trainable), Place(_ONES, 0)  # SCALE by one copies rows between spaces
    h = images(a, Place(_IMAGES, 0), (channels, height, width))
    weights = Weights(layout, _VALUES, _GRADS if trainable else None, buffer_layout(module), _BUFFERS)
    y, backward = rule(a, module, weights, h)
    a.emit(Operation.SCALE, one, y.rows, Place(_OUT, 0), sizes=(1, y.rows.size))
    if trainable:
        into = backward(images(a, Place(_GRAD_OUT, 0), y.shape).rows, input_grad)
        if into is not None:
            a.emit(Operation.SCALE, one, into, Place(_GRAD_IN, 0), sizes=(1, into.size))
    out, grad_in = (torch.zeros(f.rows.size, stride_of(batch), dtype=x.dtype) for f in (y, h))
    grad_out = _grad_like(torch.empty(batch, *y.shape, dtype=x.dtype))
    grad_row = torch.full_like(row, torch.nan).masked_fill_(layout.padding_mask, 0.0)
    tensors = {
        _IMAGES: x.contiguous(), _VALUES: row, _GRADS: grad_row,
        _BUFFERS: torch.zeros(0) if buffers is None else buffers,
        _ONES: torch.ones(1, dtype=x.dtype), _GRAD_OUT: grad_out, _OUT: out, _GRAD_IN: grad_in,
    }  # fmt: skip
    spaces = Spaces(1, NUM_WORKING + len(tensors))
    for space, tensor in tensors.items():
        spaces.share(space, tensor)
    Machine(dtype=x.dtype).run(Workload.of_each([a.program()]), spaces, batch)
    grad_x = _examples_of(grad_in, x.shape) if trainable and input_grad else None
    return Outcome(_examples_of(out, (batch, *y.shape)), grad_x, grad_row if trainable else None)


def _grad_like(y: Tensor) -> Tensor:
    """A gradient of an output; no two neighbours are equal."""
    return torch.linspace(-1.0, 1.0, 101, dtype=y.dtype).repeat(-(-y.numel() // 101))[: y.numel()].view(y.shape)


def _examples_of(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows of lanes -> [B, ...]; NaN where lanes beyond the examples are not zero."""
    batch = shape[0]
    x = rows[:, :batch].t().reshape(shape)
    return torch.full_like(x, torch.nan) if rows[:, batch:].any() else x


def _same(found: Tensor | None, want: Tensor | None) -> bool:
    if found is None or want is None:
        return found is want
    return found.shape == want.shape and torch.allclose(found, want, rtol=_TOLERANCE, atol=_TOLERANCE)


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
    layout: HostLayout,
    seeds: Mapping[str, ActiveSeed],
    optimizer: OptimizerSpec | None = None,
    label_smoothing: float = 0.0,
) -> Program:
    """Forward and backward of one batch of a host with these seeds, by slot id, and a step of the optimizer, if any."""
    a = Assembler(trainable=True)
    (logits,), backward = _forward(a, layout, seeds, {slot_id: ((), (0,)) for slot_id in seeds})
    grad = a.rows(logits.channels)
    _loss(a, logits, 0, grad, label_smoothing)
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


def _loss(a: Assembler, logits: Features, state: int, grad: Rows | None, smoothing: float = 0.0) -> None:
    operands = logits.rows, Place(Space.LABELS, 0), Place(Space.TOTALS, 2 * state), grad
    a.emit(Operation.CROSS_ENTROPY, *operands, sizes=(logits.channels,), numbers=(smoothing,))


def _step(a: Assembler, layout: HostLayout, seeds: Mapping[str, ActiveSeed], optimizer: OptimizerSpec) -> None:
    """A host is clipped by the norm of its gradient, a seed together with its gate."""
    rate = Place(Space.RATE, 0)
    clipped_step(a, optimizer, optimizer.host_lr, rate, [(Space.HOST, layout.layout.total)], Place(Space.DECAY, 0))
    for seed in seeds.values():
        if seed.trainable:
            rows = [(slot_space(seed.s, SlotSpace.SEED), seed.seed.layout.total)]
            if seed.gate_trainable and seed.gate is not None:
                rows.append((slot_space(seed.s, SlotSpace.GATE), seed.gate.layout.total))
            clipped_step(a, optimizer, optimizer.seed_lr, Place(Space.RATE, 1 + seed.s), rows, None)


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


_FIELDS = 5
"""Numbers of a slot in a structure code: blueprint, algorithm, active, trainable, gate_trainable."""
_NOTHING = -1
CACHED_PROGRAMS: Final = 2048
"""Programs of each kind in the cache: each takes about ten kilobytes, and two milliseconds to write."""


@final
class Programs:
    """The programs of a population, cached by the structure of the host (`structure_codes`).

    `refused` maps each blueprint without a rule in some slot to the reason.

    Raises:
        ConfigError: the host has no rule.
    """

    def __init__(self, population: Population, height: int, width: int, label_smoothing: float = 0.0) -> None:
        self._points, host = population.points, population.host_module
        if reason := host_problem(host):
            raise ConfigError(
                f"the host has no rule in compiled C++ ({reason}); set executor to 'fused' or 'streamed'."
            )
        assert isinstance(host, CNNHost), "the only host with rules"
        template = population.host_kind.template
        self._host = HostLayout(host, template.parameters, template.buffers, height, width)
        self._gates = {c: Module(_gate(c), kind.template.parameters) for c, kind in population.gate_kinds.items()}
        self._seeds: dict[tuple[int, int], Module] = {}
        self.refused: dict[str, str] = {}
        names = {index: registry.blueprint_at(index, population.family).name for _, index in population.seed_kinds}
        for (channels, index), kind in population.seed_kinds.items():
            module, reason = _tried(registry.blueprint_at(index, population.family), channels)
            self._seeds[channels, index] = Module(module, kind.template.parameters)
            if reason is not None:
                self.refused[names[index]] = reason
        self._runnable = [_NOTHING, *(index for index, name in names.items() if name not in self.refused)]
        self._optimizer, self._smoothing = population.optimizer_spec, label_smoothing
        self.training = lru_cache(CACHED_PROGRAMS)(self._write_training)
        self.step = lru_cache(CACHED_PROGRAMS)(self._write_step)
        self.measuring = lru_cache(CACHED_PROGRAMS)(self._write_measuring)

    def can_run(self, codes: np.ndarray) -> np.ndarray:
        """[N]: hosts whose seeds all have rules; `codes` is [N, S, 5]."""
        return np.asarray(np.isin(codes[..., 0], self._runnable).all(axis=1))

    def _write_training(self, code: bytes) -> Program:
        """The program that trains a host of this structure, [S, 5] as bytes."""
        return training_program(self._host, self._active(code), self._optimizer, self._smoothing)

    def _write_step(self, code: bytes) -> Program:
        """The optimizer step of such a host."""
        return step_program(self._host, self._active(code), self._optimizer)

    def _write_measuring(self, code: bytes, steps: tuple[PrefixStep, ...]) -> Program:
        """The program that measures it in the states of a plan."""
        by_slot = {self._points[step.slot].slot_id: (step.off, step.on) for step in steps}
        return measuring_program(self._host, self._active(code), by_slot)

    def _active(self, code: bytes) -> dict[str, ActiveSeed]:
        seeds = {}
        for s, row in enumerate(np.frombuffer(code, dtype=np.int64).reshape(-1, _FIELDS).tolist()):
            blueprint, algorithm, *flags = row
            if blueprint != _NOTHING:
                point = self._points[s]
                seed, gate = self._seeds[point.channels, blueprint], self._gates[point.channels]
                seeds[point.slot_id] = ActiveSeed(s, seed, gate, Algorithm(algorithm), *map(bool, flags))
        return seeds


@lru_cache(maxsize=1024)
def _tried(blueprint: AbstractBlueprint, channels: int) -> tuple[nn.Module, str | None]:
    """A seed, and why it has no rule (None: it has one); tried once per process."""
    module = deterministic_build(lambda: blueprint.build(channels))
    return module, problem(module) or disagreement(module, channels)


@lru_cache(maxsize=1024)
def _gate(channels: int) -> nn.Module:
    gate = deterministic_build(lambda: GateNetwork(channels))
    if reason := disagreement(gate, channels):
        raise ConfigError(f"compiled C++ disagrees with PyTorch about gates ({reason}); set executor to 'streamed'.")
    return gate


def structure_codes(structure: Structure, *, training: bool) -> np.ndarray:
    """[N, S, 5]: blueprint, algorithm, active, trainable, gate_trainable; -1 where nothing runs."""
    active = structure.alpha > 0.0
    trainable = trained_mask(structure) if training else np.zeros_like(active)
    gated = trainable & (structure.algorithm == Algorithm.GATE) & structure.has_gate
    codes = np.stack((structure.blueprint, structure.algorithm, active, trainable, gated), axis=-1).astype(np.int64)
    codes[~(active | trainable)] = _NOTHING
    return codes


def population_spaces(population: Population, alpha: Tensor) -> Spaces:
    """The spaces of all hosts, without a batch and gradients. The caller keeps `alpha` [N, S] alive."""
    p, spaces = population, Spaces(population.num_envs, num_spaces(population.num_slots))
    spaces.rows(Space.HOST, p.host.params)
    spaces.rows(Space.HOST_BUFFERS, p.host.buffers)
    for s in range(p.num_slots):
        rows = np.arange(p.num_envs) * p.num_slots + s
        spaces.rows(slot_space(s, SlotSpace.SEED), p.seeds.params, rows)
        spaces.rows(slot_space(s, SlotSpace.GATE), p.gates.params, rows)
        spaces.rows(slot_space(s, SlotSpace.ALPHA), alpha.view(-1), rows)
    return spaces


def training_spaces(
    population: Population, alpha: Tensor, hosts: TrainingCopy, rows: TrainedRows, decay: Tensor, lr_factors: Tensor
) -> Spaces:
    """The same for a train pass, in which trained rows lie in working copies.

    `decay` and `lr_factors` (`HostData.lr_factors`) are float32.
    """
    spaces, everyone = population_spaces(population, alpha), np.arange(population.num_envs)
    spaces.share(Space.DECAY, decay)
    spaces.rows(Space.RATE, lr_factors)
    _trained(spaces, hosts, Space.HOST, everyone, everyone)
    for s in range(population.num_slots):
        for working, kind, own, of_host in _rows_of_slot(rows, s):
            _trained(spaces, working, slot_space(s, kind), own, of_host)
    return spaces


def _trained(spaces: Spaces, working: TrainingCopy, space: int, own: np.ndarray, of_host: np.ndarray) -> None:
    """The five spaces from `space` on: weights, gradients and optimizer state of rows `own` of a working copy."""
    state = working.optimizer
    moments = (state.momentum,) if isinstance(state, SGDState) else (state.exp_avg, state.exp_avg_sq, state.steps)
    for k, tensor in enumerate((working.params, working.grad, *moments)):
        spaces.rows(space + k, tensor, own, of_host)


def _rows_of_slot(rows: TrainedRows, s: int) -> tuple[tuple[TrainingCopy, SlotSpace, np.ndarray, np.ndarray], ...]:
    """The working copy of seeds, then that of gates: which of its rows belong to slot `s`, and the host of each."""
    seeds = np.flatnonzero(rows.seed_slot == s)
    gates = np.flatnonzero(np.isin(rows.gate_of, seeds))
    return (
        (rows.seeds, SlotSpace.SEED, seeds, rows.seed_host[seeds]),
        (rows.gates, SlotSpace.GATE, gates, rows.seed_host[rows.gate_of[gates]]),
    )
