"""The command line from end to end: what it does, what it refuses, and how it ends when it is told to."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import small_runs
from esper.cli import COMMANDS, main
from esper.runs.training.runner import why_chosen
from small_runs import contents, records, summary

ESPER = (sys.executable, "-m", "esper")
LONG = ("train", "--task", "null", "--num-envs", "3", "--episode-length", "20", "--rounds", "400", "--seed", "5")
LONG = (*LONG, "--set", "ppo.feature_width=8", "ppo.hidden_width=8", "ppo.update_epochs=1")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}
PATIENCE = 120.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_digits_from_the_first_round_to_the_comparison(folder, capfd):
    size = ["--num-envs", "2", "--episode-length", "3", "--rounds", "2"]
    assert main(["train", *size, "--seed", "3"]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    lines = [line for line in out.splitlines() if not re.match(r"round \d/2 step ", line)]  # on a slow machine
    first, note, memory, cost, second, third, *rounds, done, best, way_on = lines
    assert first == "esper: digits, 2 hosts x 3 steps x 2 rounds, reward objective, seed 3"
    assert note.startswith("note: no seed can be fossilized before step 8, but an episode ends with step 3;")
    assert re.fullmatch(r"memory: about \d+\.\d\d GiB of \d+\.\d\d GiB, \d+\.\d MiB for each host", memory)
    # ceil(1078 / 128) batches
    assert re.fullmatch(
        r"cost: 4 trainings of 3 steps with \d+ batches each, about \d+:\d\d by a trial of one network", cost
    )
    assert second == "run directory: runs/digits-quickstart-s3, device: cpu"
    assert re.fullmatch(r"executor: native \(C\+\+ compiled for this CPU\)(, 2 threads)?", third)
    assert [line.split("  ")[0] for line in rounds] == ["round 1/2", "round 2/2"]
    number = r"\d+\.\d\d"
    kept = f"committed validation {number}, committed test {number}; growth {number}x; 2 hosts; "
    assert re.match(f"done: 100·J {number} ± {number}; {kept}", done)
    assert re.match(f"best host of all rounds: host [01] of round [12], 100·J {number}; validation {number}", best)
    assert way_on == "compare with baselines: esper evaluate runs/digits-quickstart-s3"
    run = folder / "runs" / "digits-quickstart-s3"
    assert tomllib.loads((run / "config.toml").read_text())["seed"] == 3
    found = json.loads((run / "summary.json").read_text())
    expected = {
        *("task", "preset", "seed", "rounds", "num_envs", "episode_length", "env_steps", "env_steps_per_second"),
        *("final_objective_mean", "final_committed_accuracy_mean", "final_test_accuracy_mean", "growth_ratio_mean"),
        *("host_reads_per_step", "state_digest", "torch", "python", "device"),
    }
    assert expected <= found.keys()
    assert found["host_reads_per_step"] == 1.0
    assert main(["evaluate", str(run), "wait_only", "--num-envs", "2"]) == 0
    out, err = capfd.readouterr()
    assert "2 hosts of seed 1000003" in out
    assert re.search(r"memory: about \d+\.\d\d GiB of \d+\.\d\d GiB", err)
    assert "cost: 4 trainings of 3 steps with" in err  # two controllers, each on two hosts


def test_a_run_without_a_name_gets_the_next_one_that_is_free(folder):
    size = ["--task", "null", "--num-envs", "1", "--episode-length", "1", "--rounds", "1"]
    for _ in range(3):
        assert main(["train", *size]) == 0
    names = sorted(path.name for path in (folder / "runs").iterdir())
    assert names == ["null-quickstart-s0", "null-quickstart-s0-2", "null-quickstart-s0-3"]


def test_values_come_from_file_and_options(folder):
    (folder / "mine.toml").write_text(
        'task = "null"\nepisode_length = 3\nnum_envs = 2\nrounds = 9\n[ppo]\nupdate_epochs = 1\n'
    )
    options = ["--rounds", "1", "--set", "ppo.lr=1e-3", "device=cpu", "--set", "lifecycle.sequential=false"]
    assert main(["train", "--config", "mine.toml", *options, "--reward", "sparse", "--out", "run"]) == 0
    config = tomllib.loads((folder / "run" / "config.toml").read_text())
    assert (config["episode_length"], config["num_envs"], config["rounds"]) == (3, 2, 1)
    assert (config["ppo"]["lr"], config["ppo"]["update_epochs"], config["lifecycle"]["sequential"]) == (1e-3, 1, False)
    assert (config["device"], config["reward"]["mode"]) == ("cpu", "sparse")


def test_tasks_are_listed_with_those_of_plugins_and_where_their_data_are(folder, capfd, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    (folder / "more.py").write_text(
        "import tiny\nfrom esper.tasks import register_task\nregister_task(tiny.task(name='task_to_be_listed'))\n"
    )
    (folder / "tinyshakespeare.txt").write_text("To be")
    assert main(["tasks", "--plugins", "more.py", "--data-dir", str(folder)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in lines if line}
    assert rows["digits"] == "CNN 48-96, 1x1, unshuffle 2 6,058 3 ready"
    assert rows["cifar_scale"] == "CNN 8-16-32-64-128, 3x3 99,922 5/10 missing"
    assert rows["tinyshakespeare"] == "transformer 4x128 842,496 4 found"
    assert rows["null"] == "none 3/16 none"
    assert rows["task_to_be_listed"] == "CNN 4-8, 3x3 375 3 ready"
    text = "".join("".join(lines).split())  # long lines are wrapped
    assert f"tinyshakespeare:foundin{folder}" in text
    assert "cifar10:missing;expecteddata_batch_1," in text
    assert main(["tasks"]) == 0
    assert "data folder: none; name one with --data-dir" in capfd.readouterr().out


def test_one_task_is_drawn(capfd, monkeypatch):
    monkeypatch.delenv("ESPER_DATA", raising=False)
    assert main(["tasks", "cifar_baseline"]) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for line in (
        "host: CNN 8-16-32, 3x3, 6,418 parameters",
        "training: 150 steps of all batches of 512, sgd, learning rate 0.01; measured by",
        "  ● r0c1   16 channels",
        "  ○ r1c2   32 channels",
    ):
        assert line in out


def test_the_comparison_can_be_piped_as_json(folder, capfd):
    arguments = ["evaluate", "heuristic", "--task", "null", "--num-envs", "2", "--episode-length", "5", "--json"]
    assert main(arguments) == 0
    found = json.loads(capfd.readouterr().out)
    assert {row["name"] for row in found["controllers"]} == {"heuristic", "wait_only"}
    assert found["seed"] == 1_000_000
    assert list(folder.iterdir()) == []


# -- what is refused --------------------------------------------------------------------------------------------------

NULL = "train --task null "
REFUSED = [
    (NULL + "--set nonsense", "is not an assignment; write --set NAME=VALUE"),
    (NULL + "--set ppo.lr=1 ppo.lr.x=3", "lr is a value, not a table"),
    (NULL + "--set rounds=5 --rounds 1", "rounds is given as 1 and as 5; leave one of them out"),
    (NULL + "--reward shaped --set reward.mode=objective", "reward.mode is given as 'shaped' and as 'objective'"),
    (NULL + "--rounds ten", "found 'ten' where a whole number, as in --rounds 12, is expected"),
    ("grow digits --minutes 1,5", "found '1,5' where a number, as in --minutes 2.5, is expected"),
    ("grow digits --flops 3x", "found '3x' where a number, as in --flops 2.5, is expected"),
    ("grow digits --max-params=3x", "found '3x' where a whole number, as in --max-params 12, is expected"),
    ("evaluate random --num-envs 1.5", "found '1.5' where a whole number, as in --num-envs 12, is expected"),
    ("train --task none.py:", "unknown task 'none.py:'; a task in a file is named FILE.py:NAME"),
    (NULL + "--device cuda:99", "use device 'cpu' or 'auto'"),
    (NULL + "--config ten.toml", 'rounds is "ten"; it must be a whole number'),
    (NULL + "--out folder", "exists already"),
    (NULL + "--out ten.toml", "exists already"),
    (NULL + "--out ten.toml/run", "cannot be created (Not a directory)"),
    (NULL + "--plugins nowhere.py", "there is no file"),
    ("train --task fashion_mnist", "data_dir"),
    ("train --task fashion_mnist --data-dir nowhere", "there is no such folder"),
    ("train --task fashion_mnist --data-dir data", "expected an idx file"),
    ("train --resume nowhere", "it does not exist"),
    ("train --resume folder", "it has no config.toml"),
    ("train --resume ten.toml", "it is not a folder"),
    ("evaluate", "no controller given; name a run directory"),
    ("evaluate nowhere", "neither a run directory nor a baseline"),
    ("evaluate folder", "it has no config.toml"),
    ("evaluate random --task null --out ten.toml", "cannot be used"),
    ("evaluate folder heuristc", "heuristc is neither a run directory nor a baseline; did you mean 'heuristic'?"),
    ("evaluate random --task null --best", "--best needs a run directory; name one, or leave it out"),
    ("tasks digit", "did you mean 'digits'?"),
    ("search --task digit", "unknown task 'digit'; did you mean 'digits'?"),
    ("grow --steps 3 --task=digit", "unknown task 'digit'; did you mean 'digits'?"),
    (
        "evaluate wait_only none.json --task null",
        "the policy file none.json cannot be read (No such file or directory)",
    ),
    (NULL + "--policy folder", "folder is a folder; name a file, such as a checkpoint of a run"),
    ("grwo digits", "unknown command 'grwo'; did you mean 'grow'?"),
]


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that can be got wrong."""
    folder = tmp_path_factory.mktemp("crowded")
    (folder / "folder").mkdir()
    (folder / "ten.toml").write_text('rounds = "ten"\n')
    (folder / "data").mkdir()
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / "data" / f"{name}-ubyte").write_bytes(b"\0\0\x08\x03abc")
    return folder


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_bad_input_is_refused_in_one_paragraph_and_changes_nothing(crowded, monkeypatch, capfd, arguments, said):
    monkeypatch.chdir(crowded)
    monkeypatch.delenv("ESPER_DATA", raising=False)
    before = contents(crowded)
    assert main(arguments.split()) == 2
    err = capfd.readouterr().err
    assert said in err
    assert err.startswith("esper: ")
    assert err.count("\n") == 1
    assert contents(crowded) == before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "train, evaluate, grow, export, search, query, report,"),
        ("--bogus", "Unrecognized options: --bogus"),
        ("train --roundz 3", "--rounds"),
        ("grow digits --max-param 5", "--max-params"),
        ("train --rounds", "--rounds"),
    ],
)
def test_options_that_do_not_exist_or_fit_are_refused(folder, capfd, arguments, said):
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert said in err
    assert "Traceback" not in err
    assert list(folder.iterdir()) == []


def test_what_cannot_be_changed_by_a_resume_is_refused(folder, capfd):
    assert small_runs.train(folder / "run", "null", 1) == 0
    before = contents(folder)
    for option in (["--seed", "3"], ["--out", "other"], ["--config", "x.toml"], ["--set", "ppo.lr=0.1"]):
        assert small_runs.resume(folder / "run", *option) == 2
        assert "cannot be changed when a run is resumed" in capfd.readouterr().err
    assert main(["evaluate", "run", "--preset", "small"]) == 2
    assert "preset cannot be changed for an existing run" in capfd.readouterr().err
    assert contents(folder) == before


def test_the_existing_run_of_that_name_is_not_touched(folder, capfd):
    assert small_runs.train(folder / "run", "null", 1) == 0
    before = contents(folder)
    assert small_runs.train(folder / "run", "null", 1) == 2
    assert f"continue it with esper train --resume {folder / 'run'}, or" in capfd.readouterr().err
    assert contents(folder) == before


# -- processes of their own -------------------------------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `esper` with arguments; whatever still runs at the end of a test is killed."""
    processes = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*ESPER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def uninterrupted(path: Path, rounds: int) -> None:
    """The same run as `LONG`, of `rounds` rounds, in this process and without a break."""
    arguments = list(LONG)
    arguments[arguments.index("400")] = str(rounds)
    assert main([*arguments, "--out", str(path)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_with_a_checkpoint_and_it_can_be_continued(folder, started, number):
    run = folder / "run"
    process = started(*LONG, "--out", str(run))
    wait_until(lambda: num_lines(run / "metrics.jsonl") >= 1, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert out.endswith(f"stopped; continue with: esper train --resume {run}\n")
    assert "stopping after this step" in err
    assert ("Ctrl-C" in err) == (number == signal.SIGINT)
    assert "Traceback" not in err
    done = num_lines(run / "metrics.jsonl")
    assert small_runs.resume(run, "--rounds", str(done + 1)) == 0
    uninterrupted(folder / "whole", done + 1)
    assert records(run) == records(folder / "whole")
    assert summary(run) == summary(folder / "whole")


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_a_directory_that_can_be_continued(folder, started):
    run = folder / "run"
    process = started(*LONG, "--out", str(run))
    wait_until(lambda: num_lines(run / "metrics.jsonl") >= 2, process)
    process.kill()
    process.communicate(timeout=PATIENCE)
    rounds = num_lines(run / "metrics.jsonl") + 1
    assert small_runs.resume(run, "--rounds", str(rounds)) == 0
    uninterrupted(folder / "whole", rounds)
    assert records(run) == records(folder / "whole")
    assert summary(run) == summary(folder / "whole")


def test_help_needs_no_learning_library_and_other_commands_no_compiler():
    script = "import sys; from esper.cli import main\n"
    script += "try: main(['train', '--help'])\nexcept SystemExit: print('torch' in sys.modules)\n"
    script += "main(['tasks']); print('torch._dynamo' in sys.modules)"
    command = [sys.executable, "-c", script]
    process = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert "\nFalse\ntask " in process.stdout
    assert process.stdout.endswith("\nFalse\n")
    for option in ("--config", "--task", "--preset", "--rounds", "--num-envs", "--episode-length", "--seed", "--reward",
                   "--device", "--out", "--resume", "--plugins", "--set"):  # fmt: skip
        assert option in process.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_an_option_is_as_wide_as_the_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "2000")  # tyro breaks the docstring of an option where its lines end, but no comment
    with pytest.raises(SystemExit):
        main([command, "--help"])
    texts = re.findall(r"^[│ ] {8,}(\S.*?)\s*$", capsys.readouterr().out, re.MULTILINE)
    assert all(text[0].isupper() or text.startswith("auto") for text in texts), texts


@pytest.mark.slow
def test_a_run_goes_on_when_whoever_read_its_output_has_left(folder, started):
    run = folder / "run"
    arguments = list(LONG)
    arguments[arguments.index("400")] = "2"
    process = started(*arguments, "--out", str(run))
    assert process.stdout is not None
    assert process.stdout.readline().startswith("esper: null")
    process.stdout.close()
    assert process.wait(timeout=PATIENCE) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert summary(run)["rounds"] == 2


@pytest.mark.slow
def test_a_terminal_shows_the_run_as_a_table(folder):
    ours, theirs = pty.openpty()
    arguments = list(LONG)
    arguments[arguments.index("400")] = "2"
    process = subprocess.Popen(
        [*ESPER, *arguments, "--out", "run"], stdout=theirs, stderr=theirs, env=ENVIRONMENT | {"TERM": "xterm"}
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.1)[0]:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the other side was closed: the process has ended
                break
    os.close(ours)
    assert process.wait(timeout=PATIENCE) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen.decode())
    for word in ("seeds       ", "operations  wait", "env-steps/s", "2 rounds done", "eta 0:00", "done: 100·J"):
        assert word in text


def test_where_a_compiler_is_missing_the_user_is_told_what_one_would_give(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda:0")
    assert why_chosen("native", cpu) == " (C++ compiled for this CPU)"
    assert why_chosen("streamed", cpu) == " (chosen by the size of activations)"
    monkeypatch.setattr("esper.runs.training.runner.compiler", lambda: None)
    assert "install a C++ compiler such as g++" in why_chosen("fused", cpu)
    assert why_chosen("fused", gpu) == ""  # there it is not the size that decides


@pytest.mark.parametrize(
    "size", [("episode_length=4095", "num_envs=100000"), ("ppo.num_layers=8", "ppo.hidden_width=1024")]
)
def test_memory_of_a_policy_and_its_rollout_is_predicted_for_scripted_hosts_too(folder, capfd, monkeypatch, size):
    monkeypatch.setattr("esper.runs.assembly.assemble.available_bytes", lambda device: 2**30)
    assert main(["train", "--task", "null", "--out", "run", "--set", *size]) == 2
    assert re.search(r"num_envs is \d+, which needs about \d+\.\d+ GiB of memory; .*fits?: ", capfd.readouterr().err)
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("command", "setting"),
    [
        (["train", "--out", "run", "--num-envs"], "num_envs"),
        (["evaluate", "wait_only", "--num-envs"], "num_envs"),
        (["grow", "digits", "--method", "heuristic", "--best-of"], "best_of"),
    ],
)
def test_more_hosts_than_memory_holds_are_refused_before_anything_is_made(folder, capfd, command, setting):
    assert main([*command, "1000000"]) == 2
    out, err = capfd.readouterr()
    assert "memory: about" not in out + err
    assert f"{setting} is 1000000, which needs about" in err
    assert f"fit: set {setting} to" in " ".join(err.split())
    assert list(folder.iterdir()) == []


def test_a_warning_is_one_line_without_its_place_and_is_said_once(folder):
    lines = 'warnings.warn("a seed\\n   is slow", stacklevel=1)\n' * 2
    (folder / "noisy.py").write_text(f"import warnings\n{lines}warnings.warn(DeprecationWarning('of others'))\n")
    done = subprocess.run([*ESPER, "tasks", "--plugins", "noisy.py"], capture_output=True, text=True, env=ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "warning: a seed is slow\n")


def test_an_interrupted_import_of_a_compiled_module_is_a_stop_and_others_are_errors(monkeypatch, capsys):
    def imports(cause: BaseException | None) -> Callable[[object], int]:
        def run(command: object) -> int:
            raise ImportError("initialization failed") from cause

        return run

    options, _ = COMMANDS["tasks"]
    monkeypatch.setitem(COMMANDS, "tasks", (options, imports(KeyboardInterrupt())))
    assert main(["tasks"]) == 130
    assert capsys.readouterr().err == "esper: stopped\n"
    monkeypatch.setitem(COMMANDS, "tasks", (options, imports(None)))
    with pytest.raises(ImportError, match="initialization failed"):
        main(["tasks"])
