"""Commands as processes of their own, which remember nothing but what is on the disk."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from esper.cli import main

ESPER = (sys.executable, "-m", "esper")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
FRUGAL = """
from esper.simic.rewards import RewardConfig, make_reward, register_reward

@register_reward("frugal_of_a_file", time_limit="truncate", fossils_as_players=True)
def build(config: RewardConfig):
    return make_reward("sparse", RewardConfig(mode="sparse", param_penalty_weight=config.param_penalty_weight))
"""


def esper(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ESPER, *arguments], capture_output=True, text=True, check=False, env=ENVIRONMENT, cwd=cwd, timeout=240
    )


@pytest.mark.slow
def test_a_reward_of_a_plugin_is_found_again_by_every_later_command(tmp_path, monkeypatch, capfd):
    (tmp_path / "frugal.py").write_text(FRUGAL)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    small = ("--task", "null", "--num-envs", "2", "--episode-length", "4", "--rounds", "1")
    network = ("--set", "ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1")
    own = ("--plugins", "frugal.py", "--reward", "frugal_of_a_file", "--out", "run")
    monkeypatch.chdir(tmp_path)
    assert main(["train", *small, *network, *own]) == 0
    trained = capfd.readouterr()
    assert trained.err == ""
    assert "2 hosts x 4 steps x 1 round, reward frugal_of_a_file" in trained.out
    resumed = esper("train", "--resume", str(tmp_path / "run"), "--rounds", "2", "--trust", cwd=elsewhere)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "reward frugal_of_a_file" in resumed.stdout
    compared = esper("evaluate", str(tmp_path / "run"), "wait_only", "--num-envs", "2", "--trust", cwd=elsewhere)
    assert compared.returncode == 0
    assert "trained" in compared.stdout


MOSS = """
from torch import nn

from esper.kasmina.blueprints import AbstractBlueprint, register
from esper.leyline.lifecycle import HostFamily


class Moss(AbstractBlueprint):
    name = "moss"
    family = HostFamily.CNN
    init = {"weight": 0.0, "bias": 0.0}

    def build(self, channels):
        return nn.Conv2d(channels, channels, 1)


register(Moss())
"""


@pytest.mark.slow
def test_ctrl_c_on_all_processes_of_a_run_ends_it_and_it_goes_on_with_the_blueprint_of_a_plugin(tmp_path):
    (tmp_path / "moss.py").write_text(MOSS)
    small = (
        "--num-envs",
        "2",
        "--episode-length",
        "6",
        "--rounds",
        "200",
        "--ranks",
        "2",
        "--executor",
        "streamed",
        "--plugins",
        "moss.py",
    )
    network = ("--set", "ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1", "--out", "run")
    with subprocess.Popen(
        [*ESPER, "train", *small, *network], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, cwd=tmp_path, start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert any("ranks: 2, hosts of this one: 1" in line for line in lines)
        assert any(line.startswith("round 1/200  ") for line in lines)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130
    assert out.endswith("stopped; continue with: esper train --resume run --plugins moss.py\n")
    assert "Traceback" not in err
    done = len((tmp_path / "run/metrics.jsonl").read_text().splitlines())
    resumed = esper("train", "--resume", "run", "--rounds", str(done + 1), "--trust", cwd=tmp_path)
    assert (resumed.returncode, resumed.stderr) == (0, "")


@pytest.mark.parametrize(("steps", "noted"), [(14, True), (15, False)])
def test_a_round_that_is_too_short_for_a_permanent_seed_is_noted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], steps: int, noted: bool
) -> None:
    # born in 1, trained in 2 to 11, blended in 12 to 14, fossilized in 15
    small = ("--task", "null", "--num-envs", "1", "--rounds", "1", "--episode-length", str(steps))
    network = ("--set", "ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1")
    assert main(["train", *small, *network, "--out", str(tmp_path / "run")]) == 0
    said = capfd.readouterr().out
    assert ("note: no seed can be fossilized before step 15, but" in said) == noted
    assert ("note:" in said) == noted


@pytest.mark.parametrize("command", [["--help"], ["train", "--help"], ["evaluate", "--help"]])
def test_the_help_fits_into_eighty_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_help_whose_reader_has_left_ends_in_silence():
    with subprocess.Popen(
        [*ESPER, "train", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=120) == 0


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback():
    script = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, *_):
        if name == "tyro":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
runpy.run_module("esper", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", script, "tasks"], capture_output=True, check=False, env=ENVIRONMENT)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal_", "ignored"), [(signal.SIGHUP, False), (signal.SIGHUP, True), (signal.SIGTERM, False)]
)
def test_a_closed_terminal_stops_a_run_with_a_checkpoint_but_not_under_nohup(tmp_path, signal_, ignored):
    command = [*ESPER, "train", "--task", "null", "--rounds", "400", "--num-envs", "2", "--out", "run"]
    command += ["--set", "ppo.feature_width=8", "ppo.hidden_width=8"]

    def before() -> None:
        if ignored:
            signal.signal(signal_, signal.SIG_IGN)

    with subprocess.Popen(
        command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=before,
    ) as process:  # fmt: skip
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal_)
        if ignored:
            rounds = metrics.stat().st_size
            while metrics.stat().st_size == rounds:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped; continue with: esper train --resume run" in said
    assert list((tmp_path / "run" / "checkpoints").glob("round-*"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", [pytest.param(("--help",), marks=pytest.mark.slow), ("tasks",)])
def test_a_full_disk_behind_the_output_is_said_in_a_sentence(command):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*ESPER, *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT
        )
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert process.stderr.startswith("esper: the output cannot be written (No space left on device)")


def test_output_that_was_closed_is_said_and_errors_that_were_closed_are_not():
    for closed, code in ((">&-", 2), ("2>&-", 0)):
        shell = f"{shlex.join([*ESPER, 'tasks'])} {closed}"
        process = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert process.returncode == code
    assert process.stdout.startswith("task ")


def test_commands_do_not_wait_for_the_compiler():
    script = "import sys; from esper.cli import main; main(['tasks']); print('torch._dynamo' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.endswith("\nFalse\n")
