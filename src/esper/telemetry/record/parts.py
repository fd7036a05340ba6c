"""The files of a record: `record/` in a run directory.

record/about.json                                              versions, machine, names; written when the run starts
record/steps-000001.0001-000003.0060-v1-1a2b3c4d.parquet       rows of round 1, step 1 to round 3, step 60
       kind  first place   last place    |  CRC-32 of the content
                                         version of the schema

A part is written under a hidden name, synced and renamed, so that it is there completely or not at all; its name holds
its checksum. Links are refused, because a run directory may come from somebody else.
"""

import json
import re
import stat
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, final

import numpy as np

from esper.leyline.files import draft_of, is_draft, mode_of, remove, replacing, sync
from esper.telemetry.record.schema import SCHEMA_VERSION, STORED

if TYPE_CHECKING:
    import duckdb

RECORD, ABOUT = "record", "about.json"
Place = tuple[int, int]
"""Round and step, from 1."""
_NAME = re.compile(r"(\w+)-(\d{6,})\.(\d{4,})-(\d{6,})\.(\d{4,})-v(\d+)-([0-9a-f]{8})\.parquet")


@final
@dataclass(frozen=True)
class Part:
    """One Parquet file: its kind (a key of `STORED`), the places of its first and last row, and its version."""

    kind: str
    first: Place
    last: Place
    checksum: int = 0
    version: int = SCHEMA_VERSION

    @property
    def name(self) -> str:
        """The name of the file."""
        (a, b), (c, d) = self.first, self.last
        return f"{self.kind}-{a:06d}.{b:04d}-{c:06d}.{d:04d}-v{self.version}-{self.checksum:08x}.parquet"

    @classmethod
    def of_name(cls, name: str) -> "Part | None":
        """The part that a file name describes, None for other names."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in STORED:
            return None
        a, b, c, d, version = (int(found[i]) for i in range(2, 7))
        return cls(found[1], (a, b), (c, d), int(found[7], 16), version)


@final
@dataclass(frozen=True)
class Rows:
    """Rows of one part, as arrays of equal length by column.

    `labels` are the texts of columns that hold numbers instead; a number without a label means NULL. NaN means NULL.
    Columns that are not in the schema are stored as they are.
    """

    kind: str
    columns: Mapping[str, np.ndarray]
    labels: Mapping[str, Sequence[str]]


def write_about(folder: Path, about: Mapping[str, object]) -> None:
    """Write about.json, with the time; raises OSError if the disk refuses it."""
    folder.mkdir(exist_ok=True)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with replacing(folder / ABOUT) as file:
        json.dump({"schema": SCHEMA_VERSION, "started": now, **about}, file, indent=1)


def parts_in(folder: Path) -> list[Part]:
    """The parts of a record by kind and place; none if `folder` is a link or does not exist."""
    if not stat.S_ISDIR(mode_of(folder)):
        return []
    found = filter(None, (Part.of_name(path.name) for path in folder.iterdir()))
    return sorted(found, key=lambda part: (part.kind, part.first, part.last))


def checksum(path: Path) -> int:
    """CRC-32 of a file."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            value = zlib.crc32(block, value)
    return value


def quoted(text: str | Path) -> str:
    """`text` as an SQL literal."""
    return "'" + str(text).replace("'", "''") + "'"


def identifier(name: str) -> str:
    """`name` as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def write_part(folder: Path, rows: Rows, first: Place, last: Place, database: "duckdb.DuckDBPyConnection") -> int:
    """Write rows from one place to another as a part. Returns its size in bytes; without rows, 0 and no part.

    Raises:
        OSError, duckdb.Error: the disk refuses it; nothing is left then.
    """
    if not any(map(len, rows.columns.values())):
        return 0
    database.register("rows_of_part", dict(rows.columns))
    try:
        select = ", ".join(_stored(name, rows) for name in rows.columns)
        order = "ORDER BY round, host, t" if rows.kind == "steps" else ""
        return _write(folder, Part(rows.kind, first, last), f"SELECT {select} FROM rows_of_part {order}", database)
    finally:
        database.unregister("rows_of_part")


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


def _write(folder: Path, part: Part, select: str, database: "duckdb.DuckDBPyConnection") -> int:
    draft = draft_of(folder / part.name)
    try:
        database.execute(f"COPY ({select}) TO {quoted(draft)} (FORMAT parquet, COMPRESSION zstd, PARQUET_VERSION v2)")
        sync(draft)
        size = draft.stat().st_size
        draft.rename(folder / replace(part, checksum=checksum(draft)).name)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    sync(folder)
    return size


def rewind(folder: Path, end: Place) -> None:
    """Remove all rows after the place `end`. A part that cannot be read stays, and the reader names it.

    Raises:
        OSError: the disk refuses it.
    """
    for left in filter(is_draft, folder.iterdir() if stat.S_ISDIR(mode_of(folder)) else ()):  # of a killed process
        remove(left)
    later = [part for part in parts_in(folder) if part.last > end]
    if not later:
        return
    import duckdb

    with duckdb.connect(":memory:", config={"threads": 1}) as database:
        for part in later:
            path = folder / part.name
            if part.first <= end:
                kept = f"SELECT * FROM read_parquet({quoted(path)}) WHERE (round, t) <= ({end[0]}, {end[1]})"
                try:
                    _write(folder, replace(part, last=end), kept, database)
                except duckdb.Error:
                    continue
            path.unlink()


def disjoint(parts: Sequence[Part]) -> Iterator[tuple[Part, Part | None]]:
    """Each part of one kind in order, and the earlier part that it overlaps (of a resume that was killed), if any."""
    before: Part | None = None
    for part in parts:
        overlaps = before is not None and part.first <= before.last
        yield part, before if overlaps else None
        before = before if overlaps else part
