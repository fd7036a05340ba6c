"""esper search: finds the best constant schedule and the best simple rule of a task, or tunes the heuristic for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.options import FilePath, Number, Plugins, Text, overrides, placeholder
from esper.leyline.errors import ConfigError
from esper.telemetry.progress import RunConsole


@dataclass(frozen=True, kw_only=True)
class Search:
    """Find the best schedule of a task and the best rule that looks at each host once, or tune the heuristic for it.

    They are searched on training hosts and written as files that `esper evaluate` compares.
    """

    task: Annotated[tyro.conf.Positional[str], placeholder("TASK")]
    """The task, or FILE.py:NAME."""
    heuristic: bool = False
    """Tune the hand-written rules of the heuristic instead."""
    budget: Number = None
    """Env-steps (hosts x control steps) to spend. (those of a training run of the preset)"""
    out: FilePath = None
    """Folder of the files. (a new folder under runs/)"""
    preset: Text = None
    """Base settings. (quickstart)"""
    num_envs: Number = None
    """Hosts that run at once. (as in training; up to 256 for scripted tasks)"""
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
    workers: Number = None
    """Processes that share the hosts on a CPU. (set by the preset)"""
    plugins: Plugins = ()
    """Plugins that register tasks or blueprints."""


def search(command: Search) -> int:
    """Search, write the files and print what was found."""
    from esper.runs import search as searching
    from esper.runs.build import dataset_of, device_of, require_memory
    from esper.runs.heuristic_search import tune
    from esper.runs.presets import resolve
    from esper.runs.search_tables import show, show_heuristic
    from esper.telemetry.progress import PassProgress

    given = overrides(command)
    given.pop("num_envs", None)  # of the search, not of the training run that gives the default budget
    config = resolve(given)
    budget = searching.default_budget(config) if command.budget is None else command.budget
    num_envs = searching.default_num_envs(config, budget) if command.num_envs is None else command.num_envs
    config.engine(num_envs=num_envs)  # refuses an impossible number of hosts
    passes = searching.passes_of(budget, num_envs, config.episode_length)
    folder = searching.free_name(config) if command.out is None else command.out
    console = RunConsole()
    console.say(
        f"esper: search on {config.task}, budget {budget:,} env-steps = {passes} passes of {num_envs} hosts x "
        f"{config.episode_length} steps, seed {config.seed}"
    )
    device = device_of(config)
    dataset = dataset_of(config, device)
    require_memory(config, config.task_spec(), dataset, device, console.say, num_envs=num_envs, episodes=passes)
    with _made(folder), PassProgress(console, passes) as progress:
        size = {"budget": budget, "num_envs": num_envs}
        if command.heuristic:
            tuned = tune(config, **size, on_pass=progress.advance, on_stage=progress.stage)
            tuned.write(folder)
        else:
            found = searching.search(config, **size, on_pass=progress.advance, on_stage=progress.stage)
            found.write(folder)
    if command.heuristic:
        show_heuristic(tuned, folder, console)
    else:
        show(found, folder, console)
    return 0


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The folder, made before the search is paid for, and removed again if nothing was written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be made ({error.strerror}); name another with --out.") from error
    try:
        yield
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()
