"""Growth within a budget: many candidates begin, weak ones stop, and what they would have cost trains the others.

A candidate is the network of the task with permanent seeds (an `Architecture`) and a factor of its learning rate. All
candidates are rows of one engine, with the same initial weights and the same order of examples, so that they differ in
what grew alone. At the end of a `Stage` most of them stop, and some are continued by copies that have one more seed.

    method          begins with                               at the end of a stage
    plain           the network alone, three learning rates   the best goes on
    portfolio       the network alone, and architectures      -
    halving         the same, and architectures               the best go on (Li et al. 2018, arXiv 1603.06560)
    hill_climbing   the network alone, three learning rates   the best goes on, beside copies that have one seed more
                                                              (Elsken et al. 2017, arXiv 1711.04528)
    auto            the network alone, and with seeds that    the best goes on, or begins anew if it is one of tokens;
                    cost hardly any FLOPs (behind vectors     a large budget has a race before: the best beside copies
                    none), at two learning rates              that have grown, then the best two

Compute is counted in floating-point operations: three forward passes for each training example (`runs.evaluation`),
one for each validation example that is measured: few in each step, all behind a stage. What came before a copy is paid
once. Under a budget of FLOPs the outcome is reproducible; one of minutes depends on the machine. There candidates that
run side by side, on the cores of a CPU or on a GPU, cost the time of one, so that as many of them go on to the end.

Where a budget holds few batches, they are halved, and the learning rates are lowered with them. Where it still holds
few, "auto" compares no architectures but those that are free.

Learning rates fall by a cosine, unless the task has a schedule of its own, and begin anew in each stage (Loshchilov &
Hutter 2017, arXiv 1608.03983): what is compared at its end has been annealed, and may be kept. They rise over as large
a share of a stage as of an episode of the task.
"""

import json
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal, final, get_args

import numpy as np
import torch
from pydantic import Field

from esper.export.network import GrownNetwork
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.flops import BACKWARD
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS, HostFamily
from esper.leyline.random import MAX_EPISODE_LENGTH
from esper.leyline.settings import AtLeast0, AtLeast1, NotNegative, Positive, Share, check_fields
from esper.leyline.tensor_dataclass import StateTree, below, with_prefix
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import baseline_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import flat
from esper.runs.assembly.values import plain as plain_values
from esper.runs.evaluation.tables import counted, short
from esper.runs.leaderboard import Candidate, Entry, Leaderboard
from esper.runs.state_file import read_checked, write_state
from esper.tamiyo.baselines import ROTATION
from esper.tasks.datasets import Dataset
from esper.tasks.losses import needs_whole_split, points_of_guessing
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.choice import largest_batch, training_bounds
from esper.tolaria.executors.network import examples
from esper.tolaria.memory import available_bytes, predict
from esper.tolaria.runtime import host_read, usable_cores
from esper.tolaria.state import StepReport

Method = Literal["auto", "plain", "portfolio", "halving", "hill_climbing"]
METHODS: tuple[Method, ...] = get_args(Method)
Keep = Literal["last", "best"]

RATES = (1.0, 1 / 3, 3.0)
"""Factors of the learning rate of the network alone."""
PLAIN_RUNS = 3.0
"""Trainings of the network alone that growth may cost if no budget is given."""
_FREE, _FREE_RATES = 1.02, (1.0, 3.0)
"""Price of an architecture, in that of the network alone, up to which it costs nothing, and the factors of its rate."""
_LONG = 20.0
"""Targets for each parameter above which a training of tokens is long: about where a language model of this size has
its share of a budget (Hoffmann et al. 2022, arXiv 2203.15556)."""
_PASSES = 16.0
"""Passes over examples from which on one more teaches hardly anything (Muennighoff et al. 2023, arXiv 2305.16264)."""
_EARLY = 0.02
"""Share by which the loss of the network alone, or of another architecture, must be lower than that of what is free, or
else that goes on; and likewise at each learning rate than at the one three times as high. What these are worth shows
late (docs/experiments.md)."""
_FAST, _SLOWER_UNTIL = 0.25, 0.1
"""Share by which three times the rate is worse where a third of it is tried as well, and the end of that stage. A third
looks better in a few steps than it is in many (docs/experiments.md)."""
_FEW = 3
"""Candidates from which on there are two rungs."""
_KEPT_SHARE = 0.6
"""Share of the compute that the candidate that is kept should have at least, unless it has twice its steps."""
_MANY_RUNS = 6.0
"""Trainings of the network alone from which on the price of a candidate does not matter any more."""
_RACED = 0.7
"""Share of the steps that the budget holds of the network that is kept which "auto" leaves to it."""
_SHORT = 2_000
"""Batches of the network alone in the whole budget below which "auto" halves their size: more steps are worth more
there than smoother gradients. Where these are too few as well, there is no race (docs/experiments.md)."""
_SLOWER = 1.25
"""Factor of the time of an example up to which smaller batches are taken under minutes."""
_LEAST_BATCHES = 20
"""Batches of the first stage of "auto" below which nothing can be distinguished: then the network alone has it all."""
_MEASURED = 0.02
"""Share of the compute of a step that goes into measuring; behind a stage all validation examples are measured."""
_IN_TIME = 0.95
"""Share of the minutes that are planned; the rest is for building engines and for the test."""
_TRIED, _MOST_TRIED = 0.01, 2.0
"""Share of the minutes, and most seconds, of each trial of the time that candidates take."""
_WRONG = 0.1
"""Share of the steps that are left by which a plan must be wrong to be changed halfway through a stage."""
_COPIES = 8
"""Copies of the network by which it is tried how many run at once, where all run in the same operations."""
_AFFORDABLE = 0.5
"""Share of the budget that one candidate may cost that is trained to the end."""
_CHEAP = 1.2
"""Price of a candidate, in that of the network alone, up to which it fits into every budget."""
_CLIMBED_SHARE = 0.75
"""Of that share, what is enough if the candidate grows on the way, and ends larger than it began."""
_LEAST_GAIN = 0.1
"""Share by which the loss must be lower for each doubling of the price, which half of the steps pay; unless the budget
holds many trainings."""
_PATIENCE = 2
"""Climbs without a better candidate after which hill climbing ends."""
_CLEAR = 100.0
"""Points, divided by the root of the number of validation answers, by which an earlier step must be better than the
last one: twice the largest standard error of a share. The last one has had the lowest rates (docs/experiments.md)."""
HOPELESS = 3
"""First steps after which a growth ends whose networks were all rolled back in each of them."""
SAVE_EVERY = 30.0
"""Seconds between two files of the state."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What growth may spend; None is no limit.

    Attributes:
        minutes: on this machine, from the first step. flops: of training and measuring all candidates together.
        params: of the network that is kept.
    """

    minutes: Positive | None = None
    flops: Positive | None = None
    params: Annotated[int, Field(ge=1)] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "budget")

    def require_room(self, task: TaskSpec) -> None:
        """Raise ConfigError for a limit of parameters below those of the network of a task alone."""
        alone = 0 if task.host is None else task.host.num_params()
        if self.params is not None and self.params < alone:
            raise ConfigError(
                f"the budget allows {self.params:,} parameters, but the network alone has {alone:,}; allow at least "
                "as many, or start with a smaller network."
            )


@dataclass(frozen=True)
class Stage:
    """Until this share of all steps these candidates are trained: the best ones so far, and new ones.

    Attributes:
        until: share of all steps. kept: how many go on from the stage before. new: how many copies of the best have one
            more seed.
    """

    until: Share
    kept: AtLeast1
    new: AtLeast0 = 0


def halving_stages(count: int) -> tuple[Stage, ...]:
    """A quarter of `count` candidates is left after a tenth of the steps, and one of them after a quarter.

    The one that is kept has most of the compute, because that is worth more than a larger choice (docs/experiments.md).
    """
    if count < _FEW:
        return (Stage(0.25, count), Stage(1.0, 1)) if count > 1 else (Stage(1.0, 1),)
    return (Stage(0.1, count), Stage(0.25, max(2, count // 4)), Stage(1.0, 1))


def climbing_stages(climbs: int, new: int) -> tuple[Stage, ...]:
    """Hill climbing: a tenth of the steps for the learning rates, half of them for `climbs`, the rest for the best one.

    In each climb the best candidate so far is trained beside `new` copies of it that have grown.
    """
    until = [0.1 + 0.5 * (i + 1) / climbs for i in range(climbs)]
    return (Stage(0.1, len(RATES)), *(Stage(end, 1, new) for end in until), Stage(1.0, 1))


def racing_stages(first: int, new: int) -> tuple[Stage, ...]:
    """A twentieth of the steps for the first candidates, a few for `new` architectures, and nearly all for the best."""
    race = (Stage(0.1, 1, new), Stage(0.15, 2)) if new else ()
    return (Stage(0.06, first), *race, Stage(1.0, 1))


def side_by_side(stages: Sequence[Stage], many: int) -> tuple[Stage, ...]:
    """The stages with at least `many` candidates in each that only chooses, as far as there are so many before."""
    found = list(stages[:1])
    for stage in stages[1:]:
        before = found[-1].kept + found[-1].new
        found.append(stage if stage.new else replace(stage, kept=min(max(stage.kept, many), before)))
    return tuple(found)


def _lasting(costs: Sequence[float], at_once: float) -> float:
    """FLOPs of candidates, where `at_once` of them last as long as one."""
    return max(*costs, sum(costs) / at_once) if len(costs) > 1 else sum(costs)


def require_trained(points: Sequence[Sequence[float]], steps: int) -> None:
    """Raise ConfigError if no network has been trained in its first steps: its figure of merit is NaN in each."""
    if not any(math.isfinite(of_step) for of_network in points for of_step in of_network):
        raise ConfigError(
            f"nothing has been learned in the first {counted(steps, 'step')}: the loss or a gradient of each network "
            "was NaN or infinite, and it went back to the weights before. Lower the learning rate, or look in the "
            "network and the loss for a division by 0, or a root or logarithm of it, in training mode "
            "(torch.autograd.detect_anomaly() names the operation)."
        )


@final
class Prices:
    """What architectures of a task cost in parameters and FLOPs."""

    def __init__(self, task: TaskSpec, dataset: Dataset, engine: VectorizedEngine) -> None:
        self._spec, costs = engine.spec, engine.executor.costs
        self._seed_params, self._seed_flops, host = host_read(costs.seed_params, costs.seed_flops, costs.host_flops)
        bounds = training_bounds(task, dataset)
        trained, self._whole, self.batches = (1 + BACKWARD) * bounds[-1][1], len(dataset.val), len(bounds)
        few = 1.0 if needs_whole_split(task.objective) else _MEASURED * trained / self._whole
        self.measured_share = min(1.0, few)
        self._examples = trained + math.ceil(self._whole * self.measured_share)
        self.host_params, self._host_flops = int(engine.executor.host_params), int(host)

    def _of_seeds(self, table: np.ndarray, architecture: Architecture) -> int:
        slots, names = self._spec.slot_ids, self._spec.blueprint_names
        return int(sum(table[slots.index(seed.slot), names.index(seed.blueprint)] for seed in architecture.slots))

    def flops(self, architecture: Architecture) -> float:
        """Of one example in a forward pass."""
        return float(self._host_flops + self._of_seeds(self._seed_flops, architecture))

    def params(self, architecture: Architecture) -> int:
        """Of the network with its seeds."""
        return self.host_params + self._of_seeds(self._seed_params, architecture)

    def of_step(self, flops: float) -> float:
        """FLOPs of a step of training, and of measuring a part of the validation examples."""
        return self._examples * flops

    def of_measuring(self, flops: float) -> float:
        """FLOPs of measuring all validation examples, of a network with so many for one."""
        return self._whole * flops


def longest(costs: Sequence[float], until: Sequence[float], budget: float, done: int = 0) -> int:
    """The most steps, of which the stages that are left end at the shares `until`, that cost at most `budget` FLOPs.

    `costs` are those of a step in each stage. Each has at least one step after the `done` ones, whatever that costs.
    """
    low, high = done + len(costs), MAX_EPISODE_LENGTH
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if stages_cost(costs, until, middle, done) <= budget else (low, middle - 1)
    return low


def stages_cost(costs: Sequence[float], until: Sequence[float], steps: int, done: int) -> float:
    """FLOPs of the stages that are left, whose steps have these `costs`, if there are `steps` in all."""
    ends = stage_ends(until, steps, done)
    return sum(of * (end - begin) for of, begin, end in zip(costs, (done, *ends), ends, strict=False))


def stage_ends(until: Sequence[float], steps: int, done: int = 0) -> tuple[int, ...]:
    """The step with which each stage ends; each has at least one step after the `done` ones."""
    ends: list[int] = []
    for i, share in enumerate(until):
        latest = steps - (len(until) - 1 - i)
        ends.append(max(min(round(share * steps), latest), (ends[-1] if ends else done) + 1))
    return tuple(ends)


@dataclass(frozen=True, kw_only=True)
class _Saved:
    """What the file of a growth says beside its tensors: the attributes of `Growth` that have these names.

    Raises ConfigError where they do not fit together.
    """

    key: dict[str, Any]
    stages: tuple[Stage, ...]
    entries: list[Entry]
    rows: list[AtLeast0]
    best: tuple[AtLeast0, AtLeast0] | None
    likely: tuple[AtLeast0, AtLeast0] | None
    t: AtLeast0
    steps: AtLeast1
    spent: NotNegative
    lasted: NotNegative
    seconds: NotNegative
    training_seconds: NotNegative
    stage: AtLeast0
    end: AtLeast0
    failed: AtLeast0
    begun: AtLeast0
    measured: AtLeast0
    batch: AtLeast1

    def __post_init__(self) -> None:
        trained, kept = set(self.rows), [found for found in (self.best, self.likely) if found]
        if not (
            self.entries
            and 0 < len(self.rows) == len(trained)
            and max([*trained, *(row for row, _ in kept)]) < len(self.entries)
            and all(e.parent is None or 0 <= e.parent < number for number, e in enumerate(self.entries))
            and all(len(e.val) == len(e.loss) and e.born <= len(e.val) <= self.t - e.late for e in self.entries)
            and all(len(self.entries[row].val) == self.t - self.entries[row].late for row in trained)
            and all(0 < step - self.entries[row].late <= len(self.entries[row].val) for row, step in kept)
            and self.stage < len(self.stages)
            and max(self.begun, self.measured, self.t) <= self.end <= self.steps
        ):
            raise ConfigError("its entries, stages and steps do not fit together")


@final
class Growth:
    """Candidates of a task that are trained side by side within a budget.

    Args:
        config: of the task. dataset, device: of `dataset_of` and `device_of`.
        method: how candidates are chosen. budget: what they may cost. seed: key of all random draws.
        steps: of the network that is kept, if it is not the budget that decides.
        keep: the "last" step of each candidate in a stage, or the "best" step of the last stage if that is clearly
            better: the one that was best on the few examples of each step, measured on all of them in the end.

    Attributes:
        entries: every candidate so far. rows: those in training, in the order of the engine.
        best: entry and step of the network that is kept if growth ends now. likely: those of the best step of the last
            stage on the few examples that each step measures.
        batch: examples per batch.
        t: steps so far. steps: those that are planned. spent: FLOPs so far.
        lasted: the same, but once for those that were spent at the same time.
        seconds: so far, with those before a stop; training_seconds: without those between stages.
        stages: of the plan. stage: the present one, which began after step `begun` and ends with step `end`.
        failed: climbs without a better candidate, the last ones. measured: step after which all validation examples
            were measured.

    Raises:
        ConfigError: the budget is too small for the method, or for the network alone.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        device: torch.device,
        *,
        method: Method,
        budget: Budget,
        seed: int = 0,
        steps: int | None = None,
        keep: Keep = "best",
    ) -> None:
        budget.require_room(config.task_spec())
        optimizer = config.optimizer if config.optimizer.is_scheduled else replace(config.optimizer, schedule="cosine")
        self._config = replace(config, compile="off", optimizer=optimizer)
        self._dataset, self._device = dataset, device
        self.budget, self.seed, self.t, self.spent, self.lasted = budget, seed, 0, 0.0, 0.0
        self.seconds = self.training_seconds = 0.0
        self.begun, self.end, self.stage, self.failed, self.measured = 0, config.episode_length, 0, 0, 0
        self.entries: list[Entry] = []
        self.rows: list[int] = []
        self.best: tuple[int, int] | None = None
        self.likely: tuple[int, int] | None = None
        self._best_state: StateTree = {}
        self._likely_state: StateTree = {}
        self.steps, self.batch = config.episode_length, config.batch_train
        self._before = (0.0, 0.0)
        self._engine = self._built([Candidate()])
        self._prices = Prices(self._config.task_spec(), dataset, self._engine)
        share = min(self._config.lifecycle.measured_share, self._prices.measured_share)
        self._config = replace(self._config, lifecycle=replace(self._config.lifecycle, measured_share=share))
        if budget.flops is None and budget.minutes is None:
            alone = self._prices.of_step(self._prices.flops(Architecture()))
            self.budget = replace(budget, flops=PLAIN_RUNS * alone * (steps or config.episode_length))
        task = self._config.task_spec()
        many = replace(self._engine.config, num_envs=usable_cores())
        trial, free = predict(many, task, dataset, device), available_bytes(device)
        trial.require(1, free, "candidates")
        self._most = trial.most_hosts(free)
        batch = (1 + BACKWARD) * largest_batch(task, dataset) * self._prices.flops(Architecture())
        self._trial_seconds, self._at_once = trial.batch_seconds / batch, 1.0
        self._fixed, self._asked, self._keep = steps, method, keep
        if not steps and task.last_batch != "keep":  # a last batch may become too small to train on
            self._halve_batches(trial.batch_seconds)
        self._pool = self._architectures()
        if budget.minutes is not None:
            self._try_time(trial.batch_seconds, budget.minutes, _COPIES if trial.together else trial.threads)
            self._pool = self._architectures()
        runs = self._left() / (self._of_step(Candidate()) * (steps or config.episode_length))
        self._is_rich = runs >= _MANY_RUNS
        self._free = self._free_of(self._pool) if method == "auto" else None  # others choose without a prejudice
        begin, self.stages = self._plan(method)
        self.begin(begin)

    def _halve_batches(self, batch_seconds: float) -> None:
        """Take smaller batches where the budget holds few; under minutes, as far as they do not take much longer.

        Under FLOPs alone a GPU, which needs large ones, keeps those of the task.
        """
        given, minutes = self.batch, self.budget.minutes
        if minutes is not None:
            pace = partial(self._pace, [Candidate()], min(_TRIED * 60.0 * minutes, _MOST_TRIED))
            self._trial_seconds = usual = pace(batch_seconds)
        batches = self._batches()
        while batches < _SHORT and self.batch // 2 >= self._config.task_spec().smallest_batch:
            self.batch, batches = self.batch // 2, 2.0 * batches
        if minutes is not None:
            while self.batch < given and pace(batch_seconds * self.batch / given) > _SLOWER * usual:
                self.batch = min(2 * self.batch, given)
        elif self._device.type != "cpu":
            self.batch = given
        self._prices = Prices(self._task(self._config), self._dataset, self._engine)

    def _task(self, config: RunConfig) -> TaskSpec:
        """The task of a configuration, with the batches that were chosen and as many examples in a step.

        Learning rates follow the batches: Malladi et al. 2022 (arXiv 2205.10287) for Adam, Goyal et al. 2017 (arXiv
        1706.02677) for SGD.
        """
        task, optimizer = config.task_spec(), config.optimizer
        share = self.batch / task.batch_train
        rate = share if optimizer.kind == "sgd" else math.sqrt(share)
        return replace(
            task,
            batch_train=self.batch,
            batches_per_step=task.batches_per_step and round(task.batches_per_step / share),
            optimizer=replace(optimizer, host_lr=rate * optimizer.host_lr, seed_lr=rate * optimizer.seed_lr),
        )

    def _try_time(self, batch_seconds: float, minutes: float, copies: int) -> None:
        """Measure how many candidates run in the time of one, and then the seconds of a FLOP of one.

        Seeds take more time than their FLOPs say (a norm costs none), and cores that share a memory are no two cores.
        """
        alone, grown = [Candidate()], [Candidate(), *map(Candidate, self._pool)]
        pace = partial(self._pace, seconds=min(_TRIED * 60.0 * minutes, _MOST_TRIED), batch_seconds=batch_seconds)
        if copies > 1:
            self._at_once = max(1.0, pace(alone) / pace(alone * copies))
        self._trial_seconds = pace(grown) * self._at_once

    def _pace(self, some: Sequence[Candidate], seconds: float, batch_seconds: float) -> float:
        """Seconds of a FLOP in the second of two short steps of these candidates, or of some, which last `seconds`."""
        batches = max(1, int(0.5 * seconds / batch_seconds))
        some = some[: min(self._most, batches)]
        task = self._task(self._config)
        task = replace(task, batches_per_step=min(self._prices.batches, batches // len(some)))
        prices = Prices(task, self._dataset, self._engine)
        engine = self._built(some, task, prices.measured_share)
        client = baseline_of("wait_only", self._config, engine.spec)
        engine.reset(client, episode=0)
        engine.add_fossils([candidate.architecture for candidate in some])
        for _ in range(min(2, self.end)):
            began = time.monotonic()
            engine.step(client)
            engine.apply_structure()
            seconds = time.monotonic() - began
        return seconds / sum(prices.of_step(prices.flops(one.architecture)) for one in some)

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _plan(self, method: Method) -> tuple[list[Candidate], tuple[Stage, ...]]:
        """The first candidates and the stages of a method.

        There are as many candidates as leave most of the compute to the one that is kept, or twice `episode_length`
        steps, or as many as were asked for.
        """
        left, usual = self._left(), self._config.episode_length
        target = self._fixed or min(2.0 * usual, _KEPT_SHARE * left / self._of_step(Candidate()))
        if method == "portfolio":
            target = min(target, usual)
        if method == "hill_climbing":
            target *= _CLIMBED_SHARE
        least = _LEAST_BATCHES / self._prices.batches if method == "auto" else 1.0
        plain = [Candidate(rate=rate) for rate in RATES]
        grown = [Candidate(architecture) for architecture in self._pool]
        plans: list[tuple[list[Candidate], tuple[Stage, ...]]]
        if method == "plain":
            plans = [(plain[:count], halving_stages(count)) for count in (3, 2, 1)]
        elif method == "portfolio":
            every = [plain[0], *grown]
            plans = [(every[:count], (Stage(1.0, count),)) for count in range(len(every), 0, -1)]
        elif method == "hill_climbing":
            sizes = [(climbs, new) for new in (8, 4, 2, 1) for climbs in (4, 3, 2, 1)]
            plans = [(plain, climbing_stages(*size)) for size in sizes]
        elif method == "auto":
            most = len(self._pool) if self._is_rich and self._batches() >= _SHORT else 0
            free = self._free or Architecture()
            first = [*dict.fromkeys([plain[0], *(Candidate(free, rate) for rate in _FREE_RATES)])]
            races = [(first, racing_stages(len(first), new)) for new in range(most, -1, -1)]
            plans = [*races, (plain[:1], (Stage(1.0, 1),))]
        else:
            every = [*plain, *grown]
            plans = [(every[:count], halving_stages(count)) for count in range(len(every), 0, -1)]
        for candidates, stages in plans:
            if max(stage.kept + stage.new for stage in stages) > self._most:
                continue
            steps = self._longest(candidates, stages)
            if method == "auto" and not self._fixed:
                target = _RACED * left / self._costs(candidates, stages, self._at_once)[-1]
            if steps >= min(target, MAX_EPISODE_LENGTH) and (self._fixed or steps) * stages[0].until >= least:
                break
        return candidates, stages if self.budget.flops else side_by_side(stages, int(self._at_once))

    def _architectures(self) -> list[Architecture]:
        """Each blueprint in every slot and in each single one (the latter alone for hill climbing).

        Each gives its dearest one first. Blueprints of the user come first, then those of the heuristic in its order,
        which is that of their gain (docs/experiments.md). What costs too much is left out, and by "auto" what seems
        better than it is in a long training of tokens: a convolution over them.
        """
        left_for_step = self._left() / (self._fixed or self._config.episode_length)
        most = max(_AFFORDABLE * left_for_step, _CHEAP * self._of_step(Candidate()))
        spec = self._engine.spec
        own = [index for index in spec.selectable if index >= NUM_BUILTIN_BLUEPRINTS]
        usual = [index for index in ROTATION[spec.family] if index in spec.selectable]
        names = dict.fromkeys(spec.blueprint_names[index] for index in (*own, *usual, *spec.selectable))
        if "attention" in names:
            names.pop("flex_attention", None)  # the same by another kernel
        if self._asked == "auto" and self._is_long:
            names.pop("depthwise", None)
        of_blueprint = []
        for name in names:
            seeds = [PlacedSeed(slot, name, "ADD") for slot in spec.slot_ids]
            filled = [] if self._asked == "hill_climbing" else [Architecture(tuple(seeds))]
            variants = dict.fromkeys([*filled, *(Architecture((seed,)) for seed in seeds)])
            fit = [one for one in self._allowed([*variants]) if self._of_step(Candidate(one)) <= most]
            of_blueprint.append(sorted(fit, key=self._prices.flops, reverse=True))
        turns = zip_longest(*of_blueprint)
        return [one for turn in turns for one in filter(None, turn)]

    def _free_of(self, pool: Sequence[Architecture]) -> Architecture:
        """The first architecture that fills all slots and costs hardly more than the network alone, or that.

        Where all slots give vectors, or each token has a target and there are many of them, those of the user alone:
        built-in ones are worth nothing there (docs/experiments.md).
        """
        spec, host, (x, _) = self._engine.spec, self._config.task_spec().host, examples(self._dataset, 1)
        assert host is not None, "networks grow"
        built = deterministic_build(lambda: host.build(spec.slot_ids, x))
        assert isinstance(built, Host)
        are_vectors = all(built.features(point) == (1, point.channels) for point in built.enabled)
        worth = spec.blueprint_names[NUM_BUILTIN_BLUEPRINTS if are_vectors or self._is_long else 0 :]
        most = _FREE * self._of_step(Candidate())
        for one in pool:
            fills = len(one.slots) == len(spec.slot_ids) and one.slots[0].blueprint in worth
            if fills and self._of_step(Candidate(one)) <= most:
                return one
        return Architecture()

    def _allowed(self, architectures: Sequence[Architecture]) -> list[Architecture]:
        """Those within the limit of parameters."""
        limit = self.budget.params
        return [one for one in architectures if limit is None or self._prices.params(one) <= limit]

    @property
    def _is_of_tokens(self) -> bool:
        """Whether each token has a target."""
        train = self._dataset.train
        return self._engine.spec.family is HostFamily.TRANSFORMER and train.answers > len(train)

    @property
    def _is_long(self) -> bool:
        """Whether each token has a target, and the network alone sees many of them for each parameter."""
        train = self._dataset.train
        seen = min(self._batches() * self.batch, _PASSES * len(train))
        targets = seen * train.answers / len(train)
        return self._is_of_tokens and targets > _LONG * self._prices.host_params

    @property
    def _limits(self) -> list[tuple[float, float]]:
        """Of each limit: how many candidates at the same time it counts as one, and the FLOPs that are left."""
        found = [] if self.budget.flops is None else [(1.0, self.budget.flops - self.spent)]
        if self.budget.minutes is not None:
            found.append((self._at_once, (60.0 * self.budget.minutes * _IN_TIME - self.seconds) / self._per_flop))
        return found

    def _left(self) -> float:
        """FLOPs that may still be spent on one candidate."""
        return min(left for _, left in self._limits)

    def _batches(self) -> float:
        """Batches of the network alone that may still be trained."""
        return self._left() / self._of_step(Candidate()) * self._prices.batches

    def _costs(self, candidates: Sequence[Candidate], stages: Sequence[Stage], at_once: float = 1.0) -> list[float]:
        """FLOPs of a step in the first of some stages, and in each later one if candidates of a mean price are left.

        Of `at_once` candidates, which are trained at the same time, those of one count.
        """
        now, alone = [self._of_step(one) for one in candidates], self._of_step(Candidate())
        costs, mean = [_lasting(now, at_once)], float(np.mean(now))
        for stage in stages[1:]:
            new = [mean + self._of_step(Candidate(one)) - alone for one in self._pool[: stage.new]]
            each = [mean] * stage.kept + [float(np.mean(new or 0))] * stage.new
            costs.append(_lasting(each, at_once))
            mean = float(np.mean(each))
        return costs

    def _measuring(self, costs: Sequence[float]) -> float:
        """FLOPs of measuring all validation examples behind each stage, and for the best step of the last one."""
        measured = sum(costs) + (costs[-1] if self._keep == "best" else 0.0)
        return measured * self._prices.of_measuring(1.0) / self._prices.of_step(1.0)

    def _costs_left(self, at_once: float = 1.0) -> list[float]:
        return self._costs([self.entries[row].candidate for row in self.rows], self.stages[self.stage :], at_once)

    @property
    def _until(self) -> list[float]:
        """The shares of all steps with which the stages that are left end."""
        return [stage.until for stage in self.stages[self.stage :]]

    def _longest(self, candidates: Sequence[Candidate], stages: Sequence[Stage]) -> int:
        """The most steps in all that every limit allows."""
        until, found = [stage.until for stage in stages], []
        for at_once, left in self._limits:
            costs = self._costs(candidates, stages, at_once)
            found.append(longest(costs, until, left - self._measuring(costs), self.t))
        return min(found)

    def _of_step(self, candidate: Candidate) -> float:
        return self._prices.of_step(self._prices.flops(candidate.architecture))

    def _replan(self) -> None:
        """As many steps as the budget allows; raises ConfigError if it does not hold one of each stage."""
        candidates = [self.entries[row].candidate for row in self.rows]
        self.steps = self._fixed or self._longest(candidates, self.stages[self.stage :])
        for at_once, left in self._limits if self.t == 0 else ():
            costs = self._costs_left(at_once)
            least = stages_cost(costs, self._until, self.steps, self.t)
            if least > left - self._measuring(costs):
                raise ConfigError(
                    f"the budget holds {short(left)} FLOPs, too few for {counted(self.steps, 'step')} of "
                    f"{counted(len(self.rows), 'candidate')} ({short(least + self._measuring(costs))}); allow more "
                    "minutes or FLOPs, or make the steps of a task of yours shorter with batches_per_step."
                )
        self.end = stage_ends(self._until, self.steps, self.t)[0]

    # -- steps --------------------------------------------------------------------------------------------------------

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """The first candidates, with new weights."""
        self.entries = [self._entry(candidate) for candidate in candidates]
        self.rows = list(range(len(candidates)))
        self._replan()
        self._begin_anew()

    def _begin_anew(self) -> None:
        """An engine of the present rows with new weights."""
        self._renew()
        self._engine.reset(self._client, episode=0, done=self.t)
        self._engine.add_fossils([self.entries[row].candidate.architecture for row in self.rows])

    def _renew(self) -> None:
        """An engine of the present rows, and its client, which waits."""
        self._engine = self._built([self.entries[row].candidate for row in self.rows])
        self._client = baseline_of("wait_only", self._config, self._engine.spec)

    def _built(
        self, candidates: Sequence[Candidate], task: TaskSpec | None = None, measured_share: float = 1.0
    ) -> VectorizedEngine:
        optimizer, lifecycle = self._config.optimizer, self._config.lifecycle
        length = self.end - self.begun
        warmup = min(math.ceil(length * optimizer.warmup / self._config.episode_length), length - 1)
        lifecycle = replace(lifecycle, measured_share=min(lifecycle.measured_share, measured_share))
        optimizer = replace(optimizer, warmup=warmup)
        config = replace(self._config, episode_length=self.end, optimizer=optimizer, lifecycle=lifecycle)
        hosts = config.engine(run_seed=self.seed, num_envs=len(candidates))
        hosts = replace(hosts, distinct_hosts=1, schedule_begin=self.begun)
        rates = [candidate.rate for candidate in candidates]
        task = task or self._task(config)
        with warnings.catch_warnings():
            if hasattr(self, "_engine"):  # the first engine has said the same
                warnings.simplefilter("ignore")
            return engine_of(
                config, self._dataset, self._device, engine_config=hosts, on_step=self._listen, task=task,
                lr_factors=rates,
            )  # fmt: skip

    def _entry(self, candidate: Candidate, parent: int | None = None) -> Entry:
        architecture = candidate.architecture
        made = Entry(
            candidate=candidate,
            params=self._prices.params(architecture),
            flops=self._prices.flops(architecture),
            parent=parent,
            born=self.t,
        )
        if parent is not None:
            made.val, made.loss = list(self.entries[parent].val), list(self.entries[parent].loss)
        return made

    @property
    def is_over(self) -> bool:
        """Whether the last step is done, or the budget does not hold another one."""
        costs = [cost + self._measuring([cost]) for cost in (self._costs_left()[0], self._costs_left(self._at_once)[0])]
        flops, minutes = self.budget.flops, self.budget.minutes
        paid = flops is None or self.spent + costs[0] <= flops
        in_time = minutes is None or self.seconds + costs[1] * self._per_flop <= 60.0 * minutes
        return self.t == self.steps or not (in_time and paid)

    @property
    def _per_flop(self) -> float:
        """Seconds of a FLOP of one candidate in the steps of the stage, or in those before it, or by the trial."""
        seconds, lasted = self._before
        if self.lasted > lasted:
            return (self.training_seconds - seconds) / (self.lasted - lasted)
        return seconds / lasted if lasted else self._trial_seconds

    def step(self) -> None:
        """One step of all candidates; behind the last one of a stage the next stage begins."""
        began = time.monotonic()
        self._engine.step(self._client)
        self._engine.apply_structure()  # the report comes now
        self.t += 1
        if self.t == HOPELESS:
            require_trained([entry.val for entry in self.entries], self.t)
        self._pay([self._of_step(self.entries[row].candidate) for row in self.rows])
        is_last = self.stage == len(self.stages) - 1
        if self.t == self.end:
            self._measure(self.t)
            self.measured = self.t
        elif is_last and self._keep == "best":
            self._remember()
        self.training_seconds += time.monotonic() - began
        if self.t == self.end and not is_last:
            self._next_stage()
        elif self.budget.minutes is not None and not self._fixed:
            self._replan_if_wrong()
        self.seconds += time.monotonic() - began

    def _replan_if_wrong(self) -> None:
        """Plan anew if the steps of this stage took longer or shorter than planned; else minutes would be left.

        Halfway through the stage, and where half of the rest is left, and so on: then only for fewer steps, whose last
        learning rates would not be low.
        """
        left, halves = self.end - self.t, [(self.end - self.begun) >> k for k in range(1, 10)]
        if left == 0 or left not in halves:
            return
        steps = self._longest([self.entries[row].candidate for row in self.rows], self.stages[self.stage :])
        change = (steps - self.steps) / (self.steps - self.t)
        if change < -_WRONG or (change > _WRONG and left == halves[0]):
            state = self._engine.state_of(list(range(len(self.rows))))
            self._replan()
            self._load(state)

    def _pay(self, costs: Sequence[float]) -> None:
        """Count what the rows have cost."""
        for row, cost in zip(self.rows, costs, strict=True):
            self.entries[row].spent += cost
        self.spent += sum(costs)
        self.lasted += _lasting(costs, self._at_once)

    def _remember(self) -> None:
        """Remember the best row as it is now if it is the best of this stage on the few examples that were measured."""
        best = max(self.rows, key=lambda row: self.entries[row].score)
        found = self.entries[best].score
        if found > -math.inf and (self.likely is None or found >= self._points(*self.likely)):
            self.likely, self._likely_state = (best, self.t), self._engine.state_of([self.rows.index(best)])

    def _measure(self, step: int) -> None:
        """Measure the rows, as they were after a step, on all validation examples; remember what would be kept.

        What ends a stage takes the place of what an earlier one ended with, unless that is clearly better. Where a
        growth is stopped within a stage, the best one so far is kept.
        """
        kept = self._engine.kept_network()
        figures = zip(self.rows, *host_read(kept.accuracy, kept.loss), strict=True)
        for row, val, loss in figures:
            entry = self.entries[row]
            place = step - entry.late - 1
            entry.val[place], entry.loss[place] = float(val), float(loss)
        self._pay([self._prices.of_measuring(self.entries[row].flops) for row in self.rows])
        best = max(self.rows, key=lambda row: self._points(row, step))
        found, before = self._points(best, step), -math.inf if self.best is None else self._points(*self.best)
        clear = _CLEAR / math.sqrt(self._dataset.val.answers)
        if step == self.t:
            clear = 0.0 if self.t < self.end else -math.inf if self._keep == "last" else -clear
        if found > before + clear or (found == before > -math.inf and step == self.t):  # the later one of two equals
            self.best, self._best_state = (best, step), self._engine.state_of([self.rows.index(best)])

    def _points(self, row: int, step: int) -> float:
        """Figure of merit of an entry after a step of the growth; -inf if its loss is not finite."""
        return self.entries[row].points(step - self.entries[row].late)

    def _listen(self, report: StepReport) -> None:
        for place, row in enumerate(self.rows):
            self.entries[row].val.append(float(report.val_acc[place]))
            self.entries[row].loss.append(float(report.val_loss[place]))

    def _next_stage(self) -> None:
        self.stage += 1
        stage = self.stages[self.stage]
        known = [row for row in self.rows if self.stage > 1 or self.entries[row].candidate.rate == 1.0]
        ranked = sorted(known, key=self._merit, reverse=True)
        chosen: list[tuple[int, Candidate | None]] = [self._at_best_rate(row) for row in ranked[: stage.kept]]
        row, candidate = chosen[0]
        self.failed = self.failed + 1 if self.stage > 1 and self.entries[row].born < self.begun else 0
        if self.failed == _PATIENCE:
            self.stages, stage = (*self.stages[: self.stage], self.stages[-1]), self.stages[-1]
        self.begun, self._before = self.t, (self.training_seconds, self.lasted)
        candidate, parent, slower = candidate or self.entries[row].candidate, row, []
        if self._free and self.stage == 1:
            parent = next(other for other in self.rows if not self.entries[other].candidate.architecture.slots)
            slower = [(row, replace(candidate, rate=RATES[1]))] if self._is_fast(row) and candidate.rate == 1.0 else []
            if slower and not stage.new:
                stage = Stage(_SLOWER_UNTIL, 1)
                self.stages = (self.stages[0], stage, *self.stages[1:])
        if self._asked == "auto" and self._is_of_tokens and self.stage == len(self.stages) - 1:
            self._restart([one or self.entries[row].candidate for row, one in chosen])
            return
        grown = self._neighbours(replace(self.entries[parent].candidate, rate=candidate.rate))
        self._continue([*chosen, *slower, *((parent, one) for one in grown[: stage.new])])

    def _restart(self, candidates: Sequence[Candidate]) -> None:
        """Train candidates from new weights: in networks of tokens those that were annealed early end worse.

        In others it is a gain to go on (docs/experiments.md).
        """
        self.rows = list(range(len(self.entries), len(self.entries) + len(candidates)))
        self.entries += [replace(self._entry(candidate), born=0, late=self.t) for candidate in candidates]
        self._replan()
        self._begin_anew()

    def _is_fast(self, row: int) -> bool:
        """Whether three times the learning rate is clearly worse than that of the task, which may be too high too."""
        loss, faster = self.entries[row].loss[-1], [self.entries[other] for other in self.rows]
        worst = max(entry.loss[-1] for entry in faster if entry.candidate.rate > 1.0)
        return not worst <= loss + _FAST * abs(loss)

    def _merit(self, row: int) -> float:
        """What decides at the end of a stage: the loss, which is less noisy than the figure of merit, and the price."""
        entry, free = self.entries[row], self._free
        price = 0.0 if self._is_rich and not free else math.log2(entry.flops / self._prices.flops(Architecture()))
        share = _LEAST_GAIN * price
        if free:
            slower = sum(entry.candidate.rate < rate for rate in _FREE_RATES)
            share += _EARLY * ((entry.candidate.architecture != free) + slower)
        loss = entry.loss[-1] + share * abs(entry.loss[-1])
        return -loss if math.isfinite(loss) else -math.inf

    def _at_best_rate(self, row: int) -> tuple[int, Candidate | None]:
        """What an entry goes on as behind the first stage: at the best rate of the architecture that has several.

        So the rate and the architecture are chosen apart: architectures are compared at the rate of the task.
        """
        if self.stage > 1:
            return row, None
        of_rows = [self.entries[other].candidate.architecture for other in self.rows]
        several = max(of_rows, key=of_rows.count)
        same = [other for other, of in zip(self.rows, of_rows, strict=True) if of == several]
        best, candidate = max(same, key=self._merit), self.entries[row].candidate
        if candidate.architecture == several:
            return best, None
        rate = self.entries[best].candidate.rate
        return row, None if candidate.rate == rate else replace(candidate, rate=rate)

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        """The candidate with more seeds in empty slots, as ordered in the pool, without those that were tried."""
        own, order = candidate.architecture.slots, self._engine.spec.slot_ids.index
        taken, tried = {seed.slot for seed in own}, {entry.candidate.architecture for entry in self.entries}
        more = [one.slots for one in self._pool if taken.isdisjoint(seed.slot for seed in one.slots)]
        grown = [Architecture(tuple(sorted((*own, *seeds), key=lambda seed: order(seed.slot)))) for seeds in more]
        return [replace(candidate, architecture=one) for one in self._allowed(grown) if one not in tried]

    def _continue(self, chosen: Sequence[tuple[int, Candidate | None]]) -> None:
        """Go on with entries as they are (None), or with copies of them that have become another candidate."""
        state = self._engine.state_of([self.rows.index(row) for row, _ in chosen])
        rows, added = [], []
        for row, candidate in chosen:
            own = self.entries[row].candidate.architecture.slots
            if candidate is not None:
                self.entries.append(self._entry(candidate, parent=row))
                row = len(self.entries) - 1
            rows.append(row)
            architecture = self.entries[row].candidate.architecture
            added.append(Architecture(tuple(seed for seed in architecture.slots if seed not in own)))
        self.rows = rows
        self._replan()
        self._load(state)
        if any(architecture.slots for architecture in added):
            self._engine.add_fossils(added)

    def _load(self, state: StateTree) -> None:
        """An engine of the present rows, in this state."""
        self._renew()
        self._engine.load_state_dict(state, self._client)

    # -- the result ---------------------------------------------------------------------------------------------------

    def result(self) -> tuple[GrownNetwork, int, int]:
        """The network with the best figure of merit on the validation examples, its entry, and the steps it has had.

        Raises:
            ExportError: the loss of every candidate is NaN or infinite.
        """
        if self.measured < self.t and all(len(self.entries[row].val) > self.entries[row].born for row in self.rows):
            self._measure(self.t)  # stopped within a stage
        if self.likely is not None:
            self.rows = [self.likely[0]]
            self._load(self._likely_state)
            self._measure(self.likely[1])
        row, step = self.best or (self.rows[0], self.t)
        state = self._best_state or self._engine.state_of([0])
        self.rows = [row]
        self._load(state)
        self._engine.end_episode()
        (test,) = host_read(self._engine.test())
        stats = self._engine.outcome()
        task = self._config.task_spec()
        network = GrownNetwork.of(self._engine, task, self._dataset, stats, host=0, test=float(test[0]))
        return network, row, step - self.entries[row].late

    def births(self, entry: int) -> list[tuple[PlacedSeed, int]]:
        """The seeds of an entry, and the step after which each of them came; those of one step as their slots."""
        found: list[tuple[PlacedSeed, int]] = []
        at: int | None = entry
        while at is not None:
            this = self.entries[at]
            before = () if this.parent is None else self.entries[this.parent].candidate.architecture.slots
            own = [(seed, this.born) for seed in this.candidate.architecture.slots if seed not in before]
            found, at = own + found, this.parent
        return found

    def leaderboard(self, entry: int, steps: int, test: float | None) -> Leaderboard:
        """All entries; `entry` is kept as it was after some steps, with this figure of merit on the test examples."""
        order = sorted(range(len(self.entries)), key=lambda i: (i != entry, -self.entries[i].score))
        return Leaderboard(
            entries=tuple(self.entries[i] for i in order),
            chosen=order.index(entry),
            steps=steps,
            test=test,
            unit=self._config.task_spec().objective.unit,
            spent=self.spent,
            seconds=self.seconds,
            budget=self.spent if self.budget.flops is None else self.budget.flops,
            guessing=points_of_guessing(self._config.task_spec().objective, self._dataset.val.y),
            is_over=self.is_over,
        )

    # -- progress and persistence -------------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """What will happen, in a line."""
        sizes = " -> ".join(str(stage.kept + stage.new) for stage in self.stages)
        flops, costs = self.budget.flops, self._costs_left()
        planned = self.spent + stages_cost(costs, self._until, self.steps, self.t) + self._measuring(costs)
        most = f"at most {short(flops)} FLOPs" if flops else f"about {short(planned)} FLOPs"
        given, halved = self._config.batch_train, ""
        if self.batch < given:
            rate = self._task(self._config).optimizer.host_lr
            halved = (
                f", batches of {self.batch} instead of {given} examples, because the budget holds few (lr {rate:.2g})"
            )
        again = ", planned again where steps take longer or shorter" if self.budget.minutes else ""
        steps = f"{'about ' * (len(self.stages) > 1)}{counted(self.steps, 'step')}"
        if self.steps == MAX_EPISODE_LENGTH:
            again += "; the budget holds more, but no growth has more steps"
        elif self._asked == "auto" and sizes == "1":
            again += "; the budget is too small to compare candidates, so the network alone has all of it"
        return f"plan: {steps}, candidates {sizes}, {most}{halved}{again}"

    @property
    def place(self) -> str:
        """Where the growth is, and the best candidate so far."""
        best = max((self.entries[row] for row in self.rows), key=lambda entry: entry.score)
        many = counted(len(self.rows), "candidate")
        so_far = f"best {best.score:.2f} ({best.candidate})" if best.val else f"{best.candidate} begins anew"
        return f"step {self.t}/{self.steps}, {many}, {so_far}"

    @property
    def share(self) -> float:
        """Share of the work that is done."""
        left = stages_cost(self._costs_left(), self._until, self.steps, self.t)
        return self.spent / (self.spent + left) if self.t < self.steps else 1.0

    @property
    def key(self) -> dict[str, Any]:
        """What decides the outcome, as JSON values."""
        free = {"device", "threads", "data_dir", "executor"}
        settings = {name: value for name, value in plain_values(self._config).items() if name not in free}
        key = {"settings": settings, "budget": asdict(self.budget), "seed": self.seed, "steps": self._fixed,
               "method": self._asked, "keep": self._keep, "data": dict(self._dataset.identity)}  # fmt: skip
        found: dict[str, Any] = json.loads(json.dumps(key, default=str))
        return found

    def write(self, file: Path) -> None:
        """Write the candidates between two steps; raises CheckpointError if the file cannot be written."""
        about = _Saved(**{f.name: getattr(self, f.name) for f in fields(_Saved)})
        state = with_prefix("best", self._best_state) | with_prefix("likely", self._likely_state)
        state |= with_prefix("rows", self._engine.state_dict())
        write_state(file, asdict(about), state)

    def read(self, file: Path) -> None:
        """Continue where `write` was called; raises CheckpointError if the file is damaged or of another growth."""
        found, state = read_checked(file, _Saved, "; remove it to begin again")
        if found.batch > (most := self._config.batch_train):
            raise CheckpointError(
                f"{file} has batches of {found.batch} examples, but those of the task have {most}; remove it "
                "to begin again."
            )
        was, now = flat(found.key), flat(self.key)
        if changed := [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]:
            known = "; ".join(f"{name} {was.get(name)}, here {now.get(name)}" for name in changed[:3])
            raise CheckpointError(f"{file} belongs to another growth ({known}); give the same, or name another place.")
        for name in vars(found).keys() - {"key"}:
            setattr(self, name, getattr(found, name))
        self._prices = Prices(self._task(self._config), self._dataset, self._engine)
        self._best_state, self._likely_state = below("best", state), below("likely", state)
        self._load(below("rows", state))
