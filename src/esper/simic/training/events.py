"""Step reports as event lines: what happened to seeds and hosts, sparse and readable.

{"kind": "stage_changed", "round": 0, "t": 4, "host": 2, "slot": "r0c1", "serial": 0, "from": "TRAINING",
 "to": "BLENDING", "cause": "AUTO", "blueprint": "conv_light", "alpha": 0.0, "contribution": null}
"""

from collections.abc import Iterator

import numpy as np

from esper.leyline.protocols import EngineSpec
from esper.leyline.stages import Cause, SeedStage
from esper.tolaria.governor import PanicReason
from esper.tolaria.state import StepReport

Event = dict[str, object]


def events_of(report: StepReport, spec: EngineSpec) -> Iterator[Event]:
    """The events of one step, in the order in which they happened to each host."""
    yield from _rollbacks(report, spec)
    for moves in (report.op_moves, report.tick_moves):
        yield from _moves(report, moves, spec)
    yield from _refusals(report, spec)


def _head(report: StepReport, kind: str, spec: EngineSpec, host: np.intp) -> Event:
    return {"kind": kind, "round": report.episode, "t": report.t, "host": spec.host_offset + int(host)}


def _slot(report: StepReport, spec: EngineSpec, n: int, s: int) -> Event:
    blueprint = int(report.blueprint[n, s])
    return {
        "slot": spec.slot_ids[s],
        "serial": int(report.serial[n, s]),
        "blueprint": spec.blueprint_names[blueprint] if blueprint >= 0 else None,
    }


def _rollbacks(report: StepReport, spec: EngineSpec) -> Iterator[Event]:
    for n in np.flatnonzero(report.panic_reason):
        pruned = [spec.slot_ids[s] for s in np.flatnonzero(report.rolled_back[n])]
        yield _head(report, "rollback", spec, n) | {
            "reason": PanicReason(int(report.panic_reason[n])).name.lower(),
            "loss": float(report.panic_loss[n]),
            "thresholds": [float(x) for x in report.panic_thresholds[n]],
            "strikes": int(report.panic_strikes[n]),
            "pruned": pruned,
        }


def _moves(report: StepReport, moves: np.ndarray, spec: EngineSpec) -> Iterator[Event]:
    before, after, cause = moves
    for n, s in zip(*np.nonzero(cause), strict=True):
        yield (
            _head(report, "stage_changed", spec, n)
            | _slot(report, spec, n, s)
            | {
                "from": SeedStage(int(before[n, s])).name,
                "to": SeedStage(int(after[n, s])).name,
                "cause": Cause(int(cause[n, s])).name,
                "alpha": float(report.alpha[n, s]),
                "contribution": float(report.contribution[n, s]),
            }
        )


def _refusals(report: StepReport, spec: EngineSpec) -> Iterator[Event]:
    """A FOSSILIZE that its gate refused; gates that keep a seed waiting are no event."""
    gate, passed, score, failed = report.gates
    for n, s in zip(*np.nonzero((gate == 5) & (passed == 0)), strict=True):
        yield (
            _head(report, "refused", spec, n)
            | _slot(report, spec, n, s)
            | {"gate": "G5", "score": float(score[n, s]), "failed_checks": int(failed[n, s])}
        )
