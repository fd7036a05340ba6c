import json
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from scripted_observations import NAMES, engine_spec

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HEADS, Head, LifecycleOp
from esper.tamiyo.baselines import Heuristic, HeuristicRules
from esper.tamiyo.policy_files import read_policy, script_of, write_policy
from esper.tamiyo.schedules import (
    FEATURES,
    FollowRule,
    Schedule,
    ScheduleEntry,
    ThresholdRule,
    canonical_action,
    single,
)

SPEC = engine_spec(blueprint_names=NAMES)


def schedule(rows: list[tuple[int, int, list[int]]]) -> Schedule:
    """Entries from (step, op, a number for each head); heads that the operation does not read are canonical."""
    entries = []
    for step, op, numbers in sorted(rows):
        heads = {
            head.name.lower(): 1 + number % 7 if head is Head.BLUEPRINT else number % SPEC.head_sizes[head]
            for head, number in zip(Head, numbers, strict=True)
            if op in HEADS[head].used_by and head is not Head.OP
        }
        entries.append(ScheduleEntry(step, canonical_action(LifecycleOp(op), **heads)))
    return Schedule(id="drawn", version=1, entries=tuple(entries))


ROWS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 5), st.lists(st.integers(0, 59), min_size=8, max_size=8)), max_size=6
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples."""
    return tmp_path_factory.mktemp("policies")


@settings(max_examples=20, deadline=None)
@given(
    ROWS, ROWS, st.integers(1, 60), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(sorted(FEATURES))
)
def test_what_is_written_is_read_back(folder, rows, others, step, threshold, feature):
    rule = ThresholdRule(feature=feature, step=step, threshold=threshold, below=schedule(rows), above=schedule(others))
    for policy in (rule.below, rule):
        write_policy(folder / "policy.json", policy, "digits", {"seed": 3}, SPEC)
        assert read_policy(folder / "policy.json", SPEC) == policy


def test_a_file_is_written_in_words(tmp_path: Path) -> None:
    write_policy(tmp_path / "single.json", single(SPEC), "digits", {"env_steps": 640}, SPEC)
    assert json.loads((tmp_path / "single.json").read_text()) == {
        "format": "esper policy 1",
        "kind": "schedule",
        "task": "digits",
        "schedule": {
            "name": "single",
            "lines": [
                {"step": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm", "style": "SIGMOID_ADD",
                 "tempo": "STANDARD", "alpha_target": "FULL"},
                {"step": 17, "op": "FOSSILIZE", "slot": "r0c0"},
            ],
        },
        "found": {"env_steps": 640},
    }  # fmt: skip


GERMINATE = {"step": 1, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm"}


def file_of(tmp_path: Path, *lines: object, **changes: object) -> Path:
    """A schedule file with these lines, and other fields changed; None takes one away."""
    values = {"format": "esper policy 1", "kind": "schedule", "task": "digits",
              "schedule": {"name": "own", "lines": list(lines)}, "found": {}} | changes  # fmt: skip
    path = tmp_path / "own.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return path


def test_a_line_by_hand_may_leave_out_heads_that_have_a_canonical_value(tmp_path: Path) -> None:
    assert read_policy(file_of(tmp_path, GERMINATE), SPEC).entries == single(SPEC).entries[:1]


SIDE = {"name": "wait", "lines": []}
OWN_RULES = {"blueprints": [], "slots": [], "tempo": "FAST", "first_step": 1, "patience": 0.5, "price": 3.0,
             "fossilize_above": 0.0}  # fmt: skip
RULE = {"feature": "val_acc", "step": 3, "threshold": 50.0, "below": SIDE, "above": SIDE}


@pytest.mark.parametrize(
    ("line", "changes", "complaint"),
    [
        ({"blueprint": "nrm"}, {}, r'own.json: schedule.lines\[0\].blueprint is "nrm"; did you mean \'norm\'\? Known'),
        ({"blueprint": "noop"}, {}, r'lines\[0\].blueprint is "noop"; did you mean \'norm\'\? Known names: att'),
        ({"slot": "r1c0"}, {}, r'lines\[0\].slot is "r1c0"; did you mean \'r0c0\''),
        ({"op": "GERMINAT"}, {}, "did you mean 'GERMINATE'"),
        ({"op": "FOSSILIZE"}, {}, r"lines\[0\].blueprint is unknown here; correct"),
        ({"step": 0}, {}, r"lines\[0\].step is 0; it must be at least 1\."),
        ({"step": True}, {}, r"lines\[0\].step is true; it must be a whole number"),
        ({"slot": None}, {}, r"lines\[0\].slot is null; "),
        ({}, {"kind": "rule", "schedule": None}, "own.json: rule is missing; add it"),
        ({}, {"kind": "schedul"}, 'kind is "schedul"; did you mean'),
        ({}, {"format": None}, "own.json: format is missing"),
        ({}, {"foud": {}}, "own.json: foud is unknown here"),
        ({}, {"schedule": {"name": "own", "lines": {}}}, r"own.json: schedule.lines is {}; it must be a list"),
        ({}, {"schedule": 3}, "own.json: schedule is 3; it must be an object"),
        ({}, {"schedule": {"name": "own", "lines": [GERMINATE | {"step": 2}, GERMINATE]}},
         "own.json: schedule 'own': step 1 comes after step 2; sort"),
        ({}, {"kind": "rule", "schedule": None, "rule": RULE | {"feature": "val_accuracy"}},
         "rule.feature is \"val_accuracy\"; did you mean 'val_acc'"),
        ({}, {"kind": "rule", "schedule": None, "rule": RULE | {"threshold": float("nan")}}, "threshold is NaN; it "),
        ({}, {"kind": "rule", "schedule": None, "rule": RULE | {"step": 61}}, "own.json: the rule decides in step 61"),
        ({}, {"kind": "heuristic", "schedule": None, "heuristic": OWN_RULES | {"price": "much"}},
         r'heuristic.price is "much"; it must be a number'),
        ({}, {"kind": "heuristic", "schedule": None, "heuristic": OWN_RULES | {"slots": ["r9c9"]}},
         r"heuristic.slots\[0\] is \"r9c9\""),
        ({}, {"kind": "heuristic", "schedule": None, "heuristic": OWN_RULES | {"temper": 1}},
         "heuristic.temper is unknown here"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_followed_is_refused_by_file_and_field(tmp_path, line, changes, complaint) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_policy(file_of(tmp_path, GERMINATE | line, **changes), SPEC)


def test_a_file_that_is_missing_or_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read \(No such file or directory\)"):
        read_policy(tmp_path / "gone.json", SPEC)
    (tmp_path / "text.json").write_text("step 1: grow")
    with pytest.raises(ConfigError, match=r"text\.json is not JSON"):
        read_policy(tmp_path / "text.json", SPEC)
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"list\.json: the file is \[\]; it must be an object"):
        read_policy(tmp_path / "list.json", SPEC)


def test_a_rule_that_was_read_can_be_followed(tmp_path: Path) -> None:
    path = file_of(tmp_path, kind="rule", schedule=None, rule=RULE)
    assert FollowRule(read_policy(path, SPEC), SPEC).rule.threshold == 50.0


def test_a_tuned_heuristic_is_written_by_name_and_read_back(tmp_path: Path) -> None:
    rules = HeuristicRules(blueprints=(5, 4), slots=(2, 0), tempo=0, patience=0.3, price=1.5)
    path = tmp_path / "best_heuristic.json"
    write_policy(path, rules, "digits", {"budget": 1}, SPEC)
    tree = json.loads(path.read_text())["heuristic"]
    assert (tree["blueprints"], tree["slots"], tree["tempo"]) == (["bottleneck", "depthwise"], ["r0c2", "r0c0"], "FAST")
    assert read_policy(path, SPEC) == rules
    assert isinstance(script_of(rules, SPEC), Heuristic)
