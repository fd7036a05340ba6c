"""esper evaluate: compares a trained controller with baselines."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from esper.cli.options import FilePath, Flag, Number, Plugins, Text, overrides, placeholder
from esper.leyline.errors import ConfigError
from esper.leyline.files import mode_of, replacing
from esper.telemetry.progress import RunConsole
from esper.telemetry.run_directory import CONFIG, plain_json, require_run

if TYPE_CHECKING:
    from esper.runs.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare a trained controller with baselines on the same new hosts.

    The controller is not trained further; the run directory is not changed.
    """

    controllers: Annotated[tyro.conf.Positional[tuple[str, ...]], placeholder("RUN|BASELINE ...")] = ()
    """A run directory, names of baselines, or both; a run directory alone is compared with all baselines: wait_only,
    random, fixed_schedule, fixed_schedule_fill, heuristic, explore_then_commit, static_final, and best_schedule (task
    null)."""
    best: Flag = False
    """Use the checkpoint with the highest mean J of ten rounds instead of the newest."""
    task: Text = None
    """Task, if no run is given. (digits)"""
    preset: Text = None
    """Preset, if no run is given. (quickstart)"""
    reward: Text = None
    """Reward, if no run is given. (objective)"""
    num_envs: Annotated[int, placeholder("N")] = 16
    """Hosts per controller. (16)"""
    episode_length: Number = None
    """Control steps per episode, if no run is given. (set by the task)"""
    topology: FilePath = None
    """The model.json of an exported network that static_final starts with, if no run is given."""
    seed: Number = None
    """Seed of the evaluation hosts. (training seed + 1000000)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (as in the run)"""
    data_dir: FilePath = None
    """Folder of the data files. (as in the run)"""
    plugins: Plugins = ()
    """Plugins to import; with a run, those of its plugins that may be executed."""
    trust: Flag = False
    """Execute all plugins that the run directory names."""
    json: FilePath = None
    """Also write the results of every host to this JSON file; - prints JSON instead of the table."""


def evaluate(command: Evaluate) -> int:
    """Evaluate the controllers and print the comparison."""
    from esper.runs.comparison import compare, named

    run, baselines = named(command.controllers)
    config = _evaluated_config(command, run)
    with _json_file(command.json) as write_json:
        found = compare(
            config,
            run,
            baselines,
            best=command.best,
            seed=command.seed,
            num_envs=command.num_envs,
            say=RunConsole(stderr=True).say,
        )
        write_json(plain_json(found.report()))
    if str(command.json) != "-":
        found.show(RunConsole())
    return 0


def _evaluated_config(command: Evaluate, run: Path | None) -> "RunConfig":
    from esper.runs.presets import recorded, resolve
    from esper.runs.values import read_toml

    given = overrides(command)
    for name in ("seed", "num_envs"):  # of the evaluation hosts, not of the run
        given.pop(name, None)
    if run is None:
        if command.best:
            raise ConfigError("--best needs a run directory; name one, or leave it out.")
        return resolve(given)
    allowed = given.pop("plugins", [])
    if own := sorted(given.keys() - {"device", "data_dir"}):
        raise ConfigError(f"{', '.join(own)} cannot be changed for an existing run; leave it out.")
    require_run(run)
    if command.data_dir is not None:
        given["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(run / CONFIG) | given, allowed=allowed, trust=command.trust)


@contextmanager
def _json_file(path: Path | None) -> Iterator[Callable[[object], None]]:
    """Gives a function that writes the JSON; raises before the evaluation if the file cannot be written."""
    if path is None:
        yield lambda report: None
    elif str(path) == "-":
        yield lambda report: RunConsole().out(json.dumps(report, indent=2), highlight=False)
    else:
        with ExitStack() as stack:
            try:
                file = stack.enter_context(replacing(_writable(path)))
            except OSError as error:
                raise ConfigError(
                    f"the file {path} cannot be written ({error.strerror}); name another with --json."
                ) from error
            yield lambda report: print(json.dumps(report, indent=2), file=file)


def _writable(path: Path) -> Path:
    """`path` if it is free, else the regular file it is or links to; raises ConfigError otherwise."""
    target = path.resolve()
    if target.is_file() and os.access(target, os.W_OK):
        return target
    if not mode_of(path):
        return path
    kind = "not writable" if target.is_file() else "a folder" if target.is_dir() else "not a regular file"
    raise ConfigError(f"{path} is {kind}; name another file with --json, or - for standard output.")
