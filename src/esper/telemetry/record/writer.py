"""The parts of a run record: the folder `record/` of a run directory, with one Parquet file for each kind and round.

record/steps-000003.parquet        rows of round 3
record/slots-000003.parquet
record/coalitions-000003.parquet

A part is written when its round ends, or when the run stops within it, under a hidden name, and renamed; the
next checkpoint waits until it is on the disk. The line of the round in metrics.jsonl holds its SHA-256.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from esper.leyline.files import draft_of
from esper.telemetry.record.schema import STORED

if TYPE_CHECKING:
    import duckdb


@final
@dataclass(frozen=True)
class Rows:
    """Rows of one part, as arrays of equal length by column; `kind` is a key of `STORED`.

    `labels` are the texts of columns that hold numbers instead; a number without a label means NULL. NaN means NULL.
    Columns that are not in the schema are stored as they are.
    """

    kind: str
    columns: Mapping[str, np.ndarray]
    labels: Mapping[str, Sequence[str]]


def part_of(folder: Path, kind: str, number: int) -> Path:
    """The part of a round, from 1."""
    return folder / f"{kind}-{number:06d}.parquet"


def number_of(part: Path) -> int:
    """The round of a part; 0 for other files."""
    kind, _, number = part.name.removesuffix(".parquet").partition("-")
    return int(number) if kind in STORED and part.suffix == ".parquet" and number.isdecimal() else 0


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def quoted(text: str | Path) -> str:
    """`text` as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def write_part(folder: Path, rows: Rows, number: int, first: int, database: "duckdb.DuckDBPyConnection") -> str:
    """Write the rows of a round, which begin with step `first`, after those before that are in the part already.

    Returns:
        SHA-256 of the part.

    Raises:
        OSError, duckdb.Error: the disk refuses it; the part is as it was.
    """
    path = part_of(folder, rows.kind, number)
    draft = draft_of(path)
    database.register("rows_of_part", dict(rows.columns))
    try:
        select = f"SELECT {', '.join(_stored(name, rows) for name in rows.columns)} FROM rows_of_part"
        if path.exists():  # the run was stopped within this round
            select = f"SELECT * FROM read_parquet({quoted(path)}) WHERE t < {first} UNION ALL BY NAME {select}"
        order = "ORDER BY host, t" if rows.kind == "steps" else ""
        options = "FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2"
        database.execute(f"COPY (FROM ({select}) {order}) TO {quoted(draft)} ({options})")
        digest = sha256_of(draft)
        draft.rename(path)
    finally:
        database.unregister("rows_of_part")
        draft.unlink(missing_ok=True)
    return digest


def _stored(name: str, rows: Rows) -> str:
    """The expression of a column as it is stored."""
    column, values = identifier(name), rows.columns[name]
    kind = next((c.type for c in STORED[rows.kind] if c.name == name), "")
    if name in rows.labels:
        texts = ", ".join(quoted(text) for text in rows.labels[name])
        return f"([{texts}]::VARCHAR[])[{column} + 1] AS {column}"
    if values.dtype.kind == "f":
        return f"nullif({column}::{kind or 'FLOAT'}, 'nan'::FLOAT) AS {column}"
    return f"{column}::{kind} AS {column}" if kind else column
