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
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from esper.leyline.errors import ConfigError, nearest
from esper.leyline.files import read_json, replacing
from esper.leyline.lifecycle import HEADS, TEMPO_NAMES, Head, LifecycleOp
from esper.leyline.messages import EngineSpec
from esper.leyline.settings import AtLeast1, first_problem
from esper.tamiyo.baselines import Heuristic, HeuristicRules
from esper.tamiyo.schedules import (
    FEATURES,
    FixedSchedules,
    FollowRule,
    Schedule,
    ScheduleEntry,
    Script,
    ThresholdRule,
    canonical_action,
)

FORMAT = "esper policy 1"
SUFFIX, LEARNED_SUFFIX = ".json", ".safetensors"
"""Of the files described above, and of those of learned policies, which `runs.assembly.clients` reads."""
Policy = Schedule | ThresholdRule | HeuristicRules


def is_policy_file(name: str | Path) -> bool:
    """Whether a controller is named by its file."""
    return str(name).endswith((SUFFIX, LEARNED_SUFFIX))


def script_of(policy: Policy, spec: EngineSpec) -> Script[Any]:
    """The script that follows a policy; raises ConfigError if it does not fit the engine."""
    if isinstance(policy, HeuristicRules):
        return Heuristic(spec, policy)
    if isinstance(policy, Schedule):
        return FixedSchedules([policy], spec)
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


def values_of(path: Path) -> Any:  # noqa: ANN401 -- whatever JSON may be
    """What is in a file of a policy, before it is checked; raises ConfigError if it cannot be read."""
    try:
        return read_json(path)
    except OSError as error:
        raise ConfigError(f"the policy file {path} cannot be read ({error.strerror}); name one that exists.") from error
    except ValueError as error:
        raise ConfigError(
            f"{path} is not JSON ({error}); use a file that `esper search` wrote, or correct it."
        ) from error


def read_policy(path: Path, spec: EngineSpec) -> Policy:
    """The policy of a file, for the engine of `spec`.

    Raises:
        ConfigError: the file cannot be read, is not a policy, or names what this run does not have. The message names
            the file and the field.
    """
    values = values_of(path)
    try:
        file = _files(spec).validate_python(values).model_dump(exclude_unset=True)
        policy = _policy(file["kind"], file[file["kind"]], spec)
        if not isinstance(policy, HeuristicRules):
            policy.check(spec)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_first_problem(error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return policy


def _model(title: str, /, **fields: Any) -> Any:  # noqa: ANN401 -- pydantic's types, or pairs of them with a default
    """A table that has these fields and no others."""
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    pairs: dict[str, Any] = {key: kind if isinstance(kind, tuple) else (kind, ...) for key, kind in fields.items()}
    model: type[BaseModel] = create_model(title, __config__=strict, **pairs)
    return model


def _files(spec: EngineSpec) -> Any:  # noqa: ANN401 -- a TypeAdapter, which the shape checks cannot take
    """What a file may hold, with the names of this run."""
    names: dict[Head, Any] = {head: Literal[tuple(_values(head, spec))] for head in Head if head is not Head.OP}
    needed = (Head.SLOT, Head.BLUEPRINT)
    lines = tuple(
        _model(
            op.name, step=AtLeast1, op=Literal[op.name],
            **{head.name.lower(): names[head] if head in needed else (names[head], None) for head in _heads(op)},
        )
        for op in LifecycleOp
    )  # fmt: skip
    line: Any = Annotated[Union[lines], Field(discriminator="op")]  # noqa: UP007 -- of a computed tuple
    schedule = _model("schedule", name=str, lines=list[line])
    feature: Any = Literal[tuple(FEATURES)]
    rule = _model("rule", feature=feature, step=AtLeast1, threshold=float, below=schedule, above=schedule)
    slot: Any = names[Head.SLOT]
    blueprint: Any = names[Head.BLUEPRINT]
    heuristic = _model(
        "heuristic", blueprints=list[blueprint], slots=list[slot], tempo=names[Head.TEMPO], first_step=AtLeast1,
        patience=float, price=float, fossilize_above=float,
    )  # fmt: skip
    kinds = {"schedule": schedule, "rule": rule, "heuristic": heuristic}
    files = tuple(
        _model(kind, format=Literal[FORMAT], kind=Literal[kind], task=Any, found=Any, **{kind: table})
        for kind, table in kinds.items()
    )
    file: Any = Annotated[Union[files], Field(discriminator="kind")]  # noqa: UP007
    return TypeAdapter(file)


def _first_problem(error: ValidationError) -> str:
    """The field of the first problem, what was found there, and what was expected."""
    problem = error.errors()[0]
    kind, context, found = problem["type"], problem.get("ctx", {}), problem["input"]
    places = [part for part in problem["loc"][1:] if part not in LifecycleOp.__members__]  # without tags of the unions
    if kind.startswith("union_tag"):
        places, found = [*places, context["discriminator"].strip("'")], context.get("tag")
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in places).lstrip(".")
    if kind in ("missing", "union_tag_not_found"):
        return f"{name} is missing; add it."
    if kind == "extra_forbidden":
        return f"{name} is unknown here; correct its name, or leave it out."
    known = re.findall(r"'([^']*)'", context.get("expected", context.get("expected_tags", "")))
    wish = nearest(str(found), known) if known else "it must be " + first_problem(error).rpartition("it must be ")[2]
    shown = json.dumps(found)
    return f"{name or 'the file'} is {shown if len(shown) <= 80 else shown[:77] + '...'}; {wish}"


def _policy(kind: str, tree: dict[str, Any], spec: EngineSpec) -> Policy:
    """The policy of a table of this kind."""
    if kind == "schedule":
        return _schedule(tree, spec)
    if kind == "rule":
        sides = {side: _schedule(tree[side], spec) for side in ("below", "above")}
        return ThresholdRule(**(tree | sides))
    chosen = {key: tuple(_values(head, spec)[name] for name in tree[key])
              for key, head in (("blueprints", Head.BLUEPRINT), ("slots", Head.SLOT))}  # fmt: skip
    return HeuristicRules(**(tree | chosen | {"tempo": TEMPO_NAMES.index(tree["tempo"])}))


def _heuristic_tree(rules: HeuristicRules, spec: EngineSpec) -> dict[str, Any]:
    named = {
        "blueprints": [spec.blueprint_names[index] for index in rules.blueprints],
        "slots": [spec.slot_ids[index] for index in rules.slots],
        "tempo": TEMPO_NAMES[rules.tempo],
    }
    return asdict(rules) | named


def _schedule(tree: Mapping[str, Any], spec: EngineSpec) -> Schedule:
    entries = []
    for line in tree["lines"]:
        op = LifecycleOp[line["op"]]
        heads = {head: line[head.name.lower()] for head in _heads(op) if head.name.lower() in line}
        chosen = {head.name.lower(): _values(head, spec)[name] for head, name in heads.items()}
        entries.append(ScheduleEntry(line["step"], canonical_action(op, **chosen)))
    return Schedule(id=tree["name"], version=1, entries=tuple(entries))


def _schedule_tree(schedule: Schedule, spec: EngineSpec) -> dict[str, Any]:
    return {"name": schedule.id, "lines": [_line(entry, spec) for entry in schedule.entries]}


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
    return {name: index for index, name in enumerate(HEADS[head].values)}
