"""A comparison of controllers from start to end: which ones, on which hosts, with the result as tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from esper.leyline.errors import ConfigError, RunDirectoryError, nearest
from esper.runs import evaluate, tables
from esper.runs.config import RunConfig
from esper.runs.evaluate import REFERENCE, Row
from esper.tamiyo.baselines import STATIC
from esper.telemetry.progress import RunConsole, warn


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Controllers on the same new hosts.

    Attributes:
        config: of the hosts. run: the directory of the trained controller, None without one; place: its checkpoint.
        seed, num_envs: of the hosts. data: their data set in words. rows: the results, the trained controller first.
        source: the controller whose structures `static_final` starts with, None where that was not compared.
    """

    config: RunConfig
    run: Path | None
    place: str
    seed: int
    num_envs: int
    data: str
    rows: Sequence[Row]
    source: str | None

    @property
    def verdict(self) -> str:
        """One sentence: the trained controller against the best baseline, or that one against wait_only."""
        return evaluate.verdict(self.rows)

    def report(self) -> dict[str, Any]:
        """The comparison as JSON values, including those of every host."""
        return evaluate.report(self.rows, self.config, self.data, self.run, self.place, self.seed, self.num_envs)

    def show(self, console: RunConsole) -> None:
        """Print the tables and the verdict."""
        trained = f", trained = {self.run} {self.place}" if self.run else ""
        task = self.config.task if self.data in ("none", self.config.task) else f"{self.config.task}, data {self.data}"
        console.say(f"{task}, {_hosts(self.num_envs)} of seed {self.seed}{trained}")
        for table in (tables.comparison(self.rows), tables.operations(self.rows)):
            console.print("", table, sep="\n")
        notes = (*self._static_note(), *tables.rollbacks(self.rows), self.verdict)
        console.say("\n".join(("", tables.LEGEND, *notes)))

    def __str__(self) -> str:
        return tables.text(self.show)

    __repr__ = __str__

    def _static_note(self) -> list[str]:
        """A sentence that names the controller whose structure `static_final` starts with."""
        if self.config.topology and any(row.name == STATIC for row in self.rows):
            return [f"static_final: each host has {', '.join(self.config.topology)} from step 1."]
        if self.source is None:
            return []
        (row,) = (row for row in self.rows if row.name == self.source)
        if not any(structure["slots"] for structure in row.structures):
            return [f"static_final: {self.source} ended without fossilized seeds, so this equals {REFERENCE}."]
        return [f"static_final: each host has the final structure of {self.source} from step 1."]


def named(controllers: Sequence[str]) -> tuple[Path | None, tuple[str, ...]]:
    """The run directory, and the baselines and policy files; raises ConfigError, RunDirectoryError for others."""
    known = evaluate.names()
    if not controllers:
        raise ConfigError(f"no controller given; name a run directory, or any of {', '.join(known)}.")
    baselines = [name for name in dict.fromkeys(controllers) if name in known or evaluate.is_policy_file(name)]
    runs = [name for name in controllers if name not in baselines]
    files = [Path(name).name for name in baselines if evaluate.is_policy_file(name)]
    if twice := sorted({name for name in files if files.count(name) > 1}):
        raise ConfigError(f"several policy files are named {twice[0]}, as their rows would be; rename one.")
    for name in runs:
        if not Path(name).exists():
            raise RunDirectoryError(f"{name} is neither a run directory nor a baseline; {nearest(name, known)}")
    if len(runs) > 1:
        raise ConfigError(f"{', '.join(runs)} are several run directories; give one, and any baselines.")
    return Path(runs[0]) if runs else None, tuple(baselines)


def compare(
    config: RunConfig,
    run: Path | None,
    baselines: Sequence[str],
    *,
    best: bool = False,
    seed: int | None = None,
    num_envs: int = 16,
    say: Callable[[str], None],
) -> Comparison:
    """Compare the controller of a run, if given, with baselines; none means all that the task supports.

    Args:
        config: of the run, or of the task.
        run: its directory, which is not changed.
        baselines: their names; wait_only is always among them.
        best: use the checkpoint with the highest mean J of ten rounds.
        seed: of the hosts; None for that of the run + 1,000,000.
        num_envs: hosts per controller.
        say: takes a line when a controller begins.

    Raises:
        ConfigError, RegistryError, CheckpointError, DataError: a controller cannot be evaluated.
    """
    names = dict.fromkeys((*(baselines or evaluate.all_baselines(config)), REFERENCE))
    controllers, place = [evaluate.baseline(name, config) for name in names], ""
    if run is not None:
        found = evaluate.trained(run, config, best=best)
        controllers.insert(0, found.controller)
        place = found.place
        warn(f"{complaint} Using the one {place} instead." for complaint in found.complaints)
    controllers = evaluate.in_order(controllers, config)
    seed = config.seed + evaluate.SEED_OFFSET if seed is None else seed
    outcomes = evaluate.evaluate(
        config,
        controllers,
        run_seed=seed,
        num_envs=num_envs,
        on_start=lambda name: say(f"esper: {name}, {_hosts(num_envs)} of {config.task}"),
    )
    return Comparison(
        config=config,
        run=run,
        place=place,
        seed=seed,
        num_envs=num_envs,
        data=outcomes[0].data,
        rows=evaluate.table(outcomes, config.reward),
        source=controllers[0][0] if STATIC in names and not config.topology else None,
    )


def _hosts(number: int) -> str:
    return f"{number} host{'s' * (number != 1)}"
