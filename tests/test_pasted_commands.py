"""What is printed is pasted into the shell it was printed in, and Ctrl-C, in processes of their own."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import small_runs
from esper.cli import main
from esper.leyline.errors import command, option, read_in_a_shell

ESPER = (sys.executable, "-m", "esper")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
MINE = """
import torch
from torch import nn
import esper

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x).relu())

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
task = esper.Task(model=Small, slots=["body"], train=(x, (x[:, 0] > 0).long()), batch=16, episode_length=STEPS,
                  min_training_epochs=1, name="pasted")
"""
SMALL = ("--set", "ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1")


def pasted(line: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What the shell makes of the command in a printed line."""
    words = shlex.split(line[line.index("esper ") :])
    return subprocess.run(
        [*ESPER, *words[1:]], capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=cwd, timeout=240
    )


def program(folder: Path, text: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(text)
    return subprocess.Popen(
        [sys.executable, "program.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT,
        cwd=folder,
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose name must be quoted, with a task in a file."""
    place = tmp_path / "my work"
    place.mkdir()
    (place / "mine.py").write_text(MINE.replace("STEPS", "4"))
    return place


@pytest.mark.slow
def test_the_commands_printed_after_a_run_of_a_file_work_when_they_are_pasted(folder: Path) -> None:
    trained = subprocess.run(
        [*ESPER, "train", "--task", "mine.py:task", "--num-envs", "2", "--rounds", "1", "--out", "a run", *SMALL],
        capture_output=True, text=True, check=True, env=ENVIRONMENT, cwd=folder, timeout=240,
    )  # fmt: skip
    line = next(line for line in trained.stdout.splitlines() if line.startswith("compare with baselines: "))
    assert line == "compare with baselines: esper evaluate 'a run' --plugins mine.py:task"
    compared = pasted(f"{line} --num-envs 2", folder)
    assert compared.returncode == 0, compared.stderr
    assert "static_final" in compared.stdout
    again = subprocess.run(
        [*ESPER, "train", "--resume", "a run", "--trust"], capture_output=True, text=True, check=False,
        env=ENVIRONMENT, cwd=folder, timeout=240,
    )  # fmt: skip
    assert again.returncode == 2
    longer = pasted(again.stderr.strip().removesuffix(".").replace("esper: ", "", 1), folder)
    assert longer.returncode == 0, longer.stderr
    assert "round 2/11" in longer.stdout


def test_a_command_is_quoted_and_names_its_plugins_as_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    plugins = (f"{folder}/mine.py:task", "/elsewhere/it's.py")
    assert command("evaluate", Path("a run"), plugins=plugins) == (
        "esper evaluate 'a run' --plugins mine.py:task '/elsewhere/it'\"'\"'s.py'"
    )
    assert (option("data_dir"), option("rounds", 3), option("overwrite", True)) == (
        "data_dir",
        "rounds=3",
        "overwrite=True",
    )
    with read_in_a_shell():
        assert option("data_dir") == "--data-dir"
        assert (option("rounds", 3), option("overwrite", True)) == ("--rounds 3", "--overwrite")
    assert option("data_dir") == "data_dir"


def test_names_may_follow_options(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for words in (
        ["random", "--json", "heuristic", "--num-envs", "1", "--task", "null", "--trust", "wait_only"],
        ["--trust", "random", "--num-envs=1", "heuristic", "--task", "null", "wait_only", "--json"],
    ):
        assert main(["evaluate", *words, "--episode-length", "3"]) == 0
        shown = capfd.readouterr().out
        assert all(name in shown for name in ("random", "heuristic", "wait_only"))


def test_the_version_and_where_help_is_found(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == "esper 0.1.0\n"
    with pytest.raises(SystemExit):
        main(["train", "--roundz", "3"])
    assert "esper train --help" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert "learn" in capfd.readouterr().out


LONG = """
import esper
from mine import task

if __name__ == "__main__":
    CALL
"""
GROW = """grown = esper.grow(task, "heuristic", best_of=2, executor="streamed")
    print("params", grown.num_params, grown.points is not None, grown.timeline[-1].step)
    grown.save("grown")"""
TRAIN = 'esper.train(task, 3, 2, out="run", executor="streamed", ppo={"hidden_width": 8})'


def interrupted(folder: Path, call: str, waiting: str) -> tuple[int, str, str]:
    """A program with one call and a long episode, stopped after the line that begins with `waiting`."""
    (folder / "mine.py").write_text(MINE.replace("STEPS", "4000"))
    with program(folder, LONG.replace("CALL", call)) as process:
        assert process.stdout is not None
        begun = []
        for line in iter(process.stdout.readline, ""):
            begun.append(line)
            if line.startswith(waiting):
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    return process.returncode, "".join(begun) + out, err


@pytest.mark.slow
def test_ctrl_c_keeps_what_has_grown(folder: Path) -> None:
    code, out, err = interrupted(folder, GROW, "round 1/1 step")
    assert code == 0, err
    assert "Traceback" not in err
    assert "of 4000; what grew until then is kept" in out
    assert "\nparams " in out
    assert (folder / "grown/model.py").is_file()


@pytest.mark.slow
def test_ctrl_c_in_train_says_once_how_the_run_goes_on(folder: Path) -> None:
    code, out, err = interrupted(folder, TRAIN, "round 1/3 step")
    assert code == 1
    assert "Traceback" not in err
    assert err.endswith("stopped; continue with: esper.load('run', task=task).resume()\n")
    assert "continue" not in out


def test_a_run_without_a_checkpoint_is_not_called_continued(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    twice = small_runs.interrupted_at(1, 3, signal.SIGINT, signal.SIGINT)
    with twice:
        assert small_runs.train(tmp_path / "run", "null", 2) == 130
    shown = capfd.readouterr()
    assert shown.out.endswith("stopped before the first checkpoint; nothing was kept\n")
    assert "continue" not in shown.out + shown.err
    with small_runs.interrupted_at(2, 3, signal.SIGINT, signal.SIGINT):  # one round is kept
        assert small_runs.train(tmp_path / "kept", "null", 2) == 130
    shown = capfd.readouterr()
    assert shown.out.endswith(f"stopped; continue with: esper train --resume {tmp_path / 'kept'}\n")
    assert shown.out.count("continue") == 1
