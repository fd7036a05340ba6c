"""Comparison of controllers on fresh hosts: the same hosts, data order and seeds for each of them, nobody learns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline.errors import CheckpointError
from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.leyline.state_tree import below
from esper.simic.training.build import baseline_of, dataset_of, device_of, engine_of, learner_of
from esper.simic.training.checkpoint import Checkpoint, load_newest, require_same_shape
from esper.simic.training.config import RunConfig
from esper.simic.training.identity import run_shape
from esper.simic.training.report import ops_by_name
from esper.tamiyo.baselines import BASELINES
from esper.telemetry.run_directory import CHECKPOINTS
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

SEED_OFFSET = 1_000_000
"""Evaluation hosts have the training seed plus this: they were never trained on."""
REFERENCE = "wait_only"
TRAINED = "trained"
_FREE = ("num_envs", "data")
"""What an evaluation may have otherwise than the training: other hosts, and another split drawn by their seed."""

Maker = Callable[[EngineSpec], ClientProtocol]


@dataclass(frozen=True)
class Outcome:
    """What one controller came to on the evaluation hosts; arrays [N], accuracies in percentage points."""

    name: str
    stats: RolloutStats
    test_acc: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: means over the hosts, standard deviations, and the paired difference to wait_only.

    Attributes:
        committed, test: accuracy (pp) of host and fossilized seeds on the validation and the test split.
        gain, gain_standard_error: mean of the paired differences in committed accuracy, and its standard error;
            `test_gain...` the same on the test split. NaN where wait_only was not run or there is one host.
        growth: (host + fossilized parameters) / host parameters. ops: effective operations of all hosts, by name.
        hosts: the numbers of every single host, in the order of the hosts, for statistics of one's own.
    """

    name: str
    committed: float
    committed_std: float
    test: float
    test_std: float
    gain: float
    gain_standard_error: float
    test_gain: float
    test_gain_standard_error: float
    growth: float
    mean_return: float
    fossilized: float
    rollbacks: int
    ops: dict[str, int]
    hosts: dict[str, list[float]]


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
        controllers: name and maker of each, from `baseline` and `trained`.
        run_seed: key of all draws of the evaluation.
        num_envs: hosts per controller.
        on_start: told the name of each controller before its hosts begin.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: what cannot be evaluated, before anything is.
    """
    engine_config = config.engine(run_seed=run_seed, num_envs=num_envs)
    device = device_of(config)
    dataset = dataset_of(config, device)
    outcomes = []
    for name, make in controllers:
        engine = engine_of(config, dataset, device, engine_config=engine_config)
        client = make(engine.spec)
        on_start(name)
        engine.reset(client, episode=0)
        stats = engine.rollout(client)
        assert stats is not None
        (test_acc,) = host_read(engine.test())
        outcomes.append(Outcome(name, stats, test_acc))
    return outcomes


def baseline(name: str, config: RunConfig) -> tuple[str, Maker]:
    """A controller by name from `BASELINES`."""
    return name, partial(baseline_of, name, config)


def trained(run: Path, config: RunConfig) -> tuple[tuple[str, Maker], list[str]]:
    """The controller of a run's newest whole checkpoint, and a sentence for each newer one that is damaged.

    Raises:
        CheckpointError: there is none.
    """
    checkpoint, _, complaints = load_newest(run / CHECKPOINTS)
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint yet; continue it with esper train --resume {run}.")
    return (TRAINED, partial(_trained_client, checkpoint, config)), complaints


def _trained_client(checkpoint: Checkpoint, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """The policy alone: statistics as they were, no rollout that was under way. It is never asked to learn."""
    found = {name: value for name, value in checkpoint.header.shape.items() if name not in _FREE}
    own = run_shape(config, spec, {})
    require_same_shape(found, {name: value for name, value in own.items() if name not in _FREE}, checkpoint.path)
    client = learner_of(config, spec)
    policy = below("policy", checkpoint.state)
    client.load_state_dict({name: x for name, x in policy.items() if not name.startswith("rollout.")})
    return client


def table(outcomes: Sequence[Outcome]) -> list[Row]:
    """The comparison, best committed accuracy first; differences are NaN without wait_only among the outcomes."""
    reference = next((outcome for outcome in outcomes if outcome.name == REFERENCE), None)
    rows = [_row(outcome, reference) for outcome in outcomes]
    return sorted(rows, key=lambda row: (math.isnan(row.committed), -row.committed))


def _row(outcome: Outcome, reference: Outcome | None) -> Row:
    stats, test = outcome.stats, outcome.test_acc.astype(np.float64)
    committed = stats.committed_acc.astype(np.float64)
    gain = _paired(committed, reference.stats.committed_acc if reference else None)
    test_gain = _paired(test, reference.test_acc if reference else None)
    per_host = {"committed": committed, "test": test, "growth": stats.growth, "return": stats.returns}
    return Row(
        name=outcome.name,
        committed=_mean(committed),
        committed_std=_std(committed),
        test=_mean(test),
        test_std=_std(test),
        gain=_mean(gain),
        gain_standard_error=_standard_error(gain),
        test_gain=_mean(test_gain),
        test_gain_standard_error=_standard_error(test_gain),
        growth=_mean(stats.growth),
        mean_return=_mean(stats.returns),
        fossilized=_mean(stats.fossilized),
        rollbacks=int(stats.rollbacks.sum()),
        ops=ops_by_name(stats.ops),
        hosts={name: [float(x) for x in values] for name, values in per_host.items()},
    )


def _paired(values: np.ndarray, reference: np.ndarray | None) -> np.ndarray:
    """Difference to the reference on the same host, NaN without one."""
    return values - reference.astype(np.float64) if reference is not None else np.full_like(values, np.nan)


def _mean(values: np.ndarray) -> float:
    """Mean of what was measured: a host that was rolled back in its last step has no accuracy."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def _std(values: np.ndarray) -> float:
    """Standard deviation of a sample; NaN where it has one member."""
    known = values[np.isfinite(values)]
    return float(known.std(ddof=1)) if known.size > 1 else float("nan")


def _standard_error(values: np.ndarray) -> float:
    return _std(values) / math.sqrt(max(np.isfinite(values).sum(), 1))


def all_baselines() -> tuple[str, ...]:
    """The four baselines a trained controller is compared with."""
    return tuple(name for name in BASELINES if name != "fixed_schedule_fill")


def report(rows: Sequence[Row], config: RunConfig, run: Path | None, seed: int, num_envs: int) -> dict[str, Any]:
    """The comparison as plain values, the numbers of every host included."""
    return {
        "task": config.task,
        "preset": config.preset,
        "reward": config.reward_name,
        "run": str(run) if run else None,
        "seed": seed,
        "num_envs": num_envs,
        "episode_length": config.episode_length,
        "controllers": [vars(row) for row in rows],
    }
