"""esper grow: the best network that a budget allows."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import tyro

from esper.cli.options import FilePath, Flag, Names, Number, Plugins, Real, Text, Whole, joined, overrides, placeholder
from esper.leyline.errors import ConfigError
from esper.telemetry.progress import RunConsole

PICTURE = "growth.png"


@dataclass(frozen=True, kw_only=True)
class Grow:
    """Grow the best network that a budget allows, and write it as files.

    Many candidates begin, and weak ones stop early. The best of those that are left, by its validation
    score, is kept and measured on the test examples. Ctrl-C keeps the best one so far.
    """

    task: Annotated[tyro.conf.Positional[str], placeholder("TASK")]
    """Task, one of those that `esper tasks` lists, or FILE.py:NAME, an esper.Task in a file."""
    method: Annotated[str, placeholder("NAME|RUN")] = "auto"
    """auto, plain, portfolio, halving or hill_climbing; or a controller: a run directory, or a baseline. (auto)"""
    minutes: Real = None
    """Minutes that the growth may take. (no limit)"""
    flops: Real = None
    """FLOPs that it may cost, e.g. 1e15. (three trainings of the network alone)"""
    max_params: Number = None
    """Parameters that the network may have. (no limit)"""
    keep: Literal["last", "best"] = "best"
    """The network of the best step, if it is clearly better on all validation examples than the last one; or that."""
    beside: Annotated[
        tyro.conf.UseAppendAction[tuple[Literal["plain", "portfolio", "halving", "hill_climbing"], ...]],
        placeholder("NAME"),
    ] = ()
    """Another method that spends as many FLOPs afterwards, for comparison, such as plain; may be given again."""
    best_of: Whole = 1
    """Networks that a controller grows in parallel. (1)"""
    steps: Number = None
    """Control steps. (as the budget allows; of a controller as in its run, or set by the task)"""
    seed: Whole = 0
    """Random seed of the networks and of the draws of a controller. (0)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (as in the run, or auto)"""
    data_dir: FilePath = None
    """Folder of the data files. (as in the run, or $ESPER_DATA)"""
    out: FilePath = None
    """Folder to write: the files of `esper export`, and timeline.json. Until then OUT.unfinished has the candidates."""
    resume: Flag = False
    """Continue OUT.unfinished, which Ctrl-C or a kill left."""
    overwrite: Flag = False
    """Replace a folder made by this command."""
    set: Annotated[Names, placeholder("NAME=VALUE ...")] = ()
    """Any other setting of config.toml, e.g. --set threads=1."""
    plugins: Plugins = ()
    """Plugins to import; with a run, those of its plugins that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directory names."""


def grow(command: Grow) -> int:
    """Grow the network, print its timeline, and write it."""
    from esper.api.grow import grow as grown_by
    from esper.api.run import Run
    from esper.export.network import require_free
    from esper.runs.growth import METHODS, Budget

    overwrite = command.overwrite or command.resume
    if command.out is not None:
        require_free(command.out, overwrite=overwrite)
    own = {"seed", "task", "device"}  # not settings of the run
    settings = {name: value for name, value in overrides(command, joined(command.set)).items() if name not in own}
    allowed = (*settings.get("plugins", ()), command.task)
    is_run = command.method not in METHODS and Path(command.method).is_dir()
    found = grown_by(
        command.task,
        Run(Path(command.method), allowed=allowed, trust=command.trust) if is_run else command.method,
        budget=Budget(minutes=command.minutes, flops=command.flops, params=command.max_params),
        keep=command.keep,
        beside=command.beside,
        best_of=command.best_of,
        steps=command.steps,
        seed=command.seed,
        device=command.device,
        unfinished=_unfinished(command) if command.method in METHODS else None,
        **settings,
    )
    console = RunConsole()
    console.say(f"\n{found.timeline}\n\n{found}")
    if command.out is not None:
        console.say(str(found.save(command.out, overwrite=overwrite)))
        if found.leaderboard is not None and find_spec("matplotlib"):
            found.picture(command.out / PICTURE)
            console.say(f"{command.out / PICTURE}: the candidates, points against FLOPs")
    return 0


def _unfinished(command: Grow) -> Path | None:
    """The file that keeps the candidates; raises ConfigError if it is there without --resume, or missing with it."""
    if command.out is None:
        if command.resume:
            raise ConfigError("--resume continues what is beside the folder of --out; name that folder.")
        return None
    file = command.out.with_name(f"{command.out.name}.unfinished")
    if command.resume and not file.exists():
        raise ConfigError(f"there is no {file}, so nothing can be continued; leave --resume out to start.")
    if file.exists() and not command.resume:
        raise ConfigError(f"{file} has the candidates of an earlier growth; continue it with --resume, or delete it.")
    return file


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a grown network as files that need no esper.

    model.py is source code that needs only torch; model.safetensors has the weights, model.json the description. If the
    source cannot be written, model.pt2 or model.pkl holds the whole network.

    The files are run without esper, and compared with the network, before the folder appears.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|FOLDER")]
    """A run directory, whose best host of all rounds is taken, or a folder made by this command."""
    out: Annotated[Path, placeholder("DIR")]
    """Folder to write."""
    format: Annotated[Literal["torch", "pt2", "onnx", "all"], placeholder("NAME")] = "torch"
    """Also write model.pt2 (torch.export), model.onnx, or all of them. (torch)"""
    last: Flag = False
    """Take the best host of the newest checkpoint: of the last round, or of the one in which the run was stopped."""
    host: Number = None
    """Take the host of this number in the newest checkpoint."""
    live: Flag = False
    """Include seeds that are still being blended in, with their present weight."""
    overwrite: Flag = False
    """Replace a folder made by this command."""
    device: Text = None
    """Device that measures the hosts: auto, cpu, cuda or cuda:N. (cpu)"""
    data_dir: FilePath = None
    """Folder of the data files. (as in the run)"""
    task: Text = None
    """Task of the network in a folder, FILE.py:NAME, where it is not one of esper's own networks."""
    plugins: Plugins = ()
    """Those plugins of the run that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directory names."""


def export(command: Export) -> int:
    """Write the folder and print what is in it."""
    from esper.api.grow import grown_of, load
    from esper.api.run import Run
    from esper.export.network import DESCRIPTION
    from esper.runs.assembly.plugins import names_task, task_in_file
    from esper.tasks.registry import task_by_name

    again = (command.source / DESCRIPTION).is_file()
    if again and (command.host is not None or command.live or command.last):
        raise ConfigError(f"{command.source} holds one network; leave --host, --last and --live out, or name its run.")
    if command.task is not None and not again:
        raise ConfigError(f"a run knows its task, and {command.source} is no folder of a network; leave --task out.")
    if again:
        name = command.task
        task = None if name is None else task_in_file(name) if names_task(name) else task_by_name(name)
        found = load(command.source, task=task)
    else:
        run = Run(command.source, trust=command.trust)
        found = grown_of(run, host=command.host, live=command.live, last=command.last, **overrides(command))
    assert not isinstance(found, Run)
    formats: dict[str, tuple[str, ...]] = {"torch": (), "all": ("pt2", "onnx")}
    of = formats.get(command.format, (command.format,))
    saved = found.save(command.out, formats=of, overwrite=command.overwrite)
    RunConsole().say(f"{saved}\n{found.network.summary}")
    return 0
