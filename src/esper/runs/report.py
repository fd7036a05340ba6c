"""Metrics of a round, of a round in progress, and of a run, as JSON values by name."""

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np
import torch

from esper.leyline.lifecycle import HAS_MODULE, OP_NAMES, SeedStage
from esper.leyline.settings import Count, NotNegative
from esper.runs.assembly.run_config import RunConfig
from esper.simic.rewards.objective import objective_value
from esper.simic.rewards.reward_config import RewardConfig
from esper.tasks.losses import perplexity
from esper.telemetry.machine import device_name
from esper.telemetry.record.schema import shapley_values
from esper.tolaria.state import RolloutStats, StepReport


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of some rounds, or of a part of one.

    Attributes:
        env_steps: hosts x control steps. steps: control steps. reads: host reads of the device.
        seconds: wall time of the steps. update_seconds: wall time of PPO updates.
    """

    env_steps: Count = 0
    steps: Count = 0
    reads: Count = 0
    seconds: NotNegative = 0.0
    update_seconds: NotNegative = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})


_SEED_STAGES = tuple((int(s), s.name) for s in SeedStage if s is not SeedStage.DORMANT)


def ops_by_name(ops: np.ndarray) -> dict[str, int]:
    """Number of effective operations by name; `ops` is [..., 6]."""
    totals = ops.reshape(-1, len(OP_NAMES)).sum(axis=0)
    return dict(zip(OP_NAMES, totals.tolist(), strict=True))


def slots_by_stage(stage: np.ndarray) -> dict[str, int]:
    """Number of slots by stage, without dormant ones."""
    counts = np.bincount(stage.reshape(-1), minlength=len(SeedStage) + 1).tolist()
    return {name: counts[value] for value, name in _SEED_STAGES if counts[value]}


def objective_of(stats: RolloutStats, weights: RewardConfig) -> np.ndarray:
    """100·J of the committed network of each host [N], independent of the reward of the run."""
    return 100.0 * objective_value(stats.committed_acc, stats.fossil_params, stats.host_params, stats.compute, weights)


def round_line(
    stats: RolloutStats, cost: Cost, metrics: Mapping[str, float], weights: RewardConfig
) -> dict[str, object]:
    """One line of metrics.jsonl, with accuracies in percentage points and the `metrics` of the learner.

    `objective_*` are of 100·J; live accuracy and shaped return are diagnostics. `cost` covers the whole round, also if
    it was resumed in between.
    """
    shapley, objective = shapley_of(stats), objective_of(stats, weights)
    counted = ("germinated", "fossilized", "contributing", "pruned", "refused")
    return {
        "round": stats.episode + 1,
        "objective_mean": float(objective.mean()),
        "objective_std": standard_deviation(objective),
        "committed_accuracy_mean": float(stats.committed_acc.mean(dtype=np.float64)),
        "growth_ratio_mean": float(stats.growth.mean()),
        "live_accuracy_mean": mean_of_known(stats.val_acc),
        "shaped_return": float(stats.returns.mean()),
        **{f"{name}_mean": float(getattr(stats, name).mean()) for name in counted},
        "rollbacks": int(stats.rollbacks.sum()),
        "ops": ops_by_name(stats.ops),
        "slots": slots_by_stage(stats.stage),
        "shapley_mean": mean_of_known(shapley),
        "env_steps": cost.env_steps,
        "host_reads": cost.reads,
        "seconds": cost.seconds,
        "update_seconds": cost.update_seconds,
        **metrics,
    }


def shapley_of(stats: RolloutStats) -> np.ndarray:
    """Shapley value (pp) of each live seed at the end of the episode [N, S]; NaN if a subset was not measured."""
    live = np.isin(stats.stage, tuple(HAS_MODULE)) & (stats.alpha > 0.0)
    found = np.full(live.shape, np.nan, dtype=stats.subset_acc.dtype)
    for n, accuracy in enumerate(stats.subset_acc):
        subsets = accuracy[: 2 ** live[n].sum()].tolist()
        if len(subsets) == 2 ** live[n].sum():
            found[n, live[n]] = shapley_values(subsets)
    return found


@final
class RoundSoFar:
    """Running totals of a round for listeners: the fields of kind "step".

    Means are over the measured hosts; `weights` are those of J.
    """

    def __init__(self, weights: RewardConfig) -> None:
        self._weights = weights
        self._begin(-1)

    def _begin(self, episode: int) -> None:
        self._episode, self._steps = episode, 0
        self._ops = np.zeros(len(OP_NAMES), dtype=np.int64)

    def add(self, reports: Sequence[StepReport], seconds: Sequence[float]) -> list[dict[str, object]]:
        """Fields for each of successive steps of one round; `seconds` is the time of each since the round began."""
        if reports[0].episode != self._episode:
            self._begin(reports[0].episode)
        op, valid, live, committed, fossils, host, compute, stage = (
            np.stack([getattr(report, name) for report in reports])
            for name in (
                "effective_op", "decided", "val_acc", "committed_acc", "committed_params", "host_params",
                "compute", "stage",
            )
        )  # fmt: skip
        num_hosts = op.shape[1]
        objective = 100.0 * objective_value(committed, fossils, host, compute, self._weights)
        ops = self._ops + np.cumsum(_histograms(np.where(valid, op, len(OP_NAMES)), len(OP_NAMES) + 1)[:, :-1], axis=0)
        self._ops = ops[-1]
        known = [np.ma.masked_invalid(values) for values in (objective, committed, live)]
        means = [of.mean(axis=1, dtype=np.float64).filled(np.nan).tolist() for of in known]
        deviations = known[0].std(axis=1, ddof=1).filled(np.nan).tolist()  # NaN for fewer than two
        rows = zip(
            reports, seconds, *means, deviations, ops.tolist(), _histograms(stage, len(SeedStage) + 1).tolist(),
            strict=True,
        )  # fmt: skip
        fields: list[dict[str, object]] = []
        for report, elapsed, objective_mean, committed_mean, live_mean, objective_std, op_counts, slots in rows:
            self._steps += 1
            fields.append(
                {
                    "round": report.episode + 1,
                    "t": report.t,
                    "objective_mean": objective_mean,
                    "objective_std": objective_std,
                    "committed_accuracy_mean": committed_mean,
                    "live_accuracy_mean": live_mean,
                    "ops": dict(zip(OP_NAMES, op_counts, strict=True)),
                    "slots": {name: slots[value] for value, name in _SEED_STAGES if slots[value]},
                    "env_steps": self._steps * num_hosts,
                    "seconds": elapsed,
                }
            )
        return fields


def step_of_all(parts: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, object]:
    """Fields of kind "step" of the hosts of all ranks, from their number and fields on each; the first is the own one.

    Ranks are not at the same step: `round`, `t` and `seconds` are those of the first, and the others count as they are.
    """
    _, own = parts[0]
    parts = [(n, fields) for n, fields in parts if fields["round"] == own["round"]]
    hosts = np.array([n for n, _ in parts], dtype=np.float64)

    def mean(name: str) -> float:
        values = np.array([fields[name] for _, fields in parts], dtype=np.float64)
        known = np.isfinite(values)
        return float((values * hosts)[known].sum() / hosts[known].sum()) if known.any() else math.nan

    means = {name: mean(name) for name in own if name.endswith("_mean")}
    within = np.array([fields["objective_std"] for _, fields in parts], dtype=np.float64) ** 2 * (hosts - 1)
    between = hosts * (np.array([fields["objective_mean"] for _, fields in parts]) - means["objective_mean"]) ** 2
    variance = (np.nansum(within) + np.nansum(between)) / max(hosts.sum() - 1, 1)
    counts = {
        name: {key: sum(fields[name].get(key, 0) for _, fields in parts) for _, of in parts for key in of[name]}
        for name in ("ops", "slots")
    }
    env_steps = sum(fields["env_steps"] for _, fields in parts)
    return {**own, **means, "objective_std": math.sqrt(variance), **counts, "env_steps": env_steps}


def _histograms(values: np.ndarray, kinds: int) -> np.ndarray:
    """Counts [T, kinds] of each of 0 .. kinds-1 in each row of `values` [T, ...]."""
    rows = values.reshape(len(values), -1)
    shifted = rows + kinds * np.arange(len(rows))[:, None]
    return np.bincount(shifted.reshape(-1), minlength=kinds * len(rows)).reshape(len(rows), kinds)


def mean_of_known(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.sum()) / known.size if known.size else float("nan")


def standard_deviation(values: np.ndarray) -> float:
    """Sample standard deviation; NaN for a single value."""
    return float(values.std(ddof=1, dtype=np.float64)) if values.size > 1 else float("nan")


def summary(
    config: RunConfig, device: torch.device, last: RolloutStats, test_acc: np.ndarray, total: Cost, digest: str
) -> dict[str, object]:
    """summary.json of a complete run: `final_*` are means over the committed networks of the `last` round.

    `test_acc` [N] is theirs; `final_perplexity` is that of their mean validation loss, for texts. `total` is the cost
    of all rounds, including those before a resume.
    """
    objective = objective_of(last, config.reward)
    loss = float(last.committed_loss.mean(dtype=np.float64))
    return {
        **{name: getattr(config, name) for name in ("task", "preset", "seed", "rounds", "num_envs", "episode_length")},
        "reward": config.reward_name,
        "env_steps": config.rounds * config.num_envs * config.episode_length,
        "env_steps_per_second": total.env_steps / max(total.seconds + total.update_seconds, 1e-9),
        "rollout_seconds": total.seconds,
        "update_seconds": total.update_seconds,
        "final_objective_mean": float(objective.mean()),
        "final_objective_std": standard_deviation(objective),
        "final_committed_accuracy_mean": float(last.committed_acc.mean(dtype=np.float64)),
        "final_test_accuracy_mean": float(test_acc.mean(dtype=np.float64)),
        "final_perplexity": perplexity(config.task_spec().objective, loss),
        "growth_ratio_mean": float(last.growth.mean()),
        "host_reads_per_step": total.reads / max(total.steps, 1),
        "state_digest": digest,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
