"""Tasks in files: every command finds them, and runs no code that was not named."""

import os
import re
import signal
from pathlib import Path

import pytest
from own_tasks import SMALL

import esper
import small_runs
from esper.cli import main
from esper.runs.growth import Growth
from small_runs import contents

FILE = """
import torch
from torch import nn

import esper

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)).mean(dim=(2, 3)))

x = torch.randn(40, 1, 5, 5, generator=torch.Generator().manual_seed(0))
task = esper.Task(model=Small, slots=["body"], train=(x, (x.mean(dim=(1, 2, 3)) > 0).long()), batch=16, name="{name}",
                  episode_length=4, min_training_epochs=1)
other = 3
"""
FAST = ("--set", *(f"{name}={value}" for name, value in SMALL.items()))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a task of its own name, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(FILE.replace("{name}", re.sub(r"\W", "_", tmp_path.name)))
    return path


def test_a_task_of_a_file_is_trained_resumed_compared_grown_and_drawn(file, tmp_path, capfd):
    run, size = tmp_path / "run", ["--num-envs", "2", "--rounds", "1", *FAST]
    with small_runs.interrupted_at(1, 2):
        assert main(["train", "--task", "mine.py:task", "--out", str(run), *size]) == 130
    name = esper.load(run).config["task"]
    assert esper.load(run).config["plugins"] == [f"{file}:task"]
    assert capfd.readouterr().out.startswith(f"esper: {name}, 2 hosts x 4 steps x 1 round")

    before = contents(run)
    for words in (["train", "--resume"], ["evaluate"], ["grow", "mine.py:task", "--method"]):
        if words[0] != "grow":
            assert main([*words, str(run)]) == 2
            assert "names code that would be executed" in capfd.readouterr().err
    assert contents(run) == before
    assert main(["train", "--resume", str(run), "--plugins", "mine.py"]) == 0
    assert main(["evaluate", str(run), "wait_only", "--num-envs", "1", "--trust"]) == 0
    assert main(["tasks", "mine.py:task"]) == 0
    out = capfd.readouterr().out
    assert "host: Small, 50 parameters" in out  # 40 of the convolution, 10 of the head
    assert "● body   4 channels" in out

    assert main(["grow", "mine.py:task", "--method", str(run), "--best-of", "2", "--out", "grown", *FAST[:-2]]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"esper: grow {name} by {run}, 2 networks x 4 steps, seed 0\n")
    assert "step  slot" in out
    assert "\ngrown: model.json, model.py, model.safetensors, timeline.json\n" in out
    assert esper.load("grown", task="mine.py:task").timeline[-1].event == "end"
    assert main(["export", "grown", "--out", "again"]) == 2
    assert "give --task FILE.py:NAME, or load it without esper: load_model()" in capfd.readouterr().err
    assert main(["export", "grown", "--out", "again", "--task", "mine.py:task"]) == 0
    assert {"model.py", "model.safetensors"} < {path.name for path in Path("again").iterdir()}
    assert main(["export", str(run), "--out", "third", "--task", "mine.py:task"]) == 2
    assert "a run knows its task" in capfd.readouterr().err
    assert main(["grow", "mine.py:task", "--out", "grown"]) == 2
    assert "grown exists already" in capfd.readouterr().err


@pytest.mark.slow
def test_a_run_of_a_file_names_its_task_to_python_too(file, tmp_path):
    run = esper.train("mine.py:task", 1, 1, out="run", progress=False, **SMALL)
    assert run.evaluate("wait_only", num_envs=1, progress=False).rows[0].name == "trained"
    assert esper.grow("mine.py:task", run, progress=False).points is not None
    with pytest.raises(ValueError, match="then allow it with trust=True"):
        esper.evaluate("run")
    assert esper.load("run", trust=True).evaluate("wait_only", num_envs=1, progress=False).rows


def test_a_run_of_a_registered_task_grows_it_by_its_settings(shared_run, capfd):
    run = shared_run("tiny", 3)
    assert main(["grow", "tiny", "--method", str(run), "--seed", "3"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"esper: grow tiny by {run}, 1 network x 6 steps, seed 3\n")
    assert "parameters: 375 of the host, " in out
    assert main(["grow", "tinny"]) == 2
    assert "unknown task 'tinny'; did you mean 'tiny'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py:tsk", "'tsk' does not exist, expected an esper.Task; did you mean 'task'"),
        ("mine.py:other", "'other' is of type int, expected an esper.Task"),
        ("yours.py:task", "there is no file"),
    ],
)
def test_a_name_that_is_no_task_is_refused(file, name, said, capfd):
    for words in (["train", "--task", name], ["grow", name], ["tasks", name]):
        assert main(words) == 2
        assert said in capfd.readouterr().err


@pytest.mark.slow
def test_a_growth_is_shown_stopped_continued_and_written(file, capfd, monkeypatch):
    words = ["grow", "mine.py:task", "--out", "grown", "--beside", "plain", "--steps", "6", "--flops", "1e9"]
    words += ["--set", "executor=streamed"]
    assert main([*words, "--resume"]) == 2
    assert "there is no grown.unfinished, so nothing can be continued" in capfd.readouterr().err

    step = Growth.step

    def stopping(growth: Growth) -> None:
        step(growth)
        if growth.t == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Growth, "step", stopping)
        assert main(words) == 0
    out = capfd.readouterr().out
    assert "the best candidate so far is kept; continue it by the same command with --resume" in out
    assert "by plain" not in out
    assert Path("grown/model.py").is_file()
    assert main(words) == 2
    assert "exists already" in capfd.readouterr().err
    assert main([*words, "--overwrite"]) == 2
    assert (
        "grown.unfinished has the candidates of an earlier growth; continue it with --resume" in capfd.readouterr().err
    )

    assert main([*words, "--resume"]) == 0
    out = capfd.readouterr().out
    assert "continued after step 2 of 6" in out
    assert "\nthis network: " in out
    assert "\nplain: the network alone" in out
    assert Path("grown/growth.png").is_file()
    assert not Path("grown.unfinished").exists()


def test_what_cannot_be_written_is_refused_before_anything_is_trained(file, tmp_path, capfd):
    assert main(["grow", "mine.py:task", "--out", "mine.py/x"]) == 2
    assert "nothing can be written into mine.py" in capfd.readouterr().err
    os.mkfifo(tmp_path / "grown.unfinished")
    assert main(["grow", "mine.py:task", "--out", "grown", "--resume"]) == 2
    assert "grown.unfinished is not a file that a growth wrote" in capfd.readouterr().err
