"""Rows of the overview: what was read is not read again, and what a run is writing is waited for."""

import json
import math
import time
from pathlib import Path

import pytest

from esper.telemetry.serve import runs as overview
from esper.telemetry.serve.runs import Row, Runs, rounds_of_point, thinned
from served_runs import add_round, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", rounds=2)


def read(row: Row) -> dict[str, object]:
    row.look()
    row.read_on(math.inf)
    return row.shown


def test_a_run_that_is_finished_has_its_settings_and_its_last_round(tmp_path):
    shown = read(Row("b", write_run(tmp_path / "b", rounds=1, finished=True)))
    found = [shown[name] for name in ("objective", "objective_std", "round", "rounds", "finished", "reward")]
    assert found == [10.0, 1.0, 1, 4, True, "objective"]


def test_a_new_round_is_read_without_those_before(run, monkeypatch):
    row = Row("a", run)
    assert (read(row)["curve"], row.shown["seconds"], row.shown["best"]) == ([10.0, 20.0], 4.0, 20.0)
    assert not row.shown["finished"]
    added = []
    add = Row._add
    monkeypatch.setattr(Row, "_add", lambda self, line: (added.append(json.loads(line)["round"]), add(self, line)))
    add_round(run, 3)
    assert (read(row)["curve"], row.shown["round"]) == ([10.0, 20.0, 30.0], 3)
    assert added == [3]


def test_the_newest_round_is_known_before_all_have_been_read(run):
    row = Row("a", run)
    row.look()
    row.read_on(time.monotonic() - 1.0)
    assert (row.shown["round"], row.shown["objective"], row.shown["best"], row.shown["curve"]) == (2, 20.0, None, [])
    assert row.behind > 0
    row.read_on(math.inf)
    assert (row.behind, row.shown["best"]) == (0, 20.0)


def test_a_run_that_was_cut_and_written_on_is_read_from_its_beginning(run):
    row = Row("a", run)
    read(row)
    first = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[0]
    (run / "metrics.jsonl").write_text(first)
    add_round(run, 5)
    add_round(run, 6)
    assert read(row)["curve"] == [10.0, 50.0, 60.0]


def test_half_a_line_is_waited_for_and_a_damaged_one_counted(run):
    row, metrics = Row("a", run), run / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text + text.splitlines()[-1][:40])
    assert (read(row)["curve"], row.shown["warnings"]) == ([10.0, 20.0], [])
    metrics.write_text(text + "{broken\n")
    assert read(row)["curve"] == [10.0, 20.0]
    assert "has damaged lines, which are left out (1)" in row.shown["warnings"][0]


def test_the_time_of_the_last_round_keeps_its_seconds(run):
    row = Row("a", run)
    read(row)
    assert json.loads(row.text)["changed"] == int((run / "metrics.jsonl").stat().st_mtime)


def test_settings_of_other_tables_are_not_those_of_the_run(run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text + 'seed = 7\n[ppo]\nseed = 9\nmode = "x"\n')
    shown = read(Row("a", run))
    assert (shown["seed"], shown["reward"], shown["task"]) == (0, "objective", "digits")


def test_a_reward_of_the_users_is_named(run):
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(f'custom_reward = "area"\n{text}')
    assert read(Row("a", run))["reward"] == "area"


def test_an_answer_says_how_many_runs_are_still_read(run, monkeypatch):
    monkeypatch.setattr("esper.telemetry.serve.runs.PATIENCE", -1.0)
    with Runs(run.parent) as runs:
        assert json.loads(runs.overview_json())["reading"] == 1
        monkeypatch.setattr("esper.telemetry.serve.runs.PATIENCE", 60.0)
        assert json.loads(runs.overview_json())["reading"] == 0


def test_a_long_curve_has_few_points():
    assert thinned(range(overview.POINTS * 3))[:2] == [1.5, 5.5]  # means of four, as three are no power of two
    for rounds in (0, 1, 59, 60, 61, 120, 121, 1000):
        points = len(thinned(range(rounds)))
        assert points <= overview.POINTS
        assert points == math.ceil(rounds / rounds_of_point(rounds))


def test_runs_that_differ_in_the_seed_alone_have_one_configuration(tmp_path):
    configs = {}
    for name, edit in {
        "a": ("seed = 0", "seed = 0"),
        "other-seed": ("seed = 0", "seed = 12"),
        "other-rounds": ("rounds = 4", "rounds = 5"),
        "other-reward": ('mode = "objective"', 'mode = "shaped"'),
        "other-seed-of-the-reward": ("[reward]", "[reward]\nseed = 3"),
    }.items():
        path = write_run(tmp_path / name, rounds=0) / "config.toml"
        path.write_text(path.read_text().replace(*edit))
        configs[name] = read(Row(name, path.parent))["config"]
    assert configs.pop("a") == configs.pop("other-seed")
    assert len(set(configs.values())) == 3
