"""esper query, on a run of seconds."""

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
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


ENDLESS = ("select * from range(100000000000)", "select length(repeat('x', 2000000000))")


@pytest.mark.slow
@pytest.mark.parametrize("option", [(), ("--csv",), ("--json",)])
@pytest.mark.parametrize(
    "sql", ["with recursive t as (select 1 as n union all select n from t) select max(n) from t", *ENDLESS[1:]]
)
def test_a_query_that_does_not_end_is_stopped_by_ctrl_c(run: Path, sql: str, option: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "esper", "query", str(run), sql, *option]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    ) as process:  # fmt: skip
        try:
            time.sleep(5)
            process.send_signal(signal.SIGINT)
            assert (process.wait(5), process.stderr.read()) == (130, "esper: stopped\n")
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("sql", ENDLESS)
def test_a_query_may_have_a_limit_of_time(run: Path, sql: str) -> None:
    command = [sys.executable, "-m", "esper", "query", str(run), sql, "--json", "--timeout", "1"]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "was ended after 1 seconds" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_who_reads_the_first_rows_of_many_need_not_wait_for_the_others(run: Path) -> None:
    command = [sys.executable, "-m", "esper", "query", str(run), ENDLESS[0], "--csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["range\n", "0\n"]
        process.stdout.close()
        assert (process.wait(20), process.stderr.read()) == (0, "")


def test_what_a_terminal_would_obey_is_escaped_in_a_table_and_stays_data_in_csv(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sql = "select chr(27) || ']0;x' as \"[/b]\", 'a[/x]' as \"\x9b2J\""
    table = output(capsys, str(run), sql)[1]
    assert [line.split() for line in table.splitlines()] == [["[/b]", "\\x9b2J"], ["\\x1b]0;x", "a[/x]"]]
    assert output(capsys, str(run), sql, "--csv")[1] == "[/b],\x9b2J\n\x1b]0;x,a[/x]\n"
    many = f"select {', '.join(f'chr(27) as c{i}' for i in range(60))}"  # a line for each column
    assert "\x1b" not in output(capsys, str(run), many)[1]
    assert len(output(capsys, str(run), "select repeat('x', 100000) as x")[1]) < 11_000


def test_many_rows_are_not_held_in_memory_for_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = output(capsys, str(run), "select * from range(100000000000)")[1].splitlines()[-1]
    assert re.fullmatch(r"at least \d+ more rows; --csv and --json print all\.", last)


def test_no_rows_are_an_empty_list_and_a_time_must_be_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, str(run), "select 1 as a where false", "--json")[1] == "[]\n"
    for wrong in ("0", "-1", "nan", "inf"):
        code, _, err = output(capsys, str(run), "select 1", "--timeout", wrong)
        assert (code, f"--timeout is {wrong}" in err) == (2, True)
