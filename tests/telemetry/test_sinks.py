"""Listeners and sinks: whatever becomes of them, the run does not notice; each sink is read back with its package."""

import json
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import small_runs
from esper.leyline.errors import ConfigError, RegistryError
from esper.leyline.messages import Sink
from esper.telemetry import sinks as module
from esper.telemetry.sinks import (
    SINKS,
    Hub,
    SinkKind,
    register_listener,
    register_sink,
    require_installed,
    require_sinks,
    run_id,
    scalars,
)
from small_runs import Notebook


@pytest.fixture
def registered(no_listeners: None) -> Iterator[None]:
    """The table of sinks, restored after the test, which begins without listeners."""
    before = dict(SINKS)
    yield
    SINKS.clear()
    SINKS.update(before)


class Failing(Notebook):
    """Tries to do harm."""

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        super().write(kind, fields)
        fields["round"] = 77  # type: ignore[index]


def test_listeners_and_sinks_receive_the_records_they_asked_for_in_order_and_sinks_are_closed(
    registered: None, tmp_path: Path
) -> None:
    listener, everything, rounds = Notebook(), Notebook(), Notebook()
    assert isinstance(listener, Sink)
    register_sink("everything")(lambda path: everything)
    register_sink("rounds", kinds=("round",))(lambda path: rounds)
    with Hub({"first": listener}) as hub:
        hub.start_sinks(["everything", "rounds"], tmp_path)
        for t in range(3):
            hub.write("step", {"t": t})
        hub.write("round", {"round": 1})
        assert rounds.closed == 0
    assert listener.taken == everything.taken == [*(("step", {"t": t}) for t in range(3)), ("round", {"round": 1})]
    assert rounds.taken == [("round", {"round": 1})]
    assert (listener.closed, everything.closed, rounds.closed, hub.num_lost) == (0, 1, 1, 0)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("kind", ["listener", "sink"])
def test_one_that_raises_receives_nothing_more_after_one_warning_and_the_others_everything(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook, failing, fields = Notebook(), Failing(), {"round": 1}
    (register_listener if kind == "listener" else register_sink)("failing")(lambda path: failing)
    hub = Hub({"notebook": notebook})
    hub.add_registered(tmp_path)
    hub.start_sinks(["failing"] if kind == "sink" else [], tmp_path)
    for record in ("step", "step", "round"):
        hub.write(record, fields)
    hub.close()
    assert fields == {"round": 1}
    assert (len(notebook.taken), len(failing.taken), hub.num_lost) == (3, 1, 3)
    (warning,) = capsys.readouterr().err.splitlines()
    assert f"the {kind} 'failing' failed: TypeError: " in warning
    assert warning.endswith("It receives nothing more; the run goes on.")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("when", ["made", "closed"])
def test_one_that_cannot_be_made_or_closed_is_reported(
    when: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @register_sink("impossible")
    class Impossible(Notebook):
        def __init__(self, run_directory: Path) -> None:
            super().__init__()
            if when == "made":
                raise OSError(f"no room\nin {run_directory.name}")

        def close(self) -> None:
            raise OSError(f"no room\nin {tmp_path.name}")

    hub = Hub({})
    hub.start_sinks(["impossible"], tmp_path)
    hub.write("round", {})
    hub.close()
    assert hub.num_lost == (when == "made")
    assert f"the sink 'impossible' failed: OSError: no room in {tmp_path.name}." in capsys.readouterr().err


@pytest.mark.usefixtures("registered")
def test_a_slow_sink_is_dropped_after_one_warning_and_a_slow_listener_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])

    class Slow(Notebook):
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            super().write(kind, fields)
            now[0] += 1.0

    sink, listener = Slow(), Slow()
    register_sink("slow", kinds=("round",))(lambda path: sink)
    hub = Hub({"listener": listener})
    hub.start_sinks(["slow"], tmp_path)
    for _ in range(10):
        hub.write("round", {})
    # one second a round each: 6 s of the sink after 12 s are more than 5 + 0.1 x 12 s = 6.2 s only from the seventh on
    assert (len(sink.taken), sink.closed, len(listener.taken)) == (7, 1, 10)
    assert hub.num_lost == 3
    assert capsys.readouterr().err == (
        "esper: the sink 'slow' is slow, it has taken 7.0 seconds of the run. "
        "It receives nothing more; the run goes on.\n"
    )


def test_a_keyboard_interrupt_in_a_listener_is_for_the_run() -> None:
    class Interrupted:
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub({"interrupted": Interrupted()}).write("step", {})


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


def test_an_unknown_sink_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown sink 'tensorbord'; did you mean 'tensorboard'\?"):
        require_sinks(["tensorbord"])
    with pytest.raises(ConfigError, match="twice"):
        require_sinks(["wandb", "wandb"])


def test_a_name_is_registered_once(registered: None) -> None:
    register_listener("twice")(lambda path: Notebook())
    for register, name in ((register_sink, "tensorboard"), (register_listener, "twice")):
        with pytest.raises(RegistryError, match=name):
            register(name)(lambda path: Notebook())


@pytest.mark.usefixtures("registered")
def test_a_missing_package_is_named_with_its_extra_before_the_run_exists(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    SINKS["wandb"] = SinkKind(make=SINKS["wandb"].make, package="no_such_package")
    assert small_runs.train(tmp_path / "run", "null", 1, "--sinks", "wandb") == 2
    assert "pip install 'esper-growth[no_such_package]'" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
    require_installed(["tensorboard"])


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three rounds with two sinks that was resumed, and played its second round twice."""
    import trackio.sqlite_storage

    run = tmp_path_factory.mktemp("sinks") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trackio.sqlite_storage, "TRACKIO_DIR", run.parent / "trackio")
        assert small_runs.train(run, "null", 2, "--sinks", "tensorboard", "trackio") == 0
        (run / "checkpoints" / "round-00002.safetensors").unlink()
        assert small_runs.resume(run, "--rounds", "3") == 0
    return run


@pytest.mark.slow
def test_tensorboard_shows_the_numbers_of_metrics_jsonl_and_discards_rounds_that_a_resume_repeats(
    resumed: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(resumed / "tensorboard"))
    shown.Reload()
    rounds = metrics_of(resumed)
    assert len(list((resumed / "tensorboard").iterdir())) == 2
    assert set(shown.Tags()["scalars"]) == set.union(*(set(numbers) for numbers in rounds))
    for name in ("objective_mean", "ops/WAIT", "entropy_op", "memory_bytes/peak"):
        found = [(event.step, event.value) for event in shown.Scalars(name)]
        assert found == [(i, pytest.approx(numbers[name])) for i, numbers in enumerate(rounds, start=1)]


def test_trackio_stores_every_round_and_continues_after_a_resume(resumed: Path) -> None:
    with sqlite3.connect(resumed.parent / "trackio" / "esper.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    database.close()
    assert [(name, step) for name, step, _ in rows] == [(f"run-{run_id(resumed)}", number) for number in (1, 2, 3)]
    for (_, _, found), expected in zip(rows, metrics_of(resumed), strict=True):
        assert without_clocks(expected).items() <= json.loads(found).items()


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


def test_a_failing_listener_changes_no_number_of_a_run_and_is_reported_at_its_end(
    registered: None, shared_run: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = shared_run("null", 2)
    register_listener("broken")(lambda path: Failing())
    notebook = Notebook()
    register_listener("notebook")(lambda path: notebook)
    assert small_runs.train(tmp_path / "loud", "null", 2) == 0
    assert "the listener 'broken' failed" in capfd.readouterr().err
    loud, quiet = small_runs.records(tmp_path / "loud"), small_runs.records(whole)
    found, expected = small_runs.summary(tmp_path / "loud"), small_runs.summary(whole)
    *before, (kind, _) = notebook.taken
    assert kind == "run_finished"  # it tells the count, so it is not among what was counted
    for last, summary in ((loud, found), (quiet, expected)):
        assert last["events.jsonl"][-1].pop("dropped_records") == summary["dropped_records"]
    assert loud == quiet
    assert found.pop("dropped_records") == len(before)
    assert expected.pop("dropped_records") == 0
    assert found == expected
    received = [fields for kind, fields in notebook.taken if kind == "stage_changed"]
    lines = (tmp_path / "loud" / "events.jsonl").read_text().splitlines()
    assert len(received) == sum(json.loads(line)["kind"] == "stage_changed" for line in lines)
