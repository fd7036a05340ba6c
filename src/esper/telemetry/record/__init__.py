"""The run record: what happened in a run, as tables that SQL can query."""

from esper.telemetry.record.reader import Record as Record
from esper.telemetry.record.reader import open_record as open_record
