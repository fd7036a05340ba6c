"""Rollback: a host that panics, with slots in every stage of their lives."""

import pytest
import torch
from driver import Driver, action, actions

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.lifecycle import LifecycleOp

Op = LifecycleOp
QUICK = LifecycleConfig(min_training_epochs=1, min_prune_age=1)


@pytest.mark.parametrize(
    ("panic_at", "stage"),
    # germinated in 1: TRAINING from the tick of 1, BLENDING of 2, HOLDING of 5
    [(2, 3), (3, 4), (5, 4), (6, 6)],
)
def test_after_a_rollback_the_slot_cools_down_as_after_an_immediate_prune(panic_at, stage):
    steps = Driver(1, 1, QUICK).run({1: action(Op.GERMINATE, tempo=0)}, until=panic_at + 7, panic_at=panic_at)
    panic = steps[panic_at - 1]
    assert panic.began.stage.item() == stage
    later = [step.slots.stage.item() for step in steps[panic_at:]]
    # EMBARGOED by the tick of the panic, RESETTING five ticks later, DORMANT in the next, germinable in t + 7
    assert later == [9, 9, 9, 9, 9, 10, 1]
    legal = [step.legal[0, Op.GERMINATE, 0].item() for step in steps[panic_at:]]
    assert legal == [False] * 6 + [True]


def test_a_rollback_does_not_restart_a_cooldown_that_runs():
    # pruned and embargoed in 3, RESETTING by the tick of 8, DORMANT of 9; host n panics in step 4 + n
    driver = Driver(6, 1, LifecycleConfig(min_prune_age=1))
    script = {1: action(Op.GERMINATE), 3: action(Op.PRUNE)}
    for t in range(1, 11):
        driver.step(actions(*[script.get(t, action())] * 6), panic=torch.arange(4, 10) == t)
    for host in range(6):
        assert [step.slots.stage[host, 0].item() for step in driver.steps[3:]] == [9, 9, 9, 9, 9, 10, 1]


def test_fossils_survive_and_keep_their_clocks():
    script = {1: action(Op.GERMINATE, tempo=0), 6: action(Op.FOSSILIZE), 7: action(Op.GERMINATE, slot=1)}
    steps = Driver(1, 2, QUICK).run(script, until=10, panic_at=9)
    last = steps[-1].slots
    assert last.stage.tolist() == [[7, 9]]
    assert (last.age[0, 0].item(), last.epochs_in_stage[0, 0].item()) == (9, 3)  # 10 - 1, and 10 - 1 - 6
    assert (last.alpha[0, 0].item(), last.contribution[0, 0].item()) == (1.0, 2.0)
    assert steps[-1].hosts.n_fossilized.item() == 1
