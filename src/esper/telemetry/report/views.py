"""What the sections of the report share: the record they read, and how rounds are grouped."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

POINTS = 2000
"""Most points of a curve; longer runs are averaged over neighbouring rounds."""
LONGEST_PHASE = 100
"""Most rounds at either end of a run over which decisions are counted, for the memory of the query."""
Payload = dict[str, Any]


@runtime_checkable
class Record(Protocol):
    """The part of the run record that the report reads; its views are listed in docs/record.md."""

    complaints: list[str]

    def query(self, sql: str, params: Any = ()) -> list[dict[str, Any]]:  # noqa: ANN401
        """The rows of a query."""


class Rounds(NamedTuple):
    """The complete rounds of a run.

    Attributes:
        last: number of the newest one, 0 if there is none. best: the one with the highest mean of 100·J.
        bucket: how many rounds share a point of a curve. hosts: hosts in a round.
    """

    last: int
    best: int
    bucket: int
    hosts: int

    @property
    def quarter(self) -> int:
        """How many rounds are "the first" or "the last" of the run: a quarter of them, at most `LONGEST_PHASE`."""
        return min(max(self.last // 4, 1), LONGEST_PHASE)


def rounds_of(record: Record) -> dict[str, Rounds]:
    """The complete rounds of each run, by its name."""
    rows = record.query(
        "select run, coalesce(max(r.round), 0) as last, coalesce(arg_max(r.round, r.objective), 0) as best, "
        "any_value(runs.num_envs) as hosts from runs left join rounds r using (run) group by run order by run"
    )
    return {
        row["run"]: Rounds(row["last"], row["best"], max(-(-row["last"] // POINTS), 1), row["hosts"]) for row in rows
    }


def columns_of(rows: list[dict[str, Any]]) -> Payload:
    """Rows as columns; {} without rows."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
