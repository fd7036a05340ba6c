"""One SELECT in a process of its own: its bounds, and how it ends."""

import time
from pathlib import Path

import pytest

from esper.leyline.errors import QueryError
from esper.telemetry.serve.queries import CELL, CHARACTERS, answer
from served_runs import write_run

ENDLESS = "with recursive x as (select 1 as n union all select n + 1 from x) select count(*) from x"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("queries") / "a", hosts=3, steps=8, rounds=2)


def test_rows_come_with_columns_and_the_number_of_those_that_are_left_out(run):
    assert answer([run], "select round, host, val_acc from steps where t = 8 order by all", 2) == {
        "columns": ["round", "host", "val_acc"],
        "rows": [[1, 0, 18.0], [1, 1, 19.0]],  # 10 + t + host
        "left_out": "4 more rows; aggregate, or order and limit them",  # 2 rounds of 3 hosts
    }


def test_all_rows_are_given_without_a_word_about_others(run):
    assert answer([run], "select count(*) as n from steps", 1) == {"columns": ["n"], "rows": [[48]]}


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS,
        "select len(range(1_000_000_000))",  # one value, which DuckDB does not interrupt, or refuses for its memory
    ],
)
def test_a_query_that_never_ends_is_ended(run, sql):
    began = time.monotonic()
    with pytest.raises(QueryError, match=r"ended after 2 seconds; select fewer|more than 1GiB of memory"):
        answer([run], sql, 10, seconds=2.0)
    assert time.monotonic() - began < 20.0


def test_one_value_cannot_take_the_memory_of_the_machine(run):
    with pytest.raises(QueryError, match=r"memory; select fewer"):
        answer([run], "select len(repeat('x', 4_000_000_000))", 10)


def test_values_and_answers_are_cut_and_say_by_how_much(run):
    found = answer([run], f"select repeat('x', {CELL + 7}) from range(200)", 200)
    assert found["rows"][0] == ["x" * CELL + "... (7 more characters)"]
    kept = len(found["rows"])
    assert kept * CELL <= CHARACTERS < (kept + 2) * (CELL + 40)
    assert found["left_out"].startswith(f"{200 - kept} more rows")


def test_values_that_json_lacks_become_text(run):
    sql = "select 1.5::decimal(4, 2), date '2020-01-02', 'nan'::double, [1, 2], {'a': date '2020-01-02'}"
    assert answer([run], sql, 1)["rows"] == [["1.50", "2020-01-02", None, [1, 2], {"a": "2020-01-02"}]]


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("drop table runs", "found DROP, but a record can only be read"),
        ("select * from read_text('/etc/passwd')", "reads the record alone"),
        ("select * from stepz", "does not exist.*Tables: runs, rounds"),
        ("", "found nothing"),
    ],
)
def test_only_the_record_is_read(run, sql, words):
    with pytest.raises(QueryError, match=words):
        answer([run], sql, 10)


def test_values_of_a_type_that_esper_does_not_write_are_named(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "metrics.jsonl").write_text('{"round": 1, "seconds": "soon"}\n')
    with pytest.raises(QueryError, match=r"the record .*cannot be read"):
        answer([run], "select * from rounds", 10)


def test_what_is_damaged_is_noted(tmp_path):
    run = write_run(tmp_path / "a")
    (run / "summary.json").write_text("{")
    (note,) = answer([run], "select 1", 1)["notes"]
    assert "summary.json is damaged" in note


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(QueryError, match="is not a run directory"):
        answer([tmp_path], "select 1", 1)
