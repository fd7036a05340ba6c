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


@pytest.mark.parametrize(("steps", "noted"), [pytest.param(14, True, marks=pytest.mark.slow), (15, False)])
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
    assert main(["evaluate", "random", *small[:4], *small[6:]]) == 0
    assert capfd.readouterr().err.count("note: no seed can be fossilized before step 15, but") == noted


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


LONGER = [pytest.param(command, marks=pytest.mark.slow) for command in ("--help", "tasks")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", ["--version", *LONGER])
def test_a_full_disk_behind_the_output_is_said_in_a_sentence(command):
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*ESPER, command], stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=ENVIRONMENT
        )
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert process.stderr.startswith("esper: the output cannot be written (No space left on device)")


def test_output_that_was_closed_is_said_and_errors_that_were_closed_are_not():
    for closed, code in ((">&-", 2), ("2>&-", 0)):
        shell = f"{shlex.join([*ESPER, '--version'])} {closed}"
        process = subprocess.run(shell, shell=True, capture_output=True, text=True, check=False, env=ENVIRONMENT)
        assert process.returncode == code
    assert process.stdout.startswith("esper ")
