"""The lines of steps.jsonl: measurements, decision and reward of every step of every host.

{"kind": "step", "round": 1, "t": 4, "host": 2, "val_acc": 61.0, "val_loss": 1.2, "train_loss": 1.3,
 "committed_acc": 58.5, "total_params": 5210, "coalitions": 4, "op": "GERMINATE", "slot": "r0c0", "blueprint": "norm",
 "style": 2, "tempo": 1, "alpha_target": 2, "alpha_speed": 0, "alpha_curve": 0, "effective_op": "GERMINATE",
 "success": true, "value": 0.1, "op_probability": 0.2, "reward": 0.01, "terms": {"potential": 0.01}, "flags": []}

Zero terms are left out. In a step with a rollback the host makes no decision: `op` and `reward` are null. The rollback
replaces the reward of the previous step, whose line keeps the old value.
"""

import math
from collections.abc import Iterator, Sequence

from esper.leyline.actions import HEAD_NAMES, Head, LifecycleOp
from esper.leyline.protocols import EngineSpec
from esper.simic.rewards.credit import FLAGS
from esper.tolaria.state import StepReport

Line = dict[str, object]
_OPS = [op.name for op in LifecycleOp]
_PLAIN_HEADS = [head for head in Head if head not in (Head.SLOT, Head.BLUEPRINT, Head.OP)]


def step_lines(report: StepReport, spec: EngineSpec, terms: Sequence[str]) -> Iterator[Line]:
    """One line per host; `terms` are the names of the reward terms."""
    names = ("val_acc", "val_loss", "train_loss", "committed_acc", "total_params", "reward", "value", "op_log_prob")
    columns = {name: getattr(report, name).tolist() for name in names}
    actions, effective, coalitions = (x.tolist() for x in (report.actions, report.effective_op, report.num_coalitions))
    breakdown, flags, panic = report.breakdown.tolist(), report.flags.tolist(), report.panic_reason.tolist()
    for n, action in enumerate(actions):
        line: Line = {"kind": "step", "round": report.episode + 1, "t": report.t, "host": spec.host_offset + n}
        line |= {name: columns[name][n] for name in names[:5]}
        line["coalitions"] = coalitions[n]
        if panic[n]:
            yield line | {"op": None, "reward": None}
            continue
        line |= {"op": _OPS[action[Head.OP]], "slot": spec.slot_ids[action[Head.SLOT]]}
        line["blueprint"] = spec.blueprint_names[action[Head.BLUEPRINT]]
        line |= {HEAD_NAMES[head]: action[head] for head in _PLAIN_HEADS}
        line |= {"effective_op": _OPS[effective[n]], "success": effective[n] == action[Head.OP]}
        line |= {"value": columns["value"][n], "op_probability": math.exp(columns["op_log_prob"][n])}
        line["reward"] = columns["reward"][n]
        line["terms"] = {name: value for name, value in zip(terms, breakdown[n], strict=True) if value}
        yield line | {"flags": [name for name, marked in zip(FLAGS, flags[n], strict=True) if marked]}
