import json
import shutil
import threading
from pathlib import Path

import pytest

from esper.leyline.errors import RunDirectoryError
from esper.telemetry.record.reader import Record
from esper.telemetry.serve.runs import LIVE, OPEN, Runs, UnknownRunError, host, version_of
from served_runs import add_round, write_run
from toy_record import full_record


def answer(runs: Runs, name: str, *names: str, **place: int) -> object:
    return json.loads(runs.answer(names, f"{name} {place}", lambda record: LIVE[name](record, place)))


def test_folders_that_are_not_runs_are_left_out_and_an_empty_one_says_what_to_do(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").touch()
    (note,) = Runs(tmp_path).overview()["notes"]
    assert "holds no run yet" in note
    assert "esper train --out" in note


@pytest.mark.parametrize("name", ["missing", "file.txt"])
def test_what_is_not_a_folder_is_refused(tmp_path, name):
    (tmp_path / "file.txt").touch()
    with pytest.raises(RunDirectoryError, match="name a run directory"):
        Runs(tmp_path / name)


@pytest.mark.parametrize("name", ["../a", "a/../b", "./a", "a/", "/etc", "", "a/record", "."])
def test_a_path_is_not_a_name_of_a_run(folder, name):
    with pytest.raises(UnknownRunError):
        Runs(folder).path_of(name)


def test_a_link_that_leads_out_of_the_folder_is_not_followed(folder, tmp_path_factory, runs):
    outside = write_run(tmp_path_factory.mktemp("outside") / "secret")
    (folder / "link").symlink_to(outside)
    (folder / "alias").symlink_to(folder / "a")
    assert list(runs.found()) == ["a", "alias", "b"]
    assert any(note.startswith("link leads out of") for note in runs.overview()["notes"])


def test_runs_in_nested_folders_have_their_path_as_name(folder, runs):
    shutil.copytree(folder / "a", folder / "sweep/lr 0.1/s0")
    shutil.copytree(folder / "b", folder / "sweep/lr 0.2/s0")
    assert list(runs.found()) == ["a", "b", "sweep/lr 0.1/s0", "sweep/lr 0.2/s0"]
    assert [row["run"] for row in answer(runs, "runs", "sweep/lr 0.2/s0", "sweep/lr 0.1/s0")] == [
        "sweep/lr 0.1/s0", "sweep/lr 0.2/s0"]  # fmt: skip
    assert answer(runs, "round", "sweep/lr 0.1/s0")["run"] == "sweep/lr 0.1/s0"


def test_neither_runs_nor_links_nor_hidden_folders_are_searched(folder, tmp_path_factory, runs):
    outside = tmp_path_factory.mktemp("outside")
    write_run(outside / "secret/run", rounds=0)
    (folder / "link").symlink_to(outside)
    (folder / "sub").mkdir()
    (folder / "sub/loop").symlink_to(folder)
    (folder / "sub/out").symlink_to(outside / "secret/run")
    write_run(folder / "a/checkpoints/inner", rounds=0)
    write_run(folder / ".trash/old", rounds=0)
    assert list(runs.found()) == ["a", "b"]
    assert [note.partition(" leads")[0] for note in runs.overview()["notes"]] == ["sub/out"]


def test_the_search_for_runs_is_bounded_and_says_so(folder, monkeypatch):
    write_run(folder / Path(*"12345") / "deep", rounds=0)
    write_run(folder / Path(*"123456") / "deeper", rounds=0)
    assert list(Runs(folder).found()) == ["1/2/3/4/5/deep", "a", "b"]
    monkeypatch.setattr("esper.telemetry.serve.runs.FOLDERS", 3)
    overview = Runs(folder).overview()
    assert [row["run"] for row in overview["runs"]] == ["a", "b"]
    assert "more than 3 folders, not all of which were searched" in overview["notes"][0]


def test_the_version_changes_with_each_round_part_and_summary(folder):
    run, seen = folder / "b", set()
    for change in (
        lambda: None,
        lambda: add_round(run, 2),
        lambda: (run / "evaluation.json").write_text("{}"),
        lambda: (run / "summary.json").write_text("{}"),
    ):
        change()
        seen.add(version_of(run))
    assert len(seen) == 4


def test_a_record_is_read_again_only_when_its_files_have_changed(folder, runs):
    made = []
    make = lambda record: made.append(record) or len(record.query("SELECT * FROM rounds"))  # noqa: E731
    assert [runs.answer(("b",), "n", make) for _ in range(2)] == [b"1", b"1"]
    add_round(folder / "b", 2)
    assert runs.answer(("b",), "n", make) == b"2"
    assert made[0] is made[1], "it is read on"
    metrics = folder / "b" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])  # a resume begins before its second round
    assert runs.answer(("b",), "n", make) == b"1"
    assert made[1] is not made[2], "it is read again"


def test_values_of_other_types_than_expected_are_said_to_be_damage(runs):
    with pytest.raises(RunDirectoryError, match=r"the record of \S*b cannot be read .* restore it from a backup"):
        runs.answer(("b",), "n", lambda record: len(record.query("SELECT 1 AS n")[0]["n"]))


def test_a_round_is_the_newest_whose_steps_are_there(folder, runs):
    found = answer(runs, "round", "b")
    assert (found["round"], found["first"], found["newest"], found["total"]) == (1, 1, 1, 3)
    add_round(folder / "b", 2)
    found = answer(runs, "round", "b")
    assert found["round"] == 2
    host = found["hosts"][1]
    assert host["steps"]["val_acc"] == [12, 13, 14, 15, 16, 17, 18, 19]  # 10 + t + host
    assert [(s["stage"], s["t"], len(s["alpha"])) for s in host["segments"]] == [
        ("TRAINING", 1, 2), ("BLENDING", 3, 1), ("FOSSILIZED", 4, 5)]  # fmt: skip


def test_a_host_has_everything_about_its_episode(folder, runs):
    found = answer(runs, "host", "a", round=1, host=2)
    assert (found["host"], found["result"]["objective"], found["hosts"]) == (2, 12, [0, 1, 2])
    assert [row["op"] for row in found["decisions"]] == ["GERMINATE", "WAIT", "WAIT", "FOSSILIZE", *["WAIT"] * 4]
    assert (found["decisions"][0]["slot"], found["decisions"][0]["p_wait"]) == ("s0", 0.5)
    assert {row["term"]: row["value"] for row in found["rewards"] if row["t"] == 3} == {"potential": 0.5, "rent": -0.25}
    assert found["waterfalls"]["8"]["parts"] == [{"members": ["s0"], "value": 15}]  # 45 - 30
    assert len(found["slot_rows"]) == 8


def test_the_host_that_is_shown_first_is_the_best_of_those_that_grew(tmp_path):
    record = full_record()
    record.database.execute("update episodes set objective = 50 + host, fossilized = 1 - host where round = 2")
    assert host(record, {"round": 2})["host"] == 0  # host 1 has more points, but nothing grew
    record.database.execute("update episodes set fossilized = 0 where round = 2")
    assert host(record, {"round": 2})["host"] == 1


@pytest.mark.parametrize(
    ("name", "place", "words"),
    [
        ("round", {"round": 9}, "round 9 of a is not there; rounds 1 to 2 are"),
        ("host", {"round": 0}, "round 0 of a is not there"),
        ("host", {"host": 7}, "round 2 has no host 7; it has 0 to 2"),
    ],
)
def test_places_that_are_not_there_are_explained(folder, name, place, words, runs):
    with pytest.raises(Exception, match=words):
        answer(runs, name, "a", **place)


def test_a_run_without_rounds_has_no_hosts(tmp_path):
    write_run(tmp_path / "new", rounds=0)
    with Runs(tmp_path) as runs:
        assert answer(runs, "round", "new")["hosts"] == []
        assert answer(runs, "host", "new")["host"] is None
        assert answer(runs, "policy", "new") == {"new": {}}


def test_a_record_that_is_replaced_is_closed_when_its_reader_is_done(folder, runs):
    reading, go_on, found = threading.Event(), threading.Event(), []

    def slow(record: Record) -> object:
        reading.set()
        assert go_on.wait(30)
        found.append(record.query("select count(*) as n from rounds")[0]["n"])
        return None

    reader = threading.Thread(target=runs.answer, args=(("b",), "slow", slow))
    reader.start()
    assert reading.wait(30)
    add_round(folder / "b", 2)
    other = threading.Thread(target=runs.answer, args=(("b",), "curves", lambda record: found.append("new")))
    other.start()
    go_on.set()
    reader.join()
    other.join()
    assert sorted(map(str, found)) == ["1", "new"]


def test_few_records_stay_open(folder, runs):
    for i in range(OPEN + 1):
        shutil.copytree(folder / "b", folder / f"c{i}")
        answer(runs, "curves", f"c{i}")
    assert len(runs._opened) == OPEN
