"""The lines of events.jsonl, built from step reports that are on the host already.

kind            when                       fields
run_started     once                       task, data, sizes, settings, versions
rollback        a host is rolled back      reason, loss and thresholds, pruned seeds, whether its last reward changed
stage_changed   a slot changes its stage   from, to, cause, blueprint, alpha, contribution; gate and score if one passed
refused         G5 refuses a FOSSILIZE     slot, score, failed checks
shapley         end of an episode          Shapley value of each live seed
episode         end of an episode          results of each host: 100·J, accuracy of its committed network, counts
run_finished    once                       the fields of summary.json
alarm           end of an episode          a metric beyond its threshold, reward flags of a host, and every ten rounds
                                           the trend of J

{"kind": "stage_changed", "round": 1, "t": 4, "host": 2, "slot": "r0c1", "serial": 0, "from": "TRAINING",
 "to": "BLENDING", "cause": "AUTO", "blueprint": "conv_light", "alpha": 0.0, "contribution": null, "gate": "G2",
 "score": 0.41}

Rounds and steps count from 1 (0: before the first); `host` is a global host number, or -1 for the run.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from math import isnan
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from esper.leyline.lifecycle import OP_NAMES, Cause, SeedStage
from esper.leyline.messages import EngineSpec
from esper.runs.report import objective_of, shapley_of
from esper.simic.rewards.modes import FLAGS
from esper.simic.rewards.reward_config import RewardConfig
from esper.telemetry.anomalies import Trend, of_flags, of_update
from esper.telemetry.machine import device_name
from esper.tolaria.governor import PanicReason
from esper.tolaria.state import RolloutStats, StepReport

Event = dict[str, object]
_STAGES = {int(stage): stage.name for stage in SeedStage}
_S = SeedStage
_GATE_OF = {
    (_S.GERMINATED, _S.TRAINING): 1,
    (_S.TRAINING, _S.BLENDING): 2,
    (_S.BLENDING, _S.HOLDING): 3,
    (_S.HOLDING, _S.FOSSILIZED): 5,
}
_CAUSES = {int(cause): cause.name for cause in Cause}


def run_started(shape: Mapping[str, object], fingerprint: str, host_params: int, device: torch.device) -> Event:
    """The first event of a run, from `run_shape` and `fingerprint` of its configuration."""
    return {
        "kind": "run_started",
        "round": 0,
        "t": 0,
        "host": -1,
        "config_sha256": fingerprint,
        **shape,
        "host_params": host_params,
        "device": device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def step_events(reports: Sequence[StepReport], spec: EngineSpec) -> Iterator[Event]:
    """The events of successive steps, in order for each host.

    Converting many steps at once takes about as long as one.
    """
    return merge(_rollbacks(reports, spec), _moves(reports, spec), _refusals(reports, spec), key=itemgetter("t"))


def stacked(reports: Sequence[StepReport], field: str) -> np.ndarray:
    """A field of all reports, [T, ...]."""
    return np.stack([getattr(report, field) for report in reports])


def _head(report: StepReport, kind: str, spec: EngineSpec, host: int) -> Event:
    return {"kind": kind, "round": report.episode + 1, "t": report.t, "host": spec.host_offset + host}


def _rows(at: tuple[np.ndarray, ...], *tables: np.ndarray) -> Iterator[tuple[Any, ...]]:
    """The values of each table at the indices `at`."""
    return zip(*(table[at].tolist() for table in tables), strict=True)


def _rollbacks(reports: Sequence[StepReport], spec: EngineSpec) -> Iterator[Event]:
    for i, n in np.argwhere(stacked(reports, "panic_reason")).tolist():
        report = reports[i]
        yield _head(report, "rollback", spec, n) | {
            "reason": PanicReason(int(report.panic_reason[n])).name.lower(),
            "loss": float(report.panic_loss[n]),
            "thresholds": [float(x) for x in report.panic_thresholds[n]],
            "strikes": int(report.panic_strikes[n]),
            "pruned": [spec.slot_ids[s] for s in np.flatnonzero(report.rolled_back[n])],
            "row_marked": bool(report.row_marked[n]),
        }


def _moves(reports: Sequence[StepReport], spec: EngineSpec) -> Iterator[Event]:
    """Stage changes: those by the operation of a step, then those by its tick."""
    before, after, cause = np.stack([(report.op_moves, report.tick_moves) for report in reports]).transpose(
        2, 0, 1, 3, 4
    )
    moved = np.nonzero(cause)  # step, operation or tick, host, slot
    steps, _, hosts, slots = moved
    here = (steps, hosts, slots)
    states = ("serial", "blueprint", "alpha", "contribution", "gate", "gate_passed", "gate_score")
    of_move = _rows(moved, before, after, cause)
    of_seed = _rows(here, *(stacked(reports, name) for name in states))
    places = zip(steps.tolist(), hosts.tolist(), slots.tolist(), strict=True)
    for (i, n, s), (old, new, why), (serial, blueprint, alpha, contribution, gate, passed, score) in zip(
        places, of_move, of_seed, strict=True
    ):
        opened = passed and gate != 0 and _GATE_OF.get((old, new)) == gate
        yield {  # no `_head`: there may be thousands in a step
            "kind": "stage_changed",
            "round": reports[i].episode + 1,
            "t": reports[i].t,
            "host": spec.host_offset + n,
            "slot": spec.slot_ids[s],
            "serial": serial,
            "blueprint": spec.blueprint_names[blueprint] if blueprint >= 0 else None,
            "from": _STAGES[old],
            "to": _STAGES[new],
            "cause": _CAUSES[why],
            "alpha": alpha,
            "contribution": None if isnan(contribution) else contribution,
            "gate": f"G{gate}" if opened else None,
            "score": score if opened else None,
        }


def _refusals(reports: Sequence[StepReport], spec: EngineSpec) -> Iterator[Event]:
    """FOSSILIZE operations that gate G5 refused."""
    refused = (stacked(reports, "gate") == 5) & ~stacked(reports, "gate_passed")
    for i, n, s in np.argwhere(refused).tolist():
        report = reports[i]
        blueprint = int(report.blueprint[n, s])
        yield _head(report, "refused", spec, n) | {
            "slot": spec.slot_ids[s],
            "serial": int(report.serial[n, s]),
            "blueprint": spec.blueprint_names[blueprint] if blueprint >= 0 else None,
            "gate": "G5",
            "score": float(report.gate_score[n, s]),
            "failed_checks": int(report.failed_checks[n, s]),
        }


def round_events(
    stats: RolloutStats, metrics: Mapping[str, float], spec: EngineSpec, trend: Trend, weights: RewardConfig
) -> Iterator[Event]:
    """The events at the end of a round: results of its hosts and alarms; `weights` are those of J."""
    head = {"round": stats.episode + 1, "t": spec.episode_length}
    shapley = shapley_of(stats)
    for n, s in np.argwhere(np.isfinite(shapley)).tolist():
        place = {"host": spec.host_offset + n, "slot": spec.slot_ids[s]}
        yield {"kind": "shapley", **head, **place, "value": float(shapley[n, s])}
    for n, results in enumerate(_results(stats, weights)):
        yield {"kind": "episode", **head, "host": spec.host_offset + n, **results}
    for host, alarm in (
        *((-1, found) for found in (*of_update(metrics), *trend.alarms())),
        *(
            (spec.host_offset + n, found)
            for n in np.flatnonzero(stats.flags.any(axis=1)).tolist()
            for found in of_flags(dict(zip(FLAGS, stats.flags[n].tolist(), strict=True)))
        ),
    ):
        yield {"kind": "alarm", **head, "host": host, **vars(alarm)}


def _results(stats: RolloutStats, weights: RewardConfig) -> Iterator[Event]:
    floats = {
        "objective": objective_of(stats, weights),
        "committed_accuracy": stats.committed_acc,
        "growth_ratio": stats.growth,
        "live_accuracy": stats.val_acc,
        "shaped_return": stats.returns,
    }
    counts = ("germinated", "pruned", "fossilized", "contributing", "refused", "rollbacks")
    columns = [*floats.values(), *(getattr(stats, name) for name in counts)]
    names, operations = (*floats, *counts), OP_NAMES
    instances = {name: values.tolist() for name, values in stats.instance.items()}
    for n, (*values, ops) in enumerate(zip(*(column.tolist() for column in columns), stats.ops.tolist(), strict=True)):
        results = {**dict(zip(names, values, strict=True)), "ops": dict(zip(operations, ops, strict=True))}
        if instances:
            results["instance"] = {name: column[n] for name, column in instances.items()}
        yield results
