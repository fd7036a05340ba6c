"""What steps leave behind, written one by one or several together."""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_runs_events import SPEC, moves
from test_runs_report import WEIGHTS, step

import small_runs
from esper.leyline.lifecycle import Cause, SeedStage
from esper.leyline.messages import SlotState
from esper.runs.records import LONGEST, MOST_STEPS, Records
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub, register_listener
from esper.tolaria.executors.scripted import ScriptedExecutor
from small_runs import Notebook

pytestmark = pytest.mark.usefixtures("no_listeners")
TERMS = ("gain", "rent")
GERMINATED = moves((1, 0, SeedStage.DORMANT, SeedStage.GERMINATED, Cause.OP))


class Bench:
    """Records on a clock of its own."""

    def __init__(self, path: Path) -> None:
        self.now = 100.0
        self.notebook = Notebook()
        self.directory = RunDirectory.create(path, {})
        self.records = Records(
            self.directory, Hub({"notebook": self.notebook}), SPEC, WEIGHTS, TERMS, clock=lambda: self.now
        )

    def steps(self, *numbers: int, seconds: float = 0.001, **changes: object) -> None:
        for t in numbers:
            self.now += seconds
            self.records.step(step(t=t, **changes))

    def received(self) -> list[tuple[str, int]]:
        return [(kind, fields["t"]) for kind, fields in self.notebook.taken]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    found = Bench(tmp_path / "run")
    with found.directory:
        yield found


def test_steps_are_recorded_when_there_are_enough_of_them(bench: Bench) -> None:
    bench.steps(*range(1, MOST_STEPS))
    assert bench.received() == []
    bench.steps(MOST_STEPS)
    assert bench.received() == [("step", t) for t in range(1, MOST_STEPS + 1)]


def test_a_slow_step_does_not_wait_for_others(bench: Bench) -> None:
    bench.steps(1)
    bench.steps(2, seconds=LONGEST / 2)
    assert bench.received() == []
    bench.steps(3, seconds=LONGEST / 2)
    assert bench.received() == [("step", 1), ("step", 2), ("step", 3)]


def test_where_a_listener_is_registered_nothing_waits(tmp_path: Path) -> None:
    active = Notebook()
    register_listener("active")(lambda path: active)
    directory = RunDirectory.create(tmp_path / "run", {})
    hub = Hub({})
    hub.add_registered(tmp_path)
    records = Records(directory, hub, SPEC, WEIGHTS, TERMS)
    for t in (1, 2):
        records.step(step(t=t))
        assert [fields["t"] for _, fields in active.taken] == list(range(1, t + 1))
    directory.close()


def test_seconds_count_from_the_beginning_of_the_round_to_each_step(bench: Bench) -> None:
    bench.now = 107.0
    bench.records.begin()
    bench.steps(1, 2, seconds=0.0625)
    bench.records.flush()
    assert [fields["seconds"] for _, fields in bench.notebook.taken] == [0.0625, 0.125]


def test_listeners_receive_the_events_of_a_step_and_then_the_step(bench: Bench) -> None:
    bench.steps(1)
    bench.steps(2, op_moves=GERMINATED)
    bench.steps(3)
    bench.records.write_events([{"kind": "alarm", "t": 3}])
    expected = [("step", 1), ("stage_changed", 2), ("step", 2), ("step", 3), ("alarm", 3)]
    assert bench.received() == expected
    bench.directory.close()
    events = [json.loads(line) for line in (bench.directory.path / "events.jsonl").read_text().splitlines()]
    assert [(event["kind"], event["t"]) for event in events] == [found for found in expected if found[0] != "step"]


def test_steps_of_two_rounds_are_not_written_together(bench: Bench) -> None:
    bench.steps(7, 8)
    bench.steps(1, episode=1)
    assert bench.received() == [("step", 7), ("step", 8)]
    bench.records.flush()
    _, fields = bench.notebook.taken[-1]
    assert (fields["round"], fields["env_steps"], fields["ops"]["WAIT"]) == (2, 2, 1)
    bench.records.flush()
    assert len(bench.notebook.taken) == 3  # nothing is written twice


@pytest.mark.slow
def test_a_run_records_the_same_whether_its_steps_are_written_together_or_alone(tmp_path: Path) -> None:
    assert small_runs.train(tmp_path / "together", "null", 2) == 0
    register_listener("active")(lambda path: Notebook())
    assert small_runs.train(tmp_path / "alone", "null", 2) == 0
    assert small_runs.records(tmp_path / "together") == small_runs.records(tmp_path / "alone")


def test_the_steps_before_a_failure_are_on_the_disk(
    shared_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, whole = tmp_path / "run", small_runs.records(shared_run("null", 1))["events.jsonl"]

    def failing(self: object, t: int, slots: object, coalitions: object) -> object:
        if t == 6:
            raise ZeroDivisionError("a host that cannot be measured")
        return measured(self, t, slots, coalitions)

    measured = ScriptedExecutor.evaluate
    monkeypatch.setattr(ScriptedExecutor, "evaluate", failing)
    with pytest.raises(ZeroDivisionError):
        small_runs.train(path, "null", 1)
    assert small_runs.records(path)["events.jsonl"] == [event for event in whole if event["t"] <= 5]


@pytest.mark.slow
def test_a_run_that_is_interrupted_among_steps_that_wait_goes_on_with_the_same_records(
    shared_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = shared_run("null", 2), tmp_path / "run"
    trained, steps = ScriptedExecutor.train_epoch, iter(range(16 + 3))

    def interrupted(self: ScriptedExecutor, t: int, slots: SlotState) -> object:
        if next(steps, None) == 8 + 4:
            signal.raise_signal(signal.SIGINT)
        return trained(self, t, slots)

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedExecutor, "train_epoch", interrupted)
        assert small_runs.train(path, "null", 2) == 130
    assert max(event["t"] for event in small_runs.records(path)["events.jsonl"] if event["round"] == 2) == 5
    assert small_runs.resume(path) == 0
    assert small_runs.records(path) == small_runs.records(whole)
