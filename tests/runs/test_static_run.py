"""A run of a static graph from the command line: complete, interrupted inside a round, continued."""

import json
import os
import signal
import tomllib
from pathlib import Path

import pytest

from esper.tolaria.executors.static.executor import StaticExecutor
from small_runs import records, resume, summary, train

STATIC = ("--set", "experimental=true", "graph=static")


@pytest.mark.slow
def test_a_static_run_can_be_interrupted_and_records_the_same(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, path = tmp_path / "whole", tmp_path / "run"
    assert train(whole, "tiny", 2, *STATIC) == 0
    assert "graph: static" in capfd.readouterr().out
    told = tomllib.loads((whole / "config.toml").read_text())
    assert (told["executor"], told["graph"]) == ("fused", "static")
    # two rounds of six steps; the reports of each came by one read
    assert summary(whole)["host_reads_per_step"] == pytest.approx(1 / 6, abs=1e-3)
    events = [json.loads(line) for line in (whole / "events.jsonl").read_text().splitlines()]
    moves = [(event["round"], event["t"]) for event in events if event["kind"] == "stage_changed"]
    assert moves
    assert moves == sorted(moves)

    train_epoch = StaticExecutor.train_epoch

    def interrupted(self: StaticExecutor, t: int, slots: object) -> object:
        if (self.data.episode, t) == (1, 3):
            signal.raise_signal(signal.SIGINT)
        return train_epoch(self, t, slots)

    monkeypatch.setattr(StaticExecutor, "train_epoch", interrupted)
    assert train(path, "tiny", 2, *STATIC) == 130
    monkeypatch.undo()
    assert os.listdir(path / "checkpoints")
    assert resume(path) == 0
    assert summary(path)["state_digest"] == summary(whole)["state_digest"]
    found, expected = (records(run)["events.jsonl"] for run in (path, whole))
    for last in (found[-1], expected[-1]):
        del last["host_reads_per_step"]  # the interruption read the reports of its round by a read of its own
    assert found == expected
