"""The verb grow, the network that it gives, and what happened while the network grew, step by step."""

import json
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from stat import S_ISREG
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from torch import nn

from esper.api import checked
from esper.api.run import AnyTask, Run, console, given, in_process, spec_of
from esper.export import network
from esper.export.grown import Origin, read_description
from esper.export.network import GrownNetwork, Saved
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.architecture import Architecture
from esper.leyline.errors import (
    ConfigError,
    ExportError,
    RunDirectoryError,
    Stopped,
    in_shell,
    nearest,
    option,
    refusing,
)
from esper.leyline.files import expanded, mode_of, read_json
from esper.leyline.lifecycle import COOLDOWN, SeedStage
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.leyline.ranks import is_launched, stop_signals
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of, require_memory
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.plugins import load_plugins, names_task
from esper.runs.assembly.presets import absolute_plugins, resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation import controllers as known
from esper.runs.evaluation import tables
from esper.runs.growth import HOPELESS, METHODS, SAVE_EVERY, Budget, Growth, Keep, Method, require_trained
from esper.runs.leaderboard import Leaderboard, compared
from esper.runs.records import Event, step_events
from esper.runs.report import RoundSoFar
from esper.runs.training.best_host import grown_of_run
from esper.simic.client import ScriptedClient
from esper.tamiyo.baselines import STATIC, PolicyMaker, policy_of, scheduled
from esper.tamiyo.policy_files import is_policy_file
from esper.tamiyo.schedules import Schedule
from esper.tasks.datasets import cautions
from esper.telemetry.progress import PassProgress, RunConsole, RunProgress, warn
from esper.telemetry.run_directory import CONFIG, EVENTS, plain_json
from esper.tolaria.runtime import host_read
from esper.tolaria.state import StepReport

FILE = "timeline.json"
_SILENT = {stage.name for stage in (COOLDOWN - {SeedStage.PRUNED}) | {SeedStage.DORMANT}}


class Row(NamedTuple):
    """One event: in this step, the seed of a slot reached a stage ("germinated" to "fossilized", or "pruned").

    Other events are "refused" (a seed that was not good enough to be fossilized), "rolled back" (the host, after a bad
    loss), and "end", with the points of the network that is kept. `points` are those of the network with all seeds, on
    the validation examples; None where they were not measured.
    """

    step: int
    slot: str
    event: str
    blueprint: str | None
    alpha: float | None
    points: float | None


@final
class Timeline(tuple[Row, ...]):
    """Rows in order; prints as a table."""

    unit: str

    def __new__(cls, rows: Iterable[Row], unit: str) -> "Timeline":
        """The rows, whose points have this unit."""
        found = super().__new__(cls, rows)
        found.unit = unit
        return found

    def __getnewargs__(self) -> tuple[tuple[Row, ...], str]:
        """For copies and pickles."""
        return tuple(self), self.unit

    @classmethod
    def of(cls, reports: Sequence[StepReport], spec: EngineSpec, host: int, points: float, unit: str) -> "Timeline":
        """The timeline of a host whose final network has these points."""
        live = {report.t: float(report.val_acc[host]) for report in reports}
        own = (event for event in step_events(reports, spec) if event["host"] == spec.host_offset + host)
        last = max((report.t for report in reports), default=0)  # earlier than the end of the episode if it was stopped
        return cls(_rows(own, live, last, points), unit)

    @classmethod
    def of_run(cls, run: Path, origin: Origin, steps: int, points: float, unit: str) -> "Timeline":
        """The same from the records of a run, for a host of a complete round of `steps` steps."""
        from esper.telemetry.record.reader import open_record, read_lines

        warnings: list[str] = []
        events = read_lines(run / EVENTS, ("stage_changed", "refused", "rollback"), warnings)
        with open_record([run]) as record:
            place = [origin.round, origin.host]
            found = record.query("SELECT t, val_acc FROM steps WHERE round = ? AND host = ?", place)
        live = {row["t"]: row["val_acc"] for row in found}
        warn(warnings)
        own = (event for event in events if [event["round"], event["host"]] == place)
        return cls(_rows(own, live, steps, points), unit)

    @classmethod
    def read(cls, folder: Path, unit: str) -> "Timeline":
        """The timeline in a folder of `Grown.save`, empty where there is none; raises ExportError if it is damaged."""
        file = folder / FILE
        try:
            rows = read_json(file) if file.is_file() else []
            return cls([Row(**row) for row in rows], unit)
        except (ValueError, TypeError) as error:
            raise ExportError(f"{file} is damaged ({error}); delete it to load the network without.") from error

    def text(self) -> str:
        """The JSON document."""
        return json.dumps([row._asdict() for row in self], indent=1, allow_nan=False) + "\n"

    def __str__(self) -> str:
        page = tables.plain_table("step", "slot", "event", "blueprint", "alpha", self.unit)
        for column in page.columns[1:4]:
            column.justify = "left"
        for row in self:
            alpha, points = (
                "" if value is None else f"{value:.2f}" for value in (row.alpha if row.slot else None, row.points)
            )
            page.add_row(str(row.step), row.slot, row.event, row.blueprint or "", alpha, points)
        return tables.text(lambda console: console.print(page))

    __repr__ = __str__


def _rows(events: Iterable[Event], live: Mapping[int, float | None], last: int, points: float) -> Iterator[Row]:
    """The rows of a host, of which the `last` step has the points of the network that is kept."""
    for event in events:
        if (row := _row(event, live)) is not None:
            yield row
    yield _clean(Row(last, "", "end", None, None, points))


def _row(event: Event, live: Mapping[int, float | None]) -> Row | None:
    """The row of an event of a host; None for those without interest."""
    step = event["t"]
    assert isinstance(step, int)
    match event["kind"]:
        case "stage_changed" if event["to"] not in _SILENT:
            what, slot = str(event["to"]).lower(), str(event["slot"])
        case "refused":
            what, slot = "refused", str(event["slot"])
        case "rollback":
            what, slot = "rolled back", ""
        case _:
            return None
    blueprint, alpha = event.get("blueprint"), event.get("alpha")
    assert blueprint is None or isinstance(blueprint, str)
    return _clean(Row(step, slot, what, blueprint, float(str(alpha)) if alpha is not None else None, live.get(step)))


def _clean(row: Row) -> Row:
    """Without NaN, which JSON does not have."""
    return Row(*(plain_json(value) for value in row))  # type: ignore[arg-type]


@final
class Grown:
    """A grown network and the timeline of its growth.

    Attributes:
        network: the module and its description (`esper.export`). timeline: what happened in each step.
        leaderboard: all candidates and what they cost; None if the network was loaded, or grown by a controller.
        beside: the leaderboards of other methods that had the same budget, by their names.
    """

    def __init__(self, network: GrownNetwork, timeline: Timeline, leaderboard: Leaderboard | None = None) -> None:
        self.network, self.timeline, self.leaderboard = network, timeline, leaderboard
        self.beside: dict[str, Leaderboard] = {}

    @property
    def module(self) -> nn.Module:
        """A plain module, inputs [B, ...] -> outputs [B, ...], in eval mode on the CPU; every weight is trainable.

        If the task has `inputs`, the module expects what they return. `module.network` is the user's network with
        its own parameter names; the seeds, `module.grown`, are applied by hooks.
        """
        return self.network.module

    @property
    def points(self) -> float | None:
        """Figure of merit on the validation examples."""
        return self.network.description.val

    @property
    def test_points(self) -> float | None:
        """Figure of merit on the test examples; None if it was not measured."""
        return self.network.description.test

    @property
    def perplexity(self) -> float | None:
        """Exponential of the loss per token on the validation examples; None unless the task is a text."""
        return self.network.description.perplexity

    @property
    def unit(self) -> str:
        """Name of the figure of merit."""
        return self.network.description.unit

    @property
    def num_params(self) -> int:
        """Parameters of the network and of what grew."""
        return self.network.description.host_params + self.network.description.grown_params

    @property
    def flops(self) -> int:
        """Floating-point operations of one example; a multiply-add counts as two."""
        return self.network.description.flops

    @checked
    def save(self, folder: Path | str, *, formats: Collection[str] = (), overwrite: bool = False) -> Saved:
        """Write the files of `esper export` and the timeline; `esper.load` reads them.

        Warns about each file that could not be written, such as model.py, and says why.

        Args:
            folder: must not exist, unless `overwrite` and it was made by this method.
            formats: "pt2" for torch.export, "onnx".
            overwrite: replace the folder.

        Returns:
            The files, and how the network is loaded from them without esper.

        Raises:
            ExportError: the folder exists or cannot be written, a format is unknown, or the saved network does not
                reproduce the measured figures.
        """
        texts = {FILE: self.timeline.text()} if self.timeline else {}
        saved = self.network.save(folder, formats=formats, overwrite=overwrite, texts=texts)
        warn(saved.notes)
        return saved

    @checked
    def picture(self, file: Path | str) -> None:
        """Draw the candidates, points against FLOPs, as a .png, .jpg or .svg file; needs matplotlib (extra `report`).

        Raises:
            ExportError: there is no leaderboard, or the file cannot be written.
        """
        from esper.telemetry.report.figures import growth_picture

        if self.leaderboard is None:
            raise ExportError("this network has no candidates to draw; grow one with a method such as auto.")
        boards = {"this network": self.leaderboard, **self.beside}
        figure = growth_picture({name: board.courses for name, board in boards.items()}, self.unit)
        try:
            figure.savefig(expanded(file), dpi=110)
        except (OSError, ValueError) as error:
            raise ExportError(
                f"{file} cannot be drawn ({error}); name a .png, .jpg or .svg file in a folder that can be written to."
            ) from error

    def __repr__(self) -> str:
        found = self.network.description
        grown = ", ".join(f"{seed.blueprint} in {seed.slot}" for seed in found.seeds) or "nothing grew"
        points = "" if found.val is None else f", {found.unit} {found.val:.2f}"
        return f"Grown({found.task!r}: {self.num_params:,} parameters, {grown}{points})"

    def __str__(self) -> str:
        own = f"{self.network.description.task}\n{self.network.summary}"
        if self.leaderboard is None:
            return own
        boards = {"this network": self.leaderboard, **self.beside}
        return "\n\n".join((str(self.leaderboard), *([compared(boards)] if self.beside else []), own))


Controller: TypeAlias = Run | Path | str | Schedule | PolicyMaker


def grow(
    task: AnyTask,
    method: Controller = "auto",
    *,
    budget: Budget | None = None,
    keep: Keep = "best",
    beside: Sequence[Method] = (),
    best_of: int = 1,
    steps: int | None = None,
    seed: int = 0,
    device: str | None = None,
    progress: bool = True,
    unfinished: Path | str | None = None,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> Grown:
    """Grow the best network of a task that a budget allows: the best of the last stage on `val`.

    The methods "auto", "plain", "portfolio", "halving" and "hill_climbing" train many candidates and stop weak ones
    early (`esper.runs.growth`); a budget of FLOPs, which is what three trainings of the network alone cost if none is
    given, makes them reproducible. Any other method is a controller, which grows `best_of` networks.

    A trained controller draws its operations from its policy, as in training and evaluation, by keys of `seed`: equal
    arguments give equal networks. It may come from any other task.

    Ctrl-C stops after the current step, and what has grown until then is given. A second one ends the work at once.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        method: one of those above; or a controller: a run (from `esper.train`, or its directory), the name of a
            baseline or registered policy, a schedule, or a function of the `EngineSpec` that gives a script or policy.
        budget: limits, which are never exceeded; for controllers that of parameters alone.
        keep: the network of the "best" step, if it is clearly better on all validation examples than the "last" one, by
            more than twice the standard error of a share. Which step that is, is decided on the few examples that each
            step measures. Controllers keep the last one.
        beside: other methods that spend as many FLOPs afterwards, such as "plain", so that there is something to
            compare with.
        best_of: networks that a controller grows in parallel; the best is measured on the test examples, once.
        steps: control steps of the network that is kept; decided by the budget if not given, for controllers those of
            the task or run.
        seed: key of initial weights, order of examples and draws of the controller.
        device: "auto", "cpu", "cuda" or "cuda:N"; as in the run if not given.
        progress: whether to print.
        unfinished: file that keeps the candidates until the growth is complete. If it is there, it is continued.
        settings: any key of the configuration, such as threads=1.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError, ExportError: what does not fit, and how to continue.
        KeyboardInterrupt: Ctrl-C was pressed before the first step or a second time.
    """
    if is_launched():
        raise ConfigError("torchrun has started several processes, but growth runs in one; start it without torchrun.")
    file = [task] if isinstance(task, str) and names_task(task) else []
    plugins = absolute_plugins([*settings.pop("plugins", ()), *file], Path())
    load_plugins(plugins)
    if limits := settings.keys() & {f.name for f in fields(Budget)}:
        name = min(limits)
        raise ConfigError(f"unknown argument {name}; limits are given as budget=esper.Budget({name}=...).")
    spec, budget = spec_of(task), budget or Budget()
    budget.require_room(spec)
    if best_of < 1:
        raise ConfigError(f"best_of is {best_of}; at least 1 network is needed.")
    if steps is not None and steps < 1:
        raise ConfigError(f"steps is {steps}; it must be at least 1.")
    run = None if method in METHODS else _run_of(method)
    of_methods = {"minutes": budget.minutes, "flops": budget.flops, "beside": beside, "unfinished": unfinished}
    if method in METHODS:
        if best_of != 1:
            raise ConfigError(
                f"best_of is {best_of}, but method {method!r} chooses the candidates itself; leave it out."
            )
    elif unused := [name for name, is_given in of_methods.items() if is_given]:
        raise ConfigError(
            f"a controller grows {option('best_of')} networks for {option('steps')} control steps; leave "
            f"{' and '.join(map(option, unused))} out, or choose a method: {', '.join(METHODS)}."
        )
    elif "num_envs" in settings:
        raise ConfigError("the number of networks is best_of here; leave num_envs out.")
    of_run = run.task if run is not None and run.task is not None and run.task.name != spec.name else None
    out = console(progress)
    try:
        with in_process(spec), in_process(of_run):
            if method in METHODS:
                config = resolve({"seed": seed, **given(settings, task=spec.name, device=device), "plugins": plugins})
                race = partial(_raced, config, seed=seed, steps=steps, keep=keep, out=out)
                if beside and budget.minutes is not None:
                    out.say(
                        f"note: {', '.join(beside)} will spend as many FLOPs afterwards, so that all takes about "
                        f"{(1 + len(beside)) * budget.minutes:.2g} minutes"
                    )
                return _with_rivals(race, method, budget, beside, unfinished, out)
            changes = given(settings, task=spec.name, episode_length=steps, device=device)
            config = resolve({"seed": seed, **changes}) if run is None else run.resolved(changes)
            # one episode is shorter than a compilation
            config = replace(config, compile="off", plugins=tuple(dict.fromkeys((*config.plugins, *plugins))))
            return _grown(config, *_client(method, run, config), best_of, budget, seed, out)
    except KeyboardInterrupt:
        raise Stopped("stopped; nothing was kept") from None


def _with_rivals(
    race: Callable[..., tuple[Grown, Leaderboard, bool]],
    method: Method,
    budget: Budget,
    rivals: Sequence[Method],
    unfinished: Path | str | None,
    out: RunConsole,
) -> Grown:
    """The network of a race, and the leaderboards of rivals that spend as much, until Ctrl-C ends one of them."""
    grown, board, stopped = race(method, budget, file=None if unfinished is None else expanded(unfinished))
    for rival in rivals:
        if stopped:
            break
        try:
            _, other, stopped = race(rival, Budget(flops=board.budget, params=budget.params))
        except KeyboardInterrupt:  # before its first step, or a second Ctrl-C: the network is there all the same
            break
        if not stopped:
            grown.beside[rival] = other
    if left := [rival for rival in rivals if rival not in grown.beside]:
        out.say(f"note: the table leaves {', '.join(left)} out, because the growth was stopped")
    return grown


def _run_of(controller: Controller) -> Run | None:
    """The run that was named, if it was one."""
    if isinstance(controller, Run):
        return controller
    if isinstance(controller, str | Path) and (controller in known.names() or is_policy_file(controller)):
        return None
    if isinstance(controller, str | Path):
        if not expanded(controller).exists():
            raise ConfigError(
                f"{controller} is neither a run directory, nor a method, nor a baseline; "
                f"{nearest(str(controller), (*METHODS, *known.names()))}"
            )
        return Run(expanded(controller))
    return None


def _client(
    controller: Controller, run: Run | None, config: RunConfig
) -> tuple[str, Callable[[EngineSpec], ClientProtocol]]:
    """A name for messages, and what makes the client."""
    if run is not None:
        found = known.trained(run.directory, config)
        warn(f"{warning} Using the one {found.place} instead." for warning in found.warnings)
        return str(run.directory), found.controller.make
    if isinstance(controller, str | Path):
        if controller == STATIC and not config.architecture:
            raise ConfigError(
                f"{STATIC} starts with an architecture that is given; set architecture, or use another controller."
            )
        return str(controller), known.baseline(str(controller), config).make
    if isinstance(controller, Schedule):
        return controller.id, lambda of: ScriptedClient(scheduled(controller, of), reward_of(config, of))
    assert not isinstance(controller, Run), "found to be a run before"
    name = getattr(controller, "__name__", type(controller).__name__)
    return name, lambda of: ScriptedClient(policy_of(controller, of, name), reward_of(config, of))


def _grown(
    config: RunConfig,
    name: str,
    make: Callable[[EngineSpec], ClientProtocol],
    best_of: int,
    budget: Budget,
    seed: int,
    out: RunConsole,
) -> Grown:
    device = device_of(config)
    dataset, task = dataset_of(config, device), config.task_spec()
    if dataset is None:
        raise ExportError(f"task {task.name!r} is scripted and has no networks; grow another task.")
    networks = f"{best_of} network{'s' * (best_of != 1)}"
    out.say(f"esper: grow {task.name} by {name}, {networks} x {config.episode_length} steps, seed {seed}")
    if task.proposal is not None:
        out.say(task.proposal)
    require_memory(config, task, dataset, device, out.say, num_envs=best_of, episodes=1, setting="best_of")
    watch = _Watch(out, config)
    engine = engine_of(
        config, dataset, device, engine_config=config.engine(run_seed=seed, num_envs=best_of), on_step=watch
    )
    engine.architectures = (Architecture.of_lines(config.architecture),) * best_of if config.architecture else ()
    client = make(engine.spec)
    with watch.progress, stop_signals() as stop:
        engine.reset(client, episode=0)
        stats = engine.rollout(client, should_stop=lambda: bool(stop))
        if stats is None:
            engine.end_episode()
            stats = engine.outcome()
            out.say(f"stopped after step {engine.t} of {config.episode_length}; what grew until then is kept")
    # a finite loss, then the most points; of equal ones the smallest network
    large = stats.host_params + stats.fossil_params > (budget.params or math.inf)
    if large.all():
        raise ConfigError(
            f"the budget allows {budget.params:,} parameters, and every network that {name} grew has more; allow more, "
            f"grow more networks with {option('best_of')}, or choose the method auto, which keeps to the limit."
        )
    if large.any():
        out.say(
            f"note: {int(large.sum())} of {networks} grew to more than the {budget.params:,} parameters of the budget "
            "and cannot be kept"
        )
    best = int(np.lexsort((stats.fossil_params, -stats.committed_acc, ~np.isfinite(stats.committed_loss), large))[0])
    test = float(host_read(engine.test())[0][best])
    network = GrownNetwork.of(engine, task, dataset, stats, host=best, test=test)
    unit = task.objective.unit
    return Grown(network, Timeline.of(watch.reports, engine.spec, best, float(stats.committed_acc[best]), unit))


def _raced(
    config: RunConfig,
    method: Method,
    budget: Budget,
    *,
    seed: int,
    steps: int | None,
    keep: Keep,
    out: RunConsole,
    file: Path | None = None,
) -> tuple[Grown, Leaderboard, bool]:
    """A growth by one of `METHODS`, from its start or its unfinished file; Ctrl-C ends it after a step.

    Returns:
        The network, all candidates, and whether Ctrl-C ended it: then the network is the best one so far.
    """
    if file is not None:
        _require_place(file)
    device = device_of(config)
    dataset = dataset_of(config, device)
    if dataset is None:
        raise ExportError(f"task {config.task!r} is scripted and has no networks; grow another task.")
    out.say(f"esper: grow {config.task} by {method}, seed {seed}")
    for note in cautions(dataset):
        (RunConsole(stderr=True) if out.quiet else out).say(note)
    growth = Growth(config, dataset, device, method=method, budget=budget, seed=seed, steps=steps, keep=keep)
    if file is not None and file.exists():
        growth.read(file)
        out.say(f"continued after step {growth.t} of {growth.steps}")
    out.say(growth.plan)
    saved, progress = time.monotonic(), PassProgress(out, 100, percent=True)
    with progress, stop_signals() as stop:
        if file is not None:
            growth.write(file)
        progress.skip(100.0 * growth.share)
        while not growth.is_over and not stop:
            before, entries = growth.share, len(growth.entries)
            growth.step()
            progress.stage(growth.place)
            progress.advance(100.0 * (growth.share - before))
            due = stop or len(growth.entries) > entries or time.monotonic() - saved > SAVE_EVERY
            if file is not None and due:
                growth.write(file)
                saved = time.monotonic()
    if not growth.t:
        raise KeyboardInterrupt
    if stopped := not growth.is_over:
        way = (
            f"by the same command with {option('resume')}" if in_shell() else f"with {option('unfinished', str(file))}"
        )
        kept = f"; continue it {way}" if file else ""
        out.say(f"stopped after step {growth.t} of {growth.steps}; the best candidate so far is kept{kept}")
    network, entry, last = growth.result()
    if file is not None and not stopped:
        file.unlink(missing_ok=True)
    found = network.description
    assert found.val is not None
    rows = [Row(step, seed.slot, "grown", seed.blueprint, 1.0, None) for seed, step in growth.births(entry)]
    timeline = Timeline([*rows, Row(last, "", "end", None, None, found.val)], found.unit)
    board = growth.leaderboard(entry, last, found.test)
    return Grown(network, timeline, board), board, stopped


def _require_place(file: Path) -> None:
    """Raise ConfigError, before anything is trained, if a file cannot be written, or if something else is there."""
    with refusing(ConfigError, f"nothing can be written into {file.parent}", "name another folder"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=file.parent):
            pass
    if mode_of(file) and not S_ISREG(mode_of(file)):
        raise ConfigError(f"{file} is not a file that a growth wrote; move it away, or name another one.")


@final
class _Watch:
    """Keeps the reports of the steps, and shows them."""

    def __init__(self, out: RunConsole, config: RunConfig) -> None:
        self.reports, self._so_far = list[StepReport](), RoundSoFar(config.reward)
        self.progress = RunProgress(out, rounds=1, steps=config.episode_length)
        self._began = time.monotonic()

    def __call__(self, report: StepReport) -> None:
        self.reports.append(report)
        if len(self.reports) == HOPELESS:
            require_trained([report.val_acc.tolist() for report in self.reports], HOPELESS)
        (shown,) = self._so_far.add([report], [time.monotonic() - self._began])
        self.progress.write("step", shown)


def load(path: Path | str, *, task: AnyTask | None = None, trust: bool = False) -> Run | Grown:
    """The run or the network in a folder. No code of the folder is executed unless you allow it.

    Args:
        path: a run directory, or a folder of `Grown.save` or `esper export`.
        task: the task of the run or network, where it was made in a Python program.
        trust: whether plugins that a run names may be executed.

    Raises:
        RunDirectoryError: it is neither. ExportError: the network is damaged, or its host needs `task`.
    """
    place = expanded(path)
    spec = None if task is None else spec_of(task)
    if (place / network.DESCRIPTION).is_file():
        host: Host | None = None
        if spec is not None and spec.host is not None:
            architecture, described = spec.host, read_description(place / network.DESCRIPTION)
            built = deterministic_build(lambda: architecture.build(described.slots, described.example()))
            assert isinstance(built, Host)
            host = built
        found = network.load(place, host=host)
        return Grown(found, Timeline.read(place, found.description.unit))
    if (place / CONFIG).is_file():
        return Run(place, None if isinstance(task, str) else spec, trust=trust)
    raise RunDirectoryError(
        f"{place} holds neither a run ({CONFIG}) nor a network ({network.DESCRIPTION}); name the folder of one."
    )


def grown_of(run: Run, *, host: int | None = None, live: bool = False, last: bool = False, **settings: Any) -> Grown:  # noqa: ANN401
    """A host of a run, with its timeline if its round is complete; see `best_host.grown_of_run`."""
    with in_process(run.task):
        config = run.resolved({"device": "cpu", "amp": "off", **settings})
        network = grown_of_run(run.directory, config, host=host, live=live, last=last)
    found, timeline = network.description, Timeline((), network.description.unit)
    if found.origin is not None and found.val is not None and found.test is not None:
        timeline = Timeline.of_run(run.directory, found.origin, config.episode_length, found.val, found.unit)
    return Grown(network, timeline)
