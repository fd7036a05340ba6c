"""Grows networks with a controller, and keeps the best."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, final

import numpy as np

from esper.api.grown import Grown
from esper.api.run import Run
from esper.api.session import AnyTask, console, folder, given, in_process, spec_of
from esper.api.timeline import Timeline
from esper.export.network import GrownNetwork
from esper.leyline.errors import ConfigError, ExportError, RunDirectoryError, Stopped, nearest
from esper.leyline.manifest import GrowthManifest
from esper.leyline.protocols import ClientProtocol, EngineSpec
from esper.runs import controllers as known
from esper.runs.build import dataset_of, device_of, engine_of, require_memory, reward_of
from esper.runs.config import RunConfig
from esper.runs.plugins import load_plugins, names_task
from esper.runs.presets import absolute_plugins, resolve
from esper.runs.report import RoundSoFar
from esper.runs.runner import stop_signals
from esper.simic.scripted_client import ScriptedClient
from esper.tamiyo.baselines import STATIC, PolicyMaker, as_policy, scheduled
from esper.tamiyo.schedules import Schedule
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import RunConsole, RunProgress, warn
from esper.tolaria.runtime import host_read
from esper.tolaria.state import StepReport

Controller: TypeAlias = Run | Path | str | Schedule | PolicyMaker


def grow(
    task: AnyTask,
    controller: Controller = "heuristic",
    *,
    best_of: int = 1,
    steps: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> Grown:
    """Grow networks of a task from new weights, and keep the one with the most points on the validation examples.

    A trained controller draws its operations from its policy, as in training and evaluation, by keys of `seed`: equal
    arguments give equal networks. It may come from another task with as many slots in the same family of networks.

    Ctrl-C stops after the current step, and what has grown until then is given. A second one ends the work at once.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        controller: a run (from `esper.train`, or its directory), the name of a baseline or registered policy, a
            schedule, or a function of the `EngineSpec` that gives a script or policy.
        best_of: networks that grow in parallel; the best is measured on the test examples, once.
        steps: control steps; those of the task or run if not given.
        seed: key of initial weights, order of examples and draws of the controller.
        device: "auto", "cpu", "cuda" or "cuda:N"; as in the run if not given.
        progress: whether to print.
        settings: any key of the configuration, such as workers=1.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError, ExportError: what does not fit, and the way out.
        KeyboardInterrupt: Ctrl-C was pressed before the first step or a second time.
    """
    plugins = absolute_plugins([*settings.pop("plugins", ()), *_file_of(task)], Path())
    load_plugins(plugins)
    spec, run = spec_of(task), _run_of(controller)
    if best_of < 1:
        raise ConfigError(f"best_of is {best_of}; at least 1 network is needed.")
    if "num_envs" in settings:
        raise ConfigError("the number of networks is best_of here; leave num_envs out.")
    changes = given(settings, episode_length=steps, device=device)
    with ExitStack() as stack:
        stack.enter_context(in_process(spec))
        if run is not None and run.task is not None and run.task.name != spec.name:
            stack.enter_context(in_process(run.task))
        config = _config(spec, run, changes, seed)
        # workers import them too; one episode is shorter than a compilation
        config = replace(config, compile="off", plugins=tuple(dict.fromkeys((*config.plugins, *plugins))))
        name, make = _client(spec, controller, run, config)
        try:
            return _grown(config, make, name, best_of, seed, console(progress))
        except KeyboardInterrupt:
            raise Stopped("stopped; nothing was kept") from None


def _file_of(task: AnyTask) -> list[str]:
    """The plugin that a task is, if it is named by its file."""
    return [task] if isinstance(task, str) and names_task(task) else []


def _run_of(controller: Controller) -> Run | None:
    """The run that was named, if it was one."""
    if isinstance(controller, Run):
        return controller
    if isinstance(controller, str) and controller in known.names():
        return None
    if isinstance(controller, str | Path):
        if not folder(controller).exists():
            raise RunDirectoryError(
                f"{controller} is neither a run directory nor a baseline; {nearest(str(controller), known.names())}"
            )
        return Run(folder(controller))
    return None


def _config(spec: TaskSpec, run: Run | None, changes: dict[str, Any], seed: int) -> RunConfig:
    """The settings of the run, or those of its policy for another task."""
    if run is None:
        return resolve({"task": spec.name, "seed": seed, **changes})
    if run.config["task"] == spec.name:
        return run.resolved(changes)
    return resolve({"task": spec.name, **run.policy_values(), **changes})


def _client(
    spec: TaskSpec, controller: Controller, run: Run | None, config: RunConfig
) -> tuple[str, Callable[[EngineSpec], ClientProtocol]]:
    """A name for messages, and what makes the client."""
    if run is not None:
        found = known.trained(run.directory, config, transfer=True)
        warn(f"{complaint} Using the one {found.place} instead." for complaint in found.complaints)
        return str(run.directory), found.controller.make
    if isinstance(controller, str):
        if controller == STATIC and not config.topology:
            raise ConfigError(
                f"{STATIC} starts with a structure that is given; set topology, or use another controller."
            )
        return controller, known.baseline(controller, config).make
    if isinstance(controller, Schedule):
        return controller.id, lambda of: ScriptedClient(scheduled(controller, of), reward_of(config, of))
    assert not isinstance(controller, Run | Path), "found to be a run before"
    return (
        getattr(controller, "__name__", type(controller).__name__),
        lambda of: ScriptedClient(as_policy(controller(of), of), reward_of(config, of)),
    )


def _grown(
    config: RunConfig,
    make: Callable[[EngineSpec], ClientProtocol],
    name: str,
    best_of: int,
    seed: int,
    out: RunConsole,
) -> Grown:
    device = device_of(config)
    dataset, task = dataset_of(config, device), config.task_spec()
    if dataset is None:
        raise ExportError(f"task {task.name!r} is scripted and has no networks; grow another task.")
    networks = f"{best_of} network{'s' * (best_of != 1)}"
    out.say(f"esper: grow {task.name} by {name}, {networks} x {config.episode_length} steps, seed {seed}")
    require_memory(config, task, dataset, device, out.say, num_envs=best_of, episodes=1, setting="best_of")
    watch, requests = _Watch(out, config), list[bool]()
    engine = engine_of(
        config, dataset, device, engine_config=config.engine(run_seed=seed, num_envs=best_of), on_step=watch
    )
    engine.planted = (GrowthManifest.of_lines(config.topology),) * best_of if config.topology else ()
    client = make(engine.spec)
    with watch.progress, stop_signals(lambda: requests.append(True)):
        engine.reset(client, episode=0)
        stats = engine.rollout(client, should_stop=lambda: bool(requests))
        if stats is None:
            stats = engine.outcome()
            out.say(f"stopped after step {engine.t} of {config.episode_length}; what grew until then is kept")
    # a finite loss, then the most points; of equal ones the smallest network
    best = int(np.lexsort((stats.fossil_params, -stats.committed_acc, ~np.isfinite(stats.committed_loss)))[0])
    test = float(host_read(engine.test())[0][best])
    network = GrownNetwork.of(engine, task, dataset, stats, host=best, test=test)
    unit = task.objective.unit
    return Grown(network, Timeline.of(watch.reports, engine.spec, best, float(stats.committed_acc[best]), unit))


@final
class _Watch:
    """Keeps the reports of the steps, and shows them."""

    def __init__(self, out: RunConsole, config: RunConfig) -> None:
        self.reports, self._so_far = list[StepReport](), RoundSoFar(config.reward)
        self.progress = RunProgress(out, rounds=1, steps=config.episode_length)
        self._began = time.monotonic()

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        (shown,) = self._so_far.add([report], [time.monotonic() - self._began])
        self.progress.write("step", shown)
