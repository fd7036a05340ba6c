"""Plans: constant schedules described by a few choices, so that they can be enumerated and varied.

bottleneck in r0c0, r0c1, from step 3    seeds germinate in this order, each as soon as it is legal
held 5 steps                             FOSSILIZE comes 5 steps after its first legal step
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

from esper.leyline.actions import TEMPO_NAMES, TEMPO_TICKS, LifecycleOp, Style
from esper.leyline.messages import EngineSpec
from esper.tamiyo.schedules import STANDARD, Schedule, ScheduleEntry
from esper.tamiyo.scripted import canonical_action

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
        entries = [
            ScheduleEntry(
                self.start,
                canonical_action(
                    LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, style=self.style, tempo=self.tempo
                ),
            )
            for slot, blueprint in self.seeds
        ]
        entries += [
            ScheduleEntry(self._fossilized(place, spec), canonical_action(LifecycleOp.FOSSILIZE, slot=slot))
            for place, (slot, _) in enumerate(self.seeds)
        ]
        return Schedule(id=self.words(spec), version=1, entries=tuple(entries))

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
            f"{spec.blueprint_names[kind]} in {', '.join(spec.slot_ids[slot] for slot, _ in same)}"
            for kind, same in groupby(self.seeds, key=lambda seed: seed[1])
        )
        words = [f"{seeds}, from step {self.start}"]
        if self.hold:
            words.append(f"held {self.hold} steps")
        if self.style is not Style.SIGMOID_ADD:
            words.append(self.style.name)
        if self.tempo != STANDARD:
            words.append(TEMPO_NAMES[self.tempo])
        return ", ".join(words)


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
        yield from (_with(plan, [*seeds[:i], (slot, kind), *seeds[i + 1 :]]) for kind in spec.selectable)
        if len(seeds) > 1:
            yield _with(plan, [*seeds[:i], *seeds[i + 1 :]])
    free = [slot for slot in range(spec.num_slots) if slot not in dict(seeds)]
    yield from (_with(plan, [*seeds, (slot, kind)]) for slot in free for kind in spec.selectable)
    if seeds:
        yield _with(plan, seeds[::-1])
        yield from (replace(plan, start=start) for start in STARTS)
        yield from (replace(plan, hold=hold) for hold in HOLDS)
        yield from (replace(plan, style=style) for style in Style)
        yield from (replace(plan, tempo=tempo) for tempo in range(len(TEMPO_NAMES)))


def _with(plan: Plan, seeds: Sequence[tuple[int, int]]) -> Plan:
    return replace(plan, seeds=tuple(seeds))
