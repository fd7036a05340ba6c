"""Scripted exploiters against idle and honest hosts, in a world whose seeds are known.

`KNOWN_OPEN` lists what a mode pays an exploiter by its very formulas: shaped pays the contribution of a held seed in
every step and the harm of a pruned one; basic and simplified never take back the potential of seeds alive at the end.
Those are expected failures, and no exception is made for them.
"""

import functools

import pytest
from toy_world import STEPS, Actor, Kind, ToySlot, play

from esper.leyline.actions import LifecycleOp as Op
from esper.simic.rewards import RewardConfig

DENSE = ("shaped", "escrow", "basic", "basic_plus", "simplified", "sparse", "minimal", "objective")
WAIT = (Op.WAIT, 0)
USEFUL, USELESS, TOXIC, TINY = (Kind.worth(points) for points in (3.0, 0.0, -4.0, 0.1))
RANSOM = Kind(effect=-1.0, contribution=4.0)


def idle(t, slots):
    return WAIT


def germinating(rest, slot=0):
    """Germinate in `slot` wherever it is empty, and follow `rest` while it is not."""

    def script(t: int, slots: list[ToySlot]):
        if slots[slot].stage == 1:
            return Op.GERMINATE, slot
        return rest(t, slots)

    return script


def churn(t, slots):
    return (Op.PRUNE, 0) if slots[0].age == 5 and slots[0].stage == 3 else WAIT


def farm(threshold, elsewhere):
    def script(t, slots):
        ripe = slots[0].stage in (4, 6) and slots[0].alpha >= threshold
        return (Op.PRUNE, 0) if ripe else (Op.WAIT, 1 if elsewhere else 0)

    return germinating(script)


def fossilizing(when):
    """Keep the seed in slot 0 and fossilize it as soon as `when(t, slot)` holds."""
    return germinating(lambda t, slots: (Op.FOSSILIZE, 0) if slots[0].stage == 6 and when(t, slots[0]) else WAIT)


HONEST = fossilizing(lambda t, slot: slot.epochs >= 5)
PARKING = germinating(idle)


def turntable(t, slots):
    return (Op.SET_ALPHA_TARGET, 0) if slots[0].stage == 6 else WAIT


def hoarding(t, slots):
    for index, slot in enumerate(slots):
        if slot.stage == 1:
            return Op.GERMINATE, index
        if slot.stage == 6 and slot.epochs >= 5:
            return Op.FOSSILIZE, index
    return WAIT


def at_the_end(op, target):
    """Honest until the last step, in which another seed lives in slot 1; then `op`."""

    def script(t, slots):
        if t == 55:
            return Op.GERMINATE, 1
        return (op, target) if t == STEPS else HONEST(t, slots)

    return script


def spam(t, slots):
    return (Op.GERMINATE, 0) if t == 1 else (Op.FOSSILIZE, 0)


ACTORS = {
    "idle": Actor(idle),
    "idle with drift": Actor(idle, drift=0.3),
    "honest": Actor(HONEST, USEFUL),
    "churn": Actor(germinating(churn), USELESS),
    "toxic farm, early, aimed at the seed": Actor(farm(0.2, elsewhere=False), TOXIC),
    "toxic farm, early, aimed elsewhere": Actor(farm(0.2, elsewhere=True), TOXIC),
    "toxic farm, late, aimed at the seed": Actor(farm(1.0, elsewhere=False), TOXIC),
    "toxic farm, late, aimed elsewhere": Actor(farm(1.0, elsewhere=True), TOXIC),
    "parking": Actor(PARKING, USEFUL),
    "turntable": Actor(germinating(turntable), USEFUL),
    "last minute": Actor(fossilizing(lambda t, slot: t == STEPS - 1), USEFUL),
    "drift rider": Actor(fossilizing(lambda t, slot: slot.epochs >= 5), USELESS, drift=0.3),
    "hoarding": Actor(hoarding, TINY),
    "ransom kept": Actor(PARKING, RANSOM),
    "ransom fossilized": Actor(HONEST, RANSOM),
    "refusal spam": Actor(spam, USEFUL, refused=True),
    "no spam": Actor(PARKING, USEFUL),
    "last op WAIT": Actor(at_the_end(Op.WAIT, 0), USEFUL),
    "last op GERMINATE": Actor(at_the_end(Op.GERMINATE, 2), USEFUL),
    "last op ADVANCE": Actor(at_the_end(Op.ADVANCE, 1), USEFUL),
    "last op PRUNE": Actor(at_the_end(Op.PRUNE, 1), USEFUL),
    "last op SET_ALPHA_TARGET": Actor(at_the_end(Op.SET_ALPHA_TARGET, 1), USEFUL),
}

NOT_SHAPED = tuple(mode for mode in DENSE if mode != "shaped")
PAYING_POTENTIAL = ("basic", "basic_plus", "simplified")
FARMS = tuple(name for name in ACTORS if name.startswith("toxic farm"))
PAYING_FARMS = ("toxic farm, early, aimed at the seed", "toxic farm, late, aimed elsewhere")
LAST_OPS = tuple(name for name in ACTORS if name.startswith("last op "))


def cells(exploiters, limit, modes):
    return [(name, limit, mode) for name in exploiters for mode in modes]


CLOSED = [
    *cells(("churn",), "idle", ("shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "objective")),
    *cells(FARMS, "idle", ("escrow", "basic", "basic_plus", "sparse", "minimal", "objective")),
    *cells(("parking", "turntable", "last minute"), "honest", NOT_SHAPED),
    *cells(("drift rider",), "idle with drift", ("shaped", "escrow", "sparse", "minimal", "objective")),
    *cells(("hoarding",), "idle", ("shaped", "escrow", "objective")),
    *cells(("ransom kept", "ransom fossilized"), "idle", ("shaped", "escrow", "sparse", "minimal", "objective")),
    *cells(("refusal spam",), "no spam", DENSE),
    *cells(LAST_OPS, "last op WAIT", ("objective", "sparse")),
]
KNOWN_OPEN = [
    *cells(("churn",), "idle", ("simplified",)),
    *cells(PAYING_FARMS, "idle", ("shaped",)),
    *cells(FARMS, "idle", ("simplified",)),
    *cells(("parking", "turntable", "last minute"), "honest", ("shaped",)),
    *cells(("drift rider",), "idle with drift", PAYING_POTENTIAL),
    *cells(("hoarding",), "idle", PAYING_POTENTIAL),
    *cells(("ransom kept", "ransom fossilized"), "idle", PAYING_POTENTIAL),
]


@functools.cache
def scores(mode):
    return play(ACTORS, RewardConfig(mode=mode))


@pytest.mark.parametrize(("exploiter", "limit", "mode"), CLOSED)
def test_an_exploiter_earns_no_more_than_the_behaviour_it_imitates(exploiter, limit, mode):
    assert scores(mode)[exploiter] <= scores(mode)[limit] + 1e-9


@pytest.mark.parametrize(("exploiter", "limit", "mode"), KNOWN_OPEN)
@pytest.mark.xfail(strict=True, reason="follows from the formulas of the mode")
def test_a_known_open_exploit_is_still_open(exploiter, limit, mode):
    assert scores(mode)[exploiter] <= scores(mode)[limit] + 1e-9


def test_a_useful_seed_pays_in_the_objective_and_its_price_is_known():
    # J = 0.53 - 0.03 * ln(1 + 1000 / 6418) against 0.5
    assert scores("objective")["honest"] == pytest.approx(0.995**59 * (0.53 - 0.03 * 0.1448287), abs=1e-6)
    assert scores("objective")["idle"] == pytest.approx(0.995**59 * 0.5)
