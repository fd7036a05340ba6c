"""Time of a control step on the `null` task: everything in a run except training networks.

    measured      train and validation by formula, coalitions, governor, features, policy, masks, sampling, lifecycle,
                  reward, rollout buffer, the one read of the step
    not measured  reset of the hosts, the update of the policy, records on the disk

Every repetition runs one episode at each number of hosts, in alternating order, so that a busy machine slows all of
them alike; a ratio is the median over repetitions of the ratio within each. "Beside" is the time of a step minus the
time of the matrix products of the policy alone, measured in the same repetition.

    python benchmarks/null_control_step.py --json null_control_step.json
    python benchmarks/null_control_step.py --min-steps-per-second 50 --max-ratio 5      # exit code 1 if it is slower
"""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.runs.assembly.assemble import device_of, engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import SimicClient
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.telemetry.machine import environment
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import choose_device
from paired import wall_ms

assert _presets


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the control step of the null task."""

    hosts: tuple[int, ...] = (16, 128, 1024)
    """Numbers of hosts, ascending."""
    repetitions: int = 5
    """Episodes at each number of hosts; a first one is not counted."""
    episode_length: int = 60
    """Control steps per episode."""
    threads: tuple[int, ...] = (1,)
    """Settings of torch.set_num_threads to compare. Most operators are too small to be worth a second thread."""
    compile: Literal["off", "on"] = "off"
    """Setting of `compile`; "on" needs a C++ compiler and half a minute per number of hosts."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write the numbers to this file."""
    min_steps_per_second: float = 0.0
    """Least control steps per second at the smallest number of hosts on one thread."""
    max_ms_beside: tuple[float, float] = (float("inf"), float("inf"))
    """Most milliseconds beside the matrix products of the policy, at the fewest and at the most hosts."""
    max_ratio: float = float("inf")
    """Most time of a step at the largest number of hosts relative to the smallest, likewise."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Times at one number of hosts and threads; medians over the repetitions."""

    threads: int
    hosts: int
    steps_per_second: float
    env_steps_per_second: float
    ms_per_step: float
    ms_per_step_best: float
    ms_beside: float
    """Without the matrix products of the policy."""
    ratio: float
    """Cost of a step relative to the smallest number of hosts."""


@dataclass(frozen=True)
class Subject:
    """An engine with its learner, which are measured."""

    engine: VectorizedEngine
    client: SimicClient

    @classmethod
    def build(cls, num_envs: int, options: Options) -> "Subject":
        """The preset `small` on the null task, paid by the objective."""
        given: dict[str, object] = {"task": "null", "preset": "small", "num_envs": num_envs}
        given |= {"episode_length": options.episode_length, "compile": options.compile}
        config = resolve(given | {"device": options.device, "threads": torch.get_num_threads()})
        engine = engine_of(config, None, device_of(config))
        return cls(engine, learner_of(config, engine.spec))

    @torch.no_grad()
    def seconds_of_products(self) -> float:
        """All matrix products of one step of the policy and nothing else; the median of a few."""
        network, hosts = self.client.agent.network, self.engine.spec.num_envs
        numbers = dict.fromkeys(("host_net", "trunk_others", "trunk_op", "head_op", "value_net"), hosts)
        numbers["seed_net"] = network.num_slots * network.num_blueprints
        weights, rows = [], []
        for name, weight in network.named_parameters():
            if weight.dim() == 2:
                number = numbers.get(name.split(".")[0], hosts * network.num_slots)
                weights.append(weight)
                number = hosts if name.endswith("others_weight") else number
                rows.append(torch.ones(number, weight.shape[1], device=weight.device))

        def products() -> None:
            for row, weight in zip(rows, weights, strict=True):
                torch.mm(row, weight.t())
            if weights[0].is_cuda:
                torch.cuda.synchronize()

        return 1e-3 * statistics.median(wall_ms(products) for _ in range(9))

    def seconds_per_step(self, episode: int) -> float:
        """Seconds per step of one episode, including the read of its last step."""
        self.engine.reset(self.client, episode)
        stats = self.engine.rollout(self.client)
        assert stats is not None
        return stats.cost.seconds / stats.cost.steps


def measure(options: Options, threads: int) -> list[Row]:
    """One row per number of hosts."""
    torch.set_num_threads(threads)
    subjects = {num_envs: Subject.build(num_envs, options) for num_envs in options.hosts}
    for subject in subjects.values():
        subject.seconds_per_step(0)
    costs: dict[int, list[float]] = {num_envs: [] for num_envs in options.hosts}
    products: dict[int, list[float]] = {num_envs: [] for num_envs in options.hosts}
    for repetition in range(1, options.repetitions + 1):
        for num_envs in options.hosts if repetition % 2 else reversed(options.hosts):
            costs[num_envs].append(subjects[num_envs].seconds_per_step(repetition))
            products[num_envs].append(subjects[num_envs].seconds_of_products())
    smallest = options.hosts[0]

    def relative(own: Sequence[float], others: Sequence[float]) -> float:
        return statistics.median(a / b for a, b in zip(own, others, strict=True))

    return [
        Row(
            threads=threads,
            hosts=num_envs,
            steps_per_second=1.0 / statistics.median(own),
            env_steps_per_second=num_envs / statistics.median(own),
            ms_per_step=1e3 * statistics.median(own),
            ms_per_step_best=1e3 * min(own),
            ms_beside=1e3 * statistics.median(a - b for a, b in zip(own, products[num_envs], strict=True)),
            ratio=relative(own, costs[smallest]),
        )
        for num_envs, own in costs.items()
    ]


def where_and_how(options: Options) -> dict[str, str | int]:
    """Machine and settings of the numbers."""
    settings = (
        f"task null, preset small, reward objective, {options.episode_length} steps per episode, "
        f"{options.repetitions} repetitions"
    )
    return {**environment(choose_device(options.device)), "settings": settings}


def shown(rows: Sequence[Row], where: dict[str, str | int]) -> Table:
    """The rows as a table."""
    page = Table(title="control step of the null task", caption=", ".join(map(str, where.values())))
    speeds, costs = ("steps/s", "env-steps/s"), ("ms/step", "best", "beside", "ratio")
    for column in ("threads", "hosts", *speeds, *costs):
        page.add_column(column, justify="right")
    for row in rows:
        speed = (f"{row.steps_per_second:.1f}", f"{row.env_steps_per_second:,.0f}")
        cost = (f"{x:.2f}" for x in (row.ms_per_step, row.ms_per_step_best, row.ms_beside, row.ratio))
        page.add_row(str(row.threads), str(row.hosts), *speed, *cost)
    return page


def complaints(rows: Sequence[Row], options: Options) -> list[str]:
    """What is slower than was asked for, on one thread."""
    own = [row for row in rows if row.threads == 1]
    if not own:
        return ["the limits apply to one thread, which was not measured; omit --threads or include 1."]
    first, last = own[0], own[-1]
    found = []
    if first.steps_per_second < options.min_steps_per_second:
        found.append(
            f"{first.steps_per_second:.1f} control steps per second at {first.hosts} hosts; "
            f"at least {options.min_steps_per_second:g} are required."
        )
    if last.ratio > options.max_ratio:
        found.append(
            f"a step at {last.hosts} hosts costs {last.ratio:.2f} times one at {first.hosts}; "
            f"at most {options.max_ratio:g} is required."
        )
    for row, most in zip((first, last), options.max_ms_beside, strict=True):
        if row.ms_beside > most:
            found.append(
                f"a step at {row.hosts} hosts takes {row.ms_beside:.2f} ms beside the matrix products of the policy; "
                f"at most {most:g} are required."
            )
    return found


def main(options: Options) -> int:
    """Measure, print, compare with the limits; returns the exit code."""
    rows: list[Row] = []
    where = where_and_how(options)
    for threads in options.threads:
        rows += measure(options, threads)
    Console(width=120).print(shown(rows, where))
    if options.json is not None:
        options.json.write_text(
            json.dumps({"environment": where, "rows": [asdict(row) for row in rows]}, indent=2) + "\n"
        )
    limited = options.min_steps_per_second > 0.0 or min(*options.max_ms_beside, options.max_ratio) < float("inf")
    found = complaints(rows, options) if limited else []
    for line in found:
        print(f"too slow: {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
