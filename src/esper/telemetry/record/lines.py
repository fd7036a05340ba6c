"""Tables from the lines that a run writes: metrics.jsonl and events.jsonl.

A line that is damaged, such as the last one of a killed run, is left out and counted.
"""

import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from esper.leyline.files import mode_of
from esper.telemetry.record.schema import EPISODES, OP_NAMES, ROUNDS

Line = Mapping[str, Any]
Row = dict[str, Any]

_ROUND_KEYS = {
    "objective": "objective_mean",
    "committed": "committed_accuracy_mean",
    "live": "live_accuracy_mean",
    "growth": "growth_ratio_mean",
    "shapley": "shapley_mean",
    **{name: f"{name}_mean" for name in ("germinated", "pruned", "fossilized", "contributing", "refused")},
}
"""Key in metrics.jsonl by column of `rounds`, where they differ."""
_EPISODE_KEYS = {"committed": "committed_accuracy", "live": "live_accuracy", "growth": "growth_ratio"}
"""Key of an episode in events.jsonl by column of `episodes`, where they differ."""
_NO_METRIC = {*_ROUND_KEYS.values(), *ROUNDS.types, "ops", "slots", "phase_milliseconds", "memory_bytes"}


def read_lines(path: Path, kinds: Sequence[str], complaints: list[str]) -> list[Row]:
    """The lines of a file in order; with `kinds`, those of these kinds. A link or other non-file is refused."""
    mode = mode_of(path)
    if not mode:
        return []
    if not stat.S_ISREG(mode):
        complaints.append(f"{path} is not a regular file and was not read; restore the original.")
        return []
    starts = tuple(f'{{"kind": "{kind}"' for kind in kinds)
    found, damaged = [], 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if kinds and not line.startswith(starts):
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                found.append(value)
            else:
                damaged += 1
    if damaged:
        complaints.append(f"{path} has {damaged} damaged lines, which were left out (a run was killed writing one).")
    return found


def round_rows(lines: Sequence[Line]) -> Iterator[Row]:
    """Rows of `rounds` from metrics.jsonl."""
    for line in lines:
        row = {name: line.get(_ROUND_KEYS.get(name, name)) for name in ROUNDS.types} | _ops(line)
        seconds = (line.get("seconds") or 0.0) + (line.get("update_seconds") or 0.0)
        row["env_steps_per_s"] = line.get("env_steps", 0) / seconds if seconds else None
        row["memory_peak"] = (line.get("memory_bytes") or {}).get("peak")
        yield row


def update_rows(lines: Sequence[Line]) -> tuple[list[Row], list[str]]:
    """Rows of `updates` from metrics.jsonl, and the names of the metrics in the order of their first line."""
    names: dict[str, None] = {}
    rows = []
    for line in lines:
        metrics = {
            name: value
            for name, value in line.items()
            if name not in _NO_METRIC and (value is None or isinstance(value, int | float))
        }
        names |= dict.fromkeys(metrics)
        if metrics:
            rows.append({"round": line.get("round"), **metrics})
    return rows, list(names)


def episode_rows(events: Sequence[Line], host_params: int | None) -> Iterator[Row]:
    """Rows of `episodes` from events.jsonl."""
    for event in events:
        if event.get("kind") == "episode":
            row = {name: event.get(_EPISODE_KEYS.get(name, name)) for name in EPISODES.types} | _ops(event)
            growth = row["growth"]
            row["params"] = round(growth * host_params) if host_params and growth is not None else None
            yield row


def evaluation_files(run: Path) -> list[Path]:
    """The results of `esper evaluate` in a run directory, also in folders of its --out; the oldest first."""
    folders = [path for path in run.glob("*/evaluation.json") if not path.parent.is_symlink()]
    return sorted((*run.glob("evaluation*.json"), *folders), key=lambda path: (path.lstat().st_mtime_ns, path.name))


def evaluation_rows(document: object, file: str) -> Iterator[Row]:
    """Rows of `evaluations` from a file of `esper evaluate --out`: means of all hosts, then each host.

    Of several tasks the file holds a list.
    """
    if isinstance(document, list):
        for one in document:
            yield from evaluation_rows(one, file)
        return
    controllers = document.get("controllers") if isinstance(document, dict) else None
    place = {"file": file, "task": document.get("task") if isinstance(document, dict) else None}
    for found in controllers if isinstance(controllers, list) else ():
        if not isinstance(found, dict):
            continue
        names = ("objective", "committed", "test", "growth", "training_flops")
        place["controller"] = found.get("name")
        yield {**place, "host": None, **{name: found.get(name) for name in names}}
        hosts = found.get("hosts")
        columns = {n: v for n in names if isinstance(v := hosts.get(n), list)} if isinstance(hosts, dict) else {}
        for host, values in enumerate(zip(*columns.values(), strict=False)):
            yield {**place, "host": host, **dict(zip(columns, values, strict=True))}


def _ops(line: Line) -> Row:
    ops = line.get("ops") or {}
    return {f"ops_{name.lower()}": ops.get(name) for name in OP_NAMES}
