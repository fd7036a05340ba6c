"""What happened while a network grew, step by step."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, final, overload

from esper.export.description import Origin
from esper.leyline.errors import ExportError
from esper.leyline.messages import EngineSpec
from esper.leyline.stages import COOLDOWN, SeedStage
from esper.runs import tables
from esper.runs.events import Event, step_events
from esper.telemetry.progress import warn
from esper.telemetry.run_directory import EVENTS, plain_json
from esper.tolaria.state import StepReport

FILE = "timeline.json"
_SILENT = {stage.name for stage in (COOLDOWN - {SeedStage.PRUNED}) | {SeedStage.DORMANT}}


class Row(NamedTuple):
    """One event: in this step, the seed of a slot reached a stage ("germinated" to "fossilized", or "pruned").

    Other events are "refused" (a seed that was not good enough to be fossilized), "rolled back" (the host, after a bad
    loss), and "end", with the points of the network that is kept. `points` are those of the network with all seeds, on
    the validation examples; None where they were not measured.
    """

    step: int
    slot: str
    event: str
    blueprint: str | None
    alpha: float | None
    points: float | None


@final
class Timeline(Sequence[Row]):
    """Rows in order; prints as a table."""

    def __init__(self, rows: Sequence[Row], unit: str) -> None:
        self.rows, self.unit = tuple(rows), unit

    @classmethod
    def of(cls, reports: Sequence[StepReport], spec: EngineSpec, host: int, points: float, unit: str) -> "Timeline":
        """The timeline of a host whose final network has these points."""
        live = {report.t: float(report.val_acc[host]) for report in reports}
        own = (event for event in step_events(reports, spec) if event["host"] == spec.host_offset + host)
        rows = [row for event in own if (row := _row(event, live)) is not None]
        last = max((report.t for report in reports), default=0)  # earlier than the end of the episode if it was stopped
        return cls([*rows, _clean(Row(last, "", "end", None, None, points))], unit)

    @classmethod
    def of_run(cls, run: Path, origin: Origin, steps: int, points: float, unit: str) -> "Timeline":
        """The same from the records of a run, for a host of a complete round of `steps` steps."""
        from esper.telemetry.record import open_record
        from esper.telemetry.record.lines import read_lines

        complaints: list[str] = []
        events = read_lines(run / EVENTS, ("stage_changed", "refused", "rollback"), complaints)
        with open_record([run]) as record:
            place = [origin.round, origin.host]
            found = record.query("SELECT t, val_acc FROM steps WHERE round = ? AND host = ?", place)
        live = {row["t"]: row["val_acc"] for row in found}
        own = (event for event in events if [event["round"], event["host"]] == place)
        rows = [row for event in own if (row := _row(event, live)) is not None]
        warn(complaints)
        return cls([*rows, _clean(Row(steps, "", "end", None, None, points))], unit)

    @classmethod
    def read(cls, folder: Path, unit: str) -> "Timeline":
        """The timeline in a folder of `Grown.save`, empty where there is none; raises ExportError if it is damaged."""
        file = folder / FILE
        try:
            rows = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
            return cls([Row(**row) for row in rows], unit)
        except (ValueError, TypeError) as error:
            raise ExportError(f"{file} is damaged ({error}); delete it to load the network without.") from error

    def text(self) -> str:
        """The JSON document."""
        return json.dumps([row._asdict() for row in self.rows], indent=1, allow_nan=False) + "\n"

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Row, ...]: ...
    def __getitem__(self, index: int | slice) -> Row | tuple[Row, ...]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        page = tables.plain_table("step", "slot", "event", "blueprint", "alpha", self.unit)
        for column in page.columns[1:4]:
            column.justify = "left"
        for row in self.rows:
            alpha, points = (
                "" if value is None else f"{value:.2f}" for value in (row.alpha if row.slot else None, row.points)
            )
            page.add_row(str(row.step), row.slot, row.event, row.blueprint or "", alpha, points)
        return tables.text(lambda console: console.print(page))

    __repr__ = __str__


def _row(event: Event, live: Mapping[int, float | None]) -> Row | None:
    """The row of an event of a host; None for those without interest."""
    step = event["t"]
    assert isinstance(step, int)
    match event["kind"]:
        case "stage_changed" if event["to"] not in _SILENT:
            what, slot = str(event["to"]).lower(), str(event["slot"])
        case "refused":
            what, slot = "refused", str(event["slot"])
        case "rollback":
            what, slot = "rolled back", ""
        case _:
            return None
    blueprint, alpha = event.get("blueprint"), event.get("alpha")
    assert blueprint is None or isinstance(blueprint, str)
    return _clean(Row(step, slot, what, blueprint, float(str(alpha)) if alpha is not None else None, live.get(step)))


def _clean(row: Row) -> Row:
    """Without NaN, which JSON does not have."""
    return Row(*(plain_json(value) for value in row))  # type: ignore[arg-type]
