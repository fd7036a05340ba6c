"""esper train --profile: its trace, its table, its refusals, and that it changes no result."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.runs.profiling import PHASES, TRACE, Profiler, profiled, steps_of
from esper.telemetry.progress import RunConsole
from small_runs import interrupted_at, records, summary, train

CPU = torch.device("cpu")


@pytest.mark.parametrize(("text", "found"), [("3-5", (3, 5)), (" 4 ", (4, 4)), ("3-3", (3, 3)), ("3-8", (3, 8))])
def test_steps_are_a_number_or_two(text, found):
    assert steps_of(text, 8) == found


@pytest.mark.parametrize("text", ["", "5-3", "2-4", "3-9", "3-", "a-b", "-3", "3,5"])
def test_other_steps_are_refused(text):
    with pytest.raises(ConfigError, match=r"profile_steps is"):
        steps_of(text, 8)


def ranges(folder: Path) -> list[dict[str, Any]]:
    """The steps and the phases of a trace, in the order of their begin."""
    with gzip.open(folder / TRACE, "rt") as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    return sorted(named, key=lambda event: event["ts"])


@pytest.mark.slow
def test_a_profiled_run_has_the_same_results_and_a_trace_of_the_phases_of_each_step(tmp_path, capsys, shared_run):
    folder, without = tmp_path / "traces" / "a", shared_run("tiny", 2)
    assert train(tmp_path / "with", "tiny", 2, "--profile", str(folder), "--profile-steps", "3-4") == 0
    assert summary(tmp_path / "with")["state_digest"] == summary(without)["state_digest"]
    assert records(tmp_path / "with")["events.jsonl"] == records(without)["events.jsonl"]
    found = ranges(folder)
    assert [event["name"] for event in found] == ["step 3", *PHASES, "step 4", *PHASES]
    steps = [event for event in found if event["name"].startswith("step")]
    for phase in (event for event in found if event not in steps):
        assert any(s["ts"] <= phase["ts"] and phase["ts"] + phase["dur"] <= s["ts"] + s["dur"] for s in steps)
    shown = capsys.readouterr().out
    assert f"profile: steps 3 to 4 are in {folder / TRACE}" in shown
    assert "ui.perfetto.dev" in shown
    shares = [float(share) for share in re.findall(r"([\d.]+) %", shown)]
    *parts, total = shares[: len(PHASES) + 2]
    assert total == 100.0
    assert sum(parts) == pytest.approx(100.0, abs=0.5)  # each is rounded to a tenth
    assert [file.name for file in folder.iterdir()] == [TRACE]


def test_a_run_that_is_stopped_before_says_that_there_is_no_trace_and_leaves_no_folder(tmp_path, capsys):
    with interrupted_at(1, 3):
        assert train(tmp_path / "run", "null", 1, "--profile", str(tmp_path / "p")) == 130
    assert "no trace was written: the run ended before step 5" in capsys.readouterr().out
    assert not (tmp_path / "p").exists()
    assert not torch.autograd._profiler_enabled()


def test_a_round_of_which_the_first_steps_were_not_seen_is_left_to_the_next(tmp_path):
    profiler = Profiler(tmp_path / TRACE, 3, 3, CPU, RunConsole(quiet=True))
    for t in (2, 3, 4, 1, 2):
        profiler.write("step", {"t": t})
        assert not (tmp_path / TRACE).exists()
    with torch.profiler.record_function("train"):
        torch.ones(3)
    profiler.write("step", {"t": 3})
    assert [event["name"] for event in ranges(tmp_path)] == ["step 3", "train"]


def _with_trace(folder: Path) -> None:
    folder.mkdir()
    (folder / TRACE).touch()


@pytest.mark.parametrize(
    ("prepare", "more", "words"),
    [
        (_with_trace, ["--profile", "{folder}"], "exists already; name another folder with --profile"),
        (Path.touch, ["--profile", "{folder}"], "cannot be written (File exists); name another with --profile"),
        (Path.touch, ["--profile", "{folder}/deep"], "cannot be written (Not a directory)"),
        (
            None,
            ["--profile", "{folder}", "--profile-steps", "7-9"],
            "--profile-steps is 7-9, expected steps from 3 to 8",
        ),
        (None, ["--profile-steps", "3-5"], "was given without --profile"),
    ],
)
def test_what_cannot_be_profiled_is_refused_before_the_run_begins(tmp_path, capsys, prepare, more, words):
    folder = tmp_path / "p"
    if prepare:
        prepare(folder)
    assert train(tmp_path / "run", "null", 1, *(text.format(folder=folder) for text in more)) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert "Traceback" not in shown.err
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_no_folder(tmp_path):
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", "null", 1, "--profile", str(tmp_path / "p")) == 2
    assert not (tmp_path / "p").exists()


def test_a_profile_gives_its_place_among_the_listeners_back(tmp_path):
    for name in ("a", "b"):
        with profiled(tmp_path / name, 3, 5, CPU, RunConsole(quiet=True)):
            pass
