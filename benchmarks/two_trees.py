"""Control step and update of the null task under two source trees, in turn: what a change is worth on a busy machine.

Each tree runs in a process of its own; they take episode after episode alternately, in reversed order every time.

    git worktree add ../before HEAD~1
    python benchmarks/two_trees.py --before ../before/src --now src
"""

import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
import tyro

from null_control_step import Options as StepOptions
from null_control_step import Subject

STEPS = StepOptions().episode_length


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare the control step of the null task under two source trees."""

    before: Path
    """The `src` folder of the older code."""
    now: Path
    """The `src` folder of the newer code."""
    hosts: tuple[int, ...] = (16, 1024)
    """Numbers of hosts."""
    repetitions: int = 12
    """Episodes of each tree at each number of hosts."""
    compile: Literal["off", "on"] = "off"
    """Form of the control step; "on" needs a C++ compiler and a minute."""


def serve(form: Literal["off", "on"], hosts: list[int]) -> None:
    """For each line "hosts episode" run one and update; answer with wall and CPU ms per step, then of the update."""
    torch.set_num_threads(1)
    subjects = {n: Subject.build(n, StepOptions(compile=form)) for n in hosts}
    for subject in subjects.values():
        subject.seconds_per_step(0)
        subject.client.update()
    print("ready", flush=True)
    for line in sys.stdin:
        n, episode = (int(word) for word in line.split())
        began = time.process_time()
        wall = subjects[n].seconds_per_step(episode)
        rolled, now = time.process_time(), time.perf_counter()
        subjects[n].client.update()
        update = 1e3 * (time.perf_counter() - now), 1e3 * (time.process_time() - rolled)
        print(1e3 * wall, 1e3 * (rolled - began) / STEPS, *update, flush=True)


class Tree:
    """One source tree in a process of its own."""

    def __init__(self, source: Path, options: Options) -> None:
        environment = {**os.environ, "PYTHONPATH": str(source.resolve()), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "serve", options.compile, *map(str, options.hosts)]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        answer = self._read()
        if answer != "ready":
            raise RuntimeError(f"{source} did not start ({answer!r}); look above for what it says.")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def episode(self, n: int, number: int) -> tuple[float, ...]:
        """Wall and CPU milliseconds per step, then of the update."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n} {number}\n")
        self._process.stdin.flush()
        return tuple(float(word) for word in self._read().split())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main(options: Options) -> None:
    """Measure and print."""
    trees = Tree(options.before, options), Tree(options.now, options)
    for n in options.hosts:
        pairs = []
        for number in range(1, options.repetitions + 1):
            costs = {tree: tree.episode(n, number) for tree in (trees if number % 2 else reversed(trees))}
            pairs.append(tuple(costs[tree] for tree in trees))
        for what, first in (("step", 0), ("update", 2)):
            before, now = ([cost[first] for cost in column] for column in zip(*pairs, strict=True))
            wall, cpu = (statistics.median(b[i] / a[i] for a, b in pairs) for i in (first, first + 1))
            print(
                f"{n} hosts, {what}: median ms {statistics.median(before):.2f} / {statistics.median(now):.2f}, "
                f"best ms {min(before):.2f} / {min(now):.2f}, now to before {wall:.3f} (CPU time {cpu:.3f})"
            )
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(cast(Literal["off", "on"], sys.argv[2]), [int(word) for word in sys.argv[3:]])
    else:
        main(tyro.cli(Options))
