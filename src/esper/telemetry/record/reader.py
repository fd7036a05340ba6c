"""Opens the records of one or several runs as tables of one database, which can only be read."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import duckdb
import numpy as np

from esper.leyline.errors import QueryError, RunDirectoryError
from esper.telemetry.anomalies import find, in_words
from esper.telemetry.record.parts import identifier, quoted
from esper.telemetry.record.run_files import RunFiles, insert_rows
from esper.telemetry.record.schema import ANOMALIES, TABLES

if TYPE_CHECKING:
    import pandas
    import polars

MEMORY = "1GiB"
"""Most memory that a query may use."""
_NAMES = tuple(table.name for table in TABLES)


@final
class Record:
    """The tables of some runs; see docs/record.md. Made by `open_record`, closed with `close` or a `with` block.

    Attributes:
        complaints: sentences about what is damaged, missing or not written yet.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._database = duckdb.connect(":memory:")
        self.complaints: list[str] = []
        for setting in (
            f"memory_limit = '{MEMORY}'",
            "temp_directory = ''",
            f"threads = {min(os.cpu_count() or 1, 8)}",
            "parquet_metadata_cache = true",  # parts never change
        ):
            self._database.execute(f"SET {setting}")
        names = _unique_names(paths)
        self._runs = {
            name: RunFiles(path, f"run_{i}", self._database, self.complaints)
            for i, (name, path) in enumerate(zip(names, paths, strict=True))
        }
        self._add_views()
        self._lock()
        self._searched = False

    def query(self, sql: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of one SELECT; `params` fill its question marks.

        Raises:
            QueryError: it is not a SELECT, reads other files, or is wrong; the message names the tables.
        """
        found = self._run(sql, params)
        names = _unique([column[0] for column in found.description or ()])
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]

    def arrays(self, sql: str, params: Sequence[object] = ()) -> dict[str, np.ndarray]:
        """The columns of one SELECT; NULL is NaN in columns of numbers, else None. Raises QueryError like `query`."""
        return {name: _plain(column) for name, column in self._run(sql, params).fetchnumpy().items()}

    def frame(self, sql: str, params: Sequence[object] = ()) -> "pandas.DataFrame":
        """The result of one SELECT as a pandas frame; raises QueryError like `query`, or without pandas."""
        try:
            import pandas
        except ImportError as error:
            raise QueryError(
                "frames need pandas, which is not installed; pip install 'esper-growth[frames]'."
            ) from error
        return pandas.DataFrame(self._run(sql, params).df())

    def polars(self, sql: str, params: Sequence[object] = ()) -> "polars.DataFrame":
        """The result of one SELECT as a polars frame; raises QueryError like `query`, or without polars."""
        try:
            import polars
        except ImportError as error:
            raise QueryError(
                "frames need polars, which is not installed; pip install 'esper-growth[frames]'."
            ) from error
        found = self._run(sql, params)
        names = _unique([column[0] for column in found.description or ()])
        return polars.DataFrame(found.fetchall(), schema=names, orient="row", infer_schema_length=None)

    def anomaly_lines(self) -> list[str]:
        """A line for each kind of anomaly, with its rounds and advice."""
        rows = self.query(
            "SELECT run, kind, count(*) AS n, min(round) AS first, max(round) AS last, arg_max(value, round) AS value, "
            "any_value(message) AS message, any_value(advice) AS advice FROM anomalies GROUP BY run, kind ORDER BY ALL"
        )
        return [f"{row['run']}: " * (len(self._runs) > 1) + in_words(row) for row in rows]

    def columns(self, table: str) -> dict[str, str]:
        """Type by column of a table; raises QueryError if there is none."""
        return {row["column_name"]: row["column_type"] for row in self.query(f"DESCRIBE {identifier(table)}")}

    def close(self) -> None:
        """Close the database."""
        self._database.close()

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, sql: str, params: Sequence[object]) -> duckdb.DuckDBPyConnection:
        if ANOMALIES.name in sql.lower():
            self._find_anomalies()
        try:
            statements = duckdb.extract_statements(sql)
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                kinds = " and ".join(statement.type.name for statement in statements) or "nothing"
                raise QueryError(
                    f"found {kinds}, but a record can only be read, by one SELECT (also WITH, FROM, DESCRIBE, "
                    f"SUMMARIZE). {self._known()}"
                )
            return self._database.execute(sql, list(params))
        except duckdb.PermissionException as error:
            raise QueryError(f"a query reads the record alone, no other files. {self._known()}") from error
        except duckdb.OutOfMemoryException as error:
            raise QueryError(
                f"the query needs more than {MEMORY} of memory; select fewer rounds, hosts or columns."
            ) from error
        except duckdb.Error as error:
            raise QueryError(f"{_explained(error)} {self._known()}") from error

    def _find_anomalies(self) -> None:
        """Fill the table, once: the search takes longer than opening the record."""
        if self._searched:
            return
        self._searched = True
        for name, run in self._runs.items():
            insert_rows(self._database, f"{run.schema}.{ANOMALIES.name}", ANOMALIES.types, find(self.query, name))

    def _known(self) -> str:
        return f"Tables: {', '.join(_NAMES)}; DESCRIBE shows the columns of one."

    def _add_views(self) -> None:
        """One view per table over all runs, with the column `run` first."""
        for table in TABLES:
            selects = (
                f"SELECT {quoted(name)} AS run, * FROM {run.schema}.{table.name}" for name, run in self._runs.items()
            )
            self._database.execute(f"CREATE VIEW {table.name} AS {' UNION ALL BY NAME '.join(selects)}")

    def _lock(self) -> None:
        """From here on the database reads the parts and nothing else, and these settings cannot be changed."""
        parts = ", ".join(quoted(file) for run in self._runs.values() for file in run.parts)
        for setting in (
            f"allowed_paths = [{parts}]",
            "enable_external_access = false",
            "python_enable_replacements = false",
            "lock_configuration = true",
        ):
            self._database.execute(f"SET {setting}")


def open_record(paths: Sequence[Path]) -> Record:
    """The record of these run directories, as it is now.

    Raises:
        RunDirectoryError: a path is no run directory.
    """
    if not paths:
        raise RunDirectoryError("no run was named; give at least one run directory.")
    for path in paths:
        if not (path / "config.toml").is_file():
            raise RunDirectoryError(f"{path} is not a run directory: it has no config.toml; name another folder.")
    return Record(list(paths))


def _unique_names(paths: Sequence[Path]) -> list[str]:
    """The name of each directory, with that of its parent where two are equal."""
    names = [path.absolute().name for path in paths]
    count = Counter(names)
    full = [p.absolute() for p in paths]
    return _unique([n if count[n] == 1 else f"{p.parent.name}/{n}" for n, p in zip(names, full, strict=True)])


def _unique(names: Sequence[str]) -> list[str]:
    """The names, with a number after those that occurred before."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}_{seen[name]}")
    return found


def _plain(column: Any) -> np.ndarray:  # noqa: ANN401 -- masked or not
    """Without mask: NaN for missing numbers and truth values, None for others."""
    if not isinstance(column, np.ma.MaskedArray):
        return np.asarray(column)
    if not column.mask.any():
        return np.asarray(column.data)
    if column.dtype.kind == "f":
        return np.asarray(column.filled(np.nan))
    if column.dtype.kind in "biu":
        return np.where(column.mask, np.nan, column.data.astype(np.float64))
    found = column.data.astype(object)
    found[column.mask] = None
    return np.asarray(found)


def _explained(error: duckdb.Error) -> str:
    """The first sentence of a database error, and its hint."""
    rows = [row.strip() for row in str(error).splitlines() if row.strip()]
    kept = [row for row in rows[:3] if not row.startswith(("LINE", "^"))]
    text = " ".join(kept).removeprefix("Catalog Error: ").removeprefix("Binder Error: ").removeprefix("Parser Error: ")
    return f"the query is wrong: {text.rstrip('.')}."
