"""One SELECT in a process of its own, which is ended when it takes too long or too much memory.

    answer --{"runs": paths, "sql": ..., "rows": ...}--> python -m esper.telemetry.serve.queries --JSON--> answer

DuckDB can be interrupted between values, but not within one, and its limit of memory does not count what one value
needs: `select len(range(200_000_000))` went on for 90 seconds, with 14 GB. So whoever may ask anything gets a process.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError, QueryError, in_words
from esper.telemetry.record.reader import open_record
from esper.telemetry.report.page import rounded
from esper.telemetry.serve.runs import UNREADABLE

SECONDS = 20.0
"""That a query may take, with opening the record."""
MEMORY = 4 * 2**30
"""Bytes that the process may add to what it has after its imports: 1 GiB for DuckDB, the rest for single values."""
CHARACTERS, CELL = 20_000, 500
"""Of an answer, and of one value in it."""


def answer(
    runs: Sequence[Path], sql: str, rows: int, seconds: float = SECONDS, names: Sequence[str] = ()
) -> dict[str, Any]:
    """The first `rows` rows of one SELECT about run directories, as JSON values; `names` as for `open_record`.

    `left_out` says how many rows are not among them; `notes` are sentences about what is damaged or not written yet.

    Raises:
        QueryError: it is not a SELECT, reads other files, is wrong, or was ended; or a run cannot be read.
    """
    question = json.dumps({"runs": list(map(str, runs)), "names": names, "sql": sql, "rows": rows})
    # -P: what lies in the working directory of whoever started the server is not imported
    command = [sys.executable, "-P", "-m", __name__]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise QueryError(
            f"the query was ended after {seconds:g} seconds; select fewer rounds, hosts or columns, or aggregate."
        ) from error
    if done.returncode:
        raise QueryError("the query was ended, because it needed too much memory; select fewer rows or smaller values.")
    found: dict[str, Any] = json.loads(done.stdout)
    if "error" in found:
        raise QueryError(found["error"])
    return found


def _answered(runs: Sequence[Path], names: Sequence[str], sql: str, rows: int) -> dict[str, Any]:
    """The answer, of at most `CHARACTERS` characters."""
    with open_record(runs, names=names) as record:
        found, more, is_all = record.beginning(sql, rows)
        values, left = [], CHARACTERS
        for row in found:
            values.append([_cell(value) for value in row.values()])
            left -= len(json.dumps(values[-1]))
            if left < 0 < len(values) - 1:
                values.pop()
                break
        dropped, at_least = len(found) - len(values) + more, "" if is_all else "at least "
        return {
            "columns": list(found[0]) if found else [],
            "rows": values,
            **({"left_out": f"{at_least}{dropped:,} more rows; aggregate, or order and limit them"} if dropped else {}),
            **({"notes": record.warnings} if record.warnings else {}),
        }


def _cell(value: object) -> object:
    """A value as JSON, cut if it is long."""
    plain = rounded(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, default=str)
    if len(text) > CELL:
        return f"{text[:CELL]}... ({len(text) - CELL:,} more characters)"
    return json.loads(text) if text is not plain else plain


def main() -> None:
    """Answer the question on standard input; errors are answers too."""
    now = Path("/proc/self/statm")
    if now.exists():  # elsewhere than on Linux only the time is limited
        most = int(now.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    question = json.load(sys.stdin)
    try:
        found = _answered([Path(run) for run in question["runs"]], question["names"], question["sql"], question["rows"])
    except EsperError as error:
        found = {"error": " ".join(str(error).split())}
    except MemoryError:
        sys.exit(1)
    except UNREADABLE as error:
        found = {"error": f"the record cannot be read ({in_words(error)}); restore it from a backup."}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
