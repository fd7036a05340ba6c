"""Writes docs/record.md from the schema of the run record and the table of anomalies.

python scripts/record_page.py
"""

from collections.abc import Iterable
from pathlib import Path

from esper.telemetry.anomalies import RULES
from esper.telemetry.record.schema import TABLES, Table

PAGE = Path(__file__).parents[1] / "docs" / "record.md"
HEAD = """# The run record

Every run writes what happened as tables. SQL reads them, from the command line, from Python, or in any tool that reads
Parquet.

```bash
esper query RUN                                                      # the tables, and what looks wrong
esper query RUN "select op, count(*) from decisions group by op"
esper query RUN "select * from seeds where round = 3" --csv
esper query RUN "select * from slots" --json --timeout 30                 # ended after 30 seconds
esper query RUN1 RUN2 "select run, max(objective) from rounds group by run"
```

```python
run = esper.load("runs/digits-quickstart-s0")
run.query("select t, op, slot, p_wait from decisions where round = 1 and host = ?", [0])
run.frame("seeds")  # pandas
run.polars("decisions")  # polars; pip install 'esper-growth[frames]' has both
```

The SQL is that of [DuckDB](https://duckdb.org/docs/sql/introduction). A query is one SELECT, reads the record alone,
and may use 1 GiB of memory.

## Files

| file | content |
|---|---|
| `record/steps-NNNNNN.parquet` | one row per step and host: `steps`, `decisions`, and the terms of `rewards` |
| `record/slots-NNNNNN.parquet` | one row per step and seed: `slots`, and from it `seeds` |
| `record/coalitions-NNNNNN.parquet` | one row per measured set of seeds |
| `about.json` | format, versions, machine, names, time; settings and digests of plugins at the start |
| `metrics.jsonl` | one line per round: `rounds`, `updates`; SHA-256 of the parts of the round |
| `events.jsonl` | one line per event: `episodes` |

The parts of a round are written when it ends, or when the run is stopped within it, before the checkpoint that counts
them; a disk that refuses them ends the run, which continues from its newest checkpoint. A resume deletes the parts of
rounds after its checkpoint, so that a run has every step of its rounds exactly once. A part that is damaged or missing
is named, and all others are shown. A run of another format is refused with the version that wrote it.

## Tables

Each table begins with `run`, the name of the run directory. Rounds and steps count from 1, hosts from 0. NULL means:
not measured, or not applicable. Accuracies are in percentage points.
"""


def table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    """A table of Markdown."""
    escaped = (" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows)
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {row} |" for row in escaped)]


def section(kind: Table) -> list[str]:
    """A table of the record."""
    rows = [(f"`{c.name}`", c.type, c.unit, c.meaning) for c in kind.columns]
    lines = ["", f"### {kind.name}", "", kind.meaning, "", *table(("column", "type", "unit", "meaning"), rows)]
    if kind.name == "steps":
        lines += ["", "A reward that marks steps adds one BOOLEAN column for each of its flags, `flag_NAME`."]
    if kind.name == "updates":
        lines += ["", "The other columns are the metrics of `metrics.jsonl`, each a DOUBLE, e.g. `approx_kl`."]
    return lines


def page() -> str:
    """The whole page."""
    lines = [HEAD.rstrip("\n"), *(line for kind in TABLES for line in section(kind))]
    lines += [
        "",
        "## Anomalies",
        "",
        "Those of an update, and steps that the reward marks, are also alarms in `events.jsonl` while the run goes on.",
        "",
    ]
    rows = [
        (f"`{kind}`", f"{'<' if rule.below else '>'} {rule.threshold:g}", rule.message, rule.advice)
        for kind, rules in RULES.items()
        for rule in rules
    ]
    return "\n".join([*lines, *table(("kind", "value", "meaning", "advice"), rows)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
