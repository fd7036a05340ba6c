"""One SELECT in a process of its own: its bounds, and how it ends; test_assistants.py asks through it."""

import time
from pathlib import Path

import pytest

from esper.leyline.errors import QueryError
from esper.telemetry.serve.queries import CELL, CHARACTERS, answer


@pytest.fixture
def run(written: Path) -> Path:
    return written / "a"


def test_a_value_that_is_never_complete_is_ended(run):
    began = time.monotonic()  # DuckDB does not interrupt it, or refuses it for its memory
    with pytest.raises(QueryError, match=r"ended after 2 seconds; select fewer|more than 1GiB of memory"):
        answer([run], "select len(range(1_000_000_000))", 10, seconds=2.0)
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
    sql = "select 1.5::decimal(4, 2) a, date '2020-01-02' b, 'nan'::double c, [1, 2] d, {'a': date '2020-01-02'} e"
    assert answer([run], sql, 1) == {
        "columns": list("abcde"),
        "rows": [["1.50", "2020-01-02", None, [1, 2], {"a": "2020-01-02"}]],
    }
