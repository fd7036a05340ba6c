"""Kill ranks at random instants, and see that nothing is lost.

Each run is started by torchrun with restarts. One of its ranks, drawn at random, gets SIGKILL at a random instant;
torchrun starts all of them again, and the run continues from its last checkpoint. At the end the digest, the steps in
the record and the best host must be those of an undisturbed run of one process.

    python scripts/kill_ranks.py --kills 50
    python scripts/kill_ranks.py --kills 3 --ranks 2 --seed 7
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import tyro

from esper.leyline.tensor_dataclass import state_digest
from esper.runs.state_file import read_state
from esper.telemetry.record.reader import open_record


@dataclass(frozen=True)
class Kills:
    """What is tried."""

    kills: int = 50
    """Ranks to kill in all."""
    per_run: int = 4
    """Kills in one run."""
    ranks: int = 2
    task: str = "digits"
    rounds: int = 4
    hosts: int = 4
    steps: int = 8
    seed: int = 0
    """Of the instants and the ranks."""
    timeout: float = 300.0
    """Seconds after which a run counts as hanging."""


def command(given: Kills, out: Path) -> list[str]:
    """The run, with blocks for any number of ranks up to the number of hosts."""
    settings = [f"blocks={given.hosts}", "lifecycle.min_training_epochs=1", "rank_timeout=60"]
    numbers = {"task": given.task, "rounds": given.rounds, "num-envs": given.hosts, "episode-length": given.steps}
    options = [word for name, value in numbers.items() for word in (f"--{name}", str(value))]
    return ["-m", "esper", "train", *options, "--preset", "small", "--out", str(out), "--set", *settings]


def result(run: Path) -> tuple[str, list[dict[str, object]], str]:
    """Digest, steps, and digest of the best host."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    with open_record([run]) as record:
        assert not record.warnings, record.warnings
        rows = record.query("select round, t, host, val_acc, total_params, growth from steps order by round, t, host")
    best = run / "checkpoints" / "best-host.safetensors"
    return summary["state_digest"], rows, state_digest(read_state(best)[1]) if best.exists() else ""


def ranks_of(run: Path) -> list[int]:
    """Processes of the run that are ranks, by their environment."""
    found = []
    for place in Path("/proc").iterdir():
        if not place.name.isdecimal():
            continue
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            environment = (place / "environ").read_bytes()
        except OSError:  # it has ended, or belongs to another user
            continue
        if str(run).encode() in words and b"\0LOCAL_RANK=" in environment and b"torchrun" not in b" ".join(words):
            found.append(int(place.name))
    return found


def disturbed(given: Kills, out: Path, kills: int, draw: random.Random, seconds: float) -> tuple[int, float]:
    """A run whose ranks are killed; how many were, and its time. Raises RuntimeError where it hangs or fails."""
    log = out.with_suffix(".log")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(given.ranks)]
    launch = [*torchrun, "--standalone", "--max-restarts", str(kills + 1), *command(given, out)]
    began, done = time.monotonic(), 0
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(launch, stdout=file, stderr=subprocess.STDOUT, env=os.environ)
        due = began + draw.uniform(0.0, 0.7 * seconds)
        while process.poll() is None:
            time.sleep(0.01)
            now = time.monotonic()
            if now - began > given.timeout:
                process.kill()
                raise RuntimeError(f"no end after {given.timeout} s; see {log}")
            if done < kills and now > due and (alive := ranks_of(out)):
                os.kill(draw.choice(alive), signal.SIGKILL)
                done, due = done + 1, now + draw.uniform(0.0, 0.7 * seconds)
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}; see {log}:\n{log.read_text(encoding='utf-8')[-3000:]}")
    return done, time.monotonic() - began


def main(given: Kills) -> int:
    """Print a line for each run; returns how many were wrong."""
    draw, wrong, done = random.Random(given.seed), 0, 0
    with TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([sys.executable, *command(given, Path(folder, "alone"))], check=True, stdout=subprocess.DEVNULL)
        seconds, want = time.monotonic() - began, result(Path(folder, "alone"))
        number = 0
        while done < given.kills:
            out = Path(folder, f"run-{number}")
            killed, took = disturbed(given, out, min(given.per_run, given.kills - done), draw, seconds)
            same = [a == b for a, b in zip(result(out), want, strict=True)]
            orphans = ranks_of(out)
            wrong += not all(same) or bool(orphans)
            done, number = done + max(killed, 1), number + 1
            print(
                f"run {number}: {killed} kills of {given.ranks} ranks in {took:.0f} s; digest, steps and best host "
                f"{'equal' if all(same) else f'DIFFER: {same}'}; {len(orphans)} orphans",
                flush=True,
            )
            shutil.rmtree(out)
    print(f"{done} kills in {number} runs, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Kills)))
