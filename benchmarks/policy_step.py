"""Cost of the policy step on the `null` task: eager and compiled, alone and as a part of the whole control step.

Two learners of equal weights are shown the same observations of a rollout. Every repetition times both forms, in
alternating order, so that a busy machine slows them alike; a ratio is the median over repetitions of the ratio within
each.

    python benchmarks/policy_step.py                 # a C++ compiler, and half a minute or more per number of hosts
"""

import statistics
import sys
import time
from dataclasses import dataclass, replace

import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.leyline.messages import Observation
from esper.simic.client import SimicClient
from esper.simic.compilation import graphs_compiled
from esper.simic.training.build import device_of, engine_of, learner_of
from esper.simic.training.presets import resolve
from esper.telemetry.machine import environment
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import choose_device


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure the policy step."""

    hosts: tuple[int, ...] = (16, 1024)
    """Numbers of hosts."""
    repetitions: int = 60
    """Times each form is measured."""
    steps: int = 20
    """Control steps of the rollout whose observations are decided on."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""


def learners(num_envs: int, options: Options) -> tuple[VectorizedEngine, SimicClient, SimicClient]:
    """An engine, and the learner of the preset `small` eager and compiled; only the policy step differs."""
    told = {"task": "null", "preset": "small", "num_envs": num_envs, "episode_length": options.steps, "threads": 1}
    config = resolve(told | {"device": options.device, "compile": "off", "capture": "off"})
    engine = engine_of(config, None, device_of(config))
    eager = learner_of(config, engine.spec)
    compiled = learner_of(replace(config, compile="on"), engine.spec)
    compiled.reward = eager.reward
    return engine, eager, compiled


def observations(engine: VectorizedEngine, client: SimicClient) -> list[Observation]:
    """What the learner saw in one rollout."""
    seen: list[Observation] = []
    act = client.act

    def watched(obs: Observation, *, deterministic: bool = False) -> object:
        seen.append(obs)
        return act(obs, deterministic=deterministic)

    client.act = watched  # type: ignore[method-assign,assignment]
    engine.reset(client, 0)
    engine.rollout(client)
    client.act = act  # type: ignore[method-assign]
    return seen


def seconds_of_steps(client: SimicClient, seen: list[Observation], engine: VectorizedEngine) -> float:
    """One pass over the observations, per step."""
    client.begin_rollout(1, engine.spec.host_ids())
    began = time.perf_counter()
    for obs in seen:
        client.act(obs)
    if engine.spec.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / len(seen)


def seconds_of_control_steps(client: SimicClient, engine: VectorizedEngine) -> float:
    """One rollout, per control step."""
    engine.reset(client, 1)
    stats = engine.rollout(client)
    assert stats is not None
    return stats.cost.seconds / stats.cost.steps


def measured(num_envs: int, options: Options) -> list[tuple[str, ...]]:
    """Two rows: the policy step, and the control step around it."""
    engine, eager, compiled = learners(num_envs, options)
    seen = observations(engine, eager)
    seconds_of_steps(compiled, seen, engine)
    warm = graphs_compiled()
    rows = []
    for what in ("policy step", "control step"):
        times: dict[str, list[float]] = {"eager": [], "compiled": []}
        for repetition in range(options.repetitions):
            for name, client in (("eager", eager), ("compiled", compiled))[:: 1 if repetition % 2 else -1]:
                alone = what == "policy step"
                spent = seconds_of_steps(client, seen, engine) if alone else seconds_of_control_steps(client, engine)
                times[name].append(spent)
        ratio = statistics.median(a / b for a, b in zip(times["eager"], times["compiled"], strict=True))
        best = (f"{1e3 * min(times[name]):.2f}" for name in ("eager", "compiled"))
        middle = (f"{1e3 * statistics.median(times[name]):.2f}" for name in ("eager", "compiled"))
        rows.append((str(num_envs), what, *middle, *best, f"{ratio:.2f}"))
    assert graphs_compiled() == warm, "something was compiled again while it was measured"
    return rows


def main(options: Options) -> int:
    """Measure and print."""
    torch.set_num_threads(1)
    where = ", ".join(str(value) for value in environment(choose_device(options.device)).values())
    page = Table(title="policy step, preset small on the null task", caption=f"{where}, {options}")
    for column in ("hosts", "what", "eager ms", "compiled ms", "best", "best", "eager/compiled"):
        page.add_column(column, justify="left" if column == "what" else "right")
    for num_envs in options.hosts:
        for row in measured(num_envs, options):
            page.add_row(*row)
    Console(width=120).print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
