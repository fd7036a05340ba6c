"""A run: complete, interrupted, continued. A continued run is compared with one that was never interrupted."""

import json
import shutil
import signal
import tomllib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from esper.leyline.errors import CheckpointError
from esper.runs.assembly.assemble import assemble, device_of
from esper.runs.training import runner as runner_module
from esper.runs.training.checkpoint import checkpoints, load
from small_runs import contents, interrupted_at, records, resume, summary, train


@pytest.fixture(scope="module")
def whole(shared_run: Callable[..., Path]) -> dict[str, Path]:
    """Uninterrupted runs of three rounds by kind."""
    return {kind: shared_run(kind, 3) for kind in ("null", "tiny")}


def assert_same_run(found: Path, expected: Path) -> None:
    assert records(found) == records(expected)
    assert summary(found) == summary(expected)
    trends = [load(checkpoints(path / "checkpoints")[0]).header.trend for path in (found, expected)]
    assert trends[0] == trends[1]  # what the best policy will be judged by


def test_a_run_leaves_its_configuration_records_summary_and_checkpoints(whole):
    assert {path.name for path in whole["null"].iterdir()} == {
        *("about.json", "config.toml", "metrics.jsonl", "events.jsonl", "record", "checkpoints"),
        *("summary.json", "evaluation_after_training.json"),
    }
    kept = [path.stem for path in checkpoints(whole["null"] / "checkpoints")]
    assert kept == ["round-00003", "round-00002", "round-00001"]
    assert [line["round"] for line in records(whole["null"])["metrics.jsonl"]] == [1, 2, 3]


def test_the_small_runs_are_worth_comparing(whole):
    """Seeds are born, blended, lost and kept, and a host is rolled back: a resume has all of it to restore."""
    events = [event for kind in ("null", "tiny") for event in records(whole[kind])["events.jsonl"]]
    assert {"TRAINING", "BLENDING", "PRUNED"} <= {event["to"] for event in events if event["kind"] == "stage_changed"}
    assert any(event["kind"] == "rollback" for event in events)


def test_a_summary_says_what_the_run_came_to(whole):
    found = json.loads((whole["tiny"] / "summary.json").read_text())
    expected = {"env_steps": 36, "host_reads_per_step": 1.0, "rounds": 3, "task": "tiny", "reward": "objective"}
    assert {name: found[name] for name in expected} == expected
    assert found["dropped_records"] == 0
    assert found["env_steps_per_second"] == pytest.approx(36 / (found["rollout_seconds"] + found["update_seconds"]))
    assert found["state_digest"] != json.loads((whole["null"] / "summary.json").read_text())["state_digest"]


SLOW = pytest.mark.slow
INTERRUPTED = [
    ("tiny", [(2, 3)]),
    ("null", [(2, 8)]),  # the last step of a round: it ends after the update
    pytest.param("null", [(2, 3)], marks=SLOW),
    pytest.param("tiny", [(1, 1), (1, 4), (2, 5), (3, 1)], marks=SLOW),
]


@pytest.mark.parametrize(("kind", "steps"), INTERRUPTED)
def test_a_run_that_was_interrupted_continues_as_if_it_had_not_been(whole, tmp_path, kind, steps):
    path = tmp_path / "run"
    with ExitStack() as stack:
        for step in steps:
            stack.enter_context(interrupted_at(*step))
        assert [train(path, kind), *(resume(path) for _ in steps[1:])] == [130] * len(steps)
        assert not (path / "summary.json").exists()
        assert resume(path) == 0
    assert_same_run(path, whole[kind])


def test_a_second_signal_ends_a_run_at_once_and_the_last_checkpoint_remains(whole, tmp_path, capfd):
    path = tmp_path / "run"
    with interrupted_at(2, 3, signal.SIGINT, signal.SIGINT):
        assert train(path) == 130
    out, err = capfd.readouterr()
    assert "again to stop at once" in err
    assert "stopped; continue with: esper train --resume" in out
    assert [found.stem for found in checkpoints(path / "checkpoints")] == ["round-00001"]
    assert resume(path) == 0
    assert_same_run(path, whole["null"])


def damaged(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_used(whole, tmp_path, capfd):
    path = tmp_path / "run"
    with interrupted_at(3, 5):
        assert train(path) == 130
    damaged(checkpoints(path / "checkpoints")[0])
    with interrupted_at(3, 1):
        assert resume(path) == 130
    out, err = capfd.readouterr()
    assert "round-00002-step-0006.safetensors does not match its checksum" in err
    assert "Using round-00002.safetensors instead" in err
    assert "continuing after 2 rounds (of 3)\n" in out
    assert max(event["t"] for event in records(path)["events.jsonl"] if event["round"] == 3) <= 2  # the rest was cut
    assert checkpoints(path / "checkpoints")[0].stem == "round-00002-step-0002"
    assert resume(path) == 0
    assert "checksum" not in capfd.readouterr().err
    assert_same_run(path, whole["null"])


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_anew(whole, tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    for name in ("about.json", "config.toml"):
        shutil.copy(whole["null"] / name, path)
    (path / "events.jsonl").write_text('{"kind": "half a li')
    (path / "checkpoints" / ".draft-round-00001").mkdir(parents=True)
    assert resume(path) == 0
    assert_same_run(path, whole["null"])
    assert not list((path / "checkpoints").glob(".draft*"))


def test_a_run_that_was_killed_between_its_last_checkpoint_and_its_summary_gets_it(whole, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(whole["tiny"], path)
    (path / "summary.json").unlink()
    assert resume(path) == 0
    assert_same_run(path, whole["tiny"])


def test_a_complete_run_has_nothing_to_resume(whole, capfd):
    before = contents(whole["null"])
    assert resume(whole["null"]) == 2
    assert resume(whole["null"], "--rounds", "2") == 2
    assert "has completed 3 rounds and rounds is 3" in capfd.readouterr().err
    assert contents(whole["null"]) == before


def test_a_checkpoint_of_another_run_is_refused(whole, tmp_path, capfd):
    path = tmp_path / "run"
    assert train(path, "null", 1, "--num-envs", "4") == 0
    for checkpoint in checkpoints(whole["null"] / "checkpoints"):
        shutil.copy(checkpoint, path / "checkpoints")
    before = contents(path)
    assert resume(path, "--rounds", "9") == 2
    assert "num_envs is 4" in capfd.readouterr().err
    assert contents(path) == before


def test_state_of_another_shape_under_a_fitting_header_is_refused(whole):
    from esper.runs.assembly.presets import config_of_run

    config = config_of_run(whole["null"], {"num_envs": 4})
    parts = assemble(config, device_of(config))
    checkpoint = load(checkpoints(whole["null"] / "checkpoints")[0])
    with pytest.raises(CheckpointError, match="num_envs = 3, but this run has 4"):
        runner_module.restore(parts, checkpoint)
    with pytest.raises(CheckpointError):
        runner_module.restore(replace(parts, shape=checkpoint.header.shape), checkpoint)


def test_settings_that_were_changed_in_the_run_directory_are_refused(whole, tmp_path, capfd):
    path = tmp_path / "run"
    shutil.copytree(whole["null"], path)
    config = path / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.0005", "lr = 0.5"))
    assert resume(path, "--rounds", "4") == 2
    assert "ppo.lr is 0.5 in config.toml, but the run was made with 0.0005" in capfd.readouterr().err


def test_a_run_whose_checkpoints_are_missing_or_lie_elsewhere_is_refused_and_left_as_it_is(whole, tmp_path, capfd):
    path = tmp_path / "run"
    shutil.copytree(whole["null"], path)
    shutil.move(path / "checkpoints", tmp_path / "aside")
    before = contents(tmp_path)
    for more in ((), ("--rounds", "9")):
        assert resume(path, *more) == 2
        assert "has records but no checkpoint to continue from; restore its checkpoints" in capfd.readouterr().err
    (path / "checkpoints").symlink_to(tmp_path / "aside")
    assert resume(path, "--rounds", "9") == 2
    assert "checkpoints is not a folder and cannot be resumed" in capfd.readouterr().err
    (path / "checkpoints").unlink()
    assert contents(tmp_path) == before


def executor_of(run: Path) -> str:
    found: str = tomllib.loads((run / "config.toml").read_text())["executor"]
    return found


def test_a_run_records_the_executor_that_was_taken_and_goes_on_with_it(whole, tmp_path, capfd, monkeypatch):
    assert tomllib.loads((whole["null"] / "config.toml").read_text())["compile"] == "off", "on a CPU"
    assert executor_of(whole["null"]) == "auto"  # no networks, nothing to choose
    assert executor_of(whole["tiny"]) == "native"
    with interrupted_at(2, 3):
        assert train(tmp_path / "run", "tiny") == 130
    assert "executor: native (C++ compiled for this CPU)" in capfd.readouterr().out
    monkeypatch.setattr("esper.tolaria.executors.choice._NATIVE_INTENSITY", 0.0)  # a later version has another rule
    assert resume(tmp_path / "run") == 0
    said = capfd.readouterr().out
    assert "executor: native" in said
    assert "compiled for this CPU" not in said
    assert_same_run(tmp_path / "run", whole["tiny"])
