"""esper grow: a controller grows one network, or the best of several."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from esper.cli.options import FilePath, Flag, Names, Number, Plugins, Text, joined, overrides, placeholder
from esper.telemetry.progress import RunConsole


@dataclass(frozen=True, kw_only=True)
class Grow:
    """Grow a network with a controller, and write it as files.

    Of several networks the one with the highest validation score is kept, and measured on the test examples.
    """

    task: Annotated[tyro.conf.Positional[str], placeholder("TASK")]
    """Task, one of those that `esper tasks` lists, or FILE.py:NAME, an esper.Task in a file."""
    controller: Annotated[str, placeholder("RUN|NAME")] = "heuristic"
    """A run directory, or the name of a baseline. (heuristic)"""
    best_of: Annotated[int, placeholder("N")] = 1
    """Networks that grow in parallel. (1)"""
    steps: Number = None
    """Control steps. (as in the run, or set by the task)"""
    seed: Annotated[int, placeholder("N")] = 0
    """Random seed of the networks and of the draws of the controller. (0)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (as in the run, or auto)"""
    data_dir: FilePath = None
    """Folder of the data files. (as in the run, or $ESPER_DATA)"""
    to: FilePath = None
    """Folder to write: the files of `esper export`, and timeline.json."""
    overwrite: Flag = False
    """Replace a folder made by this command."""
    set: Annotated[Names, placeholder("NAME=VALUE ...")] = ()
    """Any other setting of config.toml, e.g. --set workers=1."""
    plugins: Plugins = ()
    """Plugins to import; with a run, those of its plugins that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directory names."""


def grow(command: Grow) -> int:
    """Grow the network, print its timeline, and write it."""
    from esper.api.grow import grow as grown_by
    from esper.api.run import Run
    from esper.export.network import require_free
    from esper.runs.controllers import names

    if command.to is not None:
        require_free(command.to, overwrite=command.overwrite)
    own = {"seed", "task", "device"}  # not settings of the run
    settings = {name: value for name, value in overrides(command, joined(command.set)).items() if name not in own}
    if command.data_dir is not None:
        settings["data_dir"] = str(command.data_dir.expanduser().absolute())
    allowed = (*settings.get("plugins", ()), command.task)
    is_run = command.controller not in names() and Path(command.controller).is_dir()
    found = grown_by(
        command.task,
        Run(Path(command.controller), allowed=allowed, trust=command.trust) if is_run else command.controller,
        best_of=command.best_of,
        steps=command.steps,
        seed=command.seed,
        device=command.device,
        **settings,
    )
    console = RunConsole()
    console.say(f"\n{found.timeline}\n\n{found}")
    if command.to is not None:
        console.say(str(found.save(command.to, overwrite=command.overwrite)))
    return 0
