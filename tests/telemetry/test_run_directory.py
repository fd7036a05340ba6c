"""The run directory: complete or absent, cut to a checkpoint, written by one process at a time."""

import errno
import json
import os
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from esper.leyline.errors import RunDirectoryError
from esper.telemetry.run_directory import (
    RunDirectory,
    missing_records,
    require_free,
    require_nothing_to_lose,
    require_run,
)
from small_runs import contents

CONFIG = {"task": "null", "ppo": {"lr": 5e-4}}


def test_a_new_directory_holds_its_configuration_and_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a"
    with RunDirectory.create(path, CONFIG) as directory:
        assert directory.checkpoints == path / "checkpoints"
    assert tomllib.loads((path / "config.toml").read_text()) == CONFIG
    assert sorted(file.name for file in path.iterdir()) == [
        "about.json", "config.toml", "events.jsonl", "metrics.jsonl", "record",
    ]  # fmt: skip
    assert [file.name for file in path.parent.iterdir()] == ["a"]  # no draft is left
    require_run(path)


def test_a_path_that_exists_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG).close()
    with pytest.raises(RunDirectoryError, match=r"continue it with esper\.load\(.*\.resume\(\), or name another out"):
        require_free(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("folder", "file", "link"):
        with pytest.raises(RunDirectoryError, match="exists already; name a new folder"):
            RunDirectory.create(tmp_path / name, CONFIG)
    assert list((tmp_path / "folder").iterdir()) == []
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "link", "run"]


@pytest.mark.parametrize("name", ["file/run", "/proc/no/run"])
def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match="cannot be created"):
        RunDirectory.create(tmp_path / name, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_is_cut_to_the_cursor_of_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_metrics({"round": 1})
        directory.write_events([{"kind": "a"}])
        cursor = directory.cursor()
        directory.write_metrics({"round": 2})
        directory.write_events([{"kind": "b"}])
        directory.write_summary({"task": "null"})
    (path / "evaluation_after_training.json").write_text("{}")
    before = contents(path)
    with RunDirectory.reopen(path) as directory:
        assert contents(path) == before  # nothing happens before it is asked for
        directory.rewind(cursor, CONFIG | {"rounds": 9})
        for result in ("summary.json", "evaluation_after_training.json"):
            assert not (path / result).exists()  # it is not what this run will have come to
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
    (warning,) = missing_records(path, cursor)
    assert "events.jsonl has 0 bytes but had 14 at the checkpoint" in warning
    with RunDirectory.reopen(path) as directory:
        assert not (path / "events.jsonl").exists()
        directory.rewind(cursor, CONFIG)
        directory.write_events([{"kind": "b"}])
    assert (path / "events.jsonl").read_text() == '{"kind": "b"}\n'


def test_one_process_at_a_time_writes_to_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RunDirectory.create(path, CONFIG)
    with pytest.raises(RunDirectoryError, match="another process is writing to"):
        RunDirectory.reopen(path)
    first.close()
    RunDirectory.reopen(path).close()
    (path / "metrics.jsonl").unlink()  # what is locked may have been lost
    with RunDirectory.reopen(path) as first, RunDirectory.reopen(path) as second:
        first.rewind({}, CONFIG)
        with pytest.raises(RunDirectoryError, match="another process is writing to"):
            second.rewind({}, CONFIG)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory._files["metrics.jsonl"].close()
        directory._files["metrics.jsonl"] = open("/dev/full", "a")  # noqa: SIM115 -- closed by the directory
        with pytest.raises(RunDirectoryError, match=r"cannot be written \(No space left on device\)"):
            directory.write_metrics({"round": 1})


def test_whatever_has_a_name_and_whatever_a_cursor_counts_is_on_the_disk(
    tmp_path: Path, on_disk: Callable[[Path], bool]
) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_events([{"kind": "a"}])
        directory.write_metrics({"round": 1})
        directory.write_summary({"rounds": 1})
        assert not on_disk(path / "metrics.jsonl")  # only a checkpoint needs it there
        directory.cursor()
    assert on_disk(tmp_path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "checkpoints"])
def test_what_a_run_writes_into_is_not_followed_out_of_its_directory(tmp_path: Path, name: str) -> None:
    path, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    RunDirectory.create(path, CONFIG).close()
    elsewhere.mkdir() if name == "checkpoints" else elsewhere.write_text("mine")
    for replace in (lambda own: own.symlink_to(elsewhere), os.mkfifo):
        (path / name).unlink(missing_ok=True)
        replace(path / name)
        with pytest.raises(RunDirectoryError, match=f"{name} is not a (regular file|folder) and cannot be resumed"):
            RunDirectory.reopen(path)


def test_links_that_were_put_in_the_place_of_drafts_and_of_what_is_replaced_lead_nowhere(tmp_path: Path) -> None:
    path, mine = tmp_path / "run", tmp_path / "mine"
    mine.write_text("mine")
    RunDirectory.create(path, CONFIG).close()
    for name in (".config.toml", ".summary.json", "summary.json", ".config.toml.draft-0"):
        (path / name).symlink_to(mine)
    with RunDirectory.reopen(path) as directory:
        directory.rewind({}, CONFIG)
        directory.write_summary({"accuracy": float("nan")})
        directory.write_summary({"rounds": 1})
    assert mine.read_text() == "mine"
    assert json.loads((path / "summary.json").read_text()) == {"rounds": 1}
    assert not (path / "summary.json").is_symlink()
    assert not (path / ".config.toml.draft-0").is_symlink()  # taken for that of a process that was killed


def test_a_run_without_a_checkpoint_may_only_begin_anew_before_its_first_checkpoint_was_due(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        directory.write_events([{"kind": "a"}])
    for lines in (0, 1):  # a checkpoint is due after each round; events of a round that is not complete happen again
        (path / "metrics.jsonl").write_text("{}\n" * lines)
        require_nothing_to_lose(path)
    (path / "metrics.jsonl").write_text("{}\n{}\n")
    with pytest.raises(RunDirectoryError, match=r"no checkpoint .* --config .*config\.toml --out NEW"):
        require_nothing_to_lose(path)
    (path / "metrics.jsonl").unlink()
    (path / "summary.json").write_text("{}")
    with pytest.raises(RunDirectoryError, match="no checkpoint"):
        require_nothing_to_lose(path)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_directory_that_is_moved_ends_the_run_and_is_not_made_again(tmp_path: Path, replaced: bool) -> None:
    path = tmp_path / "run"
    with RunDirectory.create(path, CONFIG) as directory:
        path.rename(tmp_path / "moved")
        if replaced:
            path.mkdir()
        said = f"{path} was moved or deleted .* continue with --resume {path}"
        for act in (
            lambda: directory.write_metrics({}),
            lambda: directory.write_summary({}),
            lambda: directory.checkpoints,
        ):
            with pytest.raises(RunDirectoryError, match=said):
                act()
    assert list(path.iterdir()) == [] if replaced else not path.exists()
    assert (tmp_path / "moved" / "metrics.jsonl").read_text() == ""


def test_a_file_system_without_locks_and_syncs_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", unsupported)
    monkeypatch.setattr("os.fsync", unsupported)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with RunDirectory.create(tmp_path / "run", CONFIG) as directory:
            directory.write_metrics({"round": 1})
            assert directory.cursor()["metrics.jsonl"] == len('{"round": 1}\n')
    said = " ".join({str(warning.message) for warning in caught})
    assert "the file system has no locks, so that nothing keeps a second process from writing" in said
    assert "the file system cannot sync files or folders" in said
    assert "(Function not implemented)" in said


@pytest.mark.parametrize("text", ["", "[]", "null", '{"format"'])
def test_a_damaged_about_file_is_named_and_a_missing_one_is_of_another_version(tmp_path, text):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RunDirectoryError, match=r"has no about\.json, but this version reads runs of format"):
        require_run(tmp_path)
    (tmp_path / "about.json").write_text(text)
    with pytest.raises(RunDirectoryError, match=r"about\.json is damaged; restore it from a backup"):
        require_run(tmp_path)
