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


def test_stage_clock_age_and_alpha_are_observed_as_in_the_table():
    script = {1: action(Op.GERMINATE, tempo=1, **LINEAR), 17: action(Op.FOSSILIZE)}
    steps = Driver(1, 1).run(script, until=18)
    table = {
        2: (3, 0, 1, 0.0),
        11: (3, 9, 10, 0.0),
        12: (4, 0, 11, 0.0),
        13: (4, 1, 12, 0.2),
        16: (4, 4, 15, 0.8),
        17: (6, 0, 16, 1.0),
        18: (7, 0, 17, 1.0),
    }
    for u, (stage, epochs, age, alpha) in table.items():
        slots = steps[u - 1].slots
        got = (slots.stage.item(), slots.epochs_in_stage.item(), slots.age.item())
        assert got == (stage, epochs, age), u
        assert slots.alpha.item() == pytest.approx(alpha), u


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


@pytest.mark.parametrize("gate", [1, 2, 3])
def test_a_manual_gate_waits_for_its_advance_for_ever(gate):
    rules = LifecycleConfig(min_training_epochs=1, **{f"auto_g{gate}": False})
    steps = Driver(1, 1, rules).run({1: action(Op.GERMINATE, tempo=0)}, until=12)
    assert stages(steps)[-1] == gate + 1
    assert not any(step.ticks.readings.gate[0, 0] == gate for step in steps)


def test_an_advance_before_its_time_is_refused_and_costs_nothing():
    early = {t: action(Op.ADVANCE) for t in (3, 4, 6, 7)}
    script = {1: action(Op.GERMINATE, tempo=0), 2: action(Op.ADVANCE), 5: action(Op.ADVANCE), 8: action(Op.ADVANCE)}
    steps = Driver(1, 1, MANUAL).run({**script, **early}, until=9)
    plain = Driver(1, 1, MANUAL).run(script, until=9)
    assert stages(steps) == stages(plain) == [1, 2, 3, 3, 3, 4, 4, 4, 6]
    for t in early:
        step = steps[t - 1]
        assert step.legal[0, Op.ADVANCE, 0]
        assert (step.success.item(), step.effective.item()) == (False, Op.WAIT)
        assert (step.hosts_after.last_op.item(), step.hosts_after.last_success.item()) == (Op.ADVANCE, False)
    failed = [steps[t - 1].ticks.readings.failed_checks.item() for t in early]
    assert failed == [1, 1, 64, 64]


# -- the way out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "rules"),
    [(7, LifecycleConfig()), (8, FAST), (2, LifecycleConfig(min_prune_age=1, auto_g1=False))],
    ids=["TRAINING", "HOLDING", "GERMINATED"],
)
def test_after_an_immediate_prune_a_slot_is_germinable_seven_steps_later(t, rules):
    check_cooldown(t, rules, target=2)


def check_cooldown(t, rules, target):
    born = action(Op.GERMINATE, tempo=0, alpha_target=target)
    steps = Driver(1, 1, rules).run({1: born, t: action(Op.PRUNE)}, until=t + 7)
    assert steps[t - 1].slots.stage.item() == {2: 2, 7: 3, 8: 6 if target == 2 else 4}[t]
    assert steps[t - 1].ops.released.item()
    assert (tick_of(steps, 9), tick_of(steps, 10), tick_of(steps, 1)) == ([t], [t + 5], [t + 6])
    assert stages(steps)[t:] == [9, 9, 9, 9, 9, 10, 1]
    assert legal_in(steps, Op.GERMINATE, after=t) == [t + 7]
    assert steps[t - 1].hosts_after.n_pruned.item() == 1


@pytest.mark.parametrize("embargo", [0, 1, 3])
def test_the_embargo_has_the_length_of_the_configuration(embargo):
    rules = LifecycleConfig(min_prune_age=1, embargo_epochs=embargo)
    steps = Driver(1, 1, rules).run({1: action(Op.GERMINATE), 3: action(Op.PRUNE)}, until=3 + embargo + 4)
    # an embargo of nothing still takes the one step in which the slot is observed in it
    reset = 3 + max(embargo, 1)
    assert (tick_of(steps, 9), tick_of(steps, 10), tick_of(steps, 1)) == ([3], [reset], [reset + 1])


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


def test_a_seed_with_a_partial_target_is_held_only_after_it_was_raised_to_full():
    born = action(Op.GERMINATE, tempo=0, alpha_target=0, **LINEAR)
    raised = action(Op.SET_ALPHA_TARGET, style=0, alpha_target=2, alpha_speed=1)
    waiting = Driver(1, 1, FAST).run({1: born}, until=12)
    assert stages(waiting)[4:] == [4] * 8
    assert waiting[-1].slots.alpha.item() == 0.5
    steps = Driver(1, 1, FAST).run({1: born, 11: raised}, until=14)
    assert alpha_ticks(steps) == [5, 6, 7, 11, 12, 13]
    assert tick_of(steps, 6) == [13]  # the tick that ends the ramp


def test_lowering_a_held_seed_blends_it_again_from_full_alpha_in_the_same_step():
    lower = actions(*[action(Op.SET_ALPHA_TARGET, style=1, alpha_target=1, alpha_speed=speed) for speed in range(4)])
    steps = Driver(4, 1, FAST).run({1: action(Op.GERMINATE, tempo=0), 8: lower}, until=16)
    lowered = steps[7]
    assert lowered.ops.transitions.from_stage[:, 0].tolist() == [6] * 4
    assert lowered.ops.transitions.to_stage[:, 0].tolist() == [4] * 4
    assert lowered.after.algorithm[:, 0].tolist() == [2] * 4
    assert lowered.after.acc_at_stage_start[:, 0].tolist() == [48.0] * 4
    assert lowered.after.acc_at_blending_start[:, 0].tolist() == [44.0] * 4  # of the first blending
    for host, ticks in enumerate((1, 3, 5, 8)):  # INSTANT is there at once, as a ramp of one tick would be
        path = [step.after.alpha[host].item() for step in steps[7:]]
        assert path == pytest.approx([1.0 - 0.3 * min(j / ticks, 1.0) for j in range(1, 10)])
        assert stages(steps, host=host)[8:] == [4] * 8
        assert [step.after.alpha_mode[host].item() for step in steps[7:]] == [2] * (ticks - 1) + [0] * (10 - ticks)
