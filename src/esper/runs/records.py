"""Writes step reports: to events.jsonl and listeners several steps at a time, to the run record at the end of a round.

engine --step report--> Records --32 steps, or those of a quarter second--> events.jsonl, listeners
                            `----a round--> [T, N] arrays ----------------> parts: steps, slots, coalitions

Converting many steps takes numpy about as long as one. The clock decides how many are written at once, but not what is
written or in which order. With a listener of the user's, every step is written at once.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import final

import numpy as np

from esper.leyline.lifecycle import HAS_MODULE, HEAD_NAMES, HEADS, OP_NAMES, RELEVANCE, Head, LifecycleOp, SeedStage
from esper.leyline.messages import EngineSpec
from esper.runs import events
from esper.runs.events import stacked
from esper.runs.report import RoundSoFar
from esper.simic.rewards.modes import FLAGS
from esper.simic.rewards.reward_config import RewardConfig
from esper.telemetry.record.schema import FLAG, TERM
from esper.telemetry.record.writer import Rows
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub
from esper.tolaria.governor import PanicReason
from esper.tolaria.state import StepReport

MOST_STEPS = 32
LONGEST = 0.25
"""Seconds after which the arrival of a step writes those that wait."""
_RELEVANT = np.array(RELEVANCE)
_LIVE = np.isin(np.arange(max(SeedStage) + 1), tuple(HAS_MODULE))
_STAGES = [SeedStage(v).name if v in set(SeedStage) else "" for v in range(max(SeedStage) + 1)]


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
        found = list(events.step_events(held, self._spec))
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

    def write_events(self, lines: Iterable[events.Event]) -> None:
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
        labels = {"slot": self._spec.slot_ids, "stage": _STAGES, "blueprint": self._spec.blueprint_names}
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
