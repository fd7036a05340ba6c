"""Hosts with a live, active seed in every slot: the workload of the executor benchmarks.

    blueprint   all that a controller may choose; neighbouring hosts and slots differ
    algorithm   ADD, MULTIPLY, GATE        stage   BLENDING at alpha 0.5, HOLDING, FOSSILIZED

The seeds are placed directly, without an episode; their weights are drawn as usual.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from esper.cpp import compiler
from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from esper.leyline.messages import SlotState
from esper.leyline.tensor_dataclass import StateTree, tree_map
from esper.leyline.tensor_dataclass import replace as changed
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import Classification, NextToken
from esper.tasks.presets import DIGITS
from esper.tasks.registry import TaskSpec
from esper.tolaria.build import build_engine
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.engine_config import EngineConfig, ExecutorChoice
from esper.tolaria.executors.choice import native_problem
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.protocol import Executor, Structure, TrainPass, ValidationPass, empty_structure
from esper.tolaria.executors.streamed import StreamedExecutor

CPU = torch.device("cpu")
CLASSES = 10
SEEDS = 3
"""Of each host."""


@dataclass(frozen=True)
class Shape:
    """Three 3x3 blocks of `base`, twice and four times as many channels on random images of `size` x `size`.

    The exception is `DIGITS_SHAPE`: the task `digits`, whose host has two 1x1 blocks of 48 and 96 channels on
    unshuffled images.
    """

    name: str
    size: int
    channels: int = 1
    base: int = 8
    batch: int = 64


DIGITS_SHAPE = Shape("digits 8x8, 1x1 of 48-96", 8)
BLOCKS = Shape("8x8, 3x3 of 8-16-32", 8)
IMAGES = Shape("3x32x32, 3x3 of 8-16-32", 32, channels=3, batch=128)


@dataclass(frozen=True)
class TextShape:
    """Four transformer layers with a slot after each, on random tokens."""

    name: str
    dropout: float
    width: int = 64
    context: int = 128
    batch: int = 32
    vocabulary: int = 256


TEXT = TextShape("128 tokens, 4 layers of 64", 0.0)
TEXT_DROPOUT = TextShape("128 tokens, 4 layers of 64, dropout 0.1", 0.1)


def task_of(shape: Shape | TextShape) -> TaskSpec:
    """The task with hosts of this shape; it is not registered."""
    if isinstance(shape, TextShape):
        return _text_task(shape)
    if shape == DIGITS_SHAPE:
        return DIGITS
    return TaskSpec(
        name=shape.name,
        description="Random images, for benchmarks.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=shape.channels, base=shape.base, blocks=3, kernel=3, pools=3, classes=CLASSES),
        load=lambda folder, seed: _random_images((shape.channels, shape.size, shape.size)),
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=Classification(CLASSES),
        episode_length=16,
        batch_train=shape.batch,
        batch_val=min(360, 2**17 // shape.size**2),
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.01, seed_lr=0.01),
        min_training_epochs=1,
    )


def _text_task(shape: TextShape) -> TaskSpec:
    host = TransformerHostSpec(
        vocabulary=shape.vocabulary,
        width=shape.width,
        heads=4,
        layers=4,
        segments=4,
        context=shape.context,
        dropout=shape.dropout,
    )
    return TaskSpec(
        name=shape.name,
        description="Random tokens, for benchmarks.",
        family=HostFamily.TRANSFORMER,
        host=host,
        load=lambda folder, seed: _random_tokens(shape),
        enabled=("r0c0", "r0c1", "r0c2", "r0c3"),
        objective=NextToken(shape.vocabulary),
        episode_length=16,
        batch_train=shape.batch,
        batch_val=64,
        optimizer=OptimizerSpec(kind="adamw", host_lr=1e-3, seed_lr=1e-3),
        min_training_epochs=1,
    )


def _random_tokens(shape: TextShape) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        text = torch.randint(shape.vocabulary, (n, shape.context + 1), generator=generator)
        return Split(text[:, :-1].contiguous(), text[:, 1:].contiguous())

    return Dataset(identity={"name": "random tokens"}, train=split(512), val=split(128), test=split(16))


def _random_images(shape: tuple[int, int, int]) -> Dataset:
    generator = torch.Generator().manual_seed(0)

    def split(n: int) -> Split:
        return Split(torch.randn(n, *shape, generator=generator), torch.arange(n) % CLASSES)

    return Dataset(
        identity={"name": "random images"}, train=split(2048), val=split(512), test=split(16), num_classes=CLASSES
    )


def shortened(data: Dataset, train: int, val: int) -> Dataset:
    """The first examples of each split."""
    first = Split(data.train.x[:train], data.train.y[:train]), Split(data.val.x[:val], data.val.y[:val])
    return replace(data, train=first[0], val=first[1])


@dataclass(frozen=True)
class GrownHosts:
    """The same hosts under each executor, with shared weights; `chosen` is the choice of `auto`.

    `native` is None on a GPU and without a C++ compiler.
    """

    shape: Shape
    num_hosts: int
    streamed: StreamedExecutor
    fused: FusedExecutor
    native: NativeExecutor | None
    chosen: ExecutorChoice
    slots: SlotState
    coalitions: Coalitions
    structure: Structure

    @classmethod
    def build(
        cls, shape: Shape, num_hosts: int, train: int, val: int, *, seeds: bool = True, device: torch.device = CPU
    ) -> "GrownHosts":
        """Episode 0 with all seeds germinated (or without seeds); `train` and `val` are numbers of examples."""
        task = task_of(shape)
        assert task.load is not None
        data = shortened(task.load(None, 0), train, val).to(device)
        config = EngineConfig(num_envs=num_hosts, slots=task.enabled, episode_length=8, executor="auto")
        engine = build_engine(config, task, data, device)
        executor, taken = engine.executor, engine.config.executor
        assert isinstance(executor, NetworkExecutor)
        streamed = StreamedExecutor(executor.data)
        streamed.reset(0)
        slots, coalitions, structure = (grown if seeds else bare)(num_hosts, len(task.enabled))
        slots, coalitions = (tree_map(lambda x: x.to(device), rec) for rec in (slots, coalitions))
        streamed.apply_structure(structure)
        fused = FusedExecutor(streamed.data)
        fused.measures_together = True
        later = replace(structure, germinated=np.zeros_like(structure.germinated))
        native = None if native_problem(streamed.data) or compiler() is None else NativeExecutor(streamed.data)
        return cls(shape, num_hosts, streamed, fused, native, taken, slots, coalitions, later)

    def train(self, executor: Executor) -> None:
        """One epoch of all hosts."""
        executor.train_epoch(1, self.slots)

    def measure(self, executor: Executor, *, all_sets: bool = True) -> None:
        """All coalitions of all hosts, or only the full network."""
        if all_sets:
            executor.evaluate(1, self.slots, self.coalitions)
            return
        sets, valid = self.structure.sets[:, :1], self.structure.sets_valid[:, :1]
        self.streamed.apply_structure(replace(self.structure, sets=sets, sets_valid=valid))
        alone = changed(self.coalitions, sets=self.coalitions.sets[:, :1], valid=self.coalitions.valid[:, :1])
        executor.evaluate(1, self.slots, alone)
        self.streamed.apply_structure(self.structure)

    def state_bytes(self) -> int:
        """Bytes of the hosts in a checkpoint: weights, buffers, optimizers, snapshots."""
        state: StateTree = self.streamed.state_dict()
        return sum(tensor.nbytes for tensor in state.values())


@dataclass(frozen=True)
class SharedHosts:
    """The same hosts under one executor."""

    executor: Executor
    slots: SlotState
    coalitions: Coalitions
    structure: Structure
    taken: ExecutorChoice
    data: Dataset

    @classmethod
    def build(
        cls, shape: Shape | TextShape, num_hosts: int, train: int, val: int, *, executor: ExecutorChoice
    ) -> "SharedHosts":
        """Episode 0 with all seeds germinated; `train` and `val` are numbers of examples."""
        task = task_of(shape)
        assert task.load is not None
        config = EngineConfig(num_envs=num_hosts, slots=task.enabled, episode_length=8, executor=executor)
        data = shortened(task.load(None, 0), train, val)
        engine = build_engine(config, task, data, CPU)
        engine.executor.reset(0)
        slots, coalitions, structure = grown(num_hosts, len(task.enabled), task.family)
        engine.executor.apply_structure(structure)
        return cls(engine.executor, slots, coalitions, structure, engine.config.executor, data)

    def train(self) -> TrainPass:
        """One epoch of all hosts."""
        return self.executor.train_epoch(1, self.slots)

    def measure(self) -> ValidationPass:
        """All coalitions of all hosts."""
        return self.executor.evaluate(1, self.slots, self.coalitions)

    def step(self) -> None:
        """One epoch of all hosts, and all their coalitions."""
        self.train()
        self.measure()


def grown(
    num_hosts: int, num_slots: int, family: HostFamily = HostFamily.CNN
) -> tuple[SlotState, Coalitions, Structure]:
    """A new active seed in three slots of each host, and all 8 coalitions; of more slots others stay empty in turn."""
    n, s = np.indices((num_hosts, num_slots))
    choice = np.array(registry.selectable(family))
    algorithm = np.array([Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE])[(n + s) % 3]
    stage = np.array([SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED])[(n // 2 + s) % 3].astype(np.int64)
    alpha = np.where(stage == SeedStage.BLENDING, 0.5, 1.0).astype(np.float32)
    holds = (s - n) % num_slots < SEEDS
    stage, alpha = np.where(holds, stage, SeedStage.DORMANT), np.where(holds, alpha, np.float32(0.0))
    coalitions = enumerate_coalitions(
        torch.from_numpy(stage), torch.from_numpy(holds), fossils_as_players=True, interaction_limit=SEEDS
    )
    structure = replace(
        empty_structure(num_hosts, num_slots),
        stage=stage,
        blueprint=np.where(holds, choice[(n * 3 + s * 5) % len(choice)], -1),
        algorithm=algorithm.astype(np.int64),
        has_gate=holds & (algorithm == Algorithm.GATE),
        alpha=alpha,
        germinated=holds,
        sets=coalitions.sets.numpy(),
        sets_valid=coalitions.valid.numpy(),
    )
    slots = changed(
        empty_slots(num_hosts, num_slots, CPU),
        **{
            name: torch.from_numpy(getattr(structure, name)) for name in ("stage", "blueprint", "algorithm", "has_gate")
        },
        alpha=torch.from_numpy(alpha),
    )
    return slots, coalitions, structure


def bare(num_hosts: int, num_slots: int) -> tuple[SlotState, Coalitions, Structure]:
    """No seed anywhere."""
    slots = empty_slots(num_hosts, num_slots, CPU)
    return slots, enumerate_coalitions(slots.stage, slots.alpha > 0.0), empty_structure(num_hosts, num_slots)
