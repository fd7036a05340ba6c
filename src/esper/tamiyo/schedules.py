"""Controllers that do not learn: a pure script wrapped in `ScriptedPolicy`, and the scripts that are schedules.

    begin                  -> memory         a flat dataclass of tensors
    decide(obs, memory)    -> actions        eight head values per host
    remember(memory, step) -> memory         from the outcome of the step, because operations can be refused

A fixed schedule is a list of actions with the earliest step of each, the same for every host:

    step 1    GERMINATE slot 0, norm, SIGMOID_ADD, STANDARD, FULL
    step 17   FOSSILIZE slot 0

In each step a host executes its first entry that is due and legal; other due entries are tried again in the next step.
An executed entry is removed; an entry that a gate refused remains. Where a gate needs an ADVANCE and no entry can be
executed, the first slot that can be advanced is advanced.

Several schedules form a table, in which each host follows one of them, so that one engine compares many.

Shape legend: N = hosts, S = slots, K = schedules, R = rows of a schedule (its entries, empty rows up to the longest
schedule, the ADVANCE rows, and WAIT last).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, in_words, is_own, nearest
from esper.leyline.lifecycle import (
    HEAD_NAMES,
    NUM_HEADS,
    NUM_OPS,
    TEMPO_NAMES,
    TEMPO_TICKS,
    Head,
    HostFamily,
    LifecycleOp,
    Style,
)
from esper.leyline.lifecycle import canonical_action as canonical_action
from esper.leyline.messages import ActResult, EngineSpec, Hidden, Observation, StoredStep
from esper.leyline.tensor_dataclass import StateTree, blank, named_tensors, replace, restored, tensor_dataclass

M = TypeVar("M")


@tensor_dataclass
class NoMemory:
    """Memory of a stateless script."""


@runtime_checkable
class Script(Protocol[M]):
    """A rule that decides each step. `M` is a flat dataclass of tensors."""

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> M:
        """Memory at the start of an episode."""

    def decide(self, obs: Observation, memory: M) -> Int[Tensor, "N 8"]:
        """The actions of this step; each must be legal."""

    def remember(self, memory: M, step: StoredStep) -> M:
        """Memory after a step."""


class Stateless:
    """Base of a script that remembers nothing; what is left to write is `decide`."""

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> NoMemory:
        """Nothing."""
        del episode, hosts
        return NoMemory()

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """Nothing."""
        del step
        return memory


@final
class ScriptedPolicy(Generic[M]):
    """A controller that follows a script. `deterministic` has no effect: `random` stays random."""

    def __init__(self, script: Script[M], spec: EngineSpec) -> None:
        self.script = script
        self._device, self._sizes = spec.device, torch.tensor(spec.head_sizes)
        self.begin_rollout(0, spec.host_ids())

    def initial_hidden(self, n: int) -> Hidden:
        """Two tensors [1, n, 0]."""
        return Hidden(h=torch.zeros(1, n, 0, device=self._device), c=torch.zeros(1, n, 0, device=self._device))

    def begin_rollout(self, episode: int, hosts: Int[Tensor, " N"]) -> None:
        """Restart the script."""
        self._memory = self.script.begin(episode, hosts)
        self._blank = blank(ActResult, {"N": len(hosts), "D": 0, "L": 1, "H": 0}, hosts.device)
        self._blank.op_prob.fill_(torch.nan)

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """The script's actions for all hosts; changes no state."""
        del deterministic
        actions = self._decided(obs) if is_own(self.script) else self.script.decide(obs, self._memory)
        return replace(self._blank, actions=actions)

    def _decided(self, obs: Observation) -> Int[Tensor, "N 8"]:
        """The actions of a script of the user's; raises ConfigError for others than int64 [N, 8] in the action space.

        Values are looked at on a CPU alone, where that is no read of a device.
        """
        name, wanted = type(self.script).__name__, (obs.num_envs, NUM_HEADS)
        try:
            actions = self.script.decide(obs, self._memory)
        except EsperError:
            raise
        except Exception as error:  # any error of the user's code
            raise ConfigError(f"the policy {name} fails in step {obs.t}: {in_words(error)}") from error
        if not isinstance(actions, Tensor) or actions.shape != wanted or actions.dtype != torch.int64:
            found = (
                f"{list(actions.shape)} of {actions.dtype}" if isinstance(actions, Tensor) else type(actions).__name__
            )
            raise ConfigError(
                f"the policy {name} gives actions {found}; they must be int64 {list(wanted)}: a row for each host, "
                f"with the values of {', '.join(HEAD_NAMES)}."
            )
        if actions.device.type == "cpu" and (outside := (actions < 0) | (actions >= self._sizes)).any():
            host, head = outside.nonzero()[0].tolist()
            raise ConfigError(
                f"the policy {name} gives host {host} {HEAD_NAMES[head]} = {int(actions[host, head])} in step {obs.t}; "
                f"it must be in 0 to {int(self._sizes[head]) - 1}."
            )
        return actions

    def store(self, step: StoredStep) -> None:
        """Update the script's memory."""
        self._memory = self.script.remember(self._memory, step)

    def bootstrap(self, obs: Observation) -> Float[Tensor, " N"]:
        """Zeros."""
        del obs
        return self._blank.value

    def rollback(self, mask: Bool[Tensor, " N"], reward: Float[Tensor, " N"]) -> None:
        """Nothing: no transition is stored."""

    def update(self) -> Mapping[str, float]:
        """No metrics."""
        return {}

    def state_dict(self) -> StateTree:
        """The script's memory."""
        return dict(named_tensors(self._memory))

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        self._memory = restored(self._memory, state, "scripted controller")


def canonical_actions(device: torch.device) -> Int[Tensor, "6 8"]:
    """The canonical action of each operation, one row per operation."""
    return torch.tensor([canonical_action(LifecycleOp(op)) for op in range(NUM_OPS)], device=device)


@final
class FirstWanted:
    """Gives each host the first operation that is wanted and legal, in the first slot where it is.

    `priority`: operations in their order, the last one WAIT. `slots`: all slots in their order.
    """

    def __init__(self, priority: Sequence[LifecycleOp], slots: Sequence[int], device: torch.device) -> None:
        self._priority, self._slots = torch.tensor(priority, device=device), torch.tensor(slots, device=device)
        self._canonical = canonical_actions(device)

    def actions(
        self, wanted: Bool[Tensor, "N O S"], legal: Bool[Tensor, "N 6 S"], blueprint: Int[Tensor, " N"], tempo: int
    ) -> Int[Tensor, "N 8"]:
        """`wanted` is in the order of `priority`; `blueprint` and `tempo` are those of a seed that germinates."""
        possible_NOS = wanted & legal.index_select(1, self._priority)
        first_N = possible_NOS.index_select(2, self._slots).flatten(1).to(torch.int8).argmax(dim=1)
        op_N, slot_N = self._priority[first_N // len(self._slots)], self._slots[first_N % len(self._slots)]
        actions, germinates_N = self._canonical[op_N], op_N == LifecycleOp.GERMINATE
        actions[:, Head.SLOT] = slot_N * (op_N != LifecycleOp.WAIT)
        actions[:, Head.BLUEPRINT] = blueprint * germinates_N
        actions[:, Head.TEMPO].masked_fill_(germinates_N, tempo)
        return actions


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


@tensor_dataclass
class Remaining:
    """The schedule that each host follows, and its rows that the host has not executed yet.

    ADVANCE and WAIT rows always remain.
    """

    which: Int[Tensor, " N"]
    rows: Bool[Tensor, "N R"]


@final
class FixedSchedules:
    """A script by which each host follows one of several schedules, the first of them unless `following` says more.

    Raises ConfigError if one does not fit the engine.
    """

    def __init__(self, schedules: Sequence[Schedule], spec: EngineSpec) -> None:
        for schedule in schedules:
            schedule.check(spec)
        self._which: Int[Tensor, " N"] | None = None
        advance = [] if all(spec.auto_gates) else [LifecycleOp.ADVANCE] * spec.num_slots
        idle = [ScheduleEntry(0, canonical_action(op, slot=slot)) for slot, op in enumerate(advance)]
        idle.append(ScheduleEntry(0, canonical_action(LifecycleOp.WAIT)))
        longest = max(len(schedule.entries) for schedule in schedules)
        never = ScheduleEntry(spec.episode_length + 1, canonical_action(LifecycleOp.WAIT))
        rows = [[*schedule.entries, *[never] * (longest - len(schedule.entries)), *idle] for schedule in schedules]
        self._actions = torch.tensor([[entry.action for entry in row] for row in rows], device=spec.device)
        self._earliest = torch.tensor([[entry.earliest for entry in row] for row in rows], device=spec.device)
        self._row = torch.arange(len(rows[0]), device=spec.device)
        self._is_entry = self._row < longest
        op_KR, slot_KR = self._actions[..., Head.OP], self._actions[..., Head.SLOT]
        self._slot, self._place = slot_KR, op_KR * spec.num_slots + slot_KR
        gated_KR = self._actions[..., Head.STYLE] == Style.GATED_GATE
        self._gate_free = ~(gated_KR & (op_KR == LifecycleOp.SET_ALPHA_TARGET))

    def following(self, which: Int[Tensor, " N"]) -> "FixedSchedules":
        """The same schedules, of which host n follows `which[n]`."""
        other = copy(self)
        other._which = which
        return other

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Remaining:
        """All rows remain."""
        del episode
        which = torch.zeros_like(hosts) if self._which is None else self._which
        assert which.shape == hosts.shape, "one schedule per host"
        rows = torch.ones(len(which), len(self._row), dtype=torch.bool, device=which.device)
        return Remaining(which=which, rows=rows)

    def decide(self, obs: Observation, memory: Remaining) -> Int[Tensor, "N 8"]:
        """The first row of each host that can be executed."""
        return self._actions[memory.which, self._first(obs, memory)]

    def remember(self, memory: Remaining, step: StoredStep) -> Remaining:
        """Remove the entry that was executed."""
        row_N = self._first(step.obs, memory)
        executed_N = step.valid & (step.effective_op == self._actions[memory.which, row_N, Head.OP])
        gone_NR = (self._row == row_N[:, None]) & executed_N[:, None] & self._is_entry
        return replace(memory, rows=memory.rows & ~gone_NR)

    def _first(self, obs: Observation, memory: Remaining) -> Int[Tensor, " N"]:
        """Index of the first row that remains, is due and is legal; WAIT, the last row, always is."""
        which_N = memory.which
        legal_NR = obs.legal.flatten(1).gather(1, self._place[which_N])
        possible_NR = self._gate_free[which_N] | obs.has_gate.gather(1, self._slot[which_N])
        can_NR = legal_NR & possible_NR & memory.rows & (self._earliest[which_N] <= obs.t)
        return can_NR.to(torch.int8).argmax(dim=1)


Feature = Callable[[Observation], Tensor]

FEATURES: dict[str, Feature] = {
    "val_acc": lambda obs: obs.hosts.val_acc,
    "val_loss": lambda obs: obs.hosts.val_loss,
    "train_acc": lambda obs: obs.hosts.train_acc,
    "train_loss": lambda obs: obs.hosts.train_loss,
    "acc_gap": lambda obs: obs.hosts.train_acc - obs.hosts.val_acc,
    "loss_gap": lambda obs: obs.hosts.val_loss - obs.hosts.train_loss,
    "acc_slope": lambda obs: obs.hosts.val_acc - obs.hosts.prev_val_acc,
    "loss_slope": lambda obs: obs.hosts.val_loss - obs.hosts.prev_val_loss,
    "best_acc": lambda obs: obs.hosts.best_acc,
}
"""Features [N] by name: accuracies in percentage points, losses in the unit of the task; a slope is the change
since the step before. NaN where a value is not measured: slopes in step 1, training accuracy in tasks without one."""


@dataclass(frozen=True, kw_only=True)
class ThresholdRule:
    """In step `step` follow `below` where the feature is below the threshold, else `above` (also where it is NaN)."""

    feature: str
    step: int
    threshold: float
    below: Schedule
    above: Schedule

    def check(self, spec: EngineSpec) -> None:
        """Raise ConfigError for an unknown feature, a step outside the episode, or a schedule that does not fit."""
        if self.feature not in FEATURES:
            raise ConfigError(f"the rule reads the unknown feature {self.feature!r}; {nearest(self.feature, FEATURES)}")
        if not 1 <= self.step <= spec.episode_length:
            raise ConfigError(
                f"the rule decides in step {self.step}; it must be one of the steps 1 to {spec.episode_length} of an "
                "episode."
            )
        for schedule in (self.below, self.above):
            schedule.check(spec)


@final
class FollowRule:
    """Follows a rule; raises ConfigError if it does not fit the engine.

    The memory's `which` is 0 for hosts that follow `below` and 1 for `above`; it is 1 before the step of the rule.
    """

    def __init__(self, rule: ThresholdRule, spec: EngineSpec) -> None:
        rule.check(spec)
        self.rule = rule
        self._read = FEATURES[rule.feature]
        self._sides = FixedSchedules([rule.below, rule.above], spec)
        self._wait = canonical_actions(spec.device)[LifecycleOp.WAIT]

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Remaining:
        """Nothing is decided yet."""
        return self._sides.following(torch.ones_like(hosts)).begin(episode, hosts)

    def decide(self, obs: Observation, memory: Remaining) -> Int[Tensor, "N 8"]:
        """WAIT before the step of the rule, then the next action of the schedule."""
        if obs.t < self.rule.step:
            return self._wait.expand(obs.num_envs, -1).clone()
        return self._sides.decide(obs, self._decided(obs, memory))

    def remember(self, memory: Remaining, step: StoredStep) -> Remaining:
        """Keep the schedule that was chosen, and remove the entry that was executed."""
        if step.t < self.rule.step:
            return memory
        return self._sides.remember(self._decided(step.obs, memory), step)

    def _decided(self, obs: Observation, memory: Remaining) -> Remaining:
        if obs.t != self.rule.step:
            return memory
        below_N = self._read(obs).to(torch.float64) < self.rule.threshold  # False for NaN
        return replace(memory, which=1 - below_N.to(torch.int64))


STARTS = (1, 3, 5, 10)
HOLDS = (0, 5, 10)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Seeds that germinate one after the other and are fossilized; without seeds the schedule waits.

    Attributes:
        seeds: (slot, blueprint) indices in the order of germination.
        start: step from which the first seed may germinate. hold: steps between the first legal FOSSILIZE and its own.
        style, tempo: of all seeds.
    """

    seeds: tuple[tuple[int, int], ...] = ()
    start: int = 1
    hold: int = 0
    style: Style = Style.SIGMOID_ADD
    tempo: int = STANDARD

    def schedule(self, spec: EngineSpec) -> Schedule:
        """The plan as a schedule with a name in words."""
        return Schedule(id=self.words(spec), version=1, entries=self.entries(spec))

    def entries(self, spec: EngineSpec) -> tuple[ScheduleEntry, ...]:
        """All germinations, then all fossilizations."""
        same = {"style": self.style, "tempo": self.tempo}
        grown = (
            ScheduleEntry(self.start, canonical_action(LifecycleOp.GERMINATE, slot=slot, blueprint=kind, **same))
            for slot, kind in self.seeds
        )
        kept = (
            ScheduleEntry(self._fossilized(place, spec), canonical_action(LifecycleOp.FOSSILIZE, slot=slot))
            for place, (slot, _) in enumerate(self.seeds)
        )
        return (*grown, *kept)

    def _fossilized(self, place: int, spec: EngineSpec) -> int:
        """Step of the FOSSILIZE of the seed number `place`, if seeds germinate one after the other."""
        germination = self.start + place * (spec.min_training_epochs + 1)
        return germination + spec.min_training_epochs + TEMPO_TICKS[self.tempo] + 1 + self.hold

    def fits(self, spec: EngineSpec) -> bool:
        """Whether every seed is fossilized before the last step, if no gate refuses it."""
        return not self.seeds or self._fossilized(len(self.seeds) - 1, spec) < spec.episode_length

    def delayed(self, step: int) -> "Plan":
        """The same, not before `step`."""
        return replace(self, start=max(self.start, step)) if self.seeds else self

    def words(self, spec: EngineSpec) -> str:
        """The plan in one line."""
        if not self.seeds:
            return "wait"
        seeds = "; ".join(
            f"{spec.blueprint_names[blueprint]} in {', '.join(spec.slot_ids[slot] for slot, _ in same)}"
            for blueprint, same in groupby(self.seeds, key=lambda seed: seed[1])
        )
        words = [f"{seeds}, from step {self.start}"]
        if self.hold:
            words.append(f"held {self.hold} steps")
        if self.style is not Style.SIGMOID_ADD:
            words.append(self.style.name)
        if self.tempo != STANDARD:
            words.append(TEMPO_NAMES[self.tempo])
        return ", ".join(words)


def single(spec: EngineSpec) -> Schedule:
    """One `norm` seed in the first slot, fossilized at its first legal step."""
    return Schedule(id="single", version=1, entries=Plan(seeds=((0, NORM),)).entries(spec))


def fill(spec: EngineSpec) -> Schedule:
    """A light seed in every slot, one after the other, each fossilized at its first legal step."""
    cycle, blueprint = spec.min_training_epochs + 1, FILL_BLUEPRINT[spec.family]
    plans = [Plan(seeds=((slot, blueprint),), start=1 + slot * cycle) for slot in range(spec.num_slots)]
    entries = sorted(
        (entry for plan in plans for entry in plan.entries(spec)),
        key=lambda e: (e.earliest, e.op is not LifecycleOp.FOSSILIZE, e.action[Head.SLOT]),
    )
    return Schedule(id="fill", version=1, entries=tuple(entries))


def grid(spec: EngineSpec) -> list[Plan]:
    """Waiting, and each blueprint in each slot, each pair of slots and all slots, from each of `STARTS`."""
    slots = range(spec.num_slots)
    places = dict.fromkeys([*((slot,) for slot in slots), *combinations(slots, 2), tuple(slots)])
    plans = [
        Plan(seeds=tuple((slot, blueprint) for slot in place), start=start)
        for place in places
        for blueprint in spec.selectable
        for start in STARTS
    ]
    return [Plan(), *(plan for plan in plans if plan.fits(spec))]


def neighbours(plan: Plan, spec: EngineSpec) -> list[Plan]:
    """All plans that fit and differ from `plan` in one choice."""
    return [other for other in dict.fromkeys(_changed(plan, spec)) if other != plan and other.fits(spec)]


def _changed(plan: Plan, spec: EngineSpec) -> Iterator[Plan]:
    seeds = plan.seeds
    for i, (slot, _) in enumerate(seeds):
        yield from (_with(plan, [*seeds[:i], (slot, blueprint), *seeds[i + 1 :]]) for blueprint in spec.selectable)
        if len(seeds) > 1:
            yield _with(plan, [*seeds[:i], *seeds[i + 1 :]])
    free = [slot for slot in range(spec.num_slots) if slot not in dict(seeds)]
    yield from (_with(plan, [*seeds, (slot, blueprint)]) for slot in free for blueprint in spec.selectable)
    if seeds:
        yield _with(plan, seeds[::-1])
        yield from (replace(plan, start=start) for start in STARTS)
        yield from (replace(plan, hold=hold) for hold in HOLDS)
        yield from (replace(plan, style=style) for style in Style)
        yield from (replace(plan, tempo=tempo) for tempo in range(len(TEMPO_NAMES)))


def _with(plan: Plan, seeds: Sequence[tuple[int, int]]) -> Plan:
    return replace(plan, seeds=tuple(seeds))
