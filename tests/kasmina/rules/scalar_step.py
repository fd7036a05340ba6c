"""One control step of one host in plain Python: rollback or measurements, the op, the tick."""

import dataclasses
import math

from scalar_rules import (
    BLENDING,
    FOSSILIZE,
    FOSSILIZED,
    GROWING,
    HOLDING,
    NAN,
    TRAINING,
    WAIT,
    apply_op,
    missing,
    remove,
    tick,
)

FORGOTTEN = ("val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss", "committed_acc",
             "cf_total")  # fmt: skip
REMEMBERED = ("contribution", "contribution_step", "contribution_velocity", "interaction_sum", "boost_received")


def rollback(host):
    """Growing seeds go; what the host knew of its past is forgotten. Returns the indices of the slots that moved."""
    moved = set()
    host.update(dict.fromkeys(FORGOTTEN, NAN))
    host.update(acc_hist=[NAN] * 5, loss_hist=[NAN] * 5, plateau_count=0, segment=host["segment"] + 1)
    for i, slot in enumerate(host["slots"]):
        if slot["stage"] in GROWING:
            remove(slot, NAN)  # nothing is ingested in a step of panic
            moved.add(i)
        elif slot["stage"] == FOSSILIZED:
            slot.update({name: host["memory"][i][name] for name in REMEMBERED})
    return moved


def ingest(host, seen, t):
    """`seen` is a dictionary with the names of the measurements, per-slot values as lists."""
    before_acc, before_loss = host["val_acc"], host["val_loss"]
    for name in ("val_acc", "val_loss", "train_acc", "train_loss", "committed_acc", "cf_total"):
        host[name] = seen[name]
    host["prev_val_acc"], host["prev_val_loss"] = before_acc, before_loss
    host["acc_hist"] = [*host["acc_hist"][1:], seen["val_acc"]]
    host["loss_hist"] = [*host["loss_hist"][1:], seen["val_loss"]]
    host["best_acc"] = seen["val_acc"] if missing(host["best_acc"]) else max(host["best_acc"], seen["val_acc"])
    plateau = not missing(before_acc) and seen["val_acc"] - before_acc < 0.5
    host["plateau_count"] = host["plateau_count"] + 1 if plateau else 0
    if not host["stabilized"] and math.isfinite(before_loss) and before_loss > 1e-8:
        relative = (before_loss - seen["val_loss"]) / before_loss
        host["stable_count"] = host["stable_count"] + 1 if -0.05 < relative < 0.03 else 0
        host["stabilized"] = host["stable_count"] >= 3
    for i, slot in enumerate(host["slots"]):
        ingest_slot(slot, {k: v[i] for k, v in seen.items() if isinstance(v, list)}, t)


def ingest_slot(slot, seen, t):
    c = seen["contribution"]
    if not missing(c):
        if slot["contribution_step"] >= 0:
            v = 0.0 if missing(slot["contribution_velocity"]) else slot["contribution_velocity"]
            slot["contribution_velocity"] = 0.7 * v + 0.3 * (c - slot["contribution"])
        slot["contribution"], slot["contribution_step"] = c, t
    pairs = [x for x in seen["interactions"] if not missing(x)]
    slot["interaction_sum"] = sum(pairs) if pairs else NAN
    slot["boost_received"] = max(0.0, *pairs) if pairs else NAN
    slot["grad_health_prev"] = slot["grad_health"]
    for name in ("grad_norm", "grad_health", "grad_vanishing", "grad_exploding"):
        slot[name] = seen[name]
    if not missing(seen["grad_ratio"]):
        ema = slot["grad_ratio_ema"]
        slot["grad_ratio_ema"] = seen["grad_ratio"] if missing(ema) else 0.9 * ema + 0.1 * seen["grad_ratio"]


def training_cost(host, costs):
    flops = costs["host_flops"]
    for s, slot in enumerate(host["slots"]):
        if slot["stage"] in (TRAINING, BLENDING, HOLDING, FOSSILIZED):
            flops += costs["seed_flops"][s][slot["blueprint"]] + costs["gate_flops"][s] * slot["has_gate"]
    return flops / costs["host_flops"]


def step(host, seen, act, t, panic, costs, cfg):
    """One control step. Returns (took effect, effective op)."""
    moved, requested, success = set(), None, False
    host["compute"] += training_cost(host, costs)
    if panic:
        moved = rollback(host)
    else:
        ingest(host, seen, t)
        success, moved, requested = apply_op(host, act, t, costs, cfg)
    advanced = tick(host, moved, requested, cfg)
    if requested is not None:
        success = advanced
    host["last_op"], host["last_success"] = (WAIT if panic else act[-1]), success
    if not panic and (t % 5 == 0 or (act[-1] == FOSSILIZE and success)):
        host["memory"] = [dict(slot) for slot in host["slots"]]
    return success, act[-1] if success else WAIT


# -- records as dictionaries ------------------------------------------------------------------------------------------


def slot_dicts(slots):
    """`[host][slot]`, each slot a dictionary of its fields."""
    columns = {name: value.tolist() for name, value in vars(slots).items()}
    num_envs, num_slots = slots.stage.shape
    return [
        [{name: column[n][s] for name, column in columns.items()} for s in range(num_slots)] for n in range(num_envs)
    ]


def measurement_dicts(seen):
    """`[host]`, each a dictionary of its measurements."""
    names = [f.name for f in dataclasses.fields(seen) if f.name != "subset_acc"]
    columns = {name: getattr(seen, name).tolist() for name in names}
    return [{name: column[n] for name, column in columns.items()} for n in range(len(columns["val_acc"]))]


def cost_dict(costs):
    return {name: value.tolist() for name, value in vars(costs).items()}
