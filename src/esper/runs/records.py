"""Writes step reports: to events.jsonl and listeners several steps at a time, to the run record at the end of a round.

engine --step report--> Records --32 steps, or those of a quarter second--> events.jsonl, listeners
                            `----a round--> [T, N] arrays ----------------> parts: steps, slots, coalitions

Converting many steps takes numpy about as long as one. The clock decides how many are written at once, but not what is
written or in which order. With a listener of the user's, every step is written at once.

The lines of events.jsonl:

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from math import isnan
from operator import itemgetter
from typing import Any, final

import numpy as np
import torch

from esper.leyline.lifecycle import (
    HAS_MODULE,
    HEAD_NAMES,
    HEADS,
    OP_NAMES,
    RELEVANCE,
    Cause,
    Head,
    LifecycleOp,
    SeedStage,
)
from esper.leyline.messages import EngineSpec
from esper.runs.report import RoundSoFar, objective_of, shapley_of
from esper.simic.rewards.modes import FLAGS
from esper.simic.rewards.reward_config import RewardConfig
from esper.telemetry.anomalies import Trend, of_flags, of_update
from esper.telemetry.machine import device_name
from esper.telemetry.record.schema import FLAG, TERM
from esper.telemetry.record.writer import Rows
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub
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


MOST_STEPS = 32
LONGEST = 0.25
"""Seconds after which the arrival of a step writes those that wait."""
_RELEVANT = np.array(RELEVANCE)
_LIVE = np.isin(np.arange(max(SeedStage) + 1), tuple(HAS_MODULE))
_STAGE_LABELS = [SeedStage(v).name if v in set(SeedStage) else "" for v in range(max(SeedStage) + 1)]


@final
class Records:
    """Records the steps and the other events of a run, in order.

    Args:
        directory: receives the lines. listeners: receive each step and each event.
        spec: of the engine. weights: those of J. terms: names of the reward terms.
        clock: monotonic seconds.
        of_all: what is shown of the newest step by all ranks, from what is shown of the hosts of this one.
    """

    def __init__(
        self,
        directory: RunDirectory,
        listeners: Hub,
        spec: EngineSpec,
        weights: RewardConfig,
        terms: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
        of_all: Callable[[dict[str, object]], dict[str, object]] = lambda shown: shown,
    ) -> None:
        self._of_all = of_all
        self._rows = RecordRows(spec, terms)
        self._round: list[StepReport] = []
        self._directory, self._listeners, self._spec = directory, listeners, spec
        self._clock = clock
        self._began = clock()
        self._held: list[tuple[StepReport, float]] = []  # with the seconds since the round began
        self._so_far = RoundSoFar(weights)

    def begin(self) -> None:
        """Start the clock of a round, or of the rest of one."""
        self._began = self._clock()

    def step(self, report: StepReport) -> None:
        """Record a step, at the latest with the next `flush`."""
        if self._held and self._held[0][0].episode != report.episode:
            self.flush()
        self._round.append(report)
        self._held.append((report, self._clock() - self._began))
        waited = self._held[-1][1] - self._held[0][1]
        if len(self._held) == MOST_STEPS or waited >= LONGEST or self._listeners.is_prompt:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait."""
        if not self._held:
            return
        (held, times), self._held = zip(*self._held, strict=True), []
        found = list(step_events(held, self._spec))
        self._directory.write_events(found)
        events_of = {t: list(group) for t, group in groupby(found, key=itemgetter("t"))}
        for report, shown in zip(held, self._so_far.add(held, times), strict=True):
            for event in events_of.get(report.t, ()):
                self._listeners.write(str(event["kind"]), event)
            self._listeners.write("step", self._of_all(shown) if report is held[-1] else shown)

    def write_parts(self) -> dict[str, str]:
        """Write the steps of the round since the last call to the record; returns the SHA-256 of each part by kind."""
        if not self._round:
            return {}
        steps, self._round = self._round, []
        return self._directory.write_parts(self._rows(steps), steps[0].episode + 1, steps[0].t, self._spec.host_offset)

    def write_events(self, lines: Iterable[Event]) -> None:
        """Record other events, after the steps so far."""
        self.flush()
        found = list(lines)
        self._directory.write_events(found)
        for event in found:
            self._listeners.write(str(event["kind"]), event)


@final
class RecordRows:
    """Turns the reports of an engine into rows.

    Args:
        spec: names slots and blueprints. terms: names of the reward terms.
    """

    def __init__(self, spec: EngineSpec, terms: Sequence[str]) -> None:
        self._spec, self._terms = spec, tuple(terms)

    def __call__(self, reports: Sequence[StepReport]) -> Iterator[Rows]:
        """The rows of successive steps, by kind of part."""
        # the number of coalitions differs in the last step of an episode
        by_width = [list(group) for _, group in groupby(reports, key=lambda report: report.measured_acc.shape)]
        yield self._coalitions(by_width)
        yield self._slots(reports)
        yield self._steps(reports)

    def _places(self, reports: Sequence[StepReport]) -> dict[str, np.ndarray]:
        """Round, step and global number of each host, [T, N]."""
        num_hosts = len(reports[0].reward)
        hosts = np.arange(num_hosts, dtype=np.int32) + self._spec.host_offset
        place = np.array([(report.episode + 1, report.t) for report in reports], dtype=np.int32)
        round_TN, t_TN = (np.repeat(column[:, None], num_hosts, axis=1) for column in place.T)
        return {"round": round_TN, "t": t_TN, "host": np.repeat(hosts[None], len(reports), axis=0)}

    def _steps(self, reports: Sequence[StepReport]) -> Rows:
        names = ("val_acc", "val_loss", "train_acc", "train_loss", "committed_acc")
        panic, action = stacked(reports, "panic_reason"), stacked(reports, "actions")
        decided = stacked(reports, "decided")
        op = np.where(decided, action[..., Head.OP], -1).astype(np.int8)
        host_params = np.maximum(stacked(reports, "host_params"), 1)
        columns = self._places(reports) | {name: stacked(reports, name) for name in names}
        columns |= {
            "growth": 1.0 + stacked(reports, "committed_params") / host_params,
            "total_params": stacked(reports, "total_params"),
            "reward": stacked(reports, "reward"),
            "rollback": (panic - 1).astype(np.int8),
            "op": op,
        }
        for head in (head for head in Head if head is not Head.OP):
            read = decided & _RELEVANT[op, head]
            columns[HEAD_NAMES[head]] = np.where(read, action[..., head], -1).astype(np.int16)
        columns["success"] = stacked(reports, "effective_op") == action[..., Head.OP]
        probability = np.where(decided[..., None], stacked(reports, "op_prob"), np.nan)
        columns |= {f"p_{name.lower()}": probability[..., i] for i, name in enumerate(OP_NAMES)}
        # a number for each set of heads; NULL for controllers without masks, whose probabilities are NaN
        masked = decided & np.isfinite(probability[..., LifecycleOp.WAIT])
        sets, number = np.unique(
            stacked(reports, "constrained") @ (1 << np.arange(len(HEAD_NAMES))), return_inverse=True
        )
        columns["constrained"] = np.where(masked, number.reshape(decided.shape), -1).astype(np.int16)
        columns["value"] = np.where(decided, stacked(reports, "value"), np.nan)
        terms, flags = np.where(decided[..., None], stacked(reports, "breakdown"), np.nan), stacked(reports, "flags")
        columns |= {TERM + name: terms[..., i] for i, name in enumerate(self._terms)}
        columns |= {FLAG + name: flags[..., i] & decided for i, name in enumerate(FLAGS)}
        labels = {head.name: head.values for head in HEADS} | {
            "rollback": [reason.name.lower() for reason in PanicReason if reason],
            "slot": self._spec.slot_ids,
            "blueprint": self._spec.blueprint_names,
            "constrained": [_joined(HEAD_NAMES, int(heads)) for heads in sets],
        }
        return Rows("steps", {name: np.ascontiguousarray(x).reshape(-1) for name, x in columns.items()}, labels)

    def _slots(self, reports: Sequence[StepReport]) -> Rows:
        stage = stacked(reports, "stage")
        at = np.nonzero(_LIVE[stage])  # step, host, slot
        columns = {name: place[at[:2]] for name, place in self._places(reports).items()}
        columns |= {"slot": at[2].astype(np.int16), "stage": stage[at].astype(np.int8)}
        names = ("serial", "blueprint", "alpha", "contribution", "params")
        columns |= {name: stacked(reports, name)[at] for name in names}
        labels = {"slot": self._spec.slot_ids, "stage": _STAGE_LABELS, "blueprint": self._spec.blueprint_names}
        return Rows("slots", columns, labels)

    def _coalitions(self, groups: Sequence[Sequence[StepReport]]) -> Rows:
        pieces: list[dict[str, np.ndarray]] = []
        weights = 1 << np.arange(self._spec.num_slots, dtype=np.int64)
        for reports in groups:
            valid = stacked(reports, "measured_valid") & (stacked(reports, "panic_reason") == 0)[..., None]
            at = np.nonzero(valid)  # step, host, coalition
            piece = {name: place[at[:2]] for name, place in self._places(reports).items()}
            piece["members"] = stacked(reports, "measured_sets")[at] @ weights
            pieces.append(piece | {"accuracy": stacked(reports, "measured_acc")[at]})
        columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        found, columns["members"] = np.unique(columns["members"], return_inverse=True)
        return Rows("coalitions", columns, {"members": [_joined(self._spec.slot_ids, int(number)) for number in found]})


def _joined(names: Sequence[str], number: int) -> str:
    """The names of the bits of a number, separated by +."""
    return "+".join(name for i, name in enumerate(names) if number >> i & 1)
