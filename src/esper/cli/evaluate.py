"""esper evaluate: compares trained controllers with baselines."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from esper.cli.options import (
    FilePath,
    Flag,
    Number,
    Plugins,
    Ranks,
    Real,
    Text,
    Whole,
    folder_of_all,
    in_ranks,
    joined,
    overrides,
    placeholder,
)
from esper.leyline.errors import ConfigError, importing, refusing
from esper.leyline.files import replacing
from esper.telemetry.progress import RunConsole, ranks_of_job
from esper.telemetry.run_directory import plain_json

if TYPE_CHECKING:
    from esper.leyline.ranks import Group
    from esper.runs.assembly.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare trained controllers with baselines on the same new hosts.

    Controllers are not trained further; run directories are not changed.
    """

    # Run directories, baselines and policy files; several runs are one controller, trained with several seeds, or
    # several rewards or learners side by side, where they differ in settings of these alone. Runs of one are compared
    # with all baselines: wait_only, random, fixed_schedule, fixed_schedule_fill, heuristic, explore_then_commit,
    # static_final, static_common, big_host, untrained, and where they were searched best_schedule, portfolio and
    # halving. Besides: random_search, hill_climbing.
    controllers: Annotated[tyro.conf.Positional[tuple[str, ...]], placeholder("RUN|BASELINE|FILE.json ...")] = ()
    best: Flag = False
    """Use the checkpoint with the highest mean J of ten rounds instead of the newest."""
    task: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], placeholder("NAME")] = ()
    """A task, or several; with runs, others that their controllers are transferred to. (digits, or that of the runs)"""
    preset: Text = None
    """Preset, if no run is given. (quickstart)"""
    reward: Text = None
    """Reward, if no run is given. (objective)"""
    num_envs: Whole = 16
    """Hosts per controller and seed. (16)"""
    # Compare all of them once more at this budget, e.g. 1e9, for training and measuring a host: each controller run as
    # often as fits, validation keeps the best. (no such comparison; portfolio, halving, random_search and hill_climbing
    # spend what the trained controller does, without a run three trainings of the plain host)
    flops_per_host: Real = None
    episode_length: Number = None
    """Control steps per episode. (as in the run, or set by the task)"""
    architecture: FilePath = None
    """The model.json of an exported network that static_final starts with, if no run is given."""
    seed: Annotated[tyro.conf.UseAppendAction[tuple[int, ...]], placeholder("N")] = ()
    """Seed of the evaluation hosts: one for each run, or any number without runs. (training seed + 1000000)"""
    # Folder that keeps each outcome as soon as it is known, evaluation.json, and with --flops-per-host a picture; a
    # second call continues there.
    out: FilePath = None
    device: Text = None
    """auto, cpu, cuda or cuda:N. (as in the run)"""
    data_dir: FilePath = None
    """Folder of the data files. (as in the run)"""
    plugins: Plugins = ()
    """Plugins to import; with a run, those of its plugins that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directories name."""
    ranks: Ranks = None
    json: Flag = False
    """Print the results of every host as JSON instead of the table."""


def evaluate(command: Evaluate) -> int:
    """Evaluate the controllers and print the comparison."""
    from esper.runs.assembly.plugins import load_plugins, names_task
    from esper.runs.evaluation.comparison import compare, named
    from esper.runs.evaluation.outcomes import PICTURE, REPORT
    from esper.runs.evaluation.rewards import compare_rewards, differ_in_learning

    tasks = command.task or (None,)
    load_plugins([*joined(command.plugins), *(task for task in tasks if task is not None and names_task(task))])
    runs, baselines = named(command.controllers)  # among them policies that a plugin registers
    draw = _draws(command)
    if len(set(tasks)) < len(tasks):
        raise ConfigError(f"the tasks {', '.join(map(str, tasks))} are not all different; give each once.")
    configs = [_configs(command, runs, task) for task in tasks]
    if command.ranks not in (None, 1):
        return in_ranks(command.ranks)
    with ranks_of_job() as group:
        found = [
            (partial(compare_rewards, compare) if differ_in_learning(of_task) else compare)(
                of_task,
                runs,
                baselines,
                best=command.best,
                seeds=command.seed,
                num_envs=command.num_envs,
                flops=command.flops_per_host,
                out=command.out,
                console=RunConsole(stderr=True),
            )
            for of_task in configs
        ]
    if not group.is_first:
        return 0
    reports = [comparison.report() for comparison in found]
    text = json.dumps(plain_json(reports if len(reports) > 1 else reports[0]), indent=2)
    if command.out is not None:
        with replacing(command.out / REPORT) as file:
            print(text, file=file)
        for report in reports:
            name = PICTURE if len(reports) == 1 else f"{PICTURE}-{report['task']}"
            draw(report, command.out / name)
    console = RunConsole()
    if command.json:
        console.out(text, highlight=False)
        return 0
    for i, comparison in enumerate(found):
        if i:
            console.say("")
        comparison.show(console)
    return 0


def _draws(command: Evaluate) -> Callable[[Mapping[str, Any], Path], None]:
    """Draws the comparison at equal compute into files, if there is one; raises ConfigError if that is impossible."""
    budget = command.flops_per_host
    if budget is not None and not 0.0 < budget < math.inf:
        raise ConfigError(f"--flops-per-host is {budget:g}; give the FLOPs that a host may spend, e.g. 1e9.")
    if budget is None or command.out is None:
        return lambda report, path: None
    with importing("the picture at equal compute needs matplotlib", "report", "leave --out out"):
        from esper.telemetry.report.figures import write_equal_compute
    return write_equal_compute


def _configs(command: Evaluate, runs: tuple[Path, ...], task: str | None) -> list["RunConfig"]:
    """The configuration of each run on a task, or the one that the options give."""
    from esper.runs.assembly.presets import config_of_run, resolve

    given = {name: value for name, value in overrides(command).items() if name != "task"}
    given |= {"task": task} if task is not None else {}
    given.pop("num_envs", None)  # of the evaluation hosts, not of the run
    given.pop("seed", None)
    if not runs:
        if command.best:
            raise ConfigError("--best needs a run directory; name one, or leave it out.")
        return [resolve(given)]
    if own := sorted(given.keys() - {"device", "data_dir", "plugins", "task", "episode_length"}):
        raise ConfigError(f"{', '.join(own)} cannot be changed for an existing run; leave it out.")
    return [config_of_run(run, given, trust=command.trust) for run in runs]


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find the best schedule and the best rule of a task, its best portfolios, or tune the heuristic for it.

    They are searched on training hosts and written as files that `esper evaluate` compares.
    """

    task: Annotated[tyro.conf.Positional[str], placeholder("TASK")]
    """The task, or FILE.py:NAME."""
    heuristic: bool = False
    """Tune the hand-written rules of the heuristic instead."""
    portfolio: bool = False
    """Search structures to be tried side by side on each host instead: portfolios and halvings for every budget."""
    budget: Number = None
    """Env-steps (hosts x control steps) to spend. (those of a training run of the preset)"""
    out: FilePath = None
    """Folder of the files. (a new folder under runs/)"""
    preset: Text = None
    """Base settings. (quickstart)"""
    # Hosts that run at once; of --portfolio as many as the budget pays for. (as in training; up to 256 for scripted
    # tasks)
    num_envs: Number = None
    episode_length: Number = None
    """Control steps per episode. (set by the task)"""
    seed: Number = None
    """Random seed: that of the training run whose hosts are used. (0)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (auto)"""
    data_dir: FilePath = None
    """Folder of the data files. ($ESPER_DATA)"""
    executor: Text = None
    """How hosts are run: streamed, fused, native or auto. (auto)"""
    ranks: Ranks = None
    plugins: Plugins = ()
    """Plugins that register tasks or blueprints."""


def search(command: Search) -> int:
    """Search, write the files and print what was found."""
    from esper.runs.assembly.presets import resolve

    given = overrides(command)
    given.pop("num_envs", None)  # of the search, not of the training run that gives the default budget
    config = resolve(given)
    if command.ranks not in (None, 1):
        return in_ranks(command.ranks)
    with ranks_of_job() as group:
        return _search(command, config, group)


def _search(command: Search, config: "RunConfig", group: "Group") -> int:
    """Search with the other ranks; the first one writes."""
    from esper.runs.assembly.assemble import dataset_of, device_of, require_memory
    from esper.runs.assembly.run_config import free_folder
    from esper.runs.evaluation import search as searching
    from esper.telemetry.progress import PassProgress

    budget = searching.default_budget(config) if command.budget is None else command.budget
    folder = folder_of_all(group, command.out, lambda: free_folder(config, "search"))
    console = RunConsole()
    find: Callable[..., searching.Found | searching.FoundPlans]
    if not command.portfolio:
        hosts = searching.default_num_envs(config, budget) if command.num_envs is None else command.num_envs
        config.engine(num_envs=hosts)  # refuses an impossible number of hosts
        passes, what = searching.passes_of(budget, hosts, config.episode_length), "passes of"
        device = device_of(config)
        dataset = dataset_of(config, device)
        by = searching.tune if command.heuristic else searching.search
        find = partial(by, config, budget=budget, num_envs=hosts)
    elif command.heuristic or command.num_envs is not None:
        raise ConfigError("--portfolio goes with neither --heuristic nor --num-envs; leave one of them out.")
    else:
        plans = searching.PlanSearch(config, budget)
        passes, hosts, what = plans.structures, plans.hosts, "structures on"
        device, dataset, find = plans.device, plans.dataset, partial(plans.run, folder)
    console.say(
        f"esper: search on {config.task}, budget {budget:,} env-steps = {passes} {what} {hosts} hosts x "
        f"{config.episode_length} steps, seed {config.seed}"
    )
    require_memory(config, config.task_spec(), dataset, device, console.say, num_envs=hosts, episodes=passes)
    with refusing(ConfigError, f"the folder {folder} cannot be made", "name another with --out"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with PassProgress(console, passes) as progress:
            found = find(progress=progress)
        if group.is_first:
            found.write(folder)
    finally:
        if group.is_first and not any(folder.iterdir()):
            folder.rmdir()
    if group.is_first:
        found.show(folder, console)
    return 0
