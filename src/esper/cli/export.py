"""esper export: writes a grown network as files."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from esper.cli.options import FilePath, Flag, Number, Plugins, Text, overrides, placeholder
from esper.leyline.errors import ConfigError
from esper.telemetry.progress import RunConsole, warn
from esper.telemetry.run_directory import CONFIG, require_run

if TYPE_CHECKING:
    from esper.export.network import Format, GrownNetwork

Choice = Literal["torch", "pt2", "onnx", "all"]
_FORMATS: dict[Choice, "tuple[Format, ...]"] = {
    "torch": (),
    "pt2": ("pt2",),
    "onnx": ("onnx",),
    "all": ("pt2", "onnx"),
}


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write a grown network as files that need no esper.

    model.py is source that needs torch alone, model.safetensors has the weights, model.json the description. Where the
    source is not to be had, model.pt2 or model.pkl holds the whole network.

    The files are run without esper, and compared with the network, before the folder appears.
    """

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN|FOLDER")]
    """A run directory, whose best host of all rounds is taken, or a folder made by this command."""
    to: Annotated[Path, placeholder("DIR")]
    """Folder to write."""
    format: Annotated[Choice, placeholder("NAME")] = "torch"
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
    plugins: Plugins = ()
    """Those plugins of the run that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directory names."""


def export(command: Export) -> int:
    """Write the folder and print what is in it."""
    from esper.export.network import DESCRIPTION, load

    again = (command.source / DESCRIPTION).is_file()
    if again and (command.host is not None or command.live or command.last):
        raise ConfigError(f"{command.source} holds one network; leave --host, --last and --live out, or name its run.")
    network = load(command.source) if again else _of_run(command)
    texts = _timeline(command, network)
    saved = network.save(command.to, formats=_FORMATS[command.format], overwrite=command.overwrite, texts=texts)
    warn(saved.notes)
    RunConsole().say(f"{saved}\n{network.summary}")
    return 0


def _of_run(command: Export) -> "GrownNetwork":
    from esper.runs.export import grown_of_run
    from esper.runs.presets import recorded
    from esper.runs.values import read_toml

    require_run(command.source)
    given = {"device": "cpu"} | overrides(command)
    allowed = given.pop("plugins", [])
    if command.data_dir is not None:
        given["data_dir"] = str(command.data_dir.expanduser().absolute())
    values = read_toml(command.source / CONFIG) | {"amp": "off"} | given
    config = recorded(values, allowed=allowed, trust=command.trust)
    return grown_of_run(command.source, config, host=command.host, live=command.live, last=command.last)


def _timeline(command: Export, network: "GrownNetwork") -> dict[str, str]:
    """The timeline of a host whose round is complete, or the one in the folder; as files by name."""
    from esper.api.timeline import FILE, Timeline
    from esper.runs.values import read_toml

    found, copied = network.description, command.source / FILE
    if not (command.source / CONFIG).is_file():
        return {FILE: copied.read_text(encoding="utf-8")} if copied.is_file() else {}
    if found.origin is None or found.val is None or found.test is None:
        return {}
    steps = read_toml(command.source / CONFIG)["episode_length"]
    return {FILE: Timeline.of_run(command.source, found.origin, steps, found.val, found.unit).text()}
