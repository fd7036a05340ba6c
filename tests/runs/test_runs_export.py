"""esper export: the best host of a run as files; and an architecture that is trained again."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

import small_runs
from esper.export.network import load
from esper.runs.training.checkpoint import checkpoints
from hosts_to_export import ARCHITECTURES
from small_runs import contents, interrupted_at, main

ARCHITECTURE = ("--seed", "1", "--set", f"architecture={json.dumps(list(ARCHITECTURES[0].lines))}")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hosts with the same seeds from the first step, run by native code; nothing is learned but their weights."""
    path = tmp_path_factory.mktemp("export") / "run"
    assert small_runs.train(path, "tiny", 1, *ARCHITECTURE) == 0
    return path


@pytest.fixture(scope="module")
def printed(run: Path) -> str:
    """What was printed when the better host of `run` was exported into the folder beside it."""
    before = contents(run)
    with redirect_stdout(StringIO()) as out:
        assert main(["export", str(run), "--out", str(run.parent / "grown")]) == 0
    assert contents(run) == before
    return out.getvalue()


@pytest.fixture
def exported(run: Path, printed: str) -> Path:
    """The better host of `run` as files."""
    return run.parent / "grown"


def last_episode(run: Path) -> list[dict[str, float]]:
    """The results of each host in the last round."""
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "episode"][-2:]


@pytest.mark.slow
def test_the_best_host_of_a_run_is_written_with_what_was_measured(run, exported, printed, tmp_path):
    network, episode = load(exported), last_episode(run)
    best = int(np.argmax([line["objective"] for line in episode]))
    assert episode[1]["objective"] > episode[0]["objective"]
    assert network.description.val == pytest.approx(episode[best]["committed_accuracy"])
    assert network.description.architecture == ARCHITECTURES[0]
    assert "model.json, model.py, model.safetensors" in printed
    assert "grown: conv_light in r0c0 (ADD), attention in r0c1 (MULTIPLY), norm in r1c0 (GATE)" in printed
    assert "parameters: 375 of the host, 254 grown; 18,336 FLOPs per example" in printed
    assert f"accuracy: validation {network.description.val:.2f}, test {network.description.test:.2f}" in printed

    other = 1 - best
    assert main(["export", str(run), "--out", str(tmp_path / "other"), "--host", str(other)]) == 0
    assert load(tmp_path / "other").description.val == pytest.approx(episode[other]["committed_accuracy"])


@pytest.mark.slow
def test_a_folder_is_exported_again_in_another_format(run, tmp_path, capfd):
    assert main(["export", str(run), "--out", str(tmp_path / "a")]) == 0
    assert main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--format", "pt2"]) == 0
    first, second = contents(tmp_path / "a"), contents(tmp_path / "b")
    assert {name: second[name] for name in first} == first
    assert second.keys() - first.keys() == {"model.pt2"}
    assert main(["export", str(tmp_path / "a"), "--out", str(tmp_path / "c"), "--host", "1"]) == 2
    assert "holds one network; leave --host, --last and --live out" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_stopped_inside_a_round_gives_its_hosts_without_a_test_score_and_goes_on(run, tmp_path):
    path = tmp_path / "run"
    with interrupted_at(1, 3):
        assert small_runs.train(path, "tiny", 1, *ARCHITECTURE) == 130
    assert main(["export", str(path), "--out", str(tmp_path / "grown")]) == 0
    found = load(tmp_path / "grown").description
    assert (found.architecture, found.test) == (ARCHITECTURES[0], None)
    assert found.val is not None
    assert small_runs.resume(path) == 0
    assert small_runs.summary(path)["state_digest"] == small_runs.summary(run)["state_digest"]


def test_a_run_without_hosts_is_refused_with_the_way_out(run, tmp_path, capfd):
    path = tmp_path / "run"
    assert small_runs.train(path, "null", 1) == 0
    assert main(["export", str(path), "--out", str(tmp_path / "grown")]) == 2
    assert "'faulty_null' is scripted and has no networks" in capfd.readouterr().err
    assert main(["export", str(run), "--out", str(tmp_path / "grown"), "--host", "2"]) == 2
    assert "there is no host 2; choose one of 0 to 1" in capfd.readouterr().err
    with interrupted_at(2, 1):  # after the checkpoint of the first round
        assert small_runs.train(tmp_path / "between", "tiny", 2) == 130
    (newest, *_) = checkpoints(tmp_path / "between" / "checkpoints")
    newest.unlink()
    assert main(["export", str(tmp_path / "between"), "--last", "--out", str(tmp_path / "grown")]) == 2
    err = capfd.readouterr().err
    assert "has no checkpoint with hosts (the newest is after 1 round)" in err
    assert "complete it with esper train --resume" in err


def test_an_exported_architecture_is_trained_from_new_weights_with_the_same_seeds(run, exported, tmp_path, capfd):
    file, again = exported / "model.json", tmp_path / "again"
    options = ["--out", str(again), *small_runs.OPTIONS["tiny"], "--seed", "1", "--architecture", str(file)]
    assert main(["train", *options]) == 0
    assert small_runs.summary(again)["rounds"] == 1
    assert {line["ops"]["WAIT"] for line in last_episode(again)} == {6}
    assert {line["fossilized"] for line in last_episode(again)} == {3}
    assert "esper evaluate" not in capfd.readouterr().out
    # the same seed and the same seeds: it is the run that the file came from
    assert small_runs.summary(again)["final_test_accuracy_mean"] == small_runs.summary(run)["final_test_accuracy_mean"]
    assert main(["evaluate", str(again)]) == 2
    assert (
        "trained a fixed architecture and has no controller; its results are in summary.json" in capfd.readouterr().err
    )


def test_static_final_starts_with_an_architecture_of_its_own(exported, tmp_path, capfd):
    names = ["static_final", "--task", "tiny", "--episode-length", "3", "--num-envs", "1"]
    architecture = ["--architecture", str(exported / "model.json")]
    assert main(["evaluate", *names, *architecture, "--out", str(tmp_path / "out")]) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "out" / "evaluation.json").read_text())["controllers"]}
    assert rows["static_final"]["architectures"] == [ARCHITECTURES[0].tree()]
    assert rows["wait_only"]["fossilized"] == 0.0
    assert "static_final: each host has r0c0 conv_light ADD" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["r0c0 conv_light"], "'r0c0 conv_light' does not name a seed; write slot, blueprint and algorithm"),
        (["r9c9 conv_light ADD"], "has the slot 'r9c9', which this run does not have"),
        (["r0c0 conv_lihgt ADD"], "did you mean 'conv_light'"),
    ],
)
def test_an_architecture_that_does_not_fit_is_refused_before_the_run(tmp_path, capfd, lines, message):
    assert small_runs.train(tmp_path / "run", "tiny", 1, "--set", f"architecture={json.dumps(lines)}") == 2
    assert message in capfd.readouterr().err
    assert not (tmp_path / "run").exists()
