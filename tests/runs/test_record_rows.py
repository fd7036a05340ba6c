"""The rows of the record: their size at worst, and the columns that need more than stacking."""

import numpy as np
from test_runs_events import SPEC
from test_runs_report import step

from esper.leyline.lifecycle import Head, LifecycleOp, SeedStage
from esper.runs.records import RecordRows
from esper.telemetry.record.writer import Rows
from esper.tolaria.governor import PanicReason
from esper.tolaria.state import StepReport


def rows(*reports: StepReport) -> dict[str, Rows]:
    return {found.kind: found for found in RecordRows(SPEC, ("gain", "rent"))(reports)}


def text(found: Rows, column: str) -> list[str | None]:
    numbers, names = found.columns[column], found.labels[column]
    return [names[number] if number >= 0 else None for number in numbers]


def test_hosts_have_global_numbers_and_steps_their_place() -> None:
    columns = rows(step(t=3), step(t=4))["steps"].columns
    assert columns["round"].tolist() == [1, 1, 1, 1]
    assert columns["t"].tolist() == [3, 3, 4, 4]
    assert columns["host"].tolist() == [10, 11, 10, 11]
    assert columns["term_rent"].tolist() == [0.0, -0.5, 0.0, -0.5]
    assert columns["p_germinate"].tolist() == [0.0, 0.5, 0.0, 0.5]


def test_a_head_is_named_where_the_operation_reads_it() -> None:
    actions = np.array([[1, 2, 2, 2, 0, 0, 0, LifecycleOp.GERMINATE], [1, 0, 2, 1, 2, 3, 1, LifecycleOp.PRUNE]])
    found = rows(step(actions=actions, effective_op=np.array([LifecycleOp.GERMINATE, LifecycleOp.WAIT])))["steps"]
    assert text(found, "op") == ["GERMINATE", "PRUNE"]
    assert text(found, "slot") == [SPEC.slot_ids[1]] * 2
    assert text(found, "blueprint") == [SPEC.blueprint_names[2], None]
    assert text(found, "tempo") == ["SLOW", None]
    assert text(found, "alpha_target") == ["HALF", None]
    assert text(found, "alpha_speed") == [None, "SLOW"]
    assert text(found, "alpha_curve") == [None, "COSINE"]
    assert found.columns["success"].tolist() == [True, False]


def test_a_host_that_is_rolled_back_decides_nothing() -> None:
    found = rows(step(panic_reason=np.array([0, PanicReason.LOBOTOMY])))["steps"]
    assert text(found, "rollback") == [None, "lobotomy"]
    assert text(found, "op") == ["WAIT", None]
    for name in ("reward", "value", "p_wait", "term_gain"):
        assert np.isnan(found.columns[name]).tolist() == [False, True]
    assert rows(step(panic_reason=np.array([1, 1])))["coalitions"].columns["accuracy"].tolist() == []


def test_a_host_that_was_stopped_decides_nothing_either() -> None:
    found = rows(step(reward=np.array([0.5, np.nan])))["steps"]
    assert (text(found, "op"), text(found, "rollback")) == (["WAIT", None], [None, None])


def test_growth_counts_the_fossils_that_were_measured() -> None:
    stage = np.array([[SeedStage.DORMANT, SeedStage.DORMANT], [SeedStage.DORMANT, SeedStage.FOSSILIZED]])
    assert rows(step(stage=stage))["steps"].columns["growth"].tolist() == [1.0, 1.2]
    assert rows(step())["steps"].columns["total_params"].tolist() == [1000, 1200]


def test_constrained_heads_are_named_where_a_policy_drew_the_operation() -> None:
    marked, nothing = np.zeros((2, 8), dtype=np.bool_), np.full((2, 6), np.nan)
    marked[1, [Head.SLOT, Head.OP]] = True
    assert text(rows(step(constrained=marked))["steps"], "constrained") == ["", "slot+op"]
    found = rows(step(constrained=marked, op_prob=nothing))["steps"]
    assert found.columns["constrained"].tolist() == [-1, -1]  # NULL


def test_slots_with_a_seed_have_a_row() -> None:
    stage = np.array([[SeedStage.DORMANT, SeedStage.PRUNED], [SeedStage.EMBARGOED, SeedStage.BLENDING]])
    found = rows(step(stage=stage, blueprint=np.array([[-1, 2], [-1, 1]])))["slots"]
    assert found.columns["host"].tolist() == [11]
    assert text(found, "slot") == [SPEC.slot_ids[1]]
    assert text(found, "stage") == ["BLENDING"]
    assert text(found, "blueprint") == [SPEC.blueprint_names[1]]


def test_coalitions_name_their_members_also_where_the_last_step_measures_more() -> None:
    sets = np.array([[[False, False]] * 3, [[True, True], [False, True], [True, False]]])
    last = step(
        t=2, measured_sets=sets, measured_valid=np.array([[True, False, False], [True] * 3]),
        measured_acc=np.array([[50.0, 0, 0], [60.0, 55.0, 52.0]]),
    )  # fmt: skip
    found = rows(step(), last)["coalitions"]
    a, b = SPEC.slot_ids[:2]
    assert text(found, "members") == ["", b, "", "", f"{a}+{b}", b, a]
    assert found.columns["accuracy"].tolist() == [50.0, 60.0, 40.0, 50.0, 60.0, 55.0, 52.0]
    assert found.columns["t"].tolist() == [1, 1, 1, 2, 2, 2, 2]
