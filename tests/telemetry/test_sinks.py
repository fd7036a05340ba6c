"""The sinks that a run can name, each read back with the package that it writes for."""

import json
import sqlite3
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import small_runs
from esper.leyline.errors import ConfigError, RegistryError
from esper.telemetry import background
from esper.telemetry.sinks import SINKS, SinkKind, register_sink, require_installed, require_sinks
from esper.telemetry.sinks.trackers import run_id, scalars


@pytest.fixture
def registered() -> Iterator[None]:
    """The table of sinks, as it was before the test."""
    before = dict(SINKS)
    yield
    SINKS.clear()
    SINKS.update(before)


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The numbers of each line of metrics.jsonl by flat name."""
    return [dict(scalars(json.loads(line))) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_clocks(numbers: Mapping[str, float]) -> dict[str, float]:
    """What is the same when a round is run again."""
    changing = ("seconds", "update_seconds", "phase_milliseconds/", "memory_bytes/")
    return {name: value for name, value in numbers.items() if not name.startswith(changing)}


def leveldb_records(data: bytes, first: int) -> Iterator[bytes]:
    """The records of a file in the log format of LevelDB; its first block lacks `first` bytes."""
    whole, at = b"", 0
    while at < len(data):
        left = 32768 - (at + first) % 32768
        if left < 7:  # the rest of a block that holds no header
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])  # after the checksum
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # FULL or LAST
            yield whole
            whole = b""


def test_numbers_have_flat_names_and_what_was_not_measured_is_left_out() -> None:
    fields = {"round": 2, "shapley_mean": float("nan"), "ops": {"WAIT": 3}, "name": "x", "bytes": {"a": None, "b": 1.5}}
    assert dict(scalars(fields)) == {"round": 2.0, "ops/WAIT": 3.0, "bytes/b": 1.5}


def test_the_id_of_a_run_outlives_a_resume(tmp_path: Path) -> None:
    first = run_id(tmp_path)
    assert len(first) == 8
    assert run_id(tmp_path) == first


def test_an_unknown_sink_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown sink 'tensorbord'; did you mean 'tensorboard'\?"):
        require_sinks(["tensorbord"])
    with pytest.raises(ConfigError, match="twice"):
        require_sinks(["wandb", "wandb"])


def test_a_name_is_registered_once() -> None:
    with pytest.raises(RegistryError, match="tensorboard"):
        register_sink("tensorboard")


@pytest.mark.usefixtures("registered")
def test_a_missing_package_is_named_with_its_extra_before_the_run_exists(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    SINKS["wandb"] = SinkKind(make=SINKS["wandb"].make, package="no_such_package")
    assert small_runs.train(tmp_path / "run", "null", 1, "--sinks", "wandb") == 2
    assert "pip install 'esper-growth[no_such_package]'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    require_installed(["tensorboard"])


def test_tensorboard_shows_the_numbers_of_metrics_jsonl_also_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    assert small_runs.train(run, "null", 2, "--sinks", "tensorboard") == 0
    assert small_runs.resume(run, "--rounds", "3") == 0
    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    rounds = metrics_of(run)
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert set(shown.Tags()["scalars"]) == set.union(*(set(numbers) for numbers in rounds))
    for name in ("objective_mean", "ops/WAIT", "entropy_op", "memory_bytes/peak"):
        found = {event.step: event.value for event in shown.Scalars(name)}
        assert found == {i: pytest.approx(numbers[name]) for i, numbers in enumerate(rounds, start=1)}


def test_tensorboard_discards_the_rounds_that_a_resume_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from esper.telemetry.sinks.tensorboard import TensorBoardSink

    for start, value in ((1, 10.0), (2, 20.0)):  # stopped after round 3, resumed from the checkpoint of round 1
        sink = TensorBoardSink(tmp_path)
        for number in range(start, 4):
            sink.write("round", {"round": number, "x": value + number})
        sink.close()
    shown = EventAccumulator(str(tmp_path / "tensorboard"))
    shown.Reload()
    assert [(event.step, event.value) for event in shown.Scalars("x")] == [(1, 11.0), (2, 22.0), (3, 23.0)]


@pytest.mark.slow
def test_wandb_writes_an_offline_run_with_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    run = tmp_path / "run"
    assert small_runs.train(run, "null", 2, "--sinks", "wandb") == 0
    (run / "checkpoints" / "round-00002.safetensors").unlink()  # the second round is run again
    time.sleep(1.1)  # the folders of wandb are named by the second
    assert small_runs.resume(run, "--rounds", "3") == 0
    files = sorted(run.glob("wandb/offline-run-*/*.wandb"))
    assert [file.name for file in files] == [f"run-{run_id(run)}.wandb"] * 2
    logged = []
    for data in (data for file in files for data in leveldb_records(file.read_bytes()[7:], first=7)):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            names = (".".join(item.nested_key) or item.key for item in record.history.item)
            values = (json.loads(item.value_json) for item in record.history.item)
            logged.append(dict(zip(names, values, strict=True)))
    assert [numbers["round"] for numbers in logged] == [1, 2, 3]
    for numbers, expected in zip(logged, metrics_of(run), strict=True):
        assert without_clocks(expected).items() <= numbers.items()


def test_wandb_without_a_key_is_reported_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert small_runs.train(tmp_path / "run", "null", 1, "--sinks", "wandb") == 0
    assert "set WANDB_MODE=offline. The run goes on." in capfd.readouterr().err


def test_trackio_stores_every_round_and_continues_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio.sqlite_storage

    monkeypatch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", tmp_path / "trackio")
    run = tmp_path / "run"
    assert small_runs.train(run, "null", 2, "--sinks", "trackio") == 0
    (run / "checkpoints" / "round-00002.safetensors").unlink()  # the second round is run again
    assert small_runs.resume(run, "--rounds", "3") == 0
    with sqlite3.connect(tmp_path / "trackio" / "esper.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    database.close()
    assert [(name, step) for name, step, _ in rows] == [(f"run-{run_id(run)}", number) for number in (1, 2, 3)]
    for (_, _, found), expected in zip(rows, metrics_of(run), strict=True):
        assert without_clocks(expected).items() <= json.loads(found).items()


@pytest.mark.usefixtures("registered")
def test_a_slow_sink_does_not_slow_a_run_and_changes_no_number(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    taken = []

    @register_sink("slow")
    class Slow:
        def __init__(self, run_directory: Path) -> None:
            assert (run_directory / "config.toml").exists()

        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            time.sleep(0.2)
            taken.append(kind)

    began = time.monotonic()
    assert small_runs.train(tmp_path / "quiet", "null", 6) == 0
    quiet = time.monotonic() - began
    began = time.monotonic()
    assert small_runs.train(tmp_path / "loud", "null", 6, "--sinks", "slow") == 0
    loud = time.monotonic() - began
    err = capfd.readouterr().err
    dropped = int(err.partition("dropped ")[2].split()[0])
    records = dropped + len(taken)
    assert records > 90  # 18 seconds, if the run waited
    assert loud < quiet + background.DRAINING + 5.0
    assert small_runs.summary(tmp_path / "loud")["dropped_records"] <= dropped
    assert (taken[0], taken[-1]) == ("run_started", "run_finished")
    assert "the sink 'slow' was slower than the run and dropped" in err
    assert (
        small_runs.records(tmp_path / "loud")["metrics.jsonl"]
        == small_runs.records(tmp_path / "quiet")["metrics.jsonl"]
    )
