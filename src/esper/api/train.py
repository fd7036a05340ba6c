"""Trains a controller."""

from pathlib import Path
from typing import Any

from esper.api.run import Run, require_finished
from esper.api.session import AnyTask, console, folder, given, in_process, spec_of
from esper.runs import training
from esper.runs.presets import resolve


def train(
    task: AnyTask,
    rounds: int = 30,
    num_envs: int = 8,
    *,
    preset: str | None = None,
    reward: str | None = None,
    device: str | None = None,
    run_dir: Path | str | None = None,
    progress: bool = True,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> Run:
    """Train a controller that grows networks of a task, as `esper train` does, in this process.

    Ctrl-C stops after the current step, and `Run.resume` continues.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        rounds: rounds of training; coefficients are annealed over as many.
        num_envs: networks that train in parallel.
        preset: base settings: "quickstart" (default), "small", "learn" or "paper".
        reward: name of a reward, built in or registered ("objective").
        device: "auto", "cpu", "cuda" or "cuda:N".
        run_dir: run directory to create; a new folder under runs/ if not given.
        progress: whether to print.
        settings: any key of the configuration, such as workers=1, ppo={"lr": 1e-3} or **{"ppo.lr": 1e-3}.

    Raises:
        ConfigError, RegistryError, DataError, RunDirectoryError: what is wrong, and the way out.
        KeyboardInterrupt: the run was stopped; its text says how it goes on.
    """
    spec, named = spec_of(task), {"rounds": rounds, "num_envs": num_envs, "preset": preset, "reward": reward}
    values = given({"schedule_rounds": rounds, **settings}, **named, device=device)
    values["task"] = task if isinstance(task, str) else spec.name
    with in_process(None if isinstance(task, str) else spec):
        config = resolve(values)
        path = training.free_name(config) if run_dir is None else folder(run_dir)
        summary = training.start(config, path, console(progress))
    require_finished(summary, path, task=not isinstance(task, str))
    return Run(path, None if isinstance(task, str) else spec, trust=True)
