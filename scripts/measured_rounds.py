"""Timed rounds of a run, shared by the measuring scripts.

    reset --> step 1 .. step E --> rest of the rollout --> update --> records          one round of a run

Importing this module registers two tasks with random images, which need no download:

    synthetic_cifar   3 x 32 x 32, the host of cifar_baseline (8-16-32 channels, three slots), 256 + 128 examples
    synthetic_tiny    1 x 8 x 8, 4-8 channels, three slots, 32 + 16 examples; for tests
"""

import math
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from esper.runs import report
from esper.runs.assembly.assemble import assemble, device_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import plain
from esper.runs.records import Records, round_events
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import Classification
from esper.tasks.registry import DatasetLoader, TaskSpec, register_task
from esper.telemetry.anomalies import Trend
from esper.telemetry.progress import RunConsole, RunProgress
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub

CLASSES = 10
OUTSIDE = "outside the phases"


def random_images(shape: tuple[int, int, int], train: int, val: int) -> DatasetLoader:
    """A loader of noise around one pattern per class; equal in every process."""

    def load(data_dir: Path | None, run_seed: int) -> Dataset:
        del data_dir, run_seed
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES, *shape, generator=generator)

        def split(n: int) -> Split:
            y = torch.arange(n) % CLASSES
            return Split(patterns[y] + torch.randn(n, *shape, generator=generator), y)

        identity = {"name": "random images", "shape": shape, "sizes": (train, val, val)}
        return Dataset(identity=identity, train=split(train), val=split(val), test=split(val), num_classes=CLASSES)

    return load


CIFAR = register_task(
    TaskSpec(
        name="synthetic_cifar",
        description="Random 32x32 images in colour, for benchmarks.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=3, base=8, blocks=3, kernel=3, pools=3, classes=CLASSES),
        load=random_images((3, 32, 32), 256, 128),
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=Classification(CLASSES),
        episode_length=16,
        batch_train=128,
        batch_val=128,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.01, seed_lr=0.01),
        min_training_epochs=2,
    )
)
TINY = register_task(
    TaskSpec(
        name="synthetic_tiny",
        description="Random 8x8 images, for benchmarks.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=1, base=4, blocks=2, kernel=3, pools=1, classes=CLASSES),
        load=random_images((1, 8, 8), 32, 16),
        enabled=("r0c0", "r0c1", "r1c0"),
        objective=Classification(CLASSES),
        episode_length=8,
        batch_train=32,
        batch_val=16,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.02, seed_lr=0.02),
        min_training_epochs=1,
    )
)


@dataclass(frozen=True)
class Setting:
    """The settings of one subject of a comparison, e.g. `executor=fused,telemetry=on`."""

    name: str
    values: Mapping[str, Any]
    telemetry: bool

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Parse comma-separated NAME=VALUE pairs: `telemetry` (on or off) and settings of a run."""
        values: dict[str, Any] = {}
        for pair in filter(None, text.split(",")):
            name, separator, value = pair.partition("=")
            if not separator:
                raise ConfigError(f"the setting {pair!r} is not an assignment; write NAME=VALUE, e.g. executor=fused.")
            try:
                given = tomllib.loads(f"value = {value}")["value"]
            except tomllib.TOMLDecodeError:
                given = value  # a bare word is a string
            *path, leaf = name.split(".")
            table = values
            for part in path:
                table = table.setdefault(part, {})
            table[leaf] = given
        telemetry = values.pop("telemetry", "off")
        if telemetry not in ("on", "off"):
            raise ConfigError(f"telemetry is {telemetry!r}; it must be on or off.")
        return cls(text, values, telemetry == "on")


@dataclass(frozen=True, kw_only=True)
class RoundCost:
    """Wall seconds of one round. `steps` [E] by step; `phases` by phase, summed over the rollout."""

    reset: float
    rollout: float
    update: float
    records: float
    steps: Sequence[float]
    phases: Mapping[str, float]

    @property
    def whole(self) -> float:
        """The whole round."""
        return self.reset + self.rollout + self.update + self.records


class Subject:
    """A run that is measured round by round; a context manager that closes the run directory.

    Args:
        config: the run. telemetry: whether to record and show it like `esper train`. folder: the run directory.
    """

    def __init__(self, config: RunConfig, *, telemetry: bool, folder: Path) -> None:
        self.config = config
        self.parts = assemble(config, device_of(config))
        self.engine, self.client = self.parts.engine, self.parts.client
        self._open = ExitStack()
        self._records: Records | None = None
        if telemetry:
            self._directory = self._open.enter_context(RunDirectory.create(folder, plain(config)))
            screen = RunConsole(file=StringIO(), force_terminal=True, width=120, height=40)
            shown = RunProgress(screen, rounds=config.rounds, steps=config.episode_length)
            self._listeners = Hub({"progress": self._open.enter_context(shown)})
            spec, terms = self.engine.spec, self.client.terms
            self._records = Records(self._directory, self._listeners, spec, config.reward, terms)
            self.engine.listeners.append(self._records.step)

    def __enter__(self) -> "Subject":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def round(self, episode: int) -> RoundCost:
        """One round; it ends with a read, so the device has finished."""
        engine, client = self.engine, self.client
        engine.timer.enabled = True
        marks = [time.perf_counter()]
        if self._records is not None:
            self._records.begin()
        engine.reset(client, episode)
        marks.append(time.perf_counter())
        for _ in range(engine.spec.episode_length):
            engine.step(client)
            marks.append(time.perf_counter())
        stats = engine.rollout(client)  # no step is left; reads the last one and the statistics
        assert stats is not None
        rolled = time.perf_counter()
        metrics = client.update()
        updated = time.perf_counter()
        if self._records is not None:
            self._records.write_events(round_events(stats, metrics, engine.spec, Trend(), self.config.reward))
            cost = report.Cost(env_steps=self.config.num_envs * self.config.episode_length, seconds=rolled - marks[1])
            line = report.round_line(stats, cost, metrics, self.config.reward)
            self._directory.write_metrics(line | {"record": self._records.write_parts()})
            self._listeners.write("round", line)
        ended = time.perf_counter()
        phases = {name: ms / 1e3 for name, ms in engine.timer.read().items()}
        phases[OUTSIDE] = max(rolled - marks[1] - sum(phases.values()), 0.0)
        return RoundCost(
            reset=marks[1] - marks[0],
            rollout=rolled - marks[1],
            update=updated - rolled,
            records=ended - updated,
            steps=[b - a for a, b in pairwise(marks[1:])],
            phases=phases,
        )


def alternating(subjects: Sequence[Subject], rounds: int) -> list[list[RoundCost]]:
    """The times of `rounds` rounds of each, in alternating order, after a first round that is not counted."""
    costs: list[list[RoundCost]] = [[] for _ in subjects]
    for number in range(rounds + 1):
        order = range(len(subjects)) if number % 2 else range(len(subjects) - 1, -1, -1)
        for i in order:
            cost = subjects[i].round(number)
            if number:
                costs[i].append(cost)
    return costs


def configured(given: Mapping[str, Any], setting: Setting) -> RunConfig:
    """The run of a setting; by default in this process, on one thread, with the preset `small`."""
    base = {"preset": "small", "threads": max(torch.get_num_threads(), 1)}
    return resolve({**base, **given, **setting.values})


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
