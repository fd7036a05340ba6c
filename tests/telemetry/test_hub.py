"""Listeners: whatever becomes of them, the run does not notice."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import small_runs
from esper.leyline.errors import RegistryError
from esper.leyline.messages import Sink
from esper.telemetry import hub as module
from esper.telemetry.hub import Hub, register_listener


class Notebook:
    """Writes everything down."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, dict[str, Any]]] = []

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.taken.append((kind, dict(fields)))


class Failing:
    """Takes nothing, and tries to do harm."""

    def write(self, kind: str, fields: Mapping[str, Any]) -> None:
        fields["round"] = 77  # type: ignore[index]


@pytest.fixture
def registered() -> Iterator[None]:
    """The registry of listeners, as it was before the test."""
    before = dict(module._FACTORIES)
    yield
    module._FACTORIES.clear()
    module._FACTORIES.update(before)


def test_every_listener_is_told_every_record_in_order() -> None:
    first, second = Notebook(), Notebook()
    assert isinstance(first, Sink)
    hub = Hub({"first": first, "second": second})
    hub.write("step", {"t": 1})
    hub.write("round", {"round": 1})
    assert first.taken == second.taken == [("step", {"t": 1}), ("round", {"round": 1})]
    assert hub.num_lost == 0
    assert hub.complaints() == []


def test_only_a_registered_listener_is_told_at_once(registered: None, tmp_path: Path) -> None:
    register_listener("notebook")(lambda path: Notebook())
    hub = Hub({"progress": Notebook()})
    assert not hub.is_prompt
    hub.add_registered(tmp_path)
    assert hub.is_prompt


def test_a_failing_listener_loses_its_records_and_nobody_else_does() -> None:
    notebook, fields = Notebook(), {"round": 1}
    hub = Hub({"failing": Failing(), "notebook": notebook})
    for kind in ("step", "step", "round"):
        hub.write(kind, fields)
    assert fields == {"round": 1}
    assert len(notebook.taken) == 3
    assert hub.num_lost == 3
    (complaint,) = hub.complaints()
    assert "the listener 'failing' lost 3 records (step 2, round 1)" in complaint
    assert "TypeError" in complaint


def test_a_keyboard_interrupt_in_a_listener_is_for_the_run() -> None:
    class Interrupted:
        def write(self, kind: str, fields: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub({"interrupted": Interrupted()}).write("step", {})


def test_a_listener_that_cannot_be_made_is_reported(registered: None, tmp_path: Path) -> None:
    @register_listener("impossible")
    def make(run_directory: Path) -> Sink:
        raise OSError(f"no room in {run_directory.name}")

    hub = Hub({})
    hub.add_registered(tmp_path)
    (complaint,) = hub.complaints()
    assert "'impossible' lost" in complaint
    assert f"OSError: no room in {tmp_path.name}" in complaint


def test_a_name_is_given_once(registered: None) -> None:
    register_listener("twice")(lambda path: Notebook())
    with pytest.raises(RegistryError, match="twice"):
        register_listener("twice")


def test_a_failing_listener_changes_no_number_of_a_run_and_is_reported_at_its_end(
    registered: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert small_runs.train(tmp_path / "quiet", "null", 2) == 0
    register_listener("broken")(lambda path: Failing())
    notebook = Notebook()
    register_listener("notebook")(lambda path: notebook)
    assert small_runs.train(tmp_path / "loud", "null", 2) == 0
    assert "the listener 'broken' lost" in capfd.readouterr().err
    loud, quiet = small_runs.records(tmp_path / "loud"), small_runs.records(tmp_path / "quiet")
    found, expected = small_runs.summary(tmp_path / "loud"), small_runs.summary(tmp_path / "quiet")
    *before, (kind, _) = notebook.taken
    assert kind == "run_finished"  # it tells the count, so it is not among what was counted
    for last, summary in ((loud, found), (quiet, expected)):
        assert last["events.jsonl"][-1].pop("dropped_records") == summary["dropped_records"]
    assert loud == quiet
    assert found.pop("dropped_records") == len(before)
    assert expected.pop("dropped_records") == 0
    assert found == expected
    told = [fields for kind, fields in notebook.taken if kind == "stage_changed"]
    lines = (tmp_path / "loud" / "events.jsonl").read_text().splitlines()
    assert len(told) == sum(json.loads(line)["kind"] == "stage_changed" for line in lines)


def test_an_error_of_the_run_itself_is_not_swallowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> object:
        raise ZeroDivisionError("a mistake in building records")

    monkeypatch.setattr("esper.runs.events.step_events", broken)
    with pytest.raises(ZeroDivisionError):
        small_runs.train(tmp_path / "run")
