"""Sinks: where the records of a run go besides its directory, by name."""

from esper.telemetry.sinks.registry import SINKS as SINKS
from esper.telemetry.sinks.registry import SinkKind as SinkKind
from esper.telemetry.sinks.registry import register_sink as register_sink
from esper.telemetry.sinks.registry import require_installed as require_installed
from esper.telemetry.sinks.registry import require_sinks as require_sinks
