"""A run by several ranks is the run of one: digest, steps and best host, also where a rank is stopped or killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from esper.cli import main
from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import state_digest
from esper.runs.assembly.assemble import assemble
from esper.runs.assembly.presets import resolve
from esper.runs.report import step_of_all
from esper.runs.state_file import read_state
from esper.telemetry.record.reader import open_record

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
NETWORK = ("ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=2", "ppo.num_minibatches=2")
NULL = ("--task", "null", "--num-envs", "5", "--episode-length", "8", "--rounds", "2", "--set", "blocks=4", *NETWORK)
DIGITS = ("--task", "digits", "--num-envs", "5", "--episode-length", "4", "--rounds", "2",
          "--set", "blocks=4", "lifecycle.min_training_epochs=1", *NETWORK)  # fmt: skip
PLUGIN = """
import os, time
from esper.simic.rewards import RewardConfig, make_reward, register_reward

class Slow:
    def __init__(self, inner):
        self.inner, self.steps = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, inputs, state):
        self.steps += 1
        if os.environ.get("RANK") == "1" and self.steps == 4:
            {does}
        time.sleep({pause})
        return self.inner.step(inputs, state)

@register_reward("slow", time_limit="truncate")
def build(config: RewardConfig):
    return Slow(make_reward("objective", config))
"""


def here(*arguments: str) -> None:
    """The same command without ranks, in this process."""
    assert main([*arguments]) == 0


def esper(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "esper", *arguments],
        capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=240,
    )  # fmt: skip


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A program in a session of its own, which is ended as a whole."""
    with subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> tuple[str, ...]:
    options = ("--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts))
    return ("torch.distributed.run", *options, "-m", "esper", "train", *arguments)


def result(run: Path) -> tuple[object, ...]:
    """Digest, last J, steps, events and best host."""
    summary = json.loads((run / "summary.json").read_text())
    with open_record([run]) as record:
        assert record.warnings == []
        steps = record.query("select * exclude (run) from steps order by round, t, host")
        slots = record.query("select * exclude (run) from slots order by round, t, host, slot")
        coalitions = record.query("select * exclude (run) from coalitions order by round, t, host, members")
    best = run / "checkpoints/best-host.safetensors"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = sorted(json.dumps(event) for event in events if event["host"] >= 0)
    told = tuple(map(str, (steps, slots, coalitions)))  # NaN equals itself
    return (summary["state_digest"], summary["final_objective_mean"], told, found,
            state_digest(read_state(best)[1]) if best.exists() else "")  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alone") / "run"
    here("train", *NULL, "--out", str(path))
    return path


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(alone, tmp_path):
    done = esper("train", *NULL, "--ranks", "2", "--out", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "ranks: 2, hosts of this one: 3" in done.stdout
    assert result(tmp_path / "run") == result(alone)
    assert not list((tmp_path / "run").rglob(".draft*"))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert all(line["bytes_reduced"] > 0 for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["streamed", "native"])
def test_networks_trained_by_any_number_of_ranks_are_the_same_to_the_bit(tmp_path, executor):
    here("train", *DIGITS, "--executor", executor, "--out", str(tmp_path / "1"))
    results = [result(tmp_path / "1")]
    for ranks in (2, 4):
        path = tmp_path / f"{ranks}"
        done = esper("train", *DIGITS, "--executor", executor, "--ranks", str(ranks), "--out", str(path))
        assert done.returncode == 0, done.stderr
        results.append(result(path))
    assert results[1] == results[0]
    assert results[2] == results[0]
    assert results[0][-1]


@pytest.mark.slow
def test_copies_of_a_host_may_be_on_other_ranks(tmp_path):
    paired = (*NULL, "ppo.group_size=2", "--num-envs", "6")
    here("train", *paired, "--out", str(tmp_path / "1"))
    assert esper("train", *paired, "--ranks", "3", "--out", str(tmp_path / "3")).returncode == 0
    assert result(tmp_path / "3") == result(tmp_path / "1")


def slow_run(folder: Path, pause: float = 0.05, does: str = "pass") -> tuple[str, ...]:
    plugin = folder / "slow.py"
    plugin.write_text(PLUGIN.format(pause=pause, does=does))
    return (*NULL, "rank_timeout=8", "--plugins", str(plugin), "--reward", "slow", "--out", str(folder / "run"))


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_in_one_step_and_another_number_of_ranks_continues(tmp_path):
    with running("esper", "train", *slow_run(tmp_path, pause=0.4), "--ranks", "2") as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1/2 step") for line in process.stdout)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    run = tmp_path / "run"
    (checkpoint,) = (run / "checkpoints").glob("round-00000-step-*.safetensors")
    assert len(list((run / "record").glob("steps-000001*.parquet"))) == 2
    done = esper("train", "--resume", str(run), "--trust", "--ranks", "3")
    assert done.returncode == 0, done.stderr
    assert f"continuing after 0 rounds and {int(checkpoint.stem[-4:])} steps" in done.stdout
    alone = esper(*("train", *slow_run(tmp_path, pause=0.0))[:-1], str(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    assert result(run) == result(tmp_path / "alone")


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_after_one_was_killed_and_the_run_continues(tmp_path):
    kills = 'if not os.path.exists("killed"): open("killed", "w").close(); os.kill(os.getpid(), 9)'
    plugin = slow_run(tmp_path, pause=0.0, does=kills.replace('"killed"', repr(str(tmp_path / "killed"))))
    with running(*torchrun(2, *plugin, restarts=1)) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert (tmp_path / "killed").exists()
    alone = esper(*("train", *plugin)[:-1], str(tmp_path / "alone"))
    assert alone.returncode == 0, alone.stderr
    assert result(tmp_path / "run") == result(tmp_path / "alone")


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ends_the_run_in_time(tmp_path):
    with running("esper", "train", *slow_run(tmp_path, pause=0.0, does="time.sleep(600)"), "--ranks", "2") as process:
        began = time.monotonic()
        _, err = process.communicate(timeout=100)
        took = time.monotonic() - began
    assert process.returncode == 2
    assert "rank 1" in err
    assert "did not reach the end of round 1 within 8 s" in err
    assert "the run is stopped before the first checkpoint; nothing was kept" in err
    assert "Traceback" not in err
    assert took < 90


@pytest.mark.slow
def test_ranks_whose_launcher_was_killed_end_with_a_sentence(tmp_path):
    with running("esper", "train", *slow_run(tmp_path, pause=0.3), "--ranks", "2") as process:
        assert process.stdout is not None
        assert any(line.startswith("round 1/2 step") for line in process.stdout)
        os.kill(process.pid, signal.SIGKILL)
        _, err = process.communicate(timeout=60)  # until the ranks have closed it
    assert "Traceback" not in err
    said = [line for line in err.splitlines() if line.startswith("esper: ")]
    assert said == [
        "esper: the launcher of the ranks ended, so they cannot go on; the run is stopped before the first checkpoint; "
        "nothing was kept"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("'--seed', rank", r"seed of rank 1.* is 1, that of rank 0 is 0; .*the same program, settings and data\."),
        ("'--out', 'run' + rank", r"the ranks have --out run0, run1; give all of them the same\."),
    ],
)
def test_ranks_with_other_settings_are_refused_in_one_paragraph(tmp_path, monkeypatch, option, said):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom esper.cli import main\nrank = os.environ['RANK']\n"
        f"sys.exit(main(['train', '--out', 'run', *sys.argv[1:], {option}]))\n"
    )
    with running("torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program), *NULL) as process:
        _, err = process.communicate(timeout=100)
    (line,) = [line for line in err.splitlines() if line.startswith("esper: ")]
    assert re.fullmatch(f"esper: {said}", line)
    assert list(tmp_path.iterdir()) == [program]


def test_work_of_one_process_is_not_done_by_each_rank(monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["report", "run"]) == 2
    assert capsys.readouterr().err == "esper: esper report works in one process; start it without torchrun.\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--ranks", "9"), "9 ranks cannot share 5 hosts in blocks = 4"),
        (("--ranks", "0"), "ranks is 0; at least 1 process is needed"),
        (("--task", "digits", "--ranks", "2"), "several tasks train one policy in one process"),
    ],
)
def test_a_number_of_ranks_that_does_not_fit_is_refused_before_any_is_started(tmp_path, capsys, more, said):
    assert main(["train", *NULL, *more, "--out", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("esper: ")
    assert said in line


@pytest.mark.slow
def test_ranks_share_the_hosts_of_a_comparison_and_the_passes_of_a_search(tmp_path, capsys):
    def table(*arguments: str) -> str:
        done = esper(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    compared = ("evaluate", "wait_only", "heuristic", "--task", "digits", "--num-envs", "5", "--episode-length", "4")
    here(*compared)
    assert table(*compared, "--ranks", "2") == capsys.readouterr().out
    searched = ("search", "null", "--budget", "20000", "--episode-length", "20", "--num-envs", "16")
    here(*searched, "--out", str(tmp_path / "1"))
    table(*searched, "--ranks", "2", "--out", str(tmp_path / "2"))
    one, two = ({f.name: f.read_bytes() for f in (tmp_path / ranks).iterdir()} for ranks in "12")
    assert one == two


def test_what_is_shown_of_a_step_is_of_the_hosts_of_all_ranks():
    def shown(mean: float, spread: float, t: int, **ops: int) -> dict[str, object]:
        return {"round": 1, "t": t, "objective_mean": mean, "objective_std": spread, "live_accuracy_mean": mean,
                "ops": ops, "slots": {}, "env_steps": 2 * t, "seconds": 1.0}  # fmt: skip

    late = {**shown(9.0, 0.0, 1), "round": 2}  # a rank that is in another round is not counted
    found = step_of_all([(2, shown(1.0, 2**0.5, 3, WAIT=6)), (2, shown(5.0, 2**0.5, 2, WAIT=3, PRUNE=1)), (1, late)])
    # hosts 0, 2 and 4, 6
    assert (found["objective_mean"], found["t"], found["env_steps"]) == (3.0, 3, 10)
    assert found["objective_std"] == pytest.approx((20 / 3) ** 0.5)
    assert found["ops"] == {"WAIT": 9, "PRUNE": 1}


def test_a_run_asks_for_a_gpu_of_each_rank_before_anything_else(monkeypatch):
    monkeypatch.setattr("esper.leyline.ranks.local_ranks", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="cannot share its 1 GPU"):
        assemble(resolve({"task": "null", "compile": "off"}), torch.device("cuda", 0))
