"""Comparison of controllers on fresh hosts: the same hosts, data order and seeds for each of them, nobody learns."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.leyline.state_tree import below
from esper.simic.training.build import baseline_of, dataset_of, device_of, engine_of, learner_of
from esper.simic.training.checkpoint import load_newest
from esper.simic.training.config import RunConfig
from esper.simic.training.report import ops_by_name
from esper.tamiyo.baselines import BASELINES
from esper.telemetry.run_directory import CHECKPOINTS
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats

SEED_OFFSET = 1_000_000
"""Evaluation hosts have the training seed plus this: they were never trained on."""
REFERENCE = "wait_only"


@dataclass(frozen=True)
class Outcome:
    """What one controller came to on the evaluation hosts; arrays [N], accuracies in percentage points."""

    name: str
    stats: RolloutStats
    test_acc: np.ndarray


@dataclass(frozen=True)
class Row:
    """One line of the comparison. `gain` is the paired difference in committed accuracy to wait_only."""

    name: str
    committed: float
    committed_std: float
    test: float
    growth: float
    mean_return: float
    fossilized: float
    gain: float
    gain_standard_error: float
    ops: dict[str, int]


def evaluate(
    config: RunConfig, run: Path | None, baselines: Sequence[str], *, run_seed: int, num_envs: int
) -> list[Outcome]:
    """One episode of each controller on `num_envs` hosts of seed `run_seed`; the test split is touched at its end.

    Args:
        config: the task and all settings; that of the run where one is given.
        run: directory of a trained controller, or None.
        baselines: names from `BASELINES`.
        run_seed: key of all draws of the evaluation.
        num_envs: hosts per controller.

    Raises:
        RegistryError, CheckpointError, DataError: an unknown baseline, an unusable run, missing data.
    """
    makers: list[tuple[str, Callable[[EngineSpec], ClientProtocol]]] = []
    if run is not None:
        makers.append((str(run), lambda spec: trained_client(config, run, spec)))
    makers += [(name, lambda spec, name=name: baseline_of(name, config, spec)) for name in baselines]  # type: ignore[misc]
    device = device_of(config)
    dataset = dataset_of(config, device)
    outcomes = []
    for name, make in makers:
        engine_config = config.engine(run_seed=run_seed, num_envs=num_envs)
        engine = engine_of(config, dataset, device, engine_config=engine_config)
        client = make(engine.spec)
        engine.reset(client, episode=0)
        stats = engine.rollout(client)
        assert stats is not None
        (test_acc,) = host_read(engine.test())
        outcomes.append(Outcome(name, stats, test_acc))
    return outcomes


def trained_client(config: RunConfig, run: Path, spec: EngineSpec) -> ClientProtocol:
    """The policy of a run's newest checkpoint, with frozen statistics."""
    checkpoint, _ = load_newest(run / CHECKPOINTS)
    client = learner_of(config, spec)
    policy = below("policy", checkpoint.state)
    client.load_state_dict({name: x for name, x in policy.items() if not name.startswith("rollout.")})
    return client


def table(outcomes: Sequence[Outcome]) -> list[Row]:
    """The comparison, best committed accuracy first; gains are NaN without wait_only among the outcomes."""
    reference = next((o.stats.committed_acc for o in outcomes if o.name == REFERENCE), None)
    rows = [_row(outcome, reference) for outcome in outcomes]
    return sorted(rows, key=lambda row: -row.committed)


def _row(outcome: Outcome, reference: np.ndarray | None) -> Row:
    stats = outcome.stats
    committed = stats.committed_acc.astype(np.float64)
    gain = committed - reference if reference is not None else np.full_like(committed, np.nan)
    error = gain.std(ddof=1) / math.sqrt(len(gain)) if len(gain) > 1 else float("nan")
    return Row(
        name=outcome.name,
        committed=float(committed.mean()),
        committed_std=float(committed.std(ddof=1)) if len(committed) > 1 else float("nan"),
        test=float(outcome.test_acc.mean()),
        growth=float(stats.growth.mean()),
        mean_return=float(stats.returns.mean()),
        fossilized=float(stats.fossilized.mean()),
        gain=float(gain.mean()),
        gain_standard_error=float(error),
        ops=ops_by_name(stats.ops),
    )


def all_baselines() -> tuple[str, ...]:
    """The four baselines a trained controller is compared with."""
    return tuple(name for name in BASELINES if name != "fixed_schedule_fill")
