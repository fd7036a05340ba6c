"""esper evaluate: a trained controller and baselines on equal hosts."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from esper.cli.options import FilePath, Flag, Number, Plugins, Text, overrides, placeholder, warn
from esper.leyline.errors import ConfigError, RunDirectoryError, nearest
from esper.leyline.files import mode_of, replacing
from esper.telemetry.progress import RunConsole
from esper.telemetry.run_directory import CONFIG, plain_json, require_run

if TYPE_CHECKING:
    from esper.runs.config import RunConfig
    from esper.runs.evaluate import Row


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Compare a trained controller and baselines on fresh hosts with equal seeds.

    Baselines: wait_only, random, fixed_schedule, heuristic, static_final.

    A run alone is compared with all of them.

    Nobody learns, and nothing in the run directory is changed.
    """

    controllers: Annotated[tyro.conf.Positional[tuple[str, ...]], placeholder("RUN|BASELINE ...")] = ()
    """A run directory and names of baselines, in any order."""
    best: Flag = False
    """The checkpoint of the run with the best committed accuracy of ten rounds, instead of the newest."""
    task: Text = None
    """Task, where no run is given. (digits)"""
    preset: Text = None
    """Preset, where no run is given. (quickstart)"""
    reward: Text = None
    """Reward, where no run is given. (objective)"""
    num_envs: Annotated[int, placeholder("N")] = 16
    """Hosts per controller. (16)"""
    episode_length: Number = None
    """Control steps per host, where no run is given. (by the task)"""
    seed: Number = None
    """Seed of the evaluation hosts. (the training seed plus 1,000,000)"""
    device: Text = None
    """auto, cpu, cuda or cuda:N. (that of the run)"""
    data_dir: FilePath = None
    """Folder of the task's data files. (that of the run)"""
    plugins: Plugins = ()
    """Your own code that registers tasks, blueprints or rewards; with a run, the code it names that is allowed."""
    trust: Flag = False
    """Allow all code (plugins) that the run directory names."""
    json: FilePath = None
    """Also write the comparison, with the numbers of every host, to this file; - writes it instead of the table."""


def evaluate(command: Evaluate) -> int:
    """A table of controllers on equal hosts."""
    from esper.runs import evaluate as comparison
    from esper.runs import tables

    run, baselines = _named(command.controllers)
    config = _evaluated_config(command, run)
    names = dict.fromkeys((*(baselines or comparison.all_baselines(config)), comparison.REFERENCE))
    with _json_file(command.json) as write_json:
        controllers, place = [comparison.baseline(name, config) for name in names], ""
        if run is not None:
            found = comparison.trained(run, config, best=command.best)
            controllers.insert(0, found.controller)
            place = found.place
            warn(f"{complaint} Using the one {place} instead." for complaint in found.complaints)
        controllers = comparison.in_order(controllers)
        seed = config.seed + comparison.SEED_OFFSET if command.seed is None else command.seed
        console = RunConsole(stderr=True)
        outcomes = comparison.evaluate(
            config,
            controllers,
            run_seed=seed,
            num_envs=command.num_envs,
            on_start=lambda name: console.say(f"esper: {name}, {command.num_envs} hosts of {config.task}"),
        )
        rows = comparison.table(outcomes, config.reward)
        write_json(plain_json(comparison.report(rows, config, run, place, seed, command.num_envs)))
    if str(command.json) != "-":
        console = RunConsole()
        console.say(
            f"{config.task}, {command.num_envs} hosts of seed {seed}" + (f", trained = {run} {place}" if run else "")
        )
        for table in (tables.comparison(rows), tables.operations(rows)):
            console.print("", table, sep="\n")
        notes = (*_static_note(controllers, rows), *tables.rollbacks(rows), comparison.verdict(rows))
        console.say("\n".join(("", tables.LEGEND, *notes)))
    return 0


def _static_note(controllers: Sequence[tuple[str, object]], rows: Sequence["Row"]) -> list[str]:
    """Whose structure `static_final` has, where it is among them."""
    from esper.runs.evaluate import REFERENCE
    from esper.tamiyo.baselines import STATIC

    if STATIC not in (row.name for row in rows):
        return []
    source = controllers[0][0]
    (row,) = (row for row in rows if row.name == source)
    if not any(structure["slots"] for structure in row.structures):
        return [f"static_final: {source} ended without a permanent seed, so this is {REFERENCE} again."]
    return [f"static_final: the structure that {source} ended with, host by host, from step 1."]


def _named(controllers: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """The run and the baselines that are named; none is all of them."""
    from esper.runs.evaluate import NAMES

    if not controllers:
        raise ConfigError(f"nothing is named to be evaluated; name a run directory, or any of {', '.join(NAMES)}.")
    runs = [name for name in controllers if name not in NAMES]
    baselines = [name for name in dict.fromkeys(controllers) if name in NAMES]
    for name in runs:
        if not Path(name).exists():
            raise RunDirectoryError(f"{name} is neither a run directory nor a baseline; {nearest(name, NAMES)}")
    if len(runs) > 1:
        raise ConfigError(f"{', '.join(runs)} are several run directories; name one of them, and any baselines.")
    return Path(runs[0]) if runs else None, tuple(baselines)


def _evaluated_config(command: Evaluate, run: Path | None) -> "RunConfig":
    from esper.runs.presets import recorded, resolve
    from esper.runs.values import read_toml

    told = overrides(command)
    for name in ("seed", "num_envs"):  # of the evaluation hosts, not of the run
        told.pop(name, None)
    if run is None:
        if command.best:
            raise ConfigError("--best chooses a checkpoint of a run, and no run is named; name one, or leave it out.")
        return resolve(told)
    allowed = told.pop("plugins", [])
    if own := sorted(told.keys() - {"device", "data_dir"}):
        raise ConfigError(
            f"{', '.join(own)} cannot be given with a run: it is evaluated as it was trained; leave it out."
        )
    require_run(run)
    if command.data_dir is not None:
        told["data_dir"] = str(command.data_dir.expanduser().absolute())
    return recorded(read_toml(run / CONFIG) | told, allowed=allowed, trust=command.trust)


@contextmanager
def _json_file(path: Path | None) -> Iterator[Callable[[object], None]]:
    """Where the JSON goes; a file that cannot be written is refused before the evaluation rather than after it."""
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
    """The regular file at `path`, or where a link leads, or `path` where nothing is; raises ConfigError otherwise."""
    target = path.resolve()
    if target.is_file() and os.access(target, os.W_OK):
        return target
    if not mode_of(path):
        return path
    kind = (
        "a file that may not be written" if target.is_file() else "a folder" if target.is_dir() else "no regular file"
    )
    raise ConfigError(
        f"{path} is {kind} and is left as it is; name another file with --json, or - for standard output."
    )
