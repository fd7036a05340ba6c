"""The rulebook for one host in plain Python: dictionaries and ifs, one case after the other.

A host is `{"slots": [slot, ...], "memory": [...], **host fields}`, a slot a dictionary of its fields. Written as the
slow twin of the batched rules; the two share nothing but the numbers of the stages and operations.
"""

import dataclasses
import math

NAN = math.nan
DORMANT, GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED, PRUNED, EMBARGOED, RESETTING = 1, 2, 3, 4, 6, 7, 8, 9, 10
GROWING = (GERMINATED, TRAINING, BLENDING, HOLDING)
WAIT, GERMINATE, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, ADVANCE = range(6)
HOLD, UP, DOWN = range(3)
LINEAR, COSINE, SIGMOID = 1, 2, 3
ADD, MULTIPLY, GATE = 1, 2, 3

STYLES = {0: (LINEAR, ADD), 1: (LINEAR, MULTIPLY), 2: (SIGMOID, ADD), 3: (LINEAR, GATE)}
TEMPOS = {0: 3, 1: 5, 2: 8}
TARGETS = {0: 0.5, 1: 0.7, 2: 1.0}
SPEEDS = {0: 0, 1: 3, 2: 5, 3: 8}
CURVES = {0: (LINEAR, 12.0), 1: (COSINE, 12.0), 2: (SIGMOID, 6.0), 3: (SIGMOID, 12.0), 4: (SIGMOID, 24.0)}

ON_RELEASE = {
    "has_gate": False, "params": 0,
    "alpha": 0.0, "alpha_start": 0.0, "alpha_target": 0.0, "alpha_mode": HOLD, "alpha_curve": 0,
    "alpha_steepness": 12.0, "alpha_total": 0, "alpha_done": 0,
    "acc_at_germination": NAN, "acc_at_blending_start": NAN,
    "contribution": NAN, "contribution_step": -1, "contribution_velocity": NAN,
    "interaction_sum": NAN, "boost_received": NAN,
    "grad_norm": NAN, "grad_health": NAN, "grad_vanishing": False, "grad_exploding": False,
    "grad_health_prev": NAN, "grad_ratio_ema": NAN,
}  # fmt: skip
ONLY_WHEN_DORMANT = {
    "stage": DORMANT, "prev_stage": DORMANT, "epochs_in_stage": 0, "prev_epochs": 0, "age": 0, "serial": -1,
    "blueprint": -1, "algorithm": 0, "tempo": 0, "germ_curve": 0, "acc_at_stage_start": NAN,
}  # fmt: skip
EMPTY_SLOT = {**ONLY_WHEN_DORMANT, **ON_RELEASE}
NEW_HOST = {
    "val_acc": NAN, "val_loss": NAN, "train_acc": NAN, "train_loss": NAN, "prev_val_acc": NAN, "prev_val_loss": NAN,
    "acc_hist": [NAN] * 5, "loss_hist": [NAN] * 5, "committed_acc": NAN, "cf_total": NAN,
    "last_op": WAIT, "last_success": True, "n_germinated": 0, "n_pruned": 0, "n_fossilized": 0, "n_contributing": 0,
    "best_acc": NAN, "plateau_count": 0, "stable_count": 0, "stabilized": False, "segment": 0,
    "compute": 0.0,
}  # fmt: skip


def new_host(num_slots, host_params):
    """A host before its first step."""
    slots = [dict(EMPTY_SLOT) for _ in range(num_slots)]
    return {**NEW_HOST, "host_params": host_params, "slots": slots, "memory": [dict(EMPTY_SLOT) for _ in slots]}


def missing(x):
    return math.isnan(x)


# -- guards and gates -------------------------------------------------------------------------------------------------


def legal(slots, cfg):
    """`legal[op][slot]`."""
    live = sum(s["stage"] in (GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED) for s in slots)
    busy = any(s["stage"] in (GERMINATED, TRAINING, PRUNED, EMBARGOED, RESETTING) for s in slots)
    limit = len(slots) if cfg.max_seeds is None else cfg.max_seeds
    may_grow = (limit == 0 or live < limit) and not (cfg.sequential and busy)
    manual = [
        stage
        for stage, auto in ((GERMINATED, cfg.auto_g1), (TRAINING, cfg.auto_g2), (BLENDING, cfg.auto_g3))
        if not auto
    ]
    table = [[], [], [], [], [], []]
    for s in slots:
        stage, still = s["stage"], s["alpha_mode"] == HOLD
        table[WAIT].append(True)
        table[GERMINATE].append(stage == DORMANT and may_grow)
        table[SET_ALPHA_TARGET].append(stage in (BLENDING, HOLDING) and still)
        table[PRUNE].append(stage in GROWING and still and s["age"] >= cfg.min_prune_age)
        table[FOSSILIZE].append(stage == HOLDING and still)
        table[ADVANCE].append(stage in manual and s["alpha_mode"] in (HOLD, UP))
    return table


def gate_2(slot, n, val_acc, cfg):
    """Bits of the checks that fail."""
    failed = 0 if n >= cfg.min_training_epochs else 1
    if cfg.gate_mode == "strict":
        improvement = val_acc - slot["acc_at_stage_start"]
        if missing(improvement) or improvement < cfg.g2_improvement:
            failed += 16
        if missing(slot["grad_ratio_ema"]) or slot["grad_ratio_ema"] < cfg.g2_ratio:
            failed += 32
        return failed
    if missing(slot["grad_health"]):
        return failed + 2
    failed += 4 if slot["grad_exploding"] else 0
    failed += 8 if slot["grad_health"] < cfg.g2_health else 0
    return failed


def gate_3(slot, n, cfg):
    arrived = slot["alpha_mode"] == HOLD and abs(slot["alpha"] - slot["alpha_target"]) <= 1e-6
    failed = 0 if arrived and slot["alpha_target"] >= 1 - 1e-6 else 64
    if cfg.gate_mode == "strict" and n < cfg.min_blending_epochs:
        failed += 1
    return failed


def gate_5(slot, t, cfg):
    if slot["contribution_step"] != t:
        return 128
    if cfg.gate_mode == "strict" and slot["contribution"] < cfg.g5_contribution:
        return 256
    return 0


# -- alpha ------------------------------------------------------------------------------------------------------------


def logistic(x):
    return 1.0 / (1.0 + math.exp(-x))


def share_of_ramp(x, curve, k):
    if curve == COSINE:
        return 0.5 * (1.0 - math.cos(math.pi * x))
    if curve == SIGMOID:
        k = max(k, 0.1)
        low, high = logistic(-k / 2), logistic(k / 2)
        return x if high - low < 1e-12 else (logistic(k * (x - 0.5)) - low) / (high - low)
    return x


def retarget(slot, target, ticks, curve, k):
    if slot["alpha_mode"] != HOLD:
        raise ValueError("a ramp that runs cannot be changed")
    slot.update(
        alpha_start=slot["alpha"], alpha_target=target, alpha_curve=curve, alpha_steepness=k, alpha_done=0,
        alpha_total=0,
    )  # fmt: skip
    if ticks == 0:
        slot["alpha"] = target
    elif target != slot["alpha"]:
        slot.update(alpha_total=ticks, alpha_mode=UP if target > slot["alpha"] else DOWN)


def alpha_step(slot):
    slot["alpha_done"] += 1
    start, target = slot["alpha_start"], slot["alpha_target"]
    if slot["alpha_done"] >= slot["alpha_total"]:
        slot.update(alpha=target, alpha_mode=HOLD)
        return
    p = share_of_ramp(slot["alpha_done"] / slot["alpha_total"], slot["alpha_curve"], slot["alpha_steepness"])
    slot["alpha"] = min(max(start + (target - start) * p, min(start, target)), max(start, target))


# -- operations and tick ----------------------------------------------------------------------------------------------


def move(slot, stage, val_acc):
    slot.update(
        prev_stage=slot["stage"], prev_epochs=slot["epochs_in_stage"], stage=stage, epochs_in_stage=0,
        acc_at_stage_start=val_acc,
    )  # fmt: skip


def remove(slot, val_acc):
    move(slot, PRUNED, val_acc)
    slot.update(ON_RELEASE)


def apply_op(host, act, t, costs, cfg):
    """Execute one action. Returns (took effect, moved slots, slot that asks to advance or None)."""
    s, blueprint, style, tempo, target, speed, curve, op = act
    slot, val_acc = host["slots"][s], host["val_acc"]
    if not legal(host["slots"], cfg)[op][s]:
        return False, set(), None
    before = slot["stage"]
    if op == GERMINATE:
        if not costs["selectable"][blueprint]:
            return False, set(), None
        germinate(host, slot, s, blueprint, style, tempo, target, costs)
    elif op == SET_ALPHA_TARGET:
        if STYLES[style][1] == GATE and not slot["has_gate"]:
            return False, set(), None
        slot["algorithm"] = STYLES[style][1]
        lowers = TARGETS[target] < 1 - 1e-6
        if slot["stage"] == HOLDING and lowers:
            move(slot, BLENDING, val_acc)
        if slot["stage"] == BLENDING:
            retarget(slot, TARGETS[target], SPEEDS[speed], *CURVES[curve])
    elif op == PRUNE:
        if SPEEDS[speed] == 0 or slot["alpha"] == 0.0:
            remove(slot, val_acc)
            host["n_pruned"] += 1
        else:
            if slot["stage"] == HOLDING:
                move(slot, BLENDING, val_acc)
            retarget(slot, 0.0, SPEEDS[speed], *CURVES[curve])
    elif op == FOSSILIZE:
        if gate_5(slot, t, cfg):
            return False, set(), None
        move(slot, FOSSILIZED, val_acc)
        host["n_fossilized"] += 1
        host["n_contributing"] += slot["contribution"] >= 1.0
    return True, ({s} if slot["stage"] != before else set()), (s if op == ADVANCE else None)


def germinate(host, slot, s, blueprint, style, tempo, target, costs):
    curve, algorithm = STYLES[style]
    slot.update(
        stage=GERMINATED, prev_stage=GERMINATED, epochs_in_stage=0, prev_epochs=0, age=0, serial=host["n_germinated"],
        blueprint=blueprint, algorithm=algorithm, has_gate=algorithm == GATE, tempo=TEMPOS[tempo], germ_curve=curve,
        params=costs["seed_params"][s][blueprint] + (costs["gate_params"][s] if algorithm == GATE else 0),
        alpha_target=TARGETS[target], alpha_curve=curve,
        acc_at_germination=host["val_acc"], acc_at_stage_start=host["val_acc"],
    )  # fmt: skip
    host["n_germinated"] += 1


def tick(host, moved, requested, cfg):
    """End of the step. Returns whether the requested advance happened."""
    advanced = False
    for i, slot in enumerate(host["slots"]):
        if slot["stage"] == DORMANT:
            continue
        slot["age"] += 1
        stage, n = slot["stage"], slot["epochs_in_stage"] + (i not in moved)
        to = tick_slot(slot, n, i == requested, host["val_acc"], cfg)
        if to is None:
            slot["epochs_in_stage"] = n
            continue
        advanced = advanced or i == requested
        if to == PRUNED:
            host["n_pruned"] += 1
            remove(slot, host["val_acc"])
        elif to == DORMANT:
            slot.update(EMPTY_SLOT)
        else:
            move(slot, to, host["val_acc"])
        if stage == TRAINING and to == BLENDING:
            slot["acc_at_blending_start"] = host["val_acc"]
            retarget(slot, slot["alpha_target"], slot["tempo"], slot["germ_curve"], 12.0)
    return advanced


def tick_slot(slot, n, requested, val_acc, cfg):
    """Move the ramp; the stage that the slot goes to, or None."""
    stage = slot["stage"]
    removing = slot["alpha_mode"] == DOWN and slot["alpha_target"] == 0.0
    if stage == BLENDING and slot["alpha_mode"] != HOLD:
        alpha_step(slot)
    if stage == GERMINATED and (cfg.auto_g1 or requested):
        return TRAINING
    if stage == TRAINING and (cfg.auto_g2 or requested) and gate_2(slot, n, val_acc, cfg) == 0:
        return BLENDING
    if stage == BLENDING and removing and slot["alpha_mode"] == HOLD:
        return PRUNED
    if stage == BLENDING and (cfg.auto_g3 or requested) and gate_3(slot, n, cfg) == 0:
        return HOLDING
    if stage == PRUNED:
        return EMBARGOED
    if stage == EMBARGOED and n >= cfg.embargo_epochs:
        return RESETTING
    if stage == RESETTING:
        return DORMANT
    return None


# -- one control step: rollback or measurements, the op, the tick ------------------------------------------------------

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
