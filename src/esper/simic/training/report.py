"""Numbers of a round, of an episode in progress, and of a whole run, as plain values by name."""

import platform
from collections.abc import Mapping

import numpy as np
import torch

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import HAS_MODULE, SeedStage
from esper.simic.attribution.shapley import shapley_values
from esper.simic.training.config import RunConfig
from esper.telemetry.progress import Shown
from esper.tolaria.state import RolloutStats, StepReport


def ops_by_name(ops: np.ndarray) -> dict[str, int]:
    """Number of effective operations by name; `ops` is [..., 6] or counts [6]."""
    totals = ops.reshape(-1, len(LifecycleOp)).sum(axis=0)
    return {op.name: int(totals[op]) for op in LifecycleOp}


def slots_by_stage(stage: np.ndarray) -> dict[str, int]:
    """Number of slots in each stage that occurs, dormant ones left out."""
    counts = np.bincount(stage.reshape(-1), minlength=len(SeedStage) + 1)
    return {s.name: int(counts[s]) for s in SeedStage if s is not SeedStage.DORMANT and counts[s]}


def round_line(stats: RolloutStats, metrics: Mapping[str, float]) -> dict[str, object]:
    """One line of metrics.jsonl. Accuracies in percentage points; learner's metrics under their own names."""
    cost = stats.cost
    return {
        "round": stats.episode + 1,
        "mean_return": float(stats.returns.mean()),
        "val_accuracy_mean": _mean_of_known(stats.val_acc),
        "committed_accuracy_mean": _mean_of_known(stats.committed_acc),
        "growth_ratio_mean": float(stats.growth.mean()),
        "germinated_mean": float(stats.germinated.mean()),
        "fossilized_mean": float(stats.fossilized.mean()),
        "contributing_mean": float(stats.contributing.mean()),
        "pruned_mean": float(stats.pruned.mean()),
        "refused_mean": float(stats.refused.mean()),
        "rollbacks": int(stats.rollbacks.sum()),
        "ops": ops_by_name(stats.ops),
        "slots": slots_by_stage(stats.stage),
        "shapley_mean": mean_shapley(stats),
        "env_steps": cost.env_steps,
        "seconds": cost.seconds,
        "host_reads": cost.reads,
        **metrics,
    }


def mean_shapley(stats: RolloutStats) -> float:
    """Mean Shapley value (pp) of the live seeds at the end; NaN where none was measured."""
    if stats.subset_acc.shape[1] == 0:
        return float("nan")
    live = np.isin(stats.stage, tuple(HAS_MODULE)) & (stats.alpha > 0.0)
    values = shapley_values(torch.from_numpy(stats.subset_acc), torch.from_numpy(live)).numpy()
    known = values[live & np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def shown_round(stats: RolloutStats) -> Shown:
    """What the progress display says of a complete round."""
    return Shown(
        round=stats.episode + 1,
        step=stats.cost.steps,
        val_acc=_mean_of_known(stats.val_acc),
        committed_acc=_mean_of_known(stats.committed_acc),
        mean_return=float(stats.returns.mean()),
        env_steps_per_second=stats.cost.env_steps / stats.cost.seconds,
        ops=ops_by_name(stats.ops),
        seeds=slots_by_stage(stats.stage),
    )


class RoundSoFar:
    """Sums what the steps of a round report, for the display while the round runs."""

    def __init__(self) -> None:
        self._begin(-1)

    def _begin(self, episode: int) -> None:
        self._episode, self._returns = episode, 0.0
        self._ops = np.zeros(len(LifecycleOp), dtype=np.int64)

    def add(self, report: StepReport, seconds: float) -> Shown:
        """Take one step; `seconds` since the round began in this process."""
        if report.episode != self._episode:
            self._begin(report.episode)
        valid = report.panic_reason == 0
        self._returns += float(np.where(valid, report.reward, 0.0).mean())
        self._ops += np.bincount(report.effective_op[valid], minlength=len(LifecycleOp))
        return Shown(
            round=report.episode + 1,
            step=report.t,
            val_acc=_mean_of_known(report.val_acc),
            committed_acc=_mean_of_known(report.committed_acc),
            mean_return=self._returns,
            env_steps_per_second=report.t * len(report.val_acc) / max(seconds, 1e-9),
            ops=ops_by_name(self._ops),
            seeds=slots_by_stage(report.stage),
        )


def _mean_of_known(values: np.ndarray) -> float:
    """Mean of what was measured; NaN where nothing was (a host that was rolled back has no accuracy)."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def summary(
    config: RunConfig,
    device: torch.device,
    last: RolloutStats,
    test_acc: np.ndarray,
    totals: Mapping[str, float],
    digest: str,
) -> dict[str, object]:
    """summary.json of a complete run; `totals` are sums over its rounds, those before a resume included."""
    return {
        "task": config.task,
        "preset": config.preset,
        "reward": config.reward.mode,
        "seed": config.seed,
        "rounds": config.rounds,
        "num_envs": config.num_envs,
        "episode_length": config.episode_length,
        "env_steps": config.rounds * config.num_envs * config.episode_length,
        "env_steps_per_second": totals["env_steps"] / totals["seconds"],
        "rollout_seconds": totals["seconds"],
        "final_val_accuracy_mean": _mean_of_known(last.val_acc),
        "final_committed_accuracy_mean": _mean_of_known(last.committed_acc),
        "final_test_accuracy_mean": float(test_acc.mean()),
        "mean_return_last": float(last.returns.mean()),
        "growth_ratio_mean": float(last.growth.mean()),
        "host_reads_per_step": totals["reads"] / totals["steps"],
        "state_digest": digest,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
