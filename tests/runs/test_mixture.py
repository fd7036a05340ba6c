"""One policy for several tasks: they take turns, and a training that was stopped ends as if it had not been."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import small_runs
import tiny
from esper.leyline.errors import CheckpointError
from esper.runs.assembly.clients import read_learned
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.state_file import read_state, write_state
from esper.runs.training.mixture import METRICS, POLICY, STATE, train_mixture
from esper.tasks.registry import register_task
from esper.telemetry.progress import RunConsole
from small_runs import contents, main

register_task(tiny.task(name="tiny_single", enabled=("r0c1",)))
TASKS = ("faulty_null", "faulty_null", "tiny_single")
SIZES = {"num_envs": 3, "episode_length": 6}
PPO = {"feature_width": 8, "hidden_width": 8, "update_epochs": 1, "num_minibatches": 2}


class Interrupting(RunConsole):
    """A user who presses Ctrl-C when a line begins with these words."""

    def __init__(self, words: str = "never") -> None:
        super().__init__(quiet=True)
        self.words = words

    def say(self, text: str) -> None:
        super().say(text)
        if text.startswith(self.words):
            signal.raise_signal(signal.SIGINT)


def configs(rounds: int = 4, every: int = 1, tasks: tuple[str, ...] = TASKS) -> list[RunConfig]:
    given = {**SIZES, "ppo": PPO, "rounds": rounds, "checkpoint_every": every}
    return [resolve(given | {"task": task}) for task in tasks]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture") / "whole"
    assert train_mixture(configs(), path, Interrupting()) == path / POLICY
    return path


def test_tasks_take_turns_and_every_round_trains_the_one_policy(undisturbed: Path) -> None:
    lines = [json.loads(line) for line in (undisturbed / METRICS).read_text().splitlines()]
    assert [(line["round"], line["task"]) for line in lines] == [
        (1, "faulty_null"), (2, "faulty_null"), (3, "tiny_single"), (4, "faulty_null")
    ]  # fmt: skip
    assert all(line["optimizer_steps"] > 0 for line in lines)
    about, state = read_state(undisturbed / STATE)
    policy = read_learned(undisturbed / POLICY)
    assert all(torch.equal(x, state[f"policy.{name}"]) for name, x in policy.items())
    assert state["policy.counters"].tolist() == [4, 4, 0]  # updates, those with a step of the optimizer, failed ones
    assert about["scales"] == [0, 1, 2]
    scales = [float(state[f"scale.{i}.returns.var"]) for i in range(3)]
    assert len(set(scales)) == 3  # that of the returns is the only thing that a task has for itself


@pytest.mark.slow
@pytest.mark.parametrize(("every", "stopped_after"), [(1, 2), (2, 3)])
def test_a_training_that_was_stopped_and_continued_ends_byte_for_byte_as_an_undisturbed_one(
    undisturbed: Path, tmp_path: Path, every: int, stopped_after: int
) -> None:
    path = tmp_path / "stopped"
    assert train_mixture(configs(every=every), path, Interrupting(f"round {stopped_after}/4")) is None
    assert contents(path).keys() == {STATE}
    assert train_mixture(configs(every=every), path, Interrupting()) == path / POLICY
    assert contents(path)[POLICY] == contents(undisturbed)[POLICY]
    assert contents(path)[METRICS] == contents(undisturbed)[METRICS]
    before = contents(path)
    assert train_mixture(configs(every=every), path, Interrupting()) == path / POLICY  # there is nothing left to do
    assert contents(path) == before


def test_a_folder_of_other_tasks_or_of_something_else_is_refused_and_left_as_it_is(
    undisturbed: Path, tmp_path: Path
) -> None:
    before = contents(undisturbed)
    for other in (configs(tasks=TASKS[::-1]), configs(rounds=5)):
        with pytest.raises(CheckpointError, match=r"was begun with other tasks or settings; give the same ones, or"):
            train_mixture(other, undisturbed, Interrupting())
    assert contents(undisturbed) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists and holds no training over several tasks; name another folder"):
        train_mixture(configs(), tmp_path, Interrupting())
    (tmp_path / STATE).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"mixture.safetensors cannot be read"):
        train_mixture(configs(), tmp_path, Interrupting())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"lines": None}, "lines is null; it must be a list"), ({"scales": ["x"]}, r'scales\[0\] is "x"'),
     ({"x": 1}, "unknown key x"), (None, "holds no JSON object")],
)  # fmt: skip
def test_a_state_that_makes_no_sense_is_refused(undisturbed: Path, tmp_path: Path, change: Any, message: str) -> None:
    about, state = read_state(undisturbed / STATE)
    write_state(tmp_path / STATE, about | change if change else [], state)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=message):
        train_mixture(configs(), tmp_path, Interrupting())


def test_the_command_line_trains_over_several_tasks_and_says_what_to_do_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-envs", "3", "--episode-length", "6", *small_runs.FAST]
    tasks = ["--task", "faulty_null", "--task", "faulty_null"]
    assert main(["train", "--rounds", "2", *tasks, *options]) == 2
    assert "several tasks train one policy: give --out, the folder to keep it in" in capfd.readouterr().err
    assert main(["train", "--rounds", "2", "--out", str(tmp_path / "mix"), *tasks, *options]) == 0
    out = capfd.readouterr().out
    policy = tmp_path / "mix" / POLICY
    assert "esper: 2 tasks, 2 rounds: faulty_null, faulty_null" in out
    assert f"done: {policy}; compare it: esper evaluate {policy} --task faulty_null" in out
    assert main(["evaluate", str(policy), "--task", "faulty_null", "--num-envs", "1", "--episode-length", "4"]) == 0


@pytest.mark.slow
def test_a_training_starts_from_a_policy_and_continues_without_its_file(undisturbed: Path, tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    start.write_bytes((undisturbed / POLICY).read_bytes())
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))

    def train(path: Path, words: str = "never") -> Path | None:
        given = {**SIZES, "rounds": 2, "policy": str(start)}
        return train_mixture([resolve(given | {"task": task}) for task in TASKS[:2]], path, Interrupting(words))

    assert train(whole)
    assert train(stopped, "round 1/2") is None
    start.unlink()
    assert train(stopped)
    assert contents(stopped)[POLICY] == contents(whole)[POLICY]
    assert read_learned(whole / POLICY)["network.norm.weight"].shape == (8,)
