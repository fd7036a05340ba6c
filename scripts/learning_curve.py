"""Learning curves on the scripted tasks `null` and `null_permuted`, where the best controller in hindsight is known.

Trains one controller per seed and evaluates it every few rounds, with frozen weights and statistics, sampled actions,
on new hosts. On the same hosts it is compared with

    idle        wait_only
    constant    the best schedule that is the same for all hosts, chosen on other hosts
    explore     explore_then_commit
    oracle      the best schedule of each host, which knows its qualities

    gap closed = (J - that of idle) / (that of oracle - that of idle)

Intervals are 95 % percentile bootstraps over evaluation hosts (of one run) or over runs (of all).

    python scripts/learning_curve.py --seeds 0 1 2 --json learning_curve.json
    python scripts/learning_curve.py --task null_permuted --rounds 120 --every 30 --hosts 128
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

import hindsight
from esper.leyline.errors import EsperError
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.runs.assembly.assemble import device_of, engine_of
from esper.runs.assembly.clients import baseline_of, learner_of, reward_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.outcomes import SEED_OFFSET
from esper.runs.report import objective_of
from esper.simic.client import ScriptedClient, SimicClient
from esper.simic.rewards.objective import objective_value
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Schedule
from esper.tasks import null
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.null import NullSpec
from esper.tasks.registry import task_by_name
from script_report import write_result

assert _presets
CONFIG = Path(__file__).with_suffix(".toml")
RESAMPLES = 10_000
SOLVED = 0.8
SELECTION_OFFSET = 2 * SEED_OFFSET
"""Added to the training seed for the hosts on which the constant schedule is chosen."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure learning curves on a scripted task."""

    task: Literal["null", "null_permuted"] = "null"
    """Task."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Run seeds; one controller each."""
    rounds: int = 60
    """Rounds of training; the schedules span all of them."""
    num_envs: int = 64
    """Hosts per round."""
    every: int = 10
    """Rounds between two evaluations."""
    hosts: int = 64
    """Hosts per evaluation."""
    preset: str = "small"
    """Preset."""
    config: Path = CONFIG
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
    """One run: the curve, the other controllers on the same hosts, and what the learned one gains on two of them."""

    seed: int
    idle: float
    """100·J of wait_only."""
    best: float
    """100·J of the oracle, mean over hosts."""
    untrained: Score
    random: Score
    constant: Score
    explore: Score
    oracle: Score
    curve: list[Point]
    gain_on_random: Score
    gain_on_constant: Score

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


def evaluate(
    config: RunConfig, hosts: int, make: Callable[[EngineSpec], ClientProtocol], offset: int = SEED_OFFSET
) -> Score:
    """100·J of a controller on fresh hosts."""
    engine_config = config.engine(run_seed=config.seed + offset, num_envs=hosts)
    engine = engine_of(config, None, device_of(config), engine_config=engine_config)
    client = make(engine.spec)
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    return interval(objective_of(stats, config.reward).tolist())


def script_of(config: RunConfig) -> NullSpec:
    """The dynamics of the task."""
    script = task_by_name(config.task).script
    assert script is not None, "the best schedule is known for scripted tasks"
    return script


def growing(blueprint: int, config: RunConfig) -> Callable[[EngineSpec], ClientProtocol]:
    """The best schedule with one blueprint in all slots of all hosts."""

    def make(spec: EngineSpec) -> ClientProtocol:
        rows = null.best_schedule(spec.episode_length, spec.min_training_epochs, spec.num_slots, blueprint)
        return ScriptedClient(scheduled(Schedule.from_rows("constant", 1, rows), spec), reward_of(config, spec))

    return make


def best_constant(config: RunConfig, hosts: int) -> Score:
    """The best schedule that is the same for all hosts: its blueprint is chosen on other hosts, eight times as many."""

    def chosen_by(blueprint: int) -> float:
        return evaluate(config, 8 * hosts, growing(blueprint, config), SELECTION_OFFSET).mean

    best = max((row.index for row in null.BLUEPRINTS.values()), key=chosen_by)
    return evaluate(config, hosts, growing(best, config))


def oracle(config: RunConfig, hosts: int) -> Score:
    """100·J of the best schedule of each evaluation host, by formula."""
    script, rules = script_of(config), config.lifecycle
    size = (config.episode_length, rules.min_training_epochs, len(config.slots))
    best = hindsight.best_of_host(
        script, config.seed + SEED_OFFSET, torch.arange(hosts), episode=0, min_health=rules.g2_health
    )
    seeds = len(null.best_schedule(*size)) // 2  # a GERMINATE and a FOSSILIZE each
    accuracy = np.array([hindsight.best_schedule_value(*size, quality) for quality in best.quality.tolist()])
    fossils = seeds * null.params(script, best.blueprint, torch.zeros(hosts, dtype=torch.bool)).numpy()
    host, alone = np.full(hosts, script.host_params), np.ones(hosts)  # without a price of compute
    return interval((100.0 * objective_value(accuracy, fossils, host, alone, config.reward)).tolist())


def learn(config: RunConfig, options: Options, tell: Callable[[str], None]) -> Run:
    """Train one controller and evaluate it every few rounds; the CPU seconds are those of training."""
    engine = engine_of(config, None, device_of(config))
    client = learner_of(config, engine.spec)

    def frozen(spec: EngineSpec) -> SimicClient:
        copy = learner_of(config, spec)
        copy.load_state_dict(client.state_dict())
        return copy

    def baseline(name: str) -> Score:
        return evaluate(config, options.hosts, lambda spec: baseline_of(name, config, spec))

    untrained = evaluate(config, options.hosts, frozen)
    random, constant, best = baseline("random"), best_constant(config, options.hosts), oracle(config, options.hosts)
    curve: list[Point] = []
    seconds, done = 0.0, 0
    while done < options.rounds:
        upto, began = min(done + options.every, options.rounds), time.process_time()
        engine.train(client, range(done, upto), on_round=lambda stats, metrics: None)
        seconds, done = seconds + time.process_time() - began, upto
        curve.append(Point(done * options.num_envs, seconds, evaluate(config, options.hosts, frozen)))
        tell(f"seed {config.seed}: {curve[-1].episodes} episodes, 100·J {curve[-1].learned.mean:.2f}")

    def gain_on(other: Score) -> Score:
        return interval(np.subtract(curve[-1].learned.per_host, other.per_host).tolist())

    return Run(
        seed=config.seed,
        idle=baseline("wait_only").mean,
        best=best.mean,
        untrained=untrained,
        random=random,
        constant=constant,
        explore=baseline("explore_then_commit"),
        oracle=best,
        curve=curve,
        gain_on_random=gain_on(random),
        gain_on_constant=gain_on(constant),
    )


def shown(task: str, runs: Sequence[Run]) -> Table:
    """One line per run."""
    page = Table(title=f"{task}: 100·J, and the share of the gap between wait_only and the oracle")
    for column in ("seed", "episodes", "CPU s", "gap closed"):
        page.add_column(column, justify="right")
    controllers = ("learned", "untrained", "random", "constant", "explore", "oracle", "learned - constant")
    for column in controllers:
        page.add_column(column, justify="right")
    for run in runs:
        scores = (run.final.learned, run.untrained, run.random, run.constant, run.explore, run.oracle)
        cells = [f"{score.mean:.2f}" for score in scores]
        cells[0] += f" [{scores[0].low:.2f}, {scores[0].high:.2f}]"
        gain = run.gain_on_constant
        first = (str(run.seed), str(run.final.episodes), f"{run.final.seconds:.0f}", f"{run.gap_closed:.1%}")
        page.add_row(*first, *cells, f"{gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]")
    return page


def over_runs(runs: Sequence[Run]) -> list[str]:
    """Means over runs with their intervals, one sentence each."""
    learned = interval([run.final.learned.mean for run in runs])
    gain = interval([run.gain_on_constant.mean for run in runs])
    solved = sum(run.gap_closed >= SOLVED for run in runs)
    lines = [
        f"100·J, mean over runs {learned.mean:.2f} [{learned.low:.2f}, {learned.high:.2f}]",
        f"learned - constant, paired by host, mean over runs {gain.mean:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]",
        f"{solved} of {len(runs)} runs closed at least {SOLVED:.0%} of the gap",
    ]
    room = float(np.mean([run.explore.mean - run.constant.mean for run in runs]))
    if room > 0.0:
        lines.append(f"{gain.mean / room:.0%} of the way from constant to explore")
    return lines


def main(options: Options) -> int:
    """Learn once per seed, print, and write the numbers; returns the exit code."""
    torch.set_num_threads(1)  # the tensors are too small for several threads
    console = Console(width=160)
    given = {"task": options.task, "preset": options.preset, "num_envs": options.num_envs}
    given |= {"rounds": options.rounds, "schedule_rounds": options.rounds}
    config = resolve(given, options.config)
    say = partial(console.print, highlight=False)
    runs = [learn(replace(config, seed=seed), options, say) for seed in options.seeds]
    console.print(shown(options.task, runs))
    if len(runs) > 1:
        for line in over_runs(runs):
            say(line)
    if options.json is not None:
        settings = {name: value for name, value in asdict(options).items() if name != "json"}
        settings["config"] = options.config.name
        write_result(options.json, "learning_curve", torch.device("cpu"), settings, [asdict(run) for run in runs])
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options)))
    except EsperError as error:
        sys.exit(f"learning_curve: {error}")
