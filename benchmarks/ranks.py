"""`esper train` by one rank and by several, in turn: speed of rounds, update, bytes, and time to the first step.

All trainings of a case have the same hosts and blocks, and must end with the same digest. A ratio is the median over
repetitions of the ratio within each. The first round of a run is not counted.

    python benchmarks/ranks.py
    python benchmarks/ranks.py --cases own --ranks 1 2 4 --repetitions 5
    python benchmarks/ranks.py --cases own --against OLD/src --against-options="--workers 2"
"""

import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.telemetry.machine import environment
from esper.tolaria.runtime import usable_cores

OWN = """
import torch
import torch.nn.functional as F
from torch import nn

import esper


class Counting(nn.Module):
    \"\"\"A convolutional network that looks at its values, so that only PyTorch can run it.\"\"\"

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, 1), nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        if float(x.detach().sum()) < 0.0:
            raise ValueError("negative")
        return self.head(F.relu(self.body(x)).mean(dim=(2, 3)))


draw = torch.Generator().manual_seed(0)
x, y = torch.randn(1024, 3, 16, 16, generator=draw), torch.randint(0, 10, (1024,), generator=draw)
task = esper.Task(model=Counting, slots=["stem", "body"], train=(x[:768], y[:768]), val=(x[768:], y[768:]), batch=64)
"""
CASES = {
    "own": ("--task", "OWN", "--num-envs", "16", "--episode-length", "6", "--executor", "streamed"),
    "mixed_digits": ("--task", "mixed_digits", "--num-envs", "128", "--episode-length", "10"),
    "null": ("--task", "null", "--num-envs", "256", "--episode-length", "40"),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is measured."""

    cases: tuple[str, ...] = tuple(CASES)
    """Among own (a network that PyTorch runs), mixed_digits (C++), null (no networks)."""
    ranks: tuple[int, ...] = (1, 2, 4)
    """Each with threads for its share of the cores."""
    rounds: int = 3
    repetitions: int = 3
    preset: str = "learn"
    against: Path | None = None
    """Source folder of an older esper, as one more program."""
    against_options: str = ""
    """Its options."""
    json: Path | None = None
    """Also write the numbers to this file."""


@dataclass(frozen=True)
class Run:
    """One training, without its first round.

    Attributes:
        speed: env-steps per second of rounds and updates. update: its seconds. bytes_reduced: of sums that a rank
            received in an update. gradient: bytes of one. start: seconds to the first step.
    """

    speed: float
    update: float
    bytes_reduced: float
    gradient: int
    start: float
    digest: str


def train(command: list[str], source: Path, out: Path, threads: int) -> Run:
    """Run `esper train` and read what it recorded."""
    began = time.time()
    variables = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = {name: sum(line[name] for line in lines[1:]) for name in ("env_steps", "seconds", "update_seconds")}
    created = (out / "config.toml").stat().st_mtime  # just before the first step
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    state = next((out / "checkpoints").glob("round-*.safetensors"))
    return Run(
        speed=steps["env_steps"] / (steps["seconds"] + steps["update_seconds"]),
        update=steps["update_seconds"] / (len(lines) - 1),
        bytes_reduced=statistics.mean(line.get("bytes_reduced", 0) for line in lines[1:]),
        gradient=gradient_bytes(state),
        start=created - began,
        digest=summary["state_digest"],
    )


LOOP = """
import time, torch
torch.set_num_threads(1)
x, w, count, end = torch.randn(64, 16, 16, 16), torch.randn(32, 16, 3, 3), 0, time.perf_counter() + 4.0
while time.perf_counter() < end:
    torch.nn.functional.conv2d(x, w, padding=1)
    count += 1
print(count)
"""


def of_two_processes(repetitions: int) -> list[float]:
    """How much more two processes do that have nothing in common than one: the most that two ranks can gain here."""

    def work(processes: int) -> int:
        running = [subprocess.Popen([sys.executable, "-c", LOOP], stdout=subprocess.PIPE) for _ in range(processes)]
        return sum(int(process.communicate()[0]) for process in running)

    return sorted(work(2) / work(1) for _ in range(repetitions))


def gradient_bytes(checkpoint: Path) -> int:
    """Bytes of the gradient of the policy, which is as long as the moments of Adam."""
    from esper.runs.state_file import read_state

    return read_state(checkpoint)[1]["policy.optimizer.exp_avg"].nbytes


def measure(case: str, options: Options, folder: Path) -> dict[str, list[Run]]:
    """All programs in turn, as often as asked."""
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    words = [str(folder / "own.py:task") if word == "OWN" else word for word in CASES[case]]
    base = [sys.executable, "-m", "esper", "train", *words, "--rounds", str(options.rounds), "--preset", options.preset]
    source, cores = Path(__file__).parents[1] / "src", usable_cores()
    ways = {
        f"{n} ranks": (source, ["--ranks", str(n)], n, ["--set", f"blocks={max(options.ranks)}"]) for n in options.ranks
    }
    if options.against is not None:
        ways["older"] = (options.against, shlex.split(options.against_options), 1, [])
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for repetition in range(options.repetitions):
        for name, (program, more, ranks, settings) in ways.items():
            out = folder / f"{case}-{name}-{repetition}"
            module = ["esper.cli" if word == "esper" and name == "older" else word for word in base]
            command = [*module, *more, "--out", str(out), *settings]
            runs[name].append(train(command, program, out, max(1, cores // ranks)))
    digests = {run.digest for name, found in runs.items() if name != "older" for run in found}
    assert len(digests) == 1, f"{case}: the ranks differ: {digests}"
    return runs


def ratio(of: list[Run], to: list[Run], name: str) -> str:
    """Median and range of the ratio of a number within each repetition."""
    found = [getattr(a, name) / getattr(b, name) for a, b in zip(of, to, strict=True)]
    return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"


def main(options: Options) -> int:
    """Measure and print."""
    table = Table("case", "program", "env-steps/s", "times the first", "update ms", "received / gradients", "start s")
    everything = {}
    with TemporaryDirectory() as folder:
        for case in options.cases:
            runs = everything[case] = measure(case, options, Path(folder))
            first = next(iter(runs.values()))
            for name, found in runs.items():
                middle = {f: statistics.median(getattr(run, f) for run in found) for f in ("speed", "update", "start")}
                steps = optimizer_steps(options)
                received = found[0].bytes_reduced / (found[0].gradient * steps)
                speed, update = f"{middle['speed']:,.0f}", f"{1e3 * middle['update']:,.0f}"
                sizes = f"{received:.2f}", f"{middle['start']:.1f}"
                table.add_row(case, name, speed, ratio(found, first, "speed"), update, *sizes)
    console = Console(width=140)
    low, *_, high = found = of_two_processes(max(options.repetitions, 2))
    most = f"{statistics.median(found):.2f} ({low:.2f} to {high:.2f})"
    console.print(f"two processes of convolutions do {most} times the work of one")
    console.print(table)
    machine = environment(torch.device("cpu"))
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.json is not None:
        rows = {
            case: {name: [asdict(run) for run in found] for name, found in of.items()}
            for case, of in everything.items()
        }
        options.json.write_text(json.dumps({"environment": machine, "rows": rows}, indent=2), encoding="utf-8")
    return 0


def optimizer_steps(options: Options) -> int:
    """Minibatches of an update of the preset."""
    from esper.runs.assembly.presets import resolve

    ppo = resolve({"preset": options.preset, "task": "null"}).ppo
    return ppo.update_epochs * ppo.num_minibatches


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
