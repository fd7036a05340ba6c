"""The parts of a run record: the folder `record/` of a run directory, with one Parquet file for each kind and round.

record/steps-000003.parquet        rows of round 3
record/slots-000003.parquet
record/coalitions-000003.parquet
record/steps-000003-000064.parquet   of another rank, whose hosts begin with number 64

A part is written when its round ends, or when the run stops within it, under a hidden name, and renamed; the
next checkpoint waits until it is on the disk. The line of the round in metrics.jsonl holds its SHA-256.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from esper.leyline.files import draft_of, open_to_read
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


def part_of(folder: Path, kind: str, number: int, host: int = 0) -> Path:
    """The part of a round, from 1, with the rows of a rank whose hosts begin with `host`."""
    return folder / f"{kind}-{number:06d}{f'-{host:06d}' * (host > 0)}.parquet"


def key_of_part(kind: str, host: int) -> str:
    """The key of its digest in the line of its round."""
    return f"{kind}-{host:06d}" if host else kind


def number_of(part: Path) -> int:
    """The round of a part; 0 for other files."""
    kind, _, numbers = part.name.removesuffix(".parquet").partition("-")
    number, _, host = numbers.partition("-")
    known = kind in STORED and part.suffix == ".parquet" and number.isdecimal() and (host or "0").isdecimal()
    return int(number) if known else 0


def parts_of_round(folder: Path, kind: str, number: int) -> list[Path]:
    """The parts of all ranks, the first of which may be missing."""
    return sorted(part for part in folder.glob(f"{kind}-{number:06d}*.parquet") if number_of(part) == number)


def merge_parts(folder: Path, kind: str, number: int) -> None:
    """Make one part of those of all ranks: the ranks that continue the round may be others."""
    import duckdb

    first, parts = part_of(folder, kind, number), parts_of_round(folder, kind, number)
    if parts in ([], [first]):
        return
    draft = draft_of(first)
    with duckdb.connect(":memory:", config={"threads": 1}) as database:
        files = ", ".join(map(quoted, parts))
        # distinct: a process that was killed below had merged some of them already
        database.execute(f"COPY (SELECT DISTINCT * FROM read_parquet([{files}])) TO {quoted(draft)} (FORMAT parquet)")
    draft.rename(first)
    for part in parts:
        if part != first:
            part.unlink()


def sha256_of(path: Path) -> str:
    """SHA-256 of a file."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def quoted(text: str | Path) -> str:
    """`text` as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def write_part(
    folder: Path, rows: Rows, number: int, first: int, database: "duckdb.DuckDBPyConnection", host: int = 0
) -> str:
    """Write the rows of a round, which begin with step `first`, after those before that are in the part already.

    Returns:
        SHA-256 of the part.

    Raises:
        OSError, duckdb.Error: the disk refuses it; the part is as it was.
    """
    path = part_of(folder, rows.kind, number, host)
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
