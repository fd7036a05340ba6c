"""A task that trains in milliseconds, and a bench on which seeds are put into any stage by hand.

40 + 30 + 20 random images of 6x6 with three classes; a host of 4-8 channels with slots r0c0, r0c1, r1c0 (action
order), which the network passes in the order r0c0, r1c0, r0c1. The last of three training batches is short.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace as data_replace

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import Population
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import Algorithm, AlphaMode, HostFamily, SeedStage
from esper.leyline.messages import Objective
from esper.leyline.tensor_dataclass import replace
from esper.tasks.datasets import Dataset, LastBatch, Split
from esper.tasks.instances import InstanceDistribution
from esper.tasks.losses import Classification
from esper.tasks.registry import TaskSpec
from esper.tolaria.build import build_engine
from esper.tolaria.coalitions import Coalitions, enumerate_coalitions
from esper.tolaria.engine import StepListener, VectorizedEngine
from esper.tolaria.engine_config import EngineConfig, LossScaler
from esper.tolaria.executors.network import HostData
from esper.tolaria.executors.protocol import Structure, TrainPass, ValidationPass
from esper.tolaria.executors.streamed import StreamedExecutor

CPU = torch.device("cpu")
SLOTS = ("r0c0", "r0c1", "r1c0")
EXECUTION_ORDER = ("r0c0", "r1c0", "r0c1")
CHANNELS = {"r0c0": 4, "r0c1": 8, "r1c0": 4}
HOST = CNNHostSpec(in_channels=1, base=4, blocks=2, kernel=3, pools=1, classes=3)
SGD = OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.03)
BATCH, VAL_BATCH, IMAGE, CLASSES = 16, 16, 6, 3
OBJECTIVE = Classification(CLASSES)


def dataset(train: int = 40, val: int = 30, test: int = 20) -> Dataset:
    """One blurred pattern per class, and noise; the same images in every call."""
    generator = torch.Generator().manual_seed(4)
    patterns = torch.randn(CLASSES, 1, IMAGE, IMAGE, generator=generator)

    def split(n: int) -> Split:
        y = torch.arange(n) % CLASSES
        return Split(patterns[y] + 1.5 * torch.randn(n, 1, IMAGE, IMAGE, generator=generator), y)

    return Dataset(identity={"name": "tiny"}, train=split(train), val=split(val), test=split(test), num_classes=CLASSES)


def task(**changes: object) -> TaskSpec:
    """The tiny task; three epochs of training before a seed may blend."""
    fields: dict[str, object] = {
        "name": "tiny", "description": "Random images.", "family": HostFamily.CNN, "enabled": SLOTS,
        "episode_length": 12, "min_training_epochs": 1, "objective": Classification(CLASSES), "host": HOST,
        "load": lambda folder, seed: dataset(), "batch_train": BATCH, "batch_val": VAL_BATCH, "optimizer": SGD,
    }  # fmt: skip
    return TaskSpec(**{**fields, **changes})


def engine(
    num_envs: int = 2,
    episode_length: int = 12,
    *,
    of: TaskSpec | None = None,
    rules: Mapping[str, object] | None = None,
    on_step: StepListener | None = None,
    lr_factors: Sequence[float] | None = None,
    **config: object,
) -> VectorizedEngine:
    """An engine of the tiny task (or `of`); seeds train for one epoch and may be pruned at any age."""
    chosen = task() if of is None else of
    lifecycle = LifecycleConfig(**{"min_training_epochs": 1, "min_prune_age": 1, **(rules or {})})
    settings = {
        "num_envs": num_envs, "episode_length": episode_length, "slots": chosen.enabled, "lifecycle": lifecycle,
        "run_seed": 5, "executor": "streamed",
    }  # fmt: skip
    data = None if chosen.host is None else dataset()
    full = EngineConfig(**{**settings, **config})
    return build_engine(full, chosen, data, CPU, on_step=on_step, lr_factors=lr_factors)


def population(
    num_envs: int = 2,
    *,
    host_offset: int = 0,
    run_seed: int = 5,
    optimizer: OptimizerSpec = SGD,
    device: torch.device = CPU,
    host: Host | None = None,
) -> Population:
    """Hosts of the tiny task (or like `host`), not yet reset."""
    if host is None:
        host = deterministic_build(lambda: CNNHost(HOST, SLOTS, image_size=(IMAGE, IMAGE)))
        assert isinstance(host, CNNHost)
    return Population(
        host, optimizer, num_envs=num_envs, run_seed=run_seed, device=device,
        host_ids=torch.arange(host_offset, host_offset + num_envs),
    )  # fmt: skip


class Bench:
    """A streamed executor at the start of episode 3, whose slots are set by hand.

    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0)       a new seed, born in the last step
    bench.set("r0c0", alpha=0.4, alpha_mode=AlphaMode.DOWN)              the same seed in another condition
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        data: Dataset | None = None,
        objective: Objective = OBJECTIVE,
        batches_per_step: int | None = None,
        last_batch: LastBatch = "merge",
        instances: InstanceDistribution | None = None,
        measured_share: float = 1.0,
        scaler_dtype: torch.dtype | None = None,
        device: torch.device = CPU,
        episode_length: int = 12,
        lr_factors: Tensor | None = None,
        **population_settings: object,
    ) -> None:
        self.population = population(num_envs, device=device, **population_settings)
        self.data = (dataset() if data is None else data).to(device)
        data = HostData(
            self.population, self.data, objective, batch_train=BATCH, batch_val=VAL_BATCH,
            batches_per_step=batches_per_step, last_batch=last_batch, instances=instances,
            scaler=LossScaler(scaler_dtype, num_envs, device), schedule=(0, episode_length), lr_factors=lr_factors,
            measured_share=measured_share,
        )  # fmt: skip
        self.executor = StreamedExecutor(data)
        self.slots = empty_slots(num_envs, self.population.num_slots, device)
        self.episode, self.t = 3, 0
        self.executor.reset(self.episode)

    def coalitions(self, **rules: object) -> Coalitions:
        return enumerate_coalitions(self.slots.stage, self.slots.alpha > 0.0, **rules)

    def structure(self, coalitions: Coalitions | None = None, **events: np.ndarray) -> Structure:
        """What the engine would have read, with `events` such as `germinated` [N, S] or `snapshot` [N]."""
        sets = self.coalitions() if coalitions is None else coalitions
        nothing = np.zeros(self.slots.stage.shape, dtype=np.bool_)
        none = {"germinated": nothing, "released": nothing, "keep": nothing}
        nobody = dict.fromkeys(("panicked", "snapshot", "stopped"), nothing[:, 0])
        known = ("stage", "blueprint", "algorithm", "has_gate", "alpha", "alpha_mode")
        fields = {name: getattr(self.slots, name).cpu().numpy() for name in known}
        found = {"sets": sets.sets.cpu().numpy(), "sets_valid": sets.valid.cpu().numpy()}
        return Structure(**{"t": self.t, **fields, **none, **nobody, **found, **events})

    def set(self, slot_id: str, hosts: object = slice(None), *, apply_structure: bool = True, **fields: object) -> None:
        """Write slot fields of some hosts."""
        s = SLOTS.index(slot_id)
        changes = {}
        for name, value in fields.items():
            changes[name] = getattr(self.slots, name).clone()
            changes[name][hosts, s] = value
        self.slots = replace(self.slots, **changes)
        if apply_structure:
            self.executor.apply_structure(self.structure())

    def marked(self, slot_id: str, hosts: object = slice(None)) -> np.ndarray:
        """[N, S]: this slot of these hosts."""
        mask = np.zeros(self.slots.stage.shape, dtype=np.bool_)
        mask[hosts, SLOTS.index(slot_id)] = True
        return mask

    def grow(
        self,
        slot_id: str,
        blueprint: str,
        stage: SeedStage = SeedStage.TRAINING,
        *,
        alpha: float = 0.0,
        algorithm: Algorithm = Algorithm.ADD,
        hosts: object = slice(None),
    ) -> None:
        """Germinate a seed in step `self.t` and put it into `stage` at once."""
        index = registry.names().index(blueprint)
        self.set(
            slot_id, hosts, apply_structure=False, stage=int(stage), blueprint=index, algorithm=int(algorithm),
            alpha=alpha, has_gate=algorithm is Algorithm.GATE, alpha_mode=int(AlphaMode.HOLD),
        )  # fmt: skip
        self.executor.apply_structure(self.structure(germinated=self.marked(slot_id, hosts)))

    def train(self, epochs: int = 1) -> TrainPass:
        for _ in range(epochs):
            self.t += 1
            told = self.executor.train_epoch(self.t, self.slots)
        return told

    def measure(self, **rules: object) -> tuple[Coalitions, ValidationPass]:
        found = self.coalitions(**rules)
        self.executor.apply_structure(self.structure(found))
        return found, self.executor.evaluate(self.t, self.slots, found)

    def seed_row(self, slot_id: str, host: int = 0) -> int:
        return host * len(SLOTS) + SLOTS.index(slot_id)

    def seed_params(self, slot_id: str, host: int = 0) -> dict[str, Tensor]:
        """Parameters of a seed by name; copies."""
        s, kinds = SLOTS.index(slot_id), self.population.seed_kinds
        channels = self.population.points[s].channels
        layout = kinds[channels, int(self.slots.blueprint[host, s])].template.parameters
        flat = self.population.seeds.params[self.seed_row(slot_id, host), : layout.total]
        return {name: value.clone() for name, value in layout.unpack(flat).items()}

    def gate_params(self, slot_id: str, host: int = 0) -> dict[str, Tensor]:
        layout = self.population.gate_kinds[CHANNELS[slot_id]].template.parameters
        flat = self.population.gates.params[self.seed_row(slot_id, host), : layout.total]
        return {name: value.clone() for name, value in layout.unpack(flat).items()}

    def host_params(self, host: int = 0) -> dict[str, Tensor]:
        """Parameters and buffers of a host by name; copies."""
        kind, rows = self.population.host_kind.template, self.population.host
        both = {**kind.parameters.unpack(rows.params[host]), **kind.buffers.unpack(rows.buffers[host])}
        return {name: value.clone() for name, value in both.items()}


def with_players(bench: Bench) -> Bench:
    """Three players of different kinds, trained a little; host 1 has two of them and a fossil."""
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0)
    bench.grow("r1c0", "conv_light", SeedStage.BLENDING, alpha=0.6, algorithm=Algorithm.MULTIPLY)
    bench.grow("r0c1", "conv_heavy", SeedStage.BLENDING, alpha=0.3, algorithm=Algorithm.GATE)
    bench.set("r0c0", 1, stage=int(SeedStage.FOSSILIZED))
    bench.train(2)
    bench.population.seeds.params.mul_(6.0)  # loud enough to change answers
    return bench


def bit_equal(a: Tensor, b: Tensor) -> bool:
    """Same type, shape and contents; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


def same_tree(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Equal names and bit-equal tensors."""
    return a.keys() == b.keys() and all(bit_equal(a[name], b[name]) for name in a)


def adamw() -> OptimizerSpec:
    """The other kind of optimizer."""
    return data_replace(SGD, kind="adamw", host_lr=1e-3, seed_lr=1e-3)
