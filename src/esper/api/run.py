"""A run on the disk."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from esper.api.arguments import checked
from esper.api.session import console, given, in_process
from esper.leyline.errors import Stopped
from esper.runs import training
from esper.runs.comparison import Comparison
from esper.runs.config import RunConfig
from esper.runs.plugins import not_among, require_trusted
from esper.runs.presets import plugin_names, policy_values, recorded
from esper.runs.values import merge, read_toml
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import warn
from esper.telemetry.run_directory import CONFIG, METRICS, SUMMARY, require_run

if TYPE_CHECKING:
    import pandas
    import polars

    from esper.telemetry.record import Record


@final
class Run:
    """A run directory, of a run that is complete or was stopped.

    Attributes:
        directory: its path. task: specification of a task that only this process knows, or None.
    """

    def __init__(
        self, directory: Path, task: TaskSpec | None = None, *, allowed: Sequence[str] = (), trust: bool = False
    ) -> None:
        """The run in a directory.

        Args:
            directory: raises RunDirectoryError if it holds none.
            task: see above.
            allowed: plugins that may be executed if the run names them; with `trust` all.
            trust: see `allowed`.
        """
        require_run(directory)
        self.directory, self.task, self._allowed, self._trust = directory, task, tuple(allowed), trust

    @property
    def config(self) -> dict[str, Any]:
        """All settings, as in config.toml."""
        return read_toml(self.directory / CONFIG)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results, as in summary.json; None until the run is complete."""
        file = self.directory / SUMMARY
        found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        return found

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The metrics of each round, as in metrics.jsonl."""
        file = self.directory / METRICS
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []

    @property
    def objective(self) -> list[float]:
        """100·J of each round, the mean of its hosts."""
        return [line["objective_mean"] for line in self.rounds]

    def query(self, sql: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of a SELECT about the run, e.g. `select t, op from decisions where host = 3`; see docs/record.md.

        `params` fill its question marks. Raises QueryError, which names the tables.
        """
        with self._record() as record:
            return record.query(sql, params)

    def frame(self, table: str) -> "pandas.DataFrame":
        """A table of the record, such as "decisions", or the result of a SELECT, as a pandas frame."""
        with self._record() as record:
            return record.frame(_select(table))

    def polars(self, table: str) -> "polars.DataFrame":
        """The same as a polars frame."""
        with self._record() as record:
            return record.polars(_select(table))

    def _record(self) -> "Record":
        from esper.telemetry.record import open_record

        record = open_record([self.directory])
        warn(record.complaints)
        return record

    @checked
    def resume(self, *, rounds: int | None = None, progress: bool = True) -> "Run":
        """Continue a run that was stopped, or make it longer: to `rounds` rounds in all. Returns this run.

        Raises:
            ConfigError, CheckpointError: there is nothing to do, or nothing to continue from.
            KeyboardInterrupt: it was stopped again; its text says how it goes on.
        """
        with in_process(self.task):
            config = self.resolved(given({}, rounds=rounds))
            summary = training.resume(config, self.directory, console(progress))
        require_finished(summary, self.directory, task=self.task is not None)
        return self

    def evaluate(self, *baselines: str, **options: Any) -> Comparison:  # noqa: ANN401 -- see `esper.evaluate`
        """`esper.evaluate(run, *baselines, **options)`."""
        from esper.api.evaluate import evaluate

        return evaluate(self, *baselines, **options)

    def policy_values(self) -> dict[str, Any]:
        """The settings that the policy needs on another task; raises ConfigError for plugins that are not allowed."""
        values = self.config
        require_trusted(plugin_names(values), self._allowed, trust=self._trust)
        return policy_values(values)

    def resolved(self, changes: dict[str, Any]) -> RunConfig:
        """The validated configuration with changes; imports the plugins that the run names, if that is allowed."""
        plugins = plugin_names(self.config)
        forbidden = not_among(plugins, self._allowed)
        allowed = [name for name in plugins if name not in forbidden]
        return recorded(merge(self.config, changes), allowed=allowed, trust=self._trust)

    def __repr__(self) -> str:
        objective = self.objective
        last = f", 100·J {objective[-1]:.2f}" if objective else ""
        return f"Run({str(self.directory)!r}: {self.config['task']}, {len(objective)} rounds{last})"


def _select(table: str) -> str:
    """The SELECT of a whole table; a SELECT stays as it is."""
    return f"SELECT * FROM {table}" if table.isidentifier() else table


def require_finished(summary: dict[str, Any] | None, path: Path, *, task: bool) -> None:
    """Raise Stopped, which says how the run goes on, if it was stopped; `task`: only this program knows its task."""
    if summary is None:
        raise Stopped(training.stopped(path, task=task))
