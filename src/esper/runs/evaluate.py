"""Compares controllers on the same fresh hosts: equal seeds and data order, no learning."""

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
from esper.runs.build import baseline_of, dataset_of, device_of, engine_of, learner_of, policy_file_client, reward_of
from esper.runs.checkpoint import BEST, Checkpoint, checkpoints, load, load_newest, require_same_shape
from esper.runs.config import RunConfig
from esper.runs.identity import run_shape
from esper.runs.report import objective_of, ops_by_name, standard_deviation
from esper.simic.rewards.config import RewardConfig
from esper.simic.scripted_client import ScriptedClient
from esper.tamiyo.baselines import BASELINES, STATIC, policy_names, scheduled
from esper.tamiyo.policy_files import SUFFIX as POLICY_SUFFIX
from esper.tamiyo.schedules import Schedule
from esper.tasks import null
from esper.tasks.datasets import data_label
from esper.tasks.registry import task_by_name
from esper.telemetry.run_directory import CHECKPOINTS, SUMMARY
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

SEED_OFFSET = 1_000_000
"""Added to the training seed, so that evaluation hosts differ from all training hosts."""
RESAMPLES = 10_000
REFERENCE = "wait_only"
TRAINED = "trained"
BEST_SCHEDULE = "best_schedule"
_CONSTANT = ("fixed_schedule", "fixed_schedule_fill", BEST_SCHEDULE)
_FREE = ("num_envs", "data")
"""Entries of `run_shape` that may differ between training and evaluation."""
_OF_TASK = ("task", "seed", "slots", "episode_length", "reward")
"""Entries that do not matter to the network of a policy; the number of slots is in `head_sizes`."""

Maker = Callable[[EngineSpec], ClientProtocol]


@dataclass(frozen=True)
class Outcome:
    """Results of one controller: episode statistics, test accuracy (pp) [N] and the structure of each host.

    `data` is the data set in words.
    """

    name: str
    stats: RolloutStats
    test_acc: np.ndarray
    grown: tuple[GrowthManifest, ...] = ()
    data: str = "none"


@dataclass(frozen=True)
class Difference:
    """Mean of the paired differences over hosts with its 95 % interval; NaN bounds for a single host."""

    mean: float
    low: float
    high: float

    def __neg__(self) -> "Difference":
        return Difference(-self.mean, -self.high, -self.low)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: means over all hosts of their committed networks (host and fossilized seeds).

    Attributes:
        objective: 100·J. difference: paired difference in 100·J to the trained controller, else to wait_only.
        committed, test: accuracy (pp) on the validation and the test split.
        growth: (host + fossilized parameters) / host parameters. ops: effective operations of all hosts, by name.
        shaped_return: undiscounted sum of rewards; a diagnostic that does not rank controllers.
        hosts: the values of every host. structures: `GrowthManifest.tree` of every host.
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
    """One episode of each controller on `num_envs` hosts of seed `run_seed`; the test split is read at its end.

    Args:
        config: of the run if a trained controller is compared.
        controllers: from `baseline` and `trained`, sorted by `in_order`.
        run_seed: key of all random draws.
        num_envs: hosts per controller.
        on_start: called with the name of each controller before its episode.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: a controller cannot be evaluated.
    """
    config = replace(config, compile="off")  # one episode is shorter than a compilation
    engine_config = config.engine(run_seed=run_seed, num_envs=num_envs)
    device = device_of(config)
    dataset = dataset_of(config, device)
    outcomes: list[Outcome] = []
    for name, make in controllers:
        engine = engine_of(config, dataset, device, engine_config=engine_config)
        client = make(engine.spec)
        on_start(name)
        if name == STATIC:
            given = GrowthManifest.of_lines(config.topology)
            engine.planted = (given,) * num_envs if config.topology else outcomes[0].grown
        engine.reset(client, episode=0)
        stats = engine.rollout(client)
        assert stats is not None
        (test_acc,) = host_read(engine.test())
        grown = manifests(stats.stage, stats.blueprint, stats.algorithm, engine.spec)
        outcomes.append(Outcome(name, stats, test_acc, grown, data_label(dataset.identity) if dataset else "none"))
    return outcomes


def in_order(controllers: Sequence[tuple[str, Maker]], config: RunConfig) -> list[tuple[str, Maker]]:
    """The order of evaluation: `static_final` last, and first the controller whose final structure it starts with.

    That is the trained controller, else the first one that can grow; raises ConfigError if there is none. With a
    topology of its own `static_final` needs none.
    """
    names = [name for name, _ in controllers]
    if STATIC not in names or config.topology:
        return list(controllers)
    growing = [name for name in (TRAINED, *names) if name in names and name not in (STATIC, REFERENCE)]
    if not growing:
        raise ConfigError(
            f"{STATIC} starts with the final structure of another controller, and none is named; add a run directory, "
            f"one of {', '.join(name for name in BASELINES if name not in (STATIC, REFERENCE))}, or --topology."
        )
    rank = {growing[0]: 0, STATIC: 2}
    return sorted(controllers, key=lambda controller: rank.get(controller[0], 1))


def names() -> tuple[str, ...]:
    """Every controller with a name: the baselines, and the policies that users registered."""
    return (*policy_names(), BEST_SCHEDULE)


def all_baselines(config: RunConfig) -> tuple[str, ...]:
    """Names of the baselines that the task supports."""
    return (*BASELINES, BEST_SCHEDULE) if _is_solved(config) else BASELINES


def _is_solved(config: RunConfig) -> bool:
    """Whether the best schedule is known: it is for scripted tasks with the built-in dynamics."""
    script, known = task_by_name(config.task).script, null.NullSpec()
    if script is None:
        return False
    names = ("quality", "health", "algorithm_factor", "interaction", "permuted")
    return all(getattr(script, name) == getattr(known, name) for name in names)


def is_policy_file(name: str) -> bool:
    """Whether the name of a controller is that of a policy file."""
    return name.endswith(POLICY_SUFFIX)


def baseline(name: str, config: RunConfig) -> tuple[str, Maker]:
    """A baseline by name, or a policy file; raises ConfigError for `best_schedule` if the task has none."""
    if is_policy_file(name):
        return Path(name).name, partial(policy_file_client, Path(name), config)
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
    """The controller of a run, its position in the run, and a sentence for each damaged newer checkpoint."""

    controller: tuple[str, Maker]
    place: str
    complaints: list[str]


def trained(run: Path, config: RunConfig, *, best: bool = False, transfer: bool = False) -> Trained:
    """The controller of a run's newest intact (or best) checkpoint; raises CheckpointError if there is none.

    With `transfer` the task may be another one, as long as the network of the policy fits.
    """
    complaints: list[str] = []
    if config.topology:
        raise CheckpointError(f"{run} trained a fixed topology and has no controller; its results are in {SUMMARY}.")
    if best:
        checkpoint = _best(run)
    else:
        newest, _, complaints = load_newest(run / CHECKPOINTS)
        if newest is None:
            raise CheckpointError(f"{run} has no checkpoint yet; continue it with esper train --resume {run}.")
        checkpoint = newest
    free = (*_FREE, *_OF_TASK) if transfer else _FREE
    controller = (TRAINED, partial(_trained_client, checkpoint, config, free))
    return Trained(controller, f"after {checkpoint.header.place}", complaints)


def _best(run: Path) -> Checkpoint:
    folder = run / CHECKPOINTS
    if not (folder / BEST).exists():
        newest = f"the newest is {found[0].name}" if (found := checkpoints(folder)) else "it has no other either"
        raise CheckpointError(
            f"{run} has no best checkpoint ({newest}): it is chosen by a mean of ten rounds, so the first one follows "
            "round 10; leave --best out, or train longer."
        )
    return load(folder / BEST)


def _trained_client(checkpoint: Checkpoint, config: RunConfig, free: Sequence[str], spec: EngineSpec) -> ClientProtocol:
    """The policy of a checkpoint with its statistics, without the rollout in progress."""
    found = {name: value for name, value in checkpoint.header.shape.items() if name not in free}
    own = run_shape(config, spec, {})
    require_same_shape(found, {name: value for name, value in own.items() if name not in free}, checkpoint.path)
    client = learner_of(replace(config, compile="off"), spec)
    policy = below("policy", checkpoint.state)
    client.load_state_dict({name: x for name, x in policy.items() if not name.startswith("rollout.")})
    return client


def table(outcomes: Sequence[Outcome], weights: RewardConfig) -> list[Row]:
    """The comparison: the trained controller, the strongest constant schedule, then the others by J, best first."""
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
    """Mean of values [N] minus reference [N], with the percentile bootstrap interval (Efron, 1979)."""
    differences = values - reference
    if differences.size == 1:
        return Difference(float(differences[0]), math.nan, math.nan)
    size, own = differences.size, local_generator(0, Stream.RESAMPLING)
    drawn = (torch.randint(size, (RESAMPLES // 10, size), generator=own).numpy() for _ in range(10))
    means = [differences[hosts].mean(axis=1) for hosts in drawn]
    low, high = np.percentile(means, (2.5, 97.5))
    return Difference(float(differences.mean()), float(low), float(high))


def verdict(rows: Sequence[Row]) -> str:
    """One sentence: the trained controller against the best baseline, or else that one against wait_only."""
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
        return f"{subject} does not differ significantly from {other}: {numbers}."
    return f"{subject} is {'better' if found.mean > 0.0 else 'worse'} than {other}: {numbers}."


def report(
    rows: Sequence[Row], config: RunConfig, data: str, run: Path | None, place: str, seed: int, num_envs: int
) -> dict[str, Any]:
    """The comparison as JSON values, including those of every host."""
    return {
        "task": config.task,
        "data": data,
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
