"""esper query, on a run of seconds."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import esper
from esper.cli import main
from esper.cli.record import SHOWN


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path]) -> Path:
    return shared_run("null", 3)


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["query", *arguments])
    return code, *capsys.readouterr()


def test_an_answer_is_a_table_json_or_csv(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select round, host, reward from steps where t = 5 and host < 2 order by round, host"
    code, out, err = output(capsys, str(run), sql)
    assert (code, err, out.split()[:3]) == (0, "", ["round", "host", "reward"])
    assert len(out.splitlines()) == 7
    rows = json.loads(output(capsys, str(run), sql, "--json")[1])
    assert [(row["round"], row["host"]) for row in rows] == [(n, h) for n in (1, 2, 3) for h in (0, 1)]
    assert rows[1]["reward"] is None
    cells = list(csv.reader(io.StringIO(output(capsys, str(run), sql, "--csv")[1])))
    assert cells[0] == ["round", "host", "reward"]
    assert cells[2] == ["1", "1", ""]
    assert float(cells[1][2]) == rows[0]["reward"]


def test_a_long_table_is_cut_and_says_so(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = output(capsys, str(run), "select host from steps")
    assert len(out.splitlines()) == SHOWN + 2
    assert out.splitlines()[-1] == f"{72 - SHOWN} more rows; --csv and --json print all."
    assert output(capsys, str(run), "select host from steps where host = 9")[1] == "no rows\n"


def test_rows_too_wide_for_the_terminal_have_a_line_for_each_column(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = output(capsys, str(run), "select * from steps where round = 1 and t = 5 and host < 2 order by host")
    rows = out.split("\n\n")
    assert len(rows) == 2
    assert [line.split()[0] for line in rows[1].splitlines()][:4] == ["run", "round", "t", "host"]
    assert [line.split()[1:] for line in rows[1].splitlines()][1:4] == [["1"], ["5"], ["1"]]


def test_without_a_select_the_tables_are_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = output(capsys, str(run))
    assert code == 0
    assert "decisions" in out
    assert "rollbacks (rounds 1 to 3, 3 times; 0.333)" in out  # one of three hosts in each round


def test_a_wrong_question_is_one_sentence_and_code_two(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = output(capsys, str(run), "select nothing from steps")
    assert code == 2
    assert 'esper: the query is wrong: Referenced column "nothing" not found in FROM clause!' in err
    assert "Tables: runs, rounds" in err
    assert output(capsys, "nowhere", "select 1")[0] == output(capsys)[0] == output(capsys, "select 1")[0] == 2
    assert output(capsys, str(run), "select 1", "--csv", "--json")[0] == 2


def test_a_run_gives_rows_and_frames(run: Path) -> None:
    loaded = esper.load(run)
    assert loaded.query("select count(*) as n from steps where host = ?", [2]) == [{"n": 24}]
    frame = loaded.frame("decisions")
    assert len(frame) == 72 - 3
    assert frame["op"].isin(["WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE"]).all()
    assert loaded.polars("select host from decisions").columns == ["host"]


def test_the_speed_of_a_round_counts_its_update_too(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = esper.load(run).query("SELECT env_steps_per_s FROM rounds ORDER BY round")
    assert [row["env_steps_per_s"] for row in found] == pytest.approx(
        [line["env_steps"] / (line["seconds"] + line["update_seconds"]) for line in lines]
    )
