"""Grow every task by fixed schedules, check that its executors agree, and write docs/tasks.md.

For each task: the accuracy of its hosts without growth, the gain of each blueprint in a middle slot on the same hosts,
and whether the executors agree and repeat themselves. The page names the budget. Tables go between two markers of the
page; if a check fails, the exit code is 1.

    python scripts/verify_tasks.py --data-dir DATA --page docs/tasks.md --json tasks.json
    python scripts/verify_tasks.py --data-dir DATA --tasks cifar_baseline --full --device cuda --json full.json
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console

from esper.kasmina.blueprints import registry
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.lifecycle import TEMPO_TICKS, HostFamily, LifecycleOp
from esper.leyline.tensor_dataclass import StateTree
from esper.simic.client import ScriptedClient
from esper.simic.rewards import RewardConfig, make_reward
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Schedule, canonical_action
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.datasets import Dataset, Split, data_label
from esper.tasks.registry import TaskSpec, task_by_name
from esper.telemetry.machine import environment
from esper.tolaria.build import build_engine, load_dataset
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.engine_config import EngineConfig, ExecutorChoice
from esper.tolaria.runtime import choose_device, host_read
from esper.tolaria.state import StepReport
from script_report import write_result
from tasks_page import MARKERS, Agreement, Result, Trial, failures, measured, result_of, sections
from write_benchmarks import between_markers

TASKS = (*(task.name for task in _presets.CIFAR), "fashion_mnist", "digits", "tinyshakespeare")
CPU = torch.device("cpu")
FAST = 0
ALGORITHMS = ("ADD", "MULTIPLY", "GATE")


@dataclass(frozen=True)
class Budget:
    """What a short run trains and measures, in images or windows of text."""

    steps: int
    batch: int
    examples: int
    """Of training in one step."""
    val: int
    test: int


WIDE = Budget(steps=12, batch=32, examples=512, val=500, test=2_000)
NARROW = Budget(steps=40, batch=32, examples=2_816, val=500, test=2_000)
DIGITS = Budget(steps=30, batch=64, examples=768, val=360, test=360)
TEXT = Budget(steps=12, batch=8, examples=24, val=16, test=64)
BUDGETS = {"digits": DIGITS, **dict.fromkeys(("cifar_impaired", "cifar_minimal", "cifar_deep_impaired"), NARROW)}
"""Of hosts that growth is to rescue: they are cheap enough for a longer run, which shows it."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Verify the tasks."""

    data_dir: Path | None = None
    """Folder of the data files."""
    tasks: tuple[str, ...] = TASKS
    """Names of the tasks."""
    steps: int | None = None
    """Control steps of a run, instead of those of the short budgets; a seed germinates in step 1."""
    examples: int | None = None
    """Training examples of a step, instead of those of the short budgets."""
    full: bool = False
    """Train as the task says: its whole episode, its batches, all data."""
    hosts: int = 4
    """Paired hosts per blueprint."""
    seeds: tuple[int, ...] = (0, 1)
    """Run seeds that are run twice; growth is measured with the first."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    page: Path | None = None
    """Write the tables between the markers of this page."""
    json: Path | None = None
    """Also write every number to this file, after each task. Tasks in it that are not named stay in the page."""

    def __post_init__(self) -> None:
        if len(set(self.seeds)) < 2:
            raise ConfigError(f"seeds are {self.seeds}; name two different ones, which must give different hosts.")
        if self.steps is not None and self.steps < (least := 1 + TEMPO_TICKS[FAST] + 3):
            raise ConfigError(f"steps is {self.steps}; a grown seed needs at least {least}.")

    def budget(self, task: TaskSpec) -> Budget:
        """The short budget of a task."""
        found = BUDGETS.get(task.name, WIDE if task.family is HostFamily.CNN else TEXT)
        return replace(found, steps=self.steps or found.steps, examples=self.examples or found.examples)


def first_examples(data: Dataset, val: int, test: int) -> Dataset:
    """The whole training split, and the first examples of the others; all of them if there are fewer."""

    def first(split: Split, count: int) -> Split:
        return Split(split.x[:count], split.y[:count])

    return replace(data, val=first(data.val, val), test=first(data.test, test))


def middle_slot(task: TaskSpec) -> int:
    """Index of the slot of a run that has as many before as after it in the forward pass."""
    assert task.host is not None
    in_order = sorted((p for p in task.host.points() if p.slot_id in task.enabled), key=lambda p: p.position)
    return task.enabled.index(in_order[(len(in_order) - 1) // 2].slot_id)


def grow_one(blueprint: int, slot: int, min_training_epochs: int) -> Schedule:
    """A seed that germinates in step 1 and is fossilized as soon as it may be."""
    germinate = canonical_action(LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, tempo=FAST)
    first_legal = 1 + min_training_epochs + TEMPO_TICKS[FAST] + 1
    return Schedule.from_rows(
        "grow_one", 1, [(1, germinate), (first_legal, canonical_action(LifecycleOp.FOSSILIZE, slot=slot))]
    )


NOTHING = Schedule(id="wait_only", version=1, entries=())


def play(engine: VectorizedEngine, schedule: Schedule) -> Trial:
    """One episode in which all hosts follow `schedule`."""
    client = ScriptedClient(scheduled(schedule, engine.spec), make_reward("objective", RewardConfig(mode="objective")))
    began = time.process_time()
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    (test,) = host_read(engine.test())
    return Trial(
        val=stats.committed_acc.tolist(),
        test=test.tolist(),
        fossilized=int((stats.fossilized > 0).sum()),
        rollbacks=int(stats.rollbacks.sum()),
        seconds=time.process_time() - began,
    )


def verify(task: TaskSpec, options: Options, device: torch.device) -> Result:
    """Growth and agreement of one task; raises DataError if its data are missing or broken."""
    assert task.host is not None
    data = load_dataset(task, options.seeds[0], device, options.data_dir)
    assert data is not None
    budget, epochs, episode = options.budget(task), task.min_training_epochs, task.episode_length
    short, few = task, first_examples(data, budget.val, budget.test)
    if not options.full:
        short = replace(task, batch_train=budget.batch, batches_per_step=max(1, budget.examples // budget.batch))
        data, epochs, episode = few, max(1, budget.steps // 6), budget.steps
    slot = middle_slot(task)
    config = EngineConfig(
        run_seed=options.seeds[0],
        num_envs=options.hosts,
        episode_length=episode,
        slots=task.enabled,
        executor="auto",
        lifecycle=LifecycleConfig(min_training_epochs=epochs),
    )
    engine = build_engine(config, short, data, device)
    waits, grown = play(engine, NOTHING), {}
    for index in engine.spec.selectable:
        grown[registry.names()[index]] = play(engine, grow_one(index, slot, epochs))
    tiny = replace(task, batch_train=budget.batch // 4, batches_per_step=2)
    return Result(
        task=task.name,
        measured=measured(environment(device)),
        data=data_label(data.identity),
        figure=task.objective.unit,
        host_params=task.host.num_params(),
        slot=task.enabled[slot],
        executor=engine.config.executor,
        budget=f"{episode} x {short.batches_per_step or 'all'} batches of {short.batch_train}",
        measured_on=(len(data.val), len(data.test)),
        wait_only=waits,
        grown=grown,
        agreement=agreement(tiny, first_examples(few, budget.batch, budget.batch), options.seeds, device),
    )


def agreement(task: TaskSpec, data: Dataset, seeds: Sequence[int], device: torch.device) -> Agreement:
    """Short runs of hosts with every blueprint, under each executor that can run them, twice for each seed."""
    executors: tuple[ExecutorChoice, ...] = ("streamed", "fused", "native")
    if device.type != "cpu" or task.family is not HostFamily.CNN:
        executors = executors[:2]
    runs = {
        (name, seed): [short_run(task, data, name, seed, device) for _ in range(2)]
        for name in executors
        for seed in seeds
    }
    first = {key: pair[0] for key, pair in runs.items()}

    def apart(executor: ExecutorChoice, last: int) -> float:
        pairs = [(first[executor, seed][1], first["streamed", seed][1]) for seed in seeds]
        return float(np.max([np.abs(found[:last] - want[:last]).max() for found, want in pairs]))

    return Agreement(
        early={name: apart(name, 3) for name in executors[1:]},
        late={name: apart(name, 6) for name in executors[1:]},
        repeats=all(same(one[0], two[0]) for one, two in runs.values()),
        seeds_differ=all(not same(first["streamed", seeds[0]][0], first["streamed", s][0]) for s in seeds[1:]),
    )


def short_run(
    task: TaskSpec, data: Dataset, executor: ExecutorChoice, seed: int, device: torch.device
) -> tuple[StateTree, np.ndarray]:
    """The state after six steps, and the losses [6, 2, N] of training and validation.

    Host n has blueprint n from the start, blended by each algorithm in turn; one more seed is trained and blended.
    """
    selectable, slot = registry.selectable(task.family), middle_slot(task)
    config = EngineConfig(
        run_seed=seed,
        num_envs=len(selectable),
        episode_length=6,
        slots=task.enabled,
        executor=executor,
        lifecycle=LifecycleConfig(min_training_epochs=1),
    )
    reports: list[StepReport] = []
    engine = build_engine(config, task, data, device, on_step=reports.append)
    names = registry.names()
    engine.architectures = [
        Architecture((PlacedSeed(task.enabled[slot - 1], names[index], ALGORITHMS[n % 3]),))
        for n, index in enumerate(selectable)
    ]
    play(engine, grow_one(selectable[0], slot, 1))
    losses = np.array([(report.train_loss, report.val_loss) for report in reports])
    return engine.state_dict(), losses


def same(a: StateTree, b: StateTree) -> bool:
    """Whether two trees are equal to the bit; a missing measurement (NaN) equals itself."""
    return all(a[name].cpu().numpy().tobytes() == b[name].cpu().numpy().tobytes() for name in a)


def main(options: Options) -> int:
    """Verify the tasks and write the page; returns 1 if a check failed."""
    console, device = Console(stderr=True), choose_device(options.device)
    if options.page is not None:
        between_markers(options.page.read_text(encoding="utf-8"), "", MARKERS)
    settings = {name: value for name, value in asdict(options).items() if name not in ("page", "json", "data_dir")}
    found = earlier_results(options.json)
    for name in options.tasks:
        began = time.process_time()
        found[name] = verify(task_by_name(name), options, device)
        console.print(f"{name}: {time.process_time() - began:.0f} s", highlight=False)
        if options.json is not None:
            write_result(options.json, "verify_tasks", device, settings, [asdict(result) for result in found.values()])
    results = sorted(
        found.values(), key=lambda result: TASKS.index(result.task) if result.task in TASKS else len(TASKS)
    )
    text = sections(results)
    if options.page is not None:
        page = between_markers(options.page.read_text(encoding="utf-8"), f"\n{text}\n", MARKERS)
        options.page.write_text(page, encoding="utf-8")
    else:
        print(text)
    wrong = failures(results)
    for failure in wrong:
        console.print(f"verify_tasks: {failure}", highlight=False, style="red")
    return 1 if wrong else 0


def earlier_results(path: Path | None) -> dict[str, Result]:
    """The results by task in a file of an earlier run; none without one."""
    if path is None or not path.exists():
        return {}
    return {row["task"]: result_of(row) for row in json.loads(path.read_text(encoding="utf-8"))["results"]}


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options)))
    except (EsperError, OSError) as error:
        print(f"verify_tasks: {error}", file=sys.stderr)
        sys.exit(2)
