"""Timelines: when things happen, told by full control steps.

e = step of the germination, M = epochs of training, tau = ticks of the first ramp. "Observed at u" is the state after
the measurements of step u are in; a transition "in the tick of u" is observed at u + 1.
"""

import pytest
from driver import Driver, action, actions

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.lifecycle import LifecycleOp

Op = LifecycleOp
LINEAR = {"style": 0}
FAST = LifecycleConfig(min_training_epochs=3)


def stages(steps, slot=0, host=0):
    """Observed stage of a slot, step by step; index 0 is step 1."""
    return [step.slots.stage[host, slot].item() for step in steps]


def tick_of(steps, stage, slot=0, host=0):
    """The steps whose tick brought the slot to `stage`."""
    moves = {step.t: step.ticks.transitions for step in steps}
    return [t for t, m in moves.items() if m.cause[host, slot] > 0 and m.to_stage[host, slot] == stage]


def legal_in(steps, op, slot=0, host=0, after=0):
    """The steps later than `after` in which the op is legal on the slot."""
    return [step.t for step in steps if step.legal[host, op, slot] and step.t > after]


def alpha_ticks(steps):
    """The steps in which alpha of the first slot of the first host moved."""
    return [step.t for step in steps if step.after.alpha[0, 0] != step.slots.alpha[0, 0]]


# -- a seed's way to HOLDING ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "tempo", "ticks", "e"),
    [(LifecycleConfig(), 1, 5, 1), (FAST, 0, 3, 1), (FAST, 2, 8, 4)],
)
def test_every_event_of_an_automatic_life_has_its_step(rules, tempo, ticks, e):
    m = rules.min_training_epochs
    born = action(Op.GERMINATE, tempo=tempo, **LINEAR)
    steps = Driver(1, 2, rules).run({e: born}, until=e + m + ticks + 2)
    assert tick_of(steps, 3) == [e]
    assert tick_of(steps, 4) == [e + m]
    assert tick_of(steps, 6) == [e + m + ticks]
    # the train pass of step u runs with the state that step u began with
    assert [step.t for step in steps if step.began.stage[0, 0] == 3] == list(range(e + 1, e + m + 1))
    silent = [step.t for step in steps if step.slots.stage[0, 0] == 4 and step.slots.alpha[0, 0] == 0.0]
    assert silent == [e + m + 1]
    assert alpha_ticks(steps) == list(range(e + m + 1, e + m + ticks + 1))
    measured = [step.t for step in steps if step.slots.contribution_step[0, 0] == step.t]
    assert measured[0] == e + m + 2
    assert legal_in(steps, Op.FOSSILIZE)[0] == e + m + ticks + 1
    assert legal_in(steps, Op.GERMINATE, slot=1, after=e)[0] == e + m + 1
    resting = [step.t for step in steps if step.t >= e + 5 and step.slots.alpha_mode[0, 0] == 0]
    assert legal_in(steps, Op.PRUNE) == resting


# -- manual gates -----------------------------------------------------------------------------------------------------

MANUAL = LifecycleConfig(min_training_epochs=3, auto_g1=False, auto_g2=False, auto_g3=False)


@pytest.mark.parametrize("e", [1, 3])
def test_with_manual_gates_the_best_life_is_one_step_later(e):
    m, ticks = 3, 3
    best = (e + 1, e + m + 1, e + m + ticks + 1)
    script = {e: action(Op.GERMINATE, tempo=0, **LINEAR), **dict.fromkeys(best, action(Op.ADVANCE))}
    script[e + m + ticks + 2] = action(Op.FOSSILIZE)
    steps = Driver(1, 2, MANUAL).run(script, until=e + m + ticks + 3)
    assert [tick_of(steps, stage) for stage in (3, 4, 6)] == [[t] for t in best]
    assert all(steps[t - 1].success.item() and steps[t - 1].effective.item() == Op.ADVANCE for t in best)
    assert all(steps[t - 1].ticks.transitions.cause[0, 0] == 3 for t in best)
    assert steps[-1].slots.stage[0, 0].item() == 7
    assert steps[-2].success.item()


# -- the way out ------------------------------------------------------------------------------------------------------


def test_a_scheduled_prune_ramps_for_its_ticks_and_is_germinable_seven_steps_after_the_last():
    # half of the hosts hold at full alpha in step 8, the others blend at a resting alpha of one half
    t, cases = 8, [(target, speed) for target in (2, 0) for speed in (1, 2, 3)]
    born = actions(*[action(Op.GERMINATE, tempo=0, alpha_target=target, **LINEAR) for target, _ in cases])
    prune = actions(*[action(Op.PRUNE, alpha_speed=speed) for _, speed in cases])
    steps = Driver(len(cases), 1, FAST).run({1: born, t: prune, t + 1: action(Op.SET_ALPHA_TARGET)}, until=t + 15)
    for host, (target, speed) in enumerate(cases):
        k, full = (0, 3, 5, 8)[speed], (0.5, 0.7, 1.0)[target]
        assert steps[t - 1].slots.stage[host].item() == (6 if full == 1.0 else 4)
        ramp = [step.after.alpha[host].item() for step in steps[t - 1 : t + k - 1]]
        assert ramp == pytest.approx([full * (1.0 - j / k) for j in range(1, k + 1)], abs=1e-6)
        assert tick_of(steps, 8, host=host) == [t + k - 1]
        assert steps[t + k - 2].ticks.released[host].item()
        assert steps[t + k - 2].ticks.transitions.cause[host].item() == 4
        assert stages(steps, host=host)[t : t + k] == [4] * (k - 1) + [8]
        assert legal_in(steps, Op.GERMINATE, host=host, after=t)[0] == t + k + 7
        # it cannot be cancelled, and it counts when the seed is gone
        assert not any(step.legal[host, 1:, 0].any() for step in steps[t : t + k - 1])
        assert (steps[t].success[host].item(), steps[t].effective[host].item()) == (False, Op.WAIT)
        counts = [step.hosts_after.n_pruned[host].item() for step in steps[t - 2 : t + k]]
        assert counts == [0] * k + [1] * 2


# -- partial targets --------------------------------------------------------------------------------------------------
