"""Learning curve on the `null` task, whose best and idle values are known.

    gap closed = (J - that of wait_only) / (that of the best schedule - that of wait_only)

Trains one controller per seed and evaluates it every few rounds, with frozen weights and statistics, sampled actions,
on new hosts; `random` and the untrained network play on the same hosts. Intervals are 95 %
percentile bootstraps over evaluation hosts (of one run) or over runs (of all).

    python scripts/learning_curve.py --seeds 0 1 2 --json learning_curve.json
    python scripts/learning_curve.py --seeds 0 --rounds 60 --config other_values.toml
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from esper.leyline.errors import EsperError
from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.runs.build import baseline_of, device_of, engine_of, learner_of
from esper.runs.config import RunConfig
from esper.runs.outcomes import SEED_OFFSET
from esper.runs.presets import resolve
from esper.runs.report import objective_of
from esper.simic.client import SimicClient
from esper.simic.rewards.objective_value import objective_value
from esper.tasks import null
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.registry import task_by_name
from script_report import write_result

assert _presets
RESAMPLES = 10_000
SOLVED = 0.8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure learning curves on the null task."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Run seeds; one controller each."""
    rounds: int = 40
    """Rounds of training; the schedules span all of them."""
    num_envs: int = 16
    """Hosts per round."""
    every: int = 10
    """Rounds between two evaluations."""
    hosts: int = 64
    """Hosts per evaluation."""
    preset: str = "small"
    """Preset."""
    config: Path | None = None
    """Configuration file (TOML) with other values, as for `esper train`."""
    json: Path | None = None
    """Also write every number to this file."""


@dataclass(frozen=True)
class Score:
    """100·J of one controller: its mean over evaluation hosts with the bootstrap interval, and each host's."""

    mean: float
    low: float
    high: float
    per_host: list[float]


@dataclass(frozen=True)
class Point:
    """The learning controller after some host episodes."""

    episodes: int
    seconds: float
    learned: Score


@dataclass(frozen=True)
class Run:
    """One run: the curve, the reference controllers, and the gain of the learned one over `random`, paired by host."""

    seed: int
    idle: float
    """100·J of wait_only."""
    best: float
    """100·J of the best schedule."""
    untrained: Score
    random: Score
    curve: list[Point]
    gain_on_random: Score

    @property
    def final(self) -> Point:
        """The last evaluation."""
        return self.curve[-1]

    @property
    def gap_closed(self) -> float:
        """By the last evaluation."""
        return (self.final.learned.mean - self.idle) / (self.best - self.idle)


def interval(values: Sequence[float]) -> Score:
    """Mean and 95 % percentile bootstrap interval (Efron, 1979)."""
    samples = np.asarray(values)
    drawn = np.random.default_rng(0).integers(len(samples), size=(RESAMPLES, len(samples)))
    low, high = np.percentile(samples[drawn].mean(axis=1), (2.5, 97.5))
    return Score(float(samples.mean()), float(low), float(high), samples.tolist())


def evaluate(config: RunConfig, hosts: int, make: Callable[[EngineSpec], ClientProtocol]) -> Score:
    """100·J of a controller on fresh hosts."""
    told = config.engine(run_seed=config.seed + SEED_OFFSET, num_envs=hosts)
    engine = engine_of(config, None, device_of(config), engine_config=told)
    client = make(engine.spec)
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    return interval(objective_of(stats, config.reward).tolist())


def known(config: RunConfig) -> tuple[float, float]:
    """100·J of wait_only and of the best schedule."""
    script = task_by_name(config.task).script
    assert script is not None, "the best schedule is known for scripted tasks"
    size = (config.episode_length, config.lifecycle.min_training_epochs, len(config.slots))
    seeds = len(null.best_schedule(*size)) // 2  # a GERMINATE and a FOSSILIZE each
    accuracy = np.array([null.host_accuracy(config.episode_length), null.best_schedule_value(*size)])
    fossils = np.array([0, seeds * null.BLUEPRINTS[null.BEST_BLUEPRINT].params])
    host = np.full(2, script.host_params)
    idle, best = (100.0 * objective_value(accuracy, fossils, host, config.reward)).tolist()
    return idle, best


def learn(config: RunConfig, options: Options, tell: Callable[[str], None]) -> Run:
    """Train one controller and evaluate it every few rounds; the CPU seconds are those of training."""
    engine = engine_of(config, None, device_of(config))
    client = learner_of(config, engine.spec)

    def frozen(spec: EngineSpec) -> SimicClient:
        copy = learner_of(config, spec)
        copy.load_state_dict(client.state_dict())
        return copy

    untrained = evaluate(config, options.hosts, frozen)
    random = evaluate(config, options.hosts, lambda spec: baseline_of("random", config, spec))
    curve: list[Point] = []
    seconds, done = 0.0, 0
    while done < options.rounds:
        upto, began = min(done + options.every, options.rounds), time.process_time()
        engine.train(client, range(done, upto), on_round=lambda stats, metrics: None)
        seconds, done = seconds + time.process_time() - began, upto
        curve.append(Point(done * options.num_envs, seconds, evaluate(config, options.hosts, frozen)))
        tell(f"seed {config.seed}: {curve[-1].episodes} episodes, 100·J {curve[-1].learned.mean:.2f}")
    gains = np.subtract(curve[-1].learned.per_host, random.per_host).tolist()
    return Run(config.seed, *known(config), untrained, random, curve, interval(gains))


def shown(runs: Sequence[Run]) -> Table:
    """One line per run."""
    columns = ("seed", "episodes", "CPU seconds", "gap closed", "learned", "untrained", "random", "learned - random")
    page = Table(title="null task: 100·J, and the share of the gap between wait_only and the best schedule")
    for column in columns:
        page.add_column(column, justify="right")
    for run in runs:
        scores = (run.final.learned, run.untrained, run.random, run.gain_on_random)
        cells = (f"{score.mean:.2f} [{score.low:.2f}, {score.high:.2f}]" for score in scores)
        first = (str(run.seed), str(run.final.episodes), f"{run.final.seconds:.0f}", f"{run.gap_closed:.1%}")
        page.add_row(*first, *cells)
    return page


def main(options: Options) -> int:
    """Learn once per seed, print, and write the numbers; returns the exit code."""
    torch.set_num_threads(1)  # the tensors are too small for several threads
    console, runs = Console(width=140), []
    for seed in options.seeds:
        told = {"task": "null", "preset": options.preset, "num_envs": options.num_envs, "seed": seed}
        config = resolve(told | {"rounds": options.rounds, "schedule_rounds": options.rounds}, options.config)
        runs.append(learn(config, options, lambda line: console.print(line, highlight=False)))
    console.print(shown(runs))
    if len(runs) > 1:
        total = interval([run.final.learned.mean for run in runs])
        solved = sum(run.gap_closed >= SOLVED for run in runs)
        console.print(f"100·J, mean over runs {total.mean:.2f} [{total.low:.2f}, {total.high:.2f}]", highlight=False)
        console.print(f"{solved} of {len(runs)} runs closed at least {SOLVED:.0%} of the gap", highlight=False)
    if options.json is not None:
        settings = {name: value for name, value in asdict(options).items() if name != "json"}
        write_result(options.json, "learning_curve", torch.device("cpu"), settings, [asdict(run) for run in runs])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options)))
    except EsperError as error:
        sys.exit(f"learning_curve: {error}")
