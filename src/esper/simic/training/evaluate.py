"""Comparison of controllers on fresh hosts: the same hosts, data order and seeds for each of them, nobody learns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.manifest import TopologyManifest, manifests
from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.leyline.state_tree import below
from esper.simic.training.build import baseline_of, dataset_of, device_of, engine_of, learner_of
from esper.simic.training.checkpoint import BEST, Checkpoint, checkpoints, load, load_newest, require_same_shape
from esper.simic.training.config import RunConfig
from esper.simic.training.identity import run_shape
from esper.simic.training.report import ops_by_name
from esper.tamiyo.baselines import BASELINES, STATIC
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
    grown: tuple[TopologyManifest, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the comparison: means over the hosts, standard deviations, and the paired difference to wait_only.

    Attributes:
        committed, test: accuracy (pp) of host and fossilized seeds on the validation and the test split.
        gain, gain_standard_error: mean of the paired differences in committed accuracy, and its standard error;
            `test_gain...` the same on the test split. NaN where wait_only was not run or there is one host.
        growth: (host + fossilized parameters) / host parameters. ops: effective operations of all hosts, by name.
        hosts: the numbers of every single host, in the order of the hosts, for statistics of one's own.
        structures: what each host came to, as `TopologyManifest.tree`.
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


def baseline(name: str, config: RunConfig) -> tuple[str, Maker]:
    """A controller by name from `BASELINES`."""
    return name, partial(baseline_of, name, config)


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
        structures=[manifest.tree() for manifest in outcome.grown],
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
    """The five baselines a trained controller is compared with."""
    return tuple(name for name in BASELINES if name != "fixed_schedule_fill")


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
        "controllers": [vars(row) for row in rows],
    }
