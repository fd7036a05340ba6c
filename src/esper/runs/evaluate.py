"""Comparison of controllers on fresh hosts: the same hosts, data order and seeds for each of them, nobody learns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.checkpoint_tree import below
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.manifest import GrowthManifest, manifests
from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.leyline.random import Stream, local_generator
from esper.runs.build import baseline_of, dataset_of, device_of, engine_of, learner_of, reward_of
from esper.runs.checkpoint import BEST, Checkpoint, checkpoints, load, load_newest, require_same_shape
from esper.runs.config import RunConfig
from esper.runs.identity import run_shape
from esper.runs.report import objective_of, ops_by_name, standard_deviation
from esper.simic.rewards.config import RewardConfig
from esper.simic.scripted_client import ScriptedClient
from esper.tamiyo.baselines import BASELINES, STATIC, scheduled
from esper.tamiyo.schedules import Schedule
from esper.tasks import null
from esper.tasks.registry import task_by_name
from esper.telemetry.run_directory import CHECKPOINTS
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

SEED_OFFSET = 1_000_000
"""Evaluation hosts have the training seed plus this: they were never trained on."""
RESAMPLES = 10_000
REFERENCE = "wait_only"
TRAINED = "trained"
BEST_SCHEDULE = "best_schedule"
NAMES = (*BASELINES, BEST_SCHEDULE)
"""Of all baselines."""
_CONSTANT = ("fixed_schedule", "fixed_schedule_fill", BEST_SCHEDULE)
_FREE = ("num_envs", "data")
"""What an evaluation may have otherwise than the training: other hosts, and another split drawn by their seed."""

Maker = Callable[[EngineSpec], ClientProtocol]


@dataclass(frozen=True)
class Outcome:
    """What one controller came to on the evaluation hosts; arrays [N], accuracies in percentage points."""

    name: str
    stats: RolloutStats
    test_acc: np.ndarray
    grown: tuple[GrowthManifest, ...] = ()


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences over hosts with its 95 % interval; the ends are NaN where there is one host."""

    mean: float
    low: float
    high: float

    def __neg__(self) -> "Difference":
        return Difference(-self.mean, -self.high, -self.low)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: means over all hosts, of the network that is kept of each.

    Attributes:
        objective, objective_std: 100·J and its standard deviation.
        difference: of 100·J to the run's, or without a run to that of wait_only, on the same hosts.
        committed, test: accuracy (pp) on the validation and the test split, and its standard deviation.
        growth: (host + fossilized parameters) / host parameters. ops: effective operations of all hosts, by name.
        shaped_return: undiscounted sum of rewards; a diagnostic, which ranks nothing.
        hosts: the numbers of every single host, in the order of the hosts, for statistics of one's own.
        structures: what each host came to, as `GrowthManifest.tree`.
    """

    name: str
    objective: float
    objective_std: float
    difference: Difference
    committed: float
    committed_std: float
    test: float
    test_std: float
    growth: float
    fossilized: float
    rollbacks: int
    shaped_return: float
    ops: dict[str, int]
    hosts: dict[str, list[float]]
    structures: list[dict[str, Any]]


def evaluate(
    config: RunConfig,
    controllers: Sequence[tuple[str, Maker]],
    *,
    run_seed: int,
    num_envs: int,
    on_start: Callable[[str], None] = lambda name: None,
) -> list[Outcome]:
    """One episode of each controller on `num_envs` hosts of seed `run_seed`; the test split is touched at its end.

    Args:
        config: the task and all settings; that of the run where a trained controller is among them.
        controllers: name and maker of each, from `baseline` and `trained`, as `in_order` sorts them.
        run_seed: key of all draws of the evaluation.
        num_envs: hosts per controller.
        on_start: told the name of each controller before its hosts begin.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: what cannot be evaluated, before anything is.
    """
    config = replace(config, compile="off")  # an episode of each is over before anything is compiled
    engine_config = config.engine(run_seed=run_seed, num_envs=num_envs)
    device = device_of(config)
    dataset = dataset_of(config, device)
    outcomes: list[Outcome] = []
    for name, make in controllers:
        engine = engine_of(config, dataset, device, engine_config=engine_config)
        client = make(engine.spec)
        on_start(name)
        engine.reset(client, episode=0)
        if name == STATIC:
            engine.plant(outcomes[0].grown)
        stats = engine.rollout(client)
        assert stats is not None
        (test_acc,) = host_read(engine.test())
        grown = manifests(stats.stage, stats.blueprint, stats.algorithm, engine.spec)
        outcomes.append(Outcome(name, stats, test_acc, grown))
    return outcomes


def in_order(controllers: Sequence[tuple[str, Maker]]) -> list[tuple[str, Maker]]:
    """The order in which they are evaluated: whose structure `static_final` has comes first, and itself last.

    That is the trained controller where there is one, else the first one named that grows anything.

    Raises:
        ConfigError: `static_final` is among them, and nobody who grows.
    """
    names = [name for name, _ in controllers]
    if STATIC not in names:
        return list(controllers)
    growing = [name for name in (TRAINED, *names) if name in names and name not in (STATIC, REFERENCE)]
    if not growing:
        raise ConfigError(
            f"{STATIC} has the structure that another controller ends with, and none is named that grows; name a run "
            f"directory, or one of {', '.join(name for name in BASELINES if name not in (STATIC, REFERENCE))} with it."
        )
    rank = {growing[0]: 0, STATIC: 2}
    return sorted(controllers, key=lambda controller: rank.get(controller[0], 1))


def all_baselines(config: RunConfig) -> tuple[str, ...]:
    """The names of all that the task of a run can be compared with."""
    return (*BASELINES, BEST_SCHEDULE) if _is_solved(config) else BASELINES


def _is_solved(config: RunConfig) -> bool:
    """Whether the best schedule of the task is known: it is for the built-in dynamics of scripted tasks."""
    script, known = task_by_name(config.task).script, null.NullSpec()
    if script is None:
        return False
    names = ("quality", "health", "algorithm_factor", "interaction")
    return all(getattr(script, name) == getattr(known, name) for name in names)


def baseline(name: str, config: RunConfig) -> tuple[str, Maker]:
    """A controller by name from `all_baselines`.

    Raises:
        ConfigError: it is the best schedule, which is not known for the task.
    """
    if name != BEST_SCHEDULE:
        return name, partial(baseline_of, name, config)
    if not _is_solved(config):
        raise ConfigError(f"the best schedule of task {config.task!r} is not known; leave {BEST_SCHEDULE} out.")
    return name, partial(_best_schedule, config)


def _best_schedule(config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    rows = null.best_schedule(spec.episode_length, spec.min_training_epochs, spec.num_slots)
    return ScriptedClient(scheduled(Schedule.from_rows(BEST_SCHEDULE, 1, rows), spec), reward_of(config, spec))


@dataclass(frozen=True)
class Trained:
    """A controller of a run: after how much of it, and a sentence for each newer checkpoint that is damaged."""

    controller: tuple[str, Maker]
    place: str
    complaints: list[str]


def trained(run: Path, config: RunConfig, *, best: bool = False) -> Trained:
    """The controller of a run's newest whole checkpoint, or the one that did best in ten rounds.

    Raises:
        CheckpointError: there is none.
    """
    complaints: list[str] = []
    if best:
        checkpoint = _best(run)
    else:
        newest, _, complaints = load_newest(run / CHECKPOINTS)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet; continue it with esper train --resume {run}.")
        checkpoint = newest
    controller = (TRAINED, partial(_trained_client, checkpoint, config))
    return Trained(controller, f"after {checkpoint.header.place}", complaints)


def _best(run: Path) -> Checkpoint:
    folder = run / CHECKPOINTS
    if not (folder / BEST).exists():
        told = f"its newest is {names[0].name}" if (names := checkpoints(folder)) else "it has no other either"
        raise CheckpointError(
            f"{run} has no best checkpoint, which is the mean of ten rounds and so comes after the tenth at the "
            f"earliest ({told}); leave --best out, or train longer."
        )
    return load(folder / BEST)


def _trained_client(checkpoint: Checkpoint, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """The policy alone: statistics as they were, no rollout that was under way. It is never asked to learn."""
    found = {name: value for name, value in checkpoint.header.shape.items() if name not in _FREE}
    own = run_shape(config, spec, {})
    require_same_shape(found, {name: value for name, value in own.items() if name not in _FREE}, checkpoint.path)
    client = learner_of(replace(config, compile="off"), spec)
    policy = below("policy", checkpoint.state)
    client.load_state_dict({name: x for name, x in policy.items() if not name.startswith("rollout.")})
    return client


def table(outcomes: Sequence[Outcome], weights: RewardConfig) -> list[Row]:
    """The comparison: the run, the strongest constant schedule, and the others by J, best first.

    Differences are to the run where there is one, else to wait_only.
    """
    objectives = {outcome.name: objective_of(outcome.stats, weights) for outcome in outcomes}
    reference = objectives[TRAINED if TRAINED in objectives else REFERENCE]
    rows = [_row(outcome, objectives[outcome.name], reference) for outcome in outcomes]
    rows.sort(key=lambda row: -row.objective)
    constant = next((row for row in rows if row.name in _CONSTANT), None)
    return sorted(rows, key=lambda row: 0 if row.name == TRAINED else 1 if row is constant else 2)


def _row(outcome: Outcome, objective: np.ndarray, reference: np.ndarray) -> Row:
    stats, test = outcome.stats, outcome.test_acc.astype(np.float64)
    committed = stats.committed_acc.astype(np.float64)
    per_host = {
        "objective": objective,
        "committed": committed,
        "test": test,
        "growth": stats.growth,
        "shaped_return": stats.returns,
    }
    return Row(
        name=outcome.name,
        objective=float(objective.mean()),
        objective_std=standard_deviation(objective),
        difference=paired_difference(objective, reference),
        committed=float(committed.mean()),
        committed_std=standard_deviation(committed),
        test=float(test.mean()),
        test_std=standard_deviation(test),
        growth=float(stats.growth.mean()),
        fossilized=float(stats.fossilized.mean()),
        rollbacks=int(stats.rollbacks.sum()),
        shaped_return=float(stats.returns.mean()),
        ops=ops_by_name(stats.ops),
        hosts={name: [float(x) for x in values] for name, values in per_host.items()},
        structures=[manifest.tree() for manifest in outcome.grown],
    )


def paired_difference(values: np.ndarray, reference: np.ndarray) -> Difference:
    """Of [N] values to the reference's on the same hosts, with the percentile bootstrap interval (Efron, 1979)."""
    differences = values - reference
    if differences.size == 1:
        return Difference(float(differences[0]), math.nan, math.nan)
    size, own = differences.size, local_generator(0, Stream.RESAMPLING)
    drawn = (torch.randint(size, (RESAMPLES // 10, size), generator=own).numpy() for _ in range(10))
    means = [differences[hosts].mean(axis=1) for hosts in drawn]
    low, high = np.percentile(means, (2.5, 97.5))
    return Difference(float(differences.mean()), float(low), float(high))


def verdict(rows: Sequence[Row]) -> str:
    """In words: the run compared to the best baseline, or without a run the best baseline to wait_only."""
    has_run = rows[0].name == TRAINED
    best = max(rows[has_run:], key=lambda row: row.objective)
    subject, other = (TRAINED, f"the best baseline, {best.name}") if has_run else (best.name, REFERENCE)
    number = len(best.hosts["objective"])
    hosts = f"{number} host{'s' * (number != 1)}"
    if subject == other:
        return f"No baseline is better than {REFERENCE} on {hosts}."
    found = -best.difference if has_run else best.difference
    interval = "" if math.isnan(found.low) else f", 95 % interval {found.low:+z.2f} to {found.high:+z.2f}"
    numbers = f"{found.mean:+z.2f} in 100·J on {hosts}{interval}"
    if not (found.low > 0.0 or found.high < 0.0):
        return f"{subject} cannot be told apart from {other}: {numbers}."
    return f"{subject} is {'better' if found.mean > 0.0 else 'worse'} than {other}: {numbers}."


def report(
    rows: Sequence[Row], config: RunConfig, run: Path | None, place: str, seed: int, num_envs: int
) -> dict[str, Any]:
    """The comparison as plain values, the numbers of every host included."""
    return {
        "task": config.task,
        "preset": config.preset,
        "reward": config.reward_name,
        "run": str(run) if run else None,
        "trained": place or None,
        "seed": seed,
        "num_envs": num_envs,
        "episode_length": config.episode_length,
        "reference": TRAINED if run else REFERENCE,
        "verdict": verdict(rows),
        "controllers": [asdict(row) for row in rows],
    }
