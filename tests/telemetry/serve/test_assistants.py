"""The tools for assistants, asked through a session of the package mcp in this process."""

import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client

from esper.telemetry.serve.assistants import CHARACTERS, server_of
from esper.telemetry.serve.runs import Runs
from served_runs import write_run


def session(runs: Runs, *calls: tuple[str, dict[str, Any]], seconds: float = 20.0) -> list[tuple[bool, str]]:
    """Whether each call failed, and its text."""

    async def ask() -> list[tuple[bool, str]]:
        async with Client(server_of(runs, seconds)) as client:
            found = [await client.call_tool(name, arguments) for name, arguments in calls]
        return [(bool(one.is_error), one.content[0].text) for one in found]

    return anyio.run(ask)


def asked(runs: Runs, tool: str, /, **arguments: Any) -> Any:
    ((failed, text),) = session(runs, (tool, arguments))
    assert not failed, text
    return json.loads(text)


def refused(runs: Runs, tool: str, /, seconds: float = 20.0, **arguments: Any) -> str:
    ((failed, text),) = session(runs, (tool, arguments), seconds=seconds)
    assert failed, text
    assert "Traceback" not in text
    return text


def test_the_tools_say_that_they_only_read(runs):
    async def ask() -> Any:
        async with Client(server_of(runs)) as client:
            return (await client.list_tools()).tools

    tools = anyio.run(ask)
    assert [tool.name for tool in tools] == ["list_runs", "overview", "tables", "query", "host"]
    assert all(tool.annotations.read_only_hint and tool.description for tool in tools)


def test_the_list_has_the_state_the_rounds_and_j_of_each_run(runs):
    write_run(runs.root / "new", rounds=0)
    a, _, new = sorted(asked(runs, "list_runs")["runs"], key=lambda row: row["run"])
    assert a == {"run": "a", "task": "digits", "reward": "objective", "seed": 0, "round": 2, "rounds": 4,
                 "objective": 20.0, "best": 20.0, "state": "finished"}  # fmt: skip
    assert (new["round"], new["objective"]) == (None, None)
    assert new["state"].startswith("not finished, last written")


def test_a_run_at_a_glance_has_its_curve_and_its_last_round(runs):
    found = asked(runs, "overview", run="a")
    assert found["settings"]["task"] == "digits"
    assert found["settings"]["rounds_planned"] == 4
    assert [(point["first"], point["last"], point["objective"]) for point in found["means_of_rounds"]] == [
        (1, 1, 10.0), (2, 2, 20.0)]  # fmt: skip
    assert (found["last_round"]["round"], found["last_round"]["growth"]) == (2, 1.5)


def test_a_run_without_a_round_says_so(runs):
    write_run(runs.root / "new", rounds=0)
    assert asked(runs, "overview", run="new")["last_round"] == "no round is complete yet"
    assert "no round is complete yet" in asked(runs, "host", run="new")["host"]


def test_a_curve_has_at_most_twenty_points(runs):
    lines = [json.dumps({"round": n, "objective_mean": 10.0 * n}) for n in range(1, 42)]
    (runs.root / "b" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    points = asked(runs, "overview", run="b")["means_of_rounds"]
    assert len(points) == 20
    assert (points[0]["first"], points[0]["last"], points[0]["objective"]) == (1, 3, 20.0)  # of 10, 20, 30
    assert points[-1]["last"] == 41


def test_tables_have_their_rows_and_one_table_has_units_and_meanings(runs):
    assert asked(runs, "tables", run="a")["steps"]["rows"] == 48  # 2 rounds, 8 steps, 3 hosts
    assert asked(runs, "tables", run="a", table="rounds")["seconds"] == "DOUBLE, s: wall time of the steps"
    for table in ("nothing", "run_0.steps", str(runs.root / "a" / "config.toml"), __file__):
        assert "there is no table" in refused(runs, "tables", run="a", table=table)


def test_wrong_arguments_and_wrong_queries_are_one_sentence(runs):
    assert refused(runs, "query", runs="a", sql=5) == 'runs is "a"; it must be a list.'
    assert refused(runs, "host", run="a", round=1e40) == "round is 1e+40; it must be a whole number."
    assert refused(runs, "overview", run="z").startswith("there is no run")


def test_a_query_names_its_columns_and_what_it_leaves_out(runs):
    sql = "select run, host, objective from episodes order by all"
    assert asked(runs, "query", runs=["a", "b"], sql=sql, rows=1) == {
        "columns": ["run", "host", "objective"],
        "rows": [["a", 0, 10.0]],
        "left_out": "8 more rows; aggregate, or order and limit them",  # of 2 and 1 rounds of 3 hosts
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"runs": ["a"], "sql": "select 1", "rows": 201}, "rows is 201, expected 1 to 200"),
        ({"runs": [], "sql": "select 1"}, "no run is named"),
        ({"runs": ["../a"], "sql": "select 1"}, "there is no run '../a'"),
        ({"runs": ["a"], "sql": "copy runs to 'x.csv'"}, "can only be read"),
        ({"runs": ["a"]}, "sql is missing"),
    ],
)  # fmt: skip
def test_a_query_that_cannot_be_answered_is_a_sentence(runs, arguments, words):
    assert words in refused(runs, "query", **arguments)


@pytest.mark.slow
def test_a_query_without_an_end_is_ended(runs):
    endless = "with recursive x as (select 1 n union all select n+1 from x) select sum(n) from x"
    assert "ended after 2 seconds" in refused(runs, "query", seconds=2.0, runs=["a"], sql=endless)


def test_a_host_has_its_result_its_seeds_and_the_best_of_the_newest_round_comes_first(runs):
    found = asked(runs, "host", run="a")
    assert (found["round"], found["host"], found["hosts"]) == (2, 2, 3)
    assert (found["result"]["objective"], found["result"]["growth"], found["result"]["params"]) == (22.0, 1.5, 150)
    ((slot, blueprint),) = [(seed["slot"], seed["blueprint"]) for seed in found["seeds"]]
    assert (slot, blueprint) == ("s0", "norm")
    assert asked(runs, "host", run="a", round=1, host=0)["result"]["objective"] == 10.0
    assert "round 9 of a is not there; rounds 1 to 2 are" in refused(runs, "host", run="a", round=9)
    assert "has no host 7; it has 0 to 2" in refused(runs, "host", run="a", host=7)


def test_the_test_accuracy_is_that_of_the_best_host_and_the_others_say_whose_is_known(runs):
    best = {"best_host": {"round": 2, "host": 1, "test": 61.5}}
    (runs.root / "a" / "summary.json").write_text(json.dumps(best))
    assert asked(runs, "host", run="a", host=1)["test_accuracy"] == 61.5
    assert asked(runs, "host", run="a", host=2)["test_accuracy"].endswith("host 1 of round 2")


def _wrong_types(run: Path) -> None:
    (run / "config.toml").write_text('task = 3\nreward = "x"\n')


@pytest.mark.parametrize(
    ("damage", "words"),
    [(_wrong_types, "cannot be read"), (shutil.rmtree, "there is no run 'a'")],
)
def test_a_run_that_cannot_be_read_is_a_sentence_and_the_others_are_listed(runs, damage, words):
    damage(runs.root / "a")
    for tool, arguments in (("overview", {"run": "a"}), ("tables", {"run": "a"}), ("host", {"run": "a"}),
                            ("query", {"runs": ["a"], "sql": "select 1"})):  # fmt: skip
        assert words in refused(runs, tool, **arguments)
    assert "b" in [row["run"] for row in asked(runs, "list_runs")["runs"]]


def test_what_is_damaged_in_a_run_is_noted(runs):
    (runs.root / "a" / "summary.json").write_text("{")
    answers = [asked(runs, tool, run="a") for tool in ("overview", "tables", "host")]
    for found in [*answers, asked(runs, "query", runs=["a"], sql="select 1")]:
        (note,) = found["notes"]
        assert "summary.json is damaged" in note


def test_a_run_in_a_nested_folder_has_its_path_as_name_also_in_queries(runs):
    shutil.copytree(runs.root / "a", runs.root / "sweep/a")
    assert {row["run"] for row in asked(runs, "list_runs")["runs"]} == {"a", "b", "sweep/a"}
    assert asked(runs, "query", runs=["sweep/a"], sql="select distinct run from rounds")["rows"] == [["sweep/a"]]


def test_an_answer_that_would_be_too_long_is_refused(runs):
    slots = ", ".join(f'"slot {i}"' for i in range(CHARACTERS // 10))
    config = (runs.root / "a" / "config.toml").read_text()
    (runs.root / "a" / "config.toml").write_text(config.replace('slots = ["s0", "s1"]', f"slots = [{slots}]"))
    assert "characters, more than 40,000" in refused(runs, "overview", run="a")
