"""The run directory: complete or absent, cut to a checkpoint, written by one process at a time."""

import json
import tomllib
from pathlib import Path

import pytest

from esper.leyline.errors import RunDirectoryError
from esper.telemetry.run_directory import (
    RunDirectory,
    missing_records,
    plain_json,
    require_free,
    require_run,
)

CONFIG = {"task": "null", "ppo": {"lr": 5e-4}}


def test_a_new_directory_holds_its_configuration_and_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    with RunDirectory.create(path, CONFIG) as directory:
        assert directory.checkpoints == path / "checkpoints"
    assert tomllib.loads((path / "config.toml").read_text()) == CONFIG
    assert sorted(file.name for file in path.iterdir()) == ["config.toml", "events.jsonl", "metrics.jsonl"]
    assert [file.name for file in path.parent.iterdir()] == ["a"]  # no draft is left
    require_run(path)


def test_a_path_that_exists_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG).close()
    with pytest.raises(RunDirectoryError, match="continue it with --resume"):
        require_free(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(RunDirectoryError, match="exists already and is left as it is; name a new folder"):
            RunDirectory.create(tmp_path / name, CONFIG)
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "run"]


@pytest.mark.parametrize("name", ["file/run", "/proc/no/run"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be made"):
        RunDirectory.create(tmp_path / name, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_lines_are_written_as_json_and_metrics_can_be_read_at_once(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG) as directory:
        directory.write_events([{"kind": "a", "loss": float("nan")}, {"kind": "b", "pair": (1, float("inf"))}])
        directory.write_metrics({"round": 1, "ops": {"WAIT": 3}})
        events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        assert events == [{"kind": "a", "loss": None}, {"kind": "b", "pair": [1, None]}]
        assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"round": 1, "ops": {"WAIT": 3}}


def test_a_directory_is_cut_to_the_cursor_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_metrics({"round": 1})
        directory.write_events([{"kind": "a"}])
        cursor = directory.cursor()
        directory.write_metrics({"round": 2})
        directory.write_events([{"kind": "b"}])
        directory.write_summary({"task": "null"})
    with RunDirectory.reopen(path, cursor, CONFIG | {"rounds": 9}) as directory:
        assert not (path / "summary.json").exists()  # it is not what this run will have come to
        assert directory.cursor() == cursor  # also where nothing was written since
        directory.write_events([{"kind": "c"}])
        later = directory.cursor()
    assert (path / "metrics.jsonl").read_text() == '{"round": 1}\n'
    assert (path / "events.jsonl").read_text() == '{"kind": "a"}\n{"kind": "c"}\n'
    assert later["events.jsonl"] == len('{"kind": "a"}\n{"kind": "c"}\n')
    assert tomllib.loads((path / "config.toml").read_text())["rounds"] == 9


def test_records_that_were_lost_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_metrics({"round": 1})
        directory.write_events([{"kind": "a"}])
        cursor = directory.cursor()
    assert missing_records(path, cursor) == []
    (path / "events.jsonl").unlink()
    (complaint,) = missing_records(path, cursor)
    assert "events.jsonl has 0 bytes but had 14 at the checkpoint" in complaint
    with RunDirectory.reopen(path, cursor, CONFIG) as directory:
        directory.write_events([{"kind": "b"}])
    assert (path / "events.jsonl").read_text() == '{"kind": "b"}\n'


def test_one_process_at_a_time_writes_to_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RunDirectory.create(path, CONFIG)
    with pytest.raises(RunDirectoryError, match="being written by another process"):
        RunDirectory.reopen(path, {}, CONFIG)
    first.close()
    RunDirectory.reopen(path, {}, CONFIG).close()


def test_what_is_no_run_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for name, said in (("folder", "has no config.toml"), ("file", "is no folder"), ("nothing", "does not exist")):
        with pytest.raises(RunDirectoryError, match=said):
            require_run(tmp_path / name)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory._files["metrics.jsonl"].close()
        directory._files["metrics.jsonl"] = open("/dev/full", "a")  # noqa: SIM115 -- closed by the directory
        with pytest.raises(RunDirectoryError, match=r"cannot be written \(No space left on device\)"):
            directory.write_metrics({"round": 1})


def test_a_summary_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_summary({"rounds": 1, "accuracy": float("nan")})
        directory.write_summary({"rounds": 2})
    assert json.loads((path / "summary.json").read_text()) == {"rounds": 2}
    assert not (path / ".summary.json").exists()


def test_missing_numbers_are_null_in_json() -> None:
    assert plain_json({"a": float("nan"), "b": [1.5, float("-inf")], "c": ("x", None), "d": True}) == {
        "a": None, "b": [1.5, None], "c": ["x", None], "d": True,
    }  # fmt: skip
