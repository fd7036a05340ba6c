"""The record of real runs of seconds: complete, interrupted, killed, damaged, and of another version."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import QueryError, RunDirectoryError
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.runs.records import Records
from esper.telemetry.record.reader import COUNTED, Record, damage_said, open_record
from esper.telemetry.record.schema import STORED, TABLES
from esper.telemetry.record.writer import part_of
from esper.telemetry.run_directory import COMPARISON, CONFIG, EVENTS, METRICS, RECORD, SUMMARY
from esper.tolaria.state import StepReport
from small_runs import interrupted_at, resume, train

HOSTS, STEPS, ROUNDS = 3, 8, 3  # of `small_runs`, where host 1 is rolled back in step 5


@pytest.fixture(scope="module")
def reports() -> list[StepReport]:
    """What the engine reported of each step of `run`."""
    return []


@pytest.fixture(scope="module")
def run(reports: list[StepReport], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run."""
    path, record_step = tmp_path_factory.mktemp("runs") / "whole", Records.step

    def step(self: Records, report: StepReport) -> None:
        reports.append(report)
        record_step(self, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Records, "step", step)
        assert train(path, "null", ROUNDS) == 0
    return path


@pytest.fixture
def record(run: Path) -> Iterator[Record]:
    with open_record([run]) as opened:
        yield opened


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


def lines(run: Path, name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def test_every_table_begins_with_the_run_and_has_the_columns_of_the_schema(record: Record) -> None:
    for table in TABLES:
        columns = record.columns(table.name)
        assert list(columns)[: 1 + len(table.columns)] == ["run", *table.types], table.name
        assert {name: columns[name] for name in table.types} == table.types
    assert record.warnings == []


def test_steps_are_those_that_the_engine_reported(reports: list[StepReport], record: Record) -> None:
    rows = record.query(
        "SELECT s.*, d.op, d.success, d.value FROM steps s LEFT JOIN decisions d USING (run, round, t, host) "
        "ORDER BY round, t, host"
    )
    expected = [(report, n) for report in reports for n in range(HOSTS)]
    assert len(rows) == len(expected) == HOSTS * STEPS * ROUNDS
    for row, (report, n) in zip(rows, expected, strict=True):
        assert (row["round"], row["t"], row["host"]) == (report.episode + 1, report.t, n)
        for name in ("val_acc", "train_loss", "committed_acc", "total_params"):
            value = getattr(report, name)[n].item()
            assert row[name] == (None if math.isnan(value) else pytest.approx(value)), (name, row)
        if report.panic_reason[n]:
            assert row["op"] is row["success"] is row["value"] is row["reward"] is None
            continue
        op, effective = int(report.actions[n, Head.OP]), int(report.effective_op[n])
        assert (row["op"], row["success"]) == (LifecycleOp(op).name, effective == op)
        for name in ("reward", "value"):
            assert row[name] == pytest.approx(getattr(report, name)[n].item()), (name, row)
    assert [(row["host"], row["rollback"]) for row in rows if row["rollback"]] == [(1, "nan")] * ROUNDS


def test_rewards_are_the_sums_of_their_terms(record: Record) -> None:
    rows = record.query(
        "SELECT any_value(reward) AS reward, sum(value) AS terms FROM steps JOIN rewards USING (run, round, t, host) "
        "GROUP BY round, t, host"
    )
    assert len(rows) == HOSTS * STEPS * ROUNDS - ROUNDS  # a rolled back host has no reward
    assert [row["terms"] for row in rows] == pytest.approx([row["reward"] for row in rows], abs=1e-6)


def test_seeds_live_from_the_step_of_their_birth_to_that_of_their_end(run: Path, record: Record) -> None:
    changes = [event for event in lines(run, "events.jsonl") if event["kind"] == "stage_changed"]
    by_rollback = {
        (event["round"], event["host"], slot): event["t"]
        for event in lines(run, "events.jsonl")
        if event["kind"] == "rollback"
        for slot in event["pruned"]  # type: ignore[attr-defined]
    }
    seeds = record.query("SELECT * FROM seeds")
    assert len(seeds) == sum(event["to"] == "GERMINATED" for event in changes) > 0
    for seed in seeds:
        place = {name: seed[name] for name in ("round", "host", "slot", "serial")}
        own = [event for event in changes if place.items() <= event.items()]
        times = {event["to"]: event["t"] for event in own}
        assert seed["germinated_t"] == times["GERMINATED"]
        assert seed["fossilized_t"] == times.get("FOSSILIZED")
        rolled_back = by_rollback.get((seed["round"], seed["host"], seed["slot"]))
        assert seed["pruned_t"] in (times.get("PRUNED"), rolled_back)


def test_rounds_and_updates_are_those_of_metrics(run: Path, record: Record) -> None:
    metrics = lines(run, "metrics.jsonl")
    rounds = record.query("SELECT * FROM rounds ORDER BY round")
    assert [row["objective"] for row in rounds] == [line["objective_mean"] for line in metrics]
    assert rounds[0]["ops_wait"] == metrics[0]["ops"]["WAIT"]  # type: ignore[index]
    updates = record.query("SELECT * FROM updates ORDER BY round")
    assert [row["approx_kl"] for row in updates] == [line["approx_kl"] for line in metrics]
    assert "objective_mean" not in updates[0]


def test_several_runs_are_told_apart_by_name(run: Path, copy: Path, tmp_path: Path) -> None:
    same_name = Path(shutil.copytree(run, tmp_path / "other" / "whole"))
    with open_record([run, copy, same_name]) as record:
        names = [row["run"] for row in record.query("SELECT run FROM runs")]
        counts = record.query("SELECT run, count(*) AS n FROM steps GROUP BY run")
    assert names == [f"{run.parent.name}/whole", "copy", "other/whole"]
    assert {row["n"] for row in counts} == {HOSTS * STEPS * ROUNDS}


@pytest.mark.parametrize(
    "sql",
    [
        *("COPY steps TO '{path}/stolen.csv'", "ATTACH '{path}/other.db'", "INSTALL httpfs", "LOAD httpfs"),
        *("SET threads = 1", "DROP VIEW steps", "CREATE TABLE x (y INTEGER)", "EXPLAIN ANALYZE COPY steps TO 'x'"),
        *("SELECT 1; SELECT 2", "", "PRAGMA version", "EXPORT DATABASE '{path}/all'"),
        *("SELECT * FROM read_text('/etc/hostname')", "SELECT * FROM '{path}/secret.csv'"),
        *("SELECT * FROM read_csv('{path}/secret.csv')", "SELECT * FROM glob('/*')", "SELECT * FROM python_secret"),
        *("SELECT * FROM read_parquet('https://example.org/x.parquet')", "SELECT nothing FROM steps", "SELEC 1"),
    ],
)
def test_only_the_record_can_be_read_and_nothing_is_written(record: Record, tmp_path: Path, sql: str) -> None:
    python_secret = {"secret": np.arange(3)}
    (tmp_path / "secret.csv").write_text("a,b\n1,2\n")
    with pytest.raises(QueryError, match=r"Tables: runs, rounds, episodes, steps, decisions"):
        record.query(sql.format(path=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["secret.csv"]
    assert len(python_secret) == 1
    assert record.query("SELECT count(*) AS n FROM runs") == [{"n": 1}]


@pytest.mark.parametrize(
    ("kind", "number", "fault"),
    [("steps", 1, "is damaged"), ("slots", 2, "is damaged"), ("coalitions", ROUNDS, "is missing")],
)
def test_a_part_that_is_damaged_or_missing_is_named_and_the_rest_is_shown(
    copy: Path, kind: str, number: int, fault: str
) -> None:
    part = part_of(copy / RECORD, kind, number)
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(bytes(content))
    if fault == "is missing":
        part.unlink()
    with open_record([copy]) as record:
        (line,) = record.warnings
        assert f"{part.name} {fault}" in line
        assert record.query("SELECT count(*) AS n FROM rounds") == [{"n": ROUNDS}]
        shown = record.query(f"SELECT DISTINCT round FROM {kind} ORDER BY round")
    assert [row["round"] for row in shown] == [n for n in range(1, ROUNDS + 1) if n != number]


def test_a_part_that_cannot_be_read_later_is_named_and_the_query_is_not_blamed(copy: Path) -> None:
    with open_record([copy]) as record:
        part = part_of(copy / RECORD, "steps", 2)
        part.write_bytes(b"")
        with pytest.raises(QueryError, match=rf"^the record cannot be read .*{part.name}") as caught:
            record.query("SELECT sum(val_acc) FROM steps")
    assert "query is wrong" not in str(caught.value)


def test_what_the_database_makes_of_ctrl_c_is_a_keyboard_interrupt(run: Path) -> None:
    with pytest.raises(KeyboardInterrupt), damage_said([run]):
        raise RuntimeError("Query interrupted")
    with pytest.raises(RuntimeError, match="another"), damage_said([run]):
        raise RuntimeError("another")


def test_links_in_a_run_directory_are_not_followed(copy: Path, tmp_path: Path) -> None:
    part = part_of(copy / RECORD, "steps", 1)
    target = part.rename(tmp_path / "elsewhere.parquet")
    part.symlink_to(target)
    for name in (EVENTS, SUMMARY):
        (copy / name).rename(tmp_path / name)
        (copy / name).symlink_to(tmp_path / name)
    with open_record([copy]) as record:
        for name in (part.name, EVENTS, SUMMARY):
            assert any(f"{name} is not a regular file" in line for line in record.warnings)
        assert record.query("SELECT summary FROM runs") == [{"summary": None}]
        assert record.query("SELECT * FROM steps WHERE round = 1") == record.query("SELECT * FROM episodes") == []


def test_a_value_that_fails_in_a_late_row_is_explained_too(record: Record) -> None:
    # Far behind the first chunk of an answer that streams, and early enough for the time in which rows are counted.
    sql = "SELECT CAST(CASE WHEN range = 50000 THEN 'x' ELSE '1' END AS INTEGER) FROM range(1000000)"
    for ask in (record.query, lambda sql: list(record.rows(sql)), lambda sql: record.beginning(sql, 1)):
        with pytest.raises(QueryError, match="Could not convert string 'x'"):
            ask(sql)


def test_the_beginning_of_an_answer_counts_the_other_rows_up_to_a_limit(record: Record) -> None:
    assert record.beginning("SELECT * FROM range(5)", 2) == ([{"range": 0}, {"range": 1}], 3, True)
    rows, more, is_all = record.beginning("SELECT * FROM range(1000000000)", 1)
    assert (len(rows), more, is_all) == (1, COUNTED, False)


def test_a_run_of_another_version_is_refused(copy: Path) -> None:
    about = copy / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"format": 99, "version": "7.5"}))
    with pytest.raises(RunDirectoryError, match=r"was written in format 99 by esper 7\.5, but .* open it with"):
        open_record([copy])


def test_a_record_that_was_deleted_is_named_in_few_lines(copy: Path) -> None:
    shutil.rmtree(copy / RECORD)
    with open_record([copy]) as record:
        assert [line.split(" ", 1)[1] for line in record.warnings] == [
            f"is missing (also those of {ROUNDS - 1} later rounds); its rows are left out. Restore it from a backup to "
            "see them."
        ] * len(STORED)
        for table in ("steps", "decisions", "rewards", "slots", "seeds", "coalitions"):
            assert record.query(f"SELECT * FROM {table}") == []
        assert record.query("SELECT count(*) AS n FROM episodes") == [{"n": HOSTS * ROUNDS}]


def test_lines_that_are_gone_are_named(copy: Path) -> None:
    kept = (copy / METRICS).read_text().splitlines(keepends=True)
    started, *_ = (copy / EVENTS).read_text().splitlines(keepends=True)
    for name, text, said in (
        (METRICS, "", f"{copy / METRICS} has no line of round 1 and others"),
        (METRICS, kept[-1], f"{copy / METRICS} has no line of round 1"),
        (EVENTS, "", f"{copy / EVENTS} does not begin with the start of the run; episodes are left out"),
        (EVENTS, started, f"{copy / EVENTS} has 0 of {HOSTS * ROUNDS} episodes. Restore it"),
    ):
        whole = (copy / name).read_text()
        (copy / name).write_text(text)
        with open_record([copy]) as found:
            assert [warning for warning in found.warnings if warning.startswith(said)], found.warnings
        (copy / name).write_text(whole)
        with open_record([copy]) as found:
            assert found.warnings == []


@pytest.mark.parametrize("name", [METRICS, EVENTS])
def test_the_half_line_that_a_run_is_writing_is_left_out_without_a_word_and_a_damaged_one_is_counted(
    copy: Path, name: str
) -> None:
    before, half = (copy / name).read_text(), '{"kind": "episode", "round": 4, "objec'
    for end, warned in ((half, []), (half + "\n", [f"{copy / name} has damaged lines"])):
        (copy / name).write_text(before + end)
        with open_record([copy]) as record:
            assert [line.partition(",")[0] for line in record.warnings] == warned
            assert record.query("SELECT count(*) AS n FROM rounds") == [{"n": ROUNDS}]
            assert record.query("SELECT count(*) AS n FROM episodes") == [{"n": HOSTS * ROUNDS}]


def everything(record: Record) -> str:
    return repr([record.query(f"SELECT * FROM {table.name} ORDER BY ALL") for table in TABLES] + record.warnings)


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.slow
def test_a_record_that_follows_a_run_has_what_one_that_is_opened_has(copy: Path) -> None:
    whole = {name: (copy / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl", COMPARISON, "summary.json")}
    for name in (COMPARISON, "summary.json"):
        (copy / name).unlink()
    parts = shutil.move(copy / RECORD, copy.parent / "parts")
    (copy / RECORD).mkdir()
    for name in ("metrics.jsonl", "events.jsonl"):
        (copy / name).write_text("")
    with open_record([copy], follows=True) as following:

        def is_as_if_opened() -> bool:
            assert following.read_on()
            with open_record([copy]) as opened:
                return everything(following) == everything(opened)

        assert following.query("SELECT * FROM anomalies") == []
        for other in (copy / "config.toml", copy / RECORD / ".." / "config.toml"):
            with pytest.raises(QueryError, match="reads the record alone"):
                following.query(f"SELECT * FROM read_text('{other}')")
        for number, line in enumerate(whole[METRICS].splitlines(keepends=True), 1):
            for part in parts.glob(f"*{number}*"):
                shutil.copy(part, copy / RECORD)  # first as those of a round that has begun
            assert is_as_if_opened(), number
            if number == 2:
                line = line.replace(b"{", b'{"new_metric": 0.5, ', 1)  # in the rounds of a later version
            append(copy / METRICS, line[:-5])
            assert following.read_on()
            assert len(following.query("SELECT * FROM rounds")) == number - 1, "half a line is none"
            append(copy / METRICS, line[-5:])
            events = [
                text
                for text in whole[EVENTS].splitlines(keepends=True)
                if json.loads(text).get("round") == number or (number == 1 and b'"run_started"' in text)
            ]
            append(copy / EVENTS, b"".join(events))
            assert is_as_if_opened(), number
        for name in (COMPARISON, "summary.json"):
            (copy / name).write_bytes(whole[name])
        assert is_as_if_opened()
        assert len(following.query("SELECT DISTINCT round FROM steps")) == number == ROUNDS
        assert following.query("SELECT count(new_metric) AS n FROM updates") == [{"n": 1}]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_record_does_not_follow_a_run_that_was_cut_or_is_damaged(copy: Path, name: str) -> None:
    whole = (copy / name).read_bytes()
    with open_record([copy], follows=True) as following:
        assert following.read_on()
        (copy / name).write_bytes(whole[: len(whole) // 2])
        assert not following.read_on()
        (copy / name).unlink()
        assert not following.read_on()
    (copy / name).write_bytes(whole)
    part = next((copy / RECORD).glob("*.parquet"))
    content = part.read_bytes()
    part.write_bytes(b"")
    with open_record([copy], follows=True) as following:
        part.write_bytes(content)
        assert not following.read_on(), "a part may be restored"


def test_evaluations_in_the_directory_become_rows(copy: Path) -> None:
    hosts = {"objective": [60.0, 62.0], "committed": [61.0, 63.0], "test": [59.0, 60.0], "growth": [1.1, 1.2]}
    means = {"name": "trained", "objective": 61.0, "committed": 62.0, "test": 59.5, "growth": 1.15, "hosts": hosts}
    without = {"controllers": [means | {"hosts": None}]}
    (copy / COMPARISON).write_text(json.dumps({"task": "digits", "controllers": [means]}))
    (copy / "other").mkdir()
    (copy / "other" / "evaluation.json").write_text(json.dumps([without, without | {"task": "null"}]))
    (copy / "outside").symlink_to(copy / "other")
    with open_record([copy]) as record:
        rows = record.query("SELECT file, task, controller, host, objective, training_flops FROM evaluations")
        assert record.warnings == []
    assert [tuple(row.values()) for row in rows] == [
        (COMPARISON, "digits", "trained", None, 61.0, None),
        (COMPARISON, "digits", "trained", 0, 60.0, None),
        (COMPARISON, "digits", "trained", 1, 62.0, None),
        ("other/evaluation.json", None, "trained", None, 61.0, None),
        ("other/evaluation.json", "null", "trained", None, 61.0, None),
    ]


@pytest.mark.parametrize(
    "document",
    [5, {}, *({"controllers": wrong} for wrong in (None, [None], [{}], [{"name": "x", "hosts": 1}], {"name": "x"}))],
)
def test_an_evaluation_that_makes_no_sense_is_named(copy: Path, document: object) -> None:
    (copy / COMPARISON).write_text(json.dumps(document))
    with open_record([copy]) as record:
        assert record.query("SELECT * FROM evaluations") == []
        (warning,) = record.warnings
    assert f"{COMPARISON} is damaged" in warning


@pytest.mark.parametrize(
    ("was", "now", "is_said"),
    [("seed = ", "seed = 1", True), ("lr = ", "lr = 1", True), ("rounds = ", "rounds = 1", False)],
)
def test_settings_that_the_run_did_not_start_with_are_named(copy: Path, was: str, now: str, is_said: bool) -> None:
    text = (copy / CONFIG).read_text()
    (copy / CONFIG).write_text(text.replace(was, now, 1))
    with open_record([copy]) as record:
        said = [warning for warning in record.warnings if "in config.toml, but the run was made with" in warning]
    assert len(said) == is_said


@pytest.mark.parametrize("library", ["pandas", pytest.param("polars", marks=pytest.mark.slow)])
def test_a_frame_has_the_rows(record: Record, library: str) -> None:
    pytest.importorskip(library)
    sql = "SELECT host, reward FROM steps WHERE round = 1 AND t = 5 ORDER BY host"
    found = record.frame(sql) if library == "pandas" else record.polars(sql)
    assert list(found["host"]) == [0, 1, 2]
    missing = list(found["reward"])[1]
    assert missing is None or math.isnan(missing)


def require_same_rows(path: Path, expected: Path) -> None:
    with open_record([path]) as found, open_record([expected]) as whole:
        for table in ("steps", "decisions", "slots", "coalitions", "rewards", "seeds"):
            everything = f"SELECT * EXCLUDE run FROM {table} ORDER BY ALL"
            assert repr(found.query(everything)) == repr(whole.query(everything))
        assert found.warnings == []


def test_a_run_that_was_stopped_and_continued_has_every_step_once(tmp_path: Path, run: Path) -> None:
    path = tmp_path / "stopped"
    with interrupted_at(2, 4):
        assert train(path, "null", ROUNDS) == 130
    with open_record([path]) as record:  # the step after the signal is the last
        assert record.query("SELECT max(t) AS t FROM steps WHERE round = 2") == [{"t": 5}]
        assert record.warnings == []
    assert resume(path) == 0
    require_same_rows(path, run)


@pytest.mark.parametrize("begun", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_run_that_was_killed_between_checkpoints_has_every_step_once(copy: Path, run: Path, begun: bool) -> None:
    path = copy
    newest = max(path.glob("checkpoints/round-*"))
    newest.unlink()  # as if the process had been killed just before it was written
    (path / "summary.json").unlink()
    if begun:  # with a part whose round has no line yet
        lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
        (path / "metrics.jsonl").write_text("".join(lines[:-1]))
        with open_record([path]) as record:
            assert record.warnings == []
    assert resume(path) == 0
    require_same_rows(path, run)


@pytest.mark.parametrize("line", ['{"round": 1, "ops": "x"}', '{"round": 1, "seconds": [1]}'])
def test_a_record_whose_values_are_of_other_types_is_refused_in_a_sentence(copy: Path, line: str) -> None:
    (copy / METRICS).write_text(line + "\n")
    with pytest.raises(RunDirectoryError, match=r"cannot be read .* one of its files is damaged"), open_record([copy]):
        pass
