"""One row for each run, from config.toml and metrics.jsonl alone, so that a folder of many runs opens at once."""

import tomllib
from pathlib import Path
from typing import Any, final

from esper.telemetry.record.reader import read_lines, round_rows
from esper.telemetry.report.payloads import Payload
from esper.telemetry.run_directory import CONFIG, METRICS, SUMMARY
from esper.telemetry.serve.sources import Runs, version_of

POINTS = 120
"""Most points of a curve in the table."""
_SETTINGS = ("task", "preset", "seed", "num_envs", "episode_length")
_RESULTS = ("round", "objective", "objective_std", "committed", "growth", "env_steps_per_s")


@final
class Overview:
    """The table of all runs; a row is computed again when the files of its run have changed."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._rows: dict[str, tuple[str, Payload]] = {}

    def table(self) -> Payload:
        """The rows by name, and sentences about what is missing."""
        rows = {}
        for name, path in self._runs.found().items():
            version = version_of(path)
            kept = self._rows.get(name)
            rows[name] = kept if kept and kept[0] == version else (version, row_of(path))
        self._rows = rows
        return {"runs": [{"run": name, **row} for name, (_, row) in rows.items()], "notes": self._runs.notes()}


def row_of(run: Path) -> Payload:
    """What the overview says of a run; None where it is not known.

    `curve` has at most `POINTS` values of 100·J, means of neighbouring rounds. `changed` is the time (seconds since
    1970) of the last round, or of the start.
    """
    complaints: list[str] = []
    config = _config(run / CONFIG, complaints)
    rounds = list(round_rows(read_lines(run / METRICS, (), complaints)))
    last: Payload = rounds[-1] if rounds else {}
    objectives = [row["objective"] for row in rounds if row["objective"] is not None]
    written = next((path for path in (run / METRICS, run / CONFIG) if path.exists()), None)
    return {
        **{name: config.get(name) for name in _SETTINGS},
        **{name: last.get(name) for name in _RESULTS},
        "reward": (config.get("reward") or {}).get("mode"),
        "rounds": config.get("rounds"),
        "finished": (run / SUMMARY).exists(),
        "seconds": sum(row["seconds"] or 0.0 for row in rounds),
        "best": max(objectives, default=None),
        "curve": thinned(objectives),
        "changed": written and written.stat().st_mtime,
        "complaints": complaints,
    }


def _config(path: Path, complaints: list[str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        complaints.append(f"{path} cannot be read ({error}); restore it from a backup.")
        return {}


def thinned(values: list[float]) -> list[float]:
    """At most `POINTS` values: means of neighbours."""
    size = -(-len(values) // POINTS) or 1
    groups = (values[i : i + size] for i in range(0, len(values), size))
    return [sum(group) / len(group) for group in groups]
