"""Policies as small JSON files: schedules, rules and tuned heuristics, with slots and blueprints by name.

    {
      "format": "esper policy 1",
      "kind": "schedule",
      "task": "digits",
      "schedule": {
        "name": "depthwise in r0c0, from step 1",
        "lines": [
          {"step": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "depthwise", "style": "SIGMOID_ADD"},
          {"step": 11, "op": "FOSSILIZE", "slot": "r0c0"}
        ]
      },
      "found": {"env_steps": 64000, "seed": 0, "objective": 71.2}
    }

A line is executed once, from its step on. A head that it does not name has its canonical value; slot and blueprint have
none. A rule has "kind": "rule" and "rule": {"feature", "step", "threshold", "below", "above"}, the last two as
"schedule" above. A heuristic has "kind": "heuristic" and "heuristic" with the fields of `HeuristicRules`.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from esper.leyline.errors import ConfigError, nearest
from esper.leyline.files import replacing
from esper.leyline.lifecycle import (
    ALPHA_CURVE_NAMES,
    ALPHA_SPEED_NAMES,
    ALPHA_TARGET_NAMES,
    HEADS,
    TEMPO_NAMES,
    Head,
    LifecycleOp,
    Style,
)
from esper.leyline.messages import EngineSpec
from esper.tamiyo.heuristic import Heuristic, HeuristicRules
from esper.tamiyo.schedules import (
    FEATURES,
    FixedSchedules,
    FollowRule,
    Schedule,
    ScheduleEntry,
    ScheduleTable,
    ThresholdRule,
)
from esper.tamiyo.scripted import Script, canonical_action

FORMAT = "esper policy 1"
SUFFIX = ".json"
Policy = Schedule | ThresholdRule | HeuristicRules
_VALUES: dict[Head, tuple[str, ...]] = {
    Head.STYLE: tuple(style.name for style in Style),
    Head.TEMPO: TEMPO_NAMES,
    Head.ALPHA_TARGET: ALPHA_TARGET_NAMES,
    Head.ALPHA_SPEED: ALPHA_SPEED_NAMES,
    Head.ALPHA_CURVE: ALPHA_CURVE_NAMES,
}
T = TypeVar("T")


def script_of(policy: Policy, spec: EngineSpec) -> Script[Any]:
    """The script that follows a policy; raises ConfigError if it does not fit the engine."""
    if isinstance(policy, HeuristicRules):
        return Heuristic(spec, policy)
    if isinstance(policy, Schedule):
        return FixedSchedules(ScheduleTable([policy], spec))
    return FollowRule(policy, spec)


def write_policy(path: Path, policy: Policy, task: str, found: Mapping[str, object], spec: EngineSpec) -> None:
    """Write the file atomically.

    Args:
        path: the file; replaced if it exists.
        policy: a schedule, a rule or the rules of the heuristic, that fit `spec`.
        task: for which it was found.
        found: how it was found: plain values for the reader of the file.
        spec: gives the names of slots and blueprints.
    """
    if isinstance(policy, Schedule):
        kind, tree = "schedule", _schedule_tree(policy, spec)
    elif isinstance(policy, HeuristicRules):
        kind, tree = "heuristic", _heuristic_tree(policy, spec)
    else:
        kind = "rule"
        sides = {"below": _schedule_tree(policy.below, spec), "above": _schedule_tree(policy.above, spec)}
        tree = {"feature": policy.feature, "step": policy.step, "threshold": policy.threshold, **sides}
    values = {"format": FORMAT, "kind": kind, "task": task, kind: tree, "found": dict(found)}
    with replacing(path) as file:
        json.dump(values, file, indent=2, allow_nan=False)
        file.write("\n")


def read_policy(path: Path, spec: EngineSpec) -> Policy:
    """The policy of a file, for the engine of `spec`.

    Raises:
        ConfigError: the file cannot be read, is not a policy, or names what this run does not have. The message names
            the file and the field.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the policy file {path} cannot be read ({error.strerror}); name one that exists.") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); use a file that `esper search` wrote, or correct it."
        ) from error
    root = _Field(path, "", values)
    root.get("format", one_of([FORMAT]))
    kind = root.get("kind", one_of(["schedule", "rule", "heuristic"]))
    root.require_keys(["format", "kind", "task", kind, "found"])
    try:
        if kind == "heuristic":
            return _heuristic(root.at(kind), spec)
        policy = _schedule(root.at(kind), spec) if kind == "schedule" else _rule(root.at(kind), spec)
        policy.check(spec)
    except _FieldError:
        raise
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return policy


class _FieldError(ConfigError):
    """An error that names its file and field already."""


@dataclass(frozen=True)
class _Field:
    """A value of the file and its place in it."""

    path: Path
    name: str
    value: Any

    def error(self, expected: str) -> _FieldError:
        """What was found here, and what was expected."""
        place, found = f"{self.path}: {self.name}" if self.name else str(self.path), json.dumps(self.value)
        return _FieldError(f"{place} is {found if len(found) <= 80 else found[:77] + '...'}; {expected}")

    def at(self, key: str) -> "_Field":
        """The value of a key that must exist."""
        name = f"{self.name}.{key}" if self.name else key
        if not isinstance(self.value, dict):
            raise self.error("it must be an object.")
        if key not in self.value:
            raise _FieldError(f"{self.path}: {name} is missing; add it.")
        return _Field(self.path, name, self.value[key])

    def get(self, key: str, check: "Callable[[_Field], T]") -> T:
        """The checked value of a key that must exist."""
        return check(self.at(key))

    def require_keys(self, known: Sequence[str]) -> None:
        """Refuse keys that mean nothing."""
        for key in self.value:
            if key not in known:
                place = f"{self.name}.{key}" if self.name else key
                raise _FieldError(f"{self.path}: {place} is unknown here; {nearest(key, known)}")

    def items(self) -> "list[_Field]":
        """The values of a list."""
        if not isinstance(self.value, list):
            raise self.error("it must be a list.")
        return [_Field(self.path, f"{self.name}[{i}]", value) for i, value in enumerate(self.value)]


def one_of(names: Sequence[str]) -> Callable[[_Field], str]:
    """A check for one of several names."""

    def check(field: _Field) -> str:
        if not isinstance(field.value, str) or field.value not in names:
            raise field.error(nearest(str(field.value), names))
        return field.value

    return check


def _text(field: _Field) -> str:
    if not isinstance(field.value, str):
        raise field.error("it must be a text.")
    return field.value


def _step(field: _Field) -> int:
    if type(field.value) is not int or field.value < 1:
        raise field.error("it must be a step, a whole number from 1 on.")
    return field.value


def _number(field: _Field) -> float:
    if type(field.value) not in (int, float) or not math.isfinite(field.value):
        raise field.error("it must be a finite number.")
    return float(field.value)


def _rule(field: _Field, spec: EngineSpec) -> ThresholdRule:
    rule = ThresholdRule(
        feature=field.get("feature", one_of(tuple(FEATURES))),
        step=field.get("step", _step),
        threshold=field.get("threshold", _number),
        below=_schedule(field.at("below"), spec),
        above=_schedule(field.at("above"), spec),
    )
    field.require_keys(["feature", "step", "threshold", "below", "above"])
    return rule


def _heuristic(field: _Field, spec: EngineSpec) -> HeuristicRules:
    def names(key: str, head: Head) -> tuple[int, ...]:
        known = _values(head, spec)
        return tuple(known[one_of(tuple(known))(item)] for item in field.at(key).items())

    rules = HeuristicRules(
        blueprints=names("blueprints", Head.BLUEPRINT),
        slots=names("slots", Head.SLOT),
        tempo=TEMPO_NAMES.index(field.get("tempo", one_of(TEMPO_NAMES))),
        first_step=field.get("first_step", _step),
        patience=field.get("patience", _number),
        price=field.get("price", _number),
        fossilize_above=field.get("fossilize_above", _number),
    )
    field.require_keys(list(asdict(rules)))
    return rules


def _heuristic_tree(rules: HeuristicRules, spec: EngineSpec) -> dict[str, Any]:
    named = {
        "blueprints": [spec.blueprint_names[index] for index in rules.blueprints],
        "slots": [spec.slot_ids[index] for index in rules.slots],
        "tempo": TEMPO_NAMES[rules.tempo],
    }
    return asdict(rules) | named


def _schedule(field: _Field, spec: EngineSpec) -> Schedule:
    name = field.get("name", _text)
    entries = [_entry(line, spec) for line in field.at("lines").items()]
    field.require_keys(["name", "lines"])
    return Schedule(id=name, version=1, entries=tuple(entries))


def _schedule_tree(schedule: Schedule, spec: EngineSpec) -> dict[str, Any]:
    return {"name": schedule.id, "lines": [_line(entry, spec) for entry in schedule.entries]}


def _entry(line: _Field, spec: EngineSpec) -> ScheduleEntry:
    """One line as an entry."""
    step = line.get("step", _step)
    op = LifecycleOp[line.get("op", one_of([op.name for op in LifecycleOp]))]
    heads = {head.name.lower(): _values(head, spec) for head in _heads(op)}
    line.require_keys(["step", "op", *heads])
    chosen = {
        name: values[line.get(name, one_of(tuple(values)))]
        for name, values in heads.items()
        if name in line.value or name in ("slot", "blueprint")
    }
    return ScheduleEntry(step, canonical_action(op, **chosen))


def _line(entry: ScheduleEntry, spec: EngineSpec) -> dict[str, Any]:
    """An entry as one line."""
    line: dict[str, Any] = {"step": entry.earliest, "op": entry.op.name}
    for head in _heads(entry.op):
        names = {index: name for name, index in _values(head, spec).items()}
        line[head.name.lower()] = names[entry.action[head]]
    return line


def _heads(op: LifecycleOp) -> list[Head]:
    """The heads that an operation reads, besides the operation itself."""
    return [head for head in Head if op in HEADS[head].used_by and head is not Head.OP]


def _values(head: Head, spec: EngineSpec) -> dict[str, int]:
    """The values of a head by name."""
    if head is Head.SLOT:
        return {name: index for index, name in enumerate(spec.slot_ids)}
    if head is Head.BLUEPRINT:
        return {spec.blueprint_names[index]: index for index in spec.selectable}
    return {name: index for index, name in enumerate(_VALUES[head])}
