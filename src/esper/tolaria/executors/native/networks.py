"""Whole hosts as instructions: one program trains a host on a batch, another measures its coalitions.

    training     forward pass with the seeds at their slots, loss, backward pass to all gradients, optimizer step
    measuring    the forward pass alone, in all coalitions that are asked for; what two of them share is computed once

Host, seeds and gates pass through the same door (`trace`, `lowering`): what they are made of does not matter. A program
depends on the structure of a host alone; the addresses of its weights and batch are supplied when it runs. The graph of
each host, seed and gate is compared with PyTorch once, on random inputs in float64 (`compare`). A seed whose results
differ has no rule: PyTorch runs the hosts that grow it.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple, final

import numpy as np
import torch
from torch import Tensor, fx

from esper.kasmina.blueprints import registry
from esper.kasmina.parameters.layout import FlatLayout
from esper.kasmina.parameters.optimizers import OptimizerSpec, SGDState
from esper.kasmina.parameters.population import Kind, Population, TrainingCopy, once, outputs_of_host
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, HostFamily
from esper.tolaria.executors.native.compare import disagreement
from esper.tolaria.executors.native.losses import Loss
from esper.tolaria.executors.native.lowering import Constants, Lowering, State, Value, Weight, run_graph
from esper.tolaria.executors.native.machine import Spaces, cached_library
from esper.tolaria.executors.native.program import NUM_WORKING, Assembler, Operation, Place, Program, Rows, Space
from esper.tolaria.executors.native.trace import NoRuleError, trace
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.training import TrainedRows, trained_mask

SlotSpace = IntEnum(
    "SlotSpace",
    "SEED SEED_GRADS SEED_FIRST SEED_SECOND SEED_STEPS SEED_BUFFERS GATE GATE_GRADS GATE_FIRST GATE_SECOND GATE_STEPS "
    "ALPHA",
    start=0,
)
"""Spaces of each slot, after those of `Space`."""


def slot_space(s: int, kind: SlotSpace) -> int:
    """The number of a slot's space; of the slot after the last: how many spaces there are."""
    return NUM_WORKING + len(Space) + s * len(SlotSpace) + kind


class Graphs(NamedTuple):
    """A module in training and in evaluation, and where its tensors lie in a row."""

    training: fx.Graph
    measuring: fx.Graph
    parameters: FlatLayout
    buffers: FlatLayout

    def write(self, low: Lowering, spaces: tuple[int, int | None, int], x: Value, **options: object) -> list[Value]:
        """Write its forward pass on the values, gradients (None: not trained) and buffers in these spaces."""
        values, grads, buffers = spaces
        size, held = self.parameters.total, self.buffers.total
        row = Weight(Place(values, 0, size), (size,), None if grads is None else Place(grads, 0, size))
        of_buffers = Weight(Place(buffers, 0, held), (held,))
        graph = self.training if low.trainable else self.measuring
        return run_graph(low, graph, row, of_buffers, x, **options)  # type: ignore[arg-type]


def graphs_of(kind: Kind, x: Tensor, *, lines: bool = False) -> Graphs:
    """The graphs of modules of a kind for inputs like x [1, ...], compared with PyTorch.

    Raises:
        NoRuleError: an operation has no rule, or its results differ.
    """
    template = kind.new_template()
    try:
        training = trace(kind.new_template(), x, training=True, lines=lines)
        graphs = training, training  # most seeds do the same in evaluation; the comparison shows it
        if _depends_on_mode(training) or disagreement(template, x, graphs=graphs):
            graphs = training, trace(kind.new_template(), x, training=False, lines=lines)
            if reason := disagreement(template, x, graphs=graphs):
                raise NoRuleError(reason)
    except NoRuleError:
        if lines:
            raise
        return graphs_of(kind, x, lines=True)
    return Graphs(*graphs, template.parameters, template.buffers)


def _depends_on_mode(graph: fx.Graph) -> bool:
    """Whether a graph has an operation that does something else in evaluation."""
    return any(
        any(name in str(node.target) for name in ("batch_norm", "instance_norm", "drop")) for node in graph.nodes
    )


@dataclass(frozen=True)
class ActiveSeed:
    """The seed that runs in slot `s`. `active`: it changes the host's features; else it is only trained."""

    s: int
    seed: Graphs
    gate: Graphs | None
    algorithm: Algorithm
    active: bool
    trainable: bool = False
    gate_trainable: bool = False
    isolated: bool = True

    def write(self, low: Lowering, h: Value) -> Value:
        """The features after the slot (`kasmina.blending`)."""
        x = replace(h, needs=False) if self.isolated else h
        delta = self._run(low, self.seed, SlotSpace.SEED, SlotSpace.SEED_BUFFERS, self.trainable, x)
        if delta.shape != h.shape:
            raise NoRuleError(f"a seed makes {delta.shape} of {h.shape}")
        gate = None
        if self.algorithm is Algorithm.GATE:
            assert self.gate is not None
            gate = self._run(low, self.gate, SlotSpace.GATE, SlotSpace.SEED_BUFFERS, self.gate_trainable, x)
        alpha = Place(slot_space(self.s, SlotSpace.ALPHA), 0, 1)
        # tensors.h numbers the algorithms from 0 on
        sizes = (h.size, self.algorithm - Algorithm.ADD, h.size if gate is None else h.size // gate.size)
        y = low.like(h) if self.active else h
        if self.active:
            low.emit(
                Operation.BLEND, h.rows, delta.rows, None if gate is None else gate.rows, alpha, y.rows, sizes=sizes
            )
        else:
            y = replace(h, needs=False)
        multiplies = self.algorithm is Algorithm.MULTIPLY

        def backward(g: Rows) -> None:
            changes = multiplies and self.active
            g = low.own(g) if changes else g
            of_delta = low.rows(delta.size) if delta.needs else None
            of_gate = low.rows(gate.size) if gate is not None and gate.needs else None
            if of_delta is not None or changes:
                own, change = h.rows if multiplies else None, delta.rows if multiplies or of_gate is not None else None
                gates = None if gate is None else gate.rows
                low.emit(Operation.BLEND_BACKWARD, own, change, gates, alpha, g, of_delta, of_gate, sizes=sizes,
                         flag=self.active)  # fmt: skip
            if of_delta is not None:
                low.give(delta, of_delta)
            if of_gate is not None and gate is not None:
                low.give(gate, of_gate)
            low.give(h, g)

        return low.result(y, backward, h, delta, gate)

    def _run(
        self, low: Lowering, module: Graphs, values: SlotSpace, buffers: SlotSpace, trainable: bool, x: Value
    ) -> Value:
        grads, of_host = slot_space(self.s, SlotSpace(values + 1)) if trainable else None, low.slot
        low.slot = self.s
        spaces = slot_space(self.s, values), grads, slot_space(self.s, buffers)
        (out,) = module.write(low, spaces, x)
        low.slot = of_host
        return out


@final
class Networks:
    """The graphs of a population's hosts, seeds and gates, and the programs made of them.

    Attributes:
        refused: each blueprint without a rule in some slot, and the reason. constants: numbers that all hosts share.
        outputs: shape of those of one example.

    Raises:
        ConfigError: the host has no rule.
    """

    def __init__(self, population: Population, example: Tensor) -> None:
        p = self._population = population
        self._points, self._inputs = p.points, tuple(example.shape[1:])
        self.outputs = tuple(outputs_of_host(p.host_kind, example).shape[1:])
        self._optimizer: OptimizerSpec = p.optimizer_spec
        self.constants = Constants(Space.CONSTANTS)
        with ThreadPoolExecutor(2) as pool:  # they are compiled side by side, if they are not yet
            list(pool.map(cached_library, (torch.float32, torch.float64)))
        try:
            spec, what = getattr(p.host_module, "spec", p.host_module), f"graphs {p.host_module.execution_order()}"
            self._host = once(spec, self._inputs, what, lambda: graphs_of(p.host_kind, example))
        except NoRuleError as error:
            raise ConfigError(
                f"compiled C++ cannot run the host: {error}; set executor to 'fused' or 'streamed'."
            ) from error
        self.refused: dict[str, str] = {}
        self._seeds: dict[tuple[str, int], Graphs] = {}
        self._gates: dict[str, Graphs] = {}
        for point in self._points:
            h = torch.zeros(1, *p.host_module.features(point))
            try:
                self._gates[point.slot_id] = _known(p.gate_kinds[point.channels], h)
            except NoRuleError as error:
                raise ConfigError(f"compiled C++ disagrees with PyTorch about gates: {error}.") from error
            for (channels, index), kind in p.seed_kinds.items():
                if channels == point.channels:
                    try:
                        self._seeds[point.slot_id, index] = _known(kind, h)
                    except NoRuleError as error:
                        self.refused[kind.name] = str(error)
                        nothing = fx.Graph()  # PyTorch runs it; its optimizer step is a program
                        layouts = kind.start.parameters, kind.start.buffer_layout
                        self._seeds[point.slot_id, index] = Graphs(nothing, nothing, *layouts)
        refused = [i for _, i in p.seed_kinds if registry.blueprint_at(i, p.family).name in self.refused]
        self._runnable = [NOTHING, *(i for _, i in p.seed_kinds if i not in refused)]
        self.training = lru_cache(CACHED_PROGRAMS)(self._write_training)
        self.step = lru_cache(CACHED_PROGRAMS)(self._write_step)
        self.measuring = lru_cache(CACHED_PROGRAMS)(self._write_measuring)

    def can_run(self, codes: np.ndarray) -> np.ndarray:
        """[N]: hosts whose seeds all have rules; `codes` is [N, S, 5]."""
        return np.asarray(np.isin(codes[..., 0], self._runnable).all(axis=1))

    def _lowering(self, *, trainable: bool) -> Lowering:
        slot = self._population.num_slots  # of the host itself, as `Population.host_draws` counts
        return Lowering(trainable=trainable, constants=self.constants, slot=slot)

    def _write_training(self, code: bytes, loss: Loss | None) -> Program:
        """The program that trains a host of this structure, [S, 5] as bytes. No loss: PyTorch computes it."""
        low, seeds = self._lowering(trainable=True), self._active(code)
        trained = [(int(Space.HOST), self._host.parameters.total)]
        for seed in seeds.values():
            trained += self._rows_of(seed)
        for space, count in trained:
            low.emit(Operation.CLEAR, Place(space + 1, 0, count))
        (outputs,) = self._forward(low, seeds, [frozenset(seeds)])
        if loss is not None:
            loss.write(low, [outputs])
        else:
            low.emit(Operation.STORE, outputs.rows, Place(Space.OUTPUTS, 0, outputs.size), sizes=(outputs.size,) * 2)
            low.emit(Operation.BARRIER)  # `Workload.rest` goes on when PyTorch has the gradients of the outputs
            if outputs.needs:
                grad = low.rows(outputs.size)
                low.emit(Operation.LOAD, Place(Space.OUT_GRADS, 0, outputs.size), grad, sizes=(outputs.size,))
                low.give(outputs, grad)
        low.backward()
        self._step(low, seeds)
        return low.program()

    def _write_step(self, code: bytes) -> Program:
        """The optimizer step alone, for a host whose gradients PyTorch has computed."""
        low = self._lowering(trainable=True)
        self._step(low, self._active(code))
        return low.program()

    def _write_measuring(
        self, code: bytes, sets: bytes, count: int, loss: Loss | None
    ) -> tuple[Program, tuple[int, ...]]:
        """The program that measures it in coalitions, [count, S] bool as bytes; the state of each coalition."""
        low, seeds = self._lowering(trainable=False), self._active(code)
        rows = np.frombuffer(sets, dtype=np.bool_).reshape(count, -1).tolist()
        states = [
            frozenset(
                point.slot_id for point, on in zip(self._points, row, strict=True) if on and point.slot_id in seeds
            )
            for row in rows
        ]
        outputs = self._forward(low, seeds, states)
        distinct = list(dict.fromkeys(outputs))
        state_of = {id(value): k for k, value in enumerate(distinct)}
        if loss is not None:
            loss.write(low, distinct)
        else:
            for k, value in enumerate(distinct):
                place = Place(Space.OUTPUTS, k * value.size, value.size)
                low.emit(Operation.STORE, value.rows, place, sizes=(value.size, len(distinct) * value.size))
        return low.program(), tuple(state_of[id(value)] for value in outputs)

    def _forward(self, low: Lowering, seeds: Mapping[str, ActiveSeed], states: Sequence[State]) -> list[Value]:
        x = low.make(*self._inputs)
        low.emit(Operation.LOAD, Place(Space.INPUTS, 0, x.size), x.rows, sizes=(x.size,))
        grads = int(Space.HOST_GRADS) if low.trainable else None
        outputs = self._host.write(
            low, (Space.HOST, grads, Space.HOST_BUFFERS), x, states=states,
            at_slot=lambda slot_id, h: seeds[slot_id].write(low, h),
        )  # fmt: skip
        if not all(value.leads for value in outputs):
            raise NoRuleError("outputs whose first axis is not that of the examples")
        return outputs

    @staticmethod
    def _rows_of(seed: ActiveSeed) -> list[tuple[int, int]]:
        """The spaces of a seed and its gate, as far as they are trained, and the numbers in them."""
        found = []
        if seed.trainable:
            found.append((slot_space(seed.s, SlotSpace.SEED), seed.seed.parameters.total))
            if seed.gate_trainable and seed.gate is not None:
                found.append((slot_space(seed.s, SlotSpace.GATE), seed.gate.parameters.total))
        return found

    def _step(self, low: Lowering, seeds: Mapping[str, ActiveSeed]) -> None:
        """A host is clipped by the norm of its gradient, a seed together with its gate."""
        optimizer, total = self._optimizer, self._host.parameters.total
        rate, decay = Place(Space.RATE, 0, 1), Place(Space.DECAY, 0, total)
        clipped_step(low, optimizer, optimizer.host_lr, rate, [(Space.HOST, total)], decay)
        for seed in seeds.values():
            if seed.trainable:
                rate = Place(Space.RATE, 1 + seed.s, 1)
                clipped_step(low, optimizer, optimizer.seed_lr, rate, self._rows_of(seed), None)

    def _active(self, code: bytes) -> dict[str, ActiveSeed]:
        seeds = {}
        for s, row in enumerate(np.frombuffer(code, dtype=np.int64).reshape(-1, NUM_FIELDS).tolist()):
            blueprint, algorithm, *flags = row
            if blueprint != NOTHING:
                slot_id, (active, trainable, gate_trainable) = self._points[s].slot_id, map(bool, flags)
                seeds[slot_id] = ActiveSeed(
                    s, self._seeds[slot_id, blueprint], self._gates[slot_id], Algorithm(algorithm), active, trainable,
                    gate_trainable, isolated=not active or self._population.family is HostFamily.CNN,
                )  # fmt: skip
        return seeds


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
        a.emit(Operation.SQUARE_NORM, Place(space + 1, 0, count), factor, sizes=(count,), flag=k > 0)
    a.emit(Operation.CLIP, factor, numbers=(spec.grad_clip,))
    for space, count in rows:
        weights, gradient, *moments = (Place(space + k, 0, count) for k in range(4))
        operands = rate_factor, factor, gradient, mask, weights
        if spec.kind == "sgd":
            rates: tuple[float, ...] = (rate, spec.sgd_weight_decay, spec.momentum)
            a.emit(Operation.SGD, *operands, moments[0], sizes=(count,), numbers=rates)
        else:
            rates = (rate, spec.adamw_weight_decay, *spec.betas, spec.eps)
            a.emit(Operation.ADAMW, *operands, *moments, Place(space + 4, 0, 1), sizes=(count,), numbers=rates,
                   flag=spec.kind == "adam")  # fmt: skip


NUM_FIELDS: Final = 5
"""Numbers of a slot in a structure code: blueprint, algorithm, active, trainable, gate_trainable."""
NOTHING: Final = -1
"""A slot where nothing runs, in a structure code."""
CACHED_PROGRAMS: Final = 2048
"""Programs of each kind in the cache: each takes some tens of kilobytes, and a few milliseconds to write."""


def _known(kind: Kind, h: Tensor) -> Graphs:
    """`graphs_of` a seed or gate, found once per process; raises NoRuleError."""

    def find() -> Graphs | NoRuleError:
        try:
            return graphs_of(kind, h)
        except NoRuleError as error:
            return error

    found = once(kind.source, (kind.start.parameters.total, *h.shape), f"graphs of a {kind.name}", find)
    if isinstance(found, NoRuleError):
        raise found
    return found


def structure_codes(structure: Structure, *, training: bool) -> np.ndarray:
    """[N, S, 5]: blueprint, algorithm, active, trainable, gate_trainable; -1 where nothing runs."""
    active = structure.alpha > 0.0
    trainable = trained_mask(structure) if training else np.zeros_like(active)
    gated = trainable & (structure.algorithm == Algorithm.GATE) & structure.has_gate
    codes = np.stack((structure.blueprint, structure.algorithm, active, trainable, gated), axis=-1).astype(np.int64)
    codes[~(active | trainable)] = NOTHING
    return codes


def population_spaces(population: Population, alpha: Tensor, constants: Tensor) -> Spaces:
    """The spaces of all hosts, without a batch and gradients. The caller keeps `alpha` [N, S] and `constants` alive."""
    p, spaces = population, Spaces(population.num_envs, slot_space(population.num_slots, SlotSpace.SEED))
    spaces.share(Space.CONSTANTS, constants)
    spaces.rows(Space.HOST, p.host.params)
    spaces.rows(Space.HOST_BUFFERS, p.host.buffers)
    for s in range(p.num_slots):
        rows = np.arange(p.num_envs) * p.num_slots + s
        spaces.rows(slot_space(s, SlotSpace.SEED), p.seeds.params, rows)
        spaces.rows(slot_space(s, SlotSpace.SEED_BUFFERS), p.seeds.buffers, rows)
        spaces.rows(slot_space(s, SlotSpace.GATE), p.gates.params, rows)
        spaces.rows(slot_space(s, SlotSpace.ALPHA), alpha.view(-1), rows)
    return spaces


def training_spaces(
    population: Population, alpha: Tensor, constants: Tensor, hosts: TrainingCopy, rows: TrainedRows, decay: Tensor,
    lr_factors: Tensor,
) -> Spaces:  # fmt: skip
    """The same for a train pass, in which trained rows lie in working copies.

    `decay` and `lr_factors` (`HostData.lr_factors`) are float32.
    """
    spaces, everyone = population_spaces(population, alpha, constants), np.arange(population.num_envs)
    spaces.share(Space.DECAY, decay)
    spaces.rows(Space.RATE, lr_factors)
    _trained(spaces, hosts, Space.HOST, everyone, everyone)
    gate_slot, gate_host = rows.seed_slot[rows.gate_of], rows.seed_host[rows.gate_of]
    for s in range(population.num_slots):
        for working, kind, slot, host in (
            (rows.seeds, SlotSpace.SEED, rows.seed_slot, rows.seed_host),
            (rows.gates, SlotSpace.GATE, gate_slot, gate_host),
        ):
            own = np.flatnonzero(slot == s)
            _trained(spaces, working, slot_space(s, kind), own, host[own])
    return spaces


def _trained(spaces: Spaces, working: TrainingCopy, space: int, own: np.ndarray, of_host: np.ndarray) -> None:
    """The five spaces from `space` on: weights, gradients and optimizer state of rows `own` of a working copy."""
    state = working.optimizer
    moments = (state.momentum,) if isinstance(state, SGDState) else (state.exp_avg, state.exp_avg_sq, state.steps)
    for k, tensor in enumerate((working.params, working.grad, *moments)):
        spaces.rows(space + k, tensor, own, of_host)
