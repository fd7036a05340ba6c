"""What a controller looks at: measured once for a checkpoint, kept with the run, or refused with the reason."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import small_runs
from esper.leyline.errors import ConfigError, RunDirectoryError
from esper.runs.evaluation import importance
from esper.runs.evaluation.importance import importance_of


@pytest.fixture
def run(finished_run: Callable[..., Path]) -> Path:
    return finished_run("null", 1)


def test_it_is_measured_on_new_hosts_and_kept_until_the_controller_changes(run, monkeypatch):
    steps = []
    found = importance_of(run, hosts=4, on_step=lambda done, total: steps.append((done, total)))
    assert steps == [(t, 8) for t in range(9)]
    assert (found["controller"], found["hosts"], found["seed"], found["others"]) == ("after 1 round", 4, 1_000_000, 3)
    assert 0 < found["decisions"] <= 4 * 8
    rows = {row["group"]: row for row in found["groups"]}
    assert rows["everything"]["kl"] > 0.0
    assert rows["everything"]["kl_half"] > 0.0
    assert json.loads((run / "importance.json").read_text()) == found

    def play(*args, **options):
        raise AssertionError("it is played again")

    with monkeypatch.context() as patch:
        patch.setattr(importance, "engine_of", play)
        assert importance_of(run) == found  # 4 hosts are as good as 16
        with pytest.raises(AssertionError, match="played again"):
            importance_of(run, hosts=5)
        (run / "importance.json").write_text("{")
        with pytest.raises(AssertionError, match="played again"):
            importance_of(run)
    assert small_runs.resume(run, "--rounds", "2") == 0
    assert importance_of(run)["controller"] == "after 2 rounds"


def test_the_same_controller_has_the_same_importance(run):
    first = importance_of(run, hosts=3)
    (run / "importance.json").unlink()
    assert importance_of(run, hosts=3) == first


def test_without_a_checkpoint_it_says_so(run):
    for file in sorted((run / "checkpoints").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    with pytest.raises(RunDirectoryError, match="has records but no checkpoint to continue from; restore its"):
        importance_of(run)


def test_what_takes_longer_than_a_minute_must_be_asked_for(run, monkeypatch):
    monkeypatch.setattr(importance, "LONGEST", 0.0)
    with pytest.raises(ConfigError, match="ask for it with --num-envs 16"):
        importance_of(run)
    assert importance_of(run, hosts=2)["hosts"] == 2
