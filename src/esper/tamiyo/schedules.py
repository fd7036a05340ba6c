"""Fixed schedules: a list of actions with the earliest step of each, the same for every host.

    step 1    GERMINATE slot 0, norm, SIGMOID_ADD, STANDARD, FULL
    step 17   FOSSILIZE slot 0

In each step a host executes its first entry that is due and legal; other due entries are tried again in the next step.
An executed entry is removed; an entry that a gate refused remains. Where a gate needs an ADVANCE and no entry can be
executed, the first slot that can be advanced is advanced.

Shape legend: N = hosts, R = rows (the entries, the ADVANCE rows, and WAIT last).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES, NUM_HEADS, TEMPO_TICKS, Head, LifecycleOp, Style
from esper.leyline.errors import ConfigError
from esper.leyline.messages import Observation, StoredStep
from esper.leyline.protocols import EngineSpec
from esper.leyline.stages import HostFamily
from esper.leyline.tensor_dataclass import replace, tensor_dataclass
from esper.tamiyo.scripted import canonical_action

NORM, CONV_LIGHT, MLP_SMALL = 3, 1, 10  # indices in the blueprint head
FILL_BLUEPRINT = {HostFamily.CNN: CONV_LIGHT, HostFamily.TRANSFORMER: MLP_SMALL}
STANDARD = 1


@dataclass(frozen=True)
class ScheduleEntry:
    """From step `earliest` on, execute `action` once, e.g. ScheduleEntry(17, (0, 0, 2, 1, 2, 0, 0, 4))."""

    earliest: int
    action: tuple[int, ...]

    @property
    def op(self) -> LifecycleOp:
        """The operation."""
        return LifecycleOp(self.action[Head.OP])


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A named list of entries, sorted by their earliest step; of two due entries the first is executed."""

    id: str
    version: int
    entries: tuple[ScheduleEntry, ...]

    def __post_init__(self) -> None:
        for before, after in pairwise(self.entries):
            if after.earliest < before.earliest:
                raise ConfigError(
                    f"schedule {self.id!r}: step {after.earliest} comes after step {before.earliest}; "
                    "sort the entries by their earliest step."
                )
        for entry in self.entries:
            if len(entry.action) != NUM_HEADS:
                raise ConfigError(
                    f"schedule {self.id!r}: the action {entry.action} has {len(entry.action)} values; "
                    f"give {NUM_HEADS}: {', '.join(HEAD_NAMES)}."
                )

    @classmethod
    def from_rows(cls, id: str, version: int, rows: Iterable[tuple[int, tuple[int, ...]]]) -> "Schedule":
        """A schedule from pairs (earliest step, eight head values)."""
        entries = tuple(ScheduleEntry(earliest, tuple(action)) for earliest, action in rows)
        return cls(id=id, version=version, entries=entries)

    def check(self, spec: EngineSpec) -> None:
        """Raise ConfigError for a value outside its head, or a blueprint that is not selectable in this run."""
        for entry in self.entries:
            for name, value, size in zip(HEAD_NAMES, entry.action, spec.head_sizes, strict=True):
                if not 0 <= value < size:
                    raise ConfigError(
                        f"schedule {self.id!r}: {name} is {value} at step {entry.earliest}; this run has 0..{size - 1}."
                    )
            blueprint = entry.action[Head.BLUEPRINT]
            if entry.op is LifecycleOp.GERMINATE and blueprint not in spec.selectable:
                raise ConfigError(
                    f"schedule {self.id!r}: blueprint {blueprint} at step {entry.earliest} cannot be selected; "
                    f"choose one of {', '.join(map(str, spec.selectable))}."
                )


def single(spec: EngineSpec) -> Schedule:
    """One `norm` seed in the first slot, fossilized at its first legal step."""
    return Schedule(id="single", version=1, entries=_grow(spec, 0, NORM, germination=1))


def fill(spec: EngineSpec) -> Schedule:
    """A light seed in every slot, one after the other, each fossilized at its first legal step."""
    cycle, blueprint = spec.min_training_epochs + 1, FILL_BLUEPRINT[spec.family]
    grown = [_grow(spec, i, blueprint, germination=1 + i * cycle) for i in range(spec.num_slots)]
    entries = sorted(
        (entry for pair in grown for entry in pair),
        key=lambda e: (e.earliest, e.op is not LifecycleOp.FOSSILIZE, e.action[Head.SLOT]),
    )
    return Schedule(id="fill", version=1, entries=tuple(entries))


def _grow(spec: EngineSpec, slot: int, blueprint: int, *, germination: int) -> tuple[ScheduleEntry, ScheduleEntry]:
    first_legal = germination + spec.min_training_epochs + TEMPO_TICKS[STANDARD] + 1
    return (
        ScheduleEntry(germination, canonical_action(LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint)),
        ScheduleEntry(first_legal, canonical_action(LifecycleOp.FOSSILIZE, slot=slot)),
    )


@tensor_dataclass
class Remaining:
    """Rows that each host has not executed yet; ADVANCE and WAIT rows always remain."""

    rows: Bool[Tensor, "N R"]


@final
class FixedSchedule:
    """Follows a schedule; raises ConfigError if it does not fit the engine."""

    def __init__(self, schedule: Schedule, spec: EngineSpec) -> None:
        schedule.check(spec)
        self.schedule = schedule
        advance = [] if all(spec.auto_gates) else [LifecycleOp.ADVANCE] * spec.num_slots
        idle = [ScheduleEntry(0, canonical_action(op, slot=slot)) for slot, op in enumerate(advance)]
        idle.append(ScheduleEntry(0, canonical_action(LifecycleOp.WAIT)))
        rows = [*schedule.entries, *idle]
        self._actions = torch.tensor([entry.action for entry in rows], device=spec.device)
        self._earliest = torch.tensor([entry.earliest for entry in rows], device=spec.device)
        self._is_entry = torch.arange(len(rows), device=spec.device) < len(schedule.entries)
        self._row = torch.arange(len(rows), device=spec.device)
        self._op, self._slot = self._actions[:, Head.OP], self._actions[:, Head.SLOT]
        self._place = self._op * spec.num_slots + self._slot
        gated = self._actions[:, Head.STYLE] == Style.GATED_GATE
        self._gate_free = ~(gated & (self._op == LifecycleOp.SET_ALPHA_TARGET))

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Remaining:
        """All rows remain."""
        del episode
        return Remaining(rows=torch.ones(len(hosts), len(self._row), dtype=torch.bool, device=hosts.device))

    def decide(self, obs: Observation, memory: Remaining) -> Int[Tensor, "N 8"]:
        """The first row that can be executed."""
        return self._actions[self._first(obs, memory)]

    def remember(self, memory: Remaining, step: StoredStep) -> Remaining:
        """Remove the entry that was executed."""
        row_N = self._first(step.obs, memory)
        executed_N = step.valid & (step.effective_op == self._op[row_N])
        gone_NR = (self._row == row_N[:, None]) & executed_N[:, None] & self._is_entry
        return replace(memory, rows=memory.rows & ~gone_NR)

    def _first(self, obs: Observation, memory: Remaining) -> Int[Tensor, " N"]:
        """Index of the first row that remains, is due and is legal; WAIT, the last row, always is."""
        legal_NR = obs.legal.flatten(1).index_select(1, self._place)
        possible_NR = self._gate_free | obs.has_gate.index_select(1, self._slot)
        can_NR = legal_NR & possible_NR & memory.rows & (self._earliest <= obs.t)
        return can_NR.to(torch.int8).argmax(dim=1)
