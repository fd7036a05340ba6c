"""Rollback: a host that panics, with slots in every stage of their lives."""

import math

import pytest
import torch
from driver import CPU, HOST_PARAMS, Driver, action, actions, with_slot
from scalar_rules import EMPTY_SLOT, ON_RELEASE

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.lifecycle import memory_of, remember, rollback
from esper.kasmina.rules.slot_fields import empty_slots, new_hosts
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.tensor_dataclass import named_tensors, replace

NAN = float("nan")
Op = LifecycleOp
STAGES = (1, 2, 3, 4, 6, 7, 8, 9, 10)
QUICK = LifecycleConfig(min_training_epochs=1, min_prune_age=1)
MEMORY = ("contribution", "contribution_step", "contribution_velocity", "interaction_sum", "boost_received")


def same(a, b):
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=0.0, equal_nan=True)


def one_slot_per_stage(num_envs):
    """Slots 0..8 in the nine stages; every field holds a value that tells slots and fields apart."""
    slots = empty_slots(num_envs, len(STAGES), CPU)
    for s, stage in enumerate(STAGES[1:], start=1):
        tags = {name: type(empty)(10 * s + k) for k, (name, empty) in enumerate(EMPTY_SLOT.items())}
        slots = with_slot(slots, s, **{**tags, "stage": stage, "alpha_mode": 0})
    return slots


def hosts_with_a_past(num_envs):
    hosts = new_hosts(num_envs, HOST_PARAMS, CPU)
    values = {name: torch.full_like(value, k + 1) for k, (name, value) in enumerate(named_tensors(hosts))}
    return replace(hosts, **values)


def test_growing_seeds_are_pruned_and_all_other_slots_are_left_alone():
    slots = one_slot_per_stage(2)
    got, _, pruned = rollback(slots, hosts_with_a_past(2), torch.tensor([True, False]), memory_of(slots))
    assert pruned.tolist() == [[stage in (2, 3, 4, 6) for stage in STAGES], [False] * len(STAGES)]
    assert got.stage[0].tolist() == [8 if stage in (2, 3, 4, 6) else stage for stage in STAGES]
    for name, value in named_tensors(got):
        old = getattr(slots, name)
        assert same(value[~pruned], old[~pruned]), name
        if name in ON_RELEASE:
            assert same(value[pruned], torch.full((4,), float(ON_RELEASE[name]))), name
        elif name not in ("stage", "prev_stage", "prev_epochs", "epochs_in_stage", "acc_at_stage_start"):
            assert same(value[pruned], old[pruned]), name
    assert torch.equal(got.prev_stage[pruned], slots.stage[pruned])
    assert torch.equal(got.prev_epochs[pruned], slots.epochs_in_stage[pruned])
    assert not got.epochs_in_stage[pruned].any()


def test_a_fossil_takes_back_the_measurements_that_the_snapshot_knew():
    slots = one_slot_per_stage(2)
    fossil = STAGES.index(7)
    before = with_slot(slots, fossil, contribution=-1.0, contribution_step=-2, contribution_velocity=-3.0,
                       interaction_sum=-4.0, boost_received=-5.0)  # fmt: skip
    got, _, _ = rollback(slots, hosts_with_a_past(2), torch.tensor([True, False]), memory_of(before))
    for name, value in named_tensors(got):
        source = before if name in MEMORY else slots
        assert same(value[0, fossil], getattr(source, name)[0, fossil]), name
        assert same(value[1], getattr(slots, name)[1]), name


def test_a_host_begins_a_new_segment_without_a_past_but_keeps_its_books():
    slots, hosts = one_slot_per_stage(2), hosts_with_a_past(2)
    _, got, _ = rollback(slots, hosts, torch.tensor([True, False]), memory_of(slots))
    forgotten = {
        "val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss", "committed_acc", "cf_total",
        "acc_hist", "loss_hist",
    }  # fmt: skip
    changed = {"plateau_count": 0, "segment": hosts.segment[0].item() + 1}
    for name, value in named_tensors(got):
        old = getattr(hosts, name)
        assert same(value[1], old[1]), name
        want = torch.full_like(old[0], NAN) if name in forgotten else torch.full_like(old[0], changed.get(name, old[0]))
        assert same(value[0], want), name


def test_remember_takes_over_the_marked_slots_only():
    old, new = memory_of(empty_slots(2, 2, CPU)), one_slot_per_stage(2)
    new = replace(empty_slots(2, 2, CPU), **{name: getattr(new, name)[:, 1:3] for name in MEMORY})
    taken = torch.tensor([[True, False], [False, False]])
    got = remember(old, new, taken)
    for name, value in named_tensors(got):
        assert same(value, torch.where(taken, getattr(new, name), getattr(old, name))), name


# -- in the full step -------------------------------------------------------------------------------------------------


def test_every_stage_goes_on_as_it_should_in_the_step_of_the_panic():
    driver = Driver(2, len(STAGES), QUICK)
    driver.slots = with_slot(one_slot_per_stage(2), STAGES.index(9), epochs_in_stage=0)
    driver.t = 20
    step = driver.step(panic=torch.tensor([True, False]))
    #       DORMANT  GERMINATED  TRAINING  BLENDING  HOLDING  FOSSILIZED  PRUNED  EMBARGOED  RESETTING
    assert step.after.stage[0].tolist() == [1, 9, 9, 9, 9, 7, 9, 9, 1]
    occupied = torch.tensor([stage not in (1, 10) for stage in STAGES])
    assert torch.equal(step.after.age[0, occupied], step.began.age[0, occupied] + 1)
    assert step.after.epochs_in_stage[0].tolist() == [
        # pruned and embargoed in one step; the fossil's clock goes on; one step of the embargo is over
        0, 0, 0, 0, 0, step.began.epochs_in_stage[0, 5].item() + 1, 0, 1, 0,
    ]  # fmt: skip
    assert step.after.prev_stage[0, 1:5].tolist() == [8, 8, 8, 8]
    assert step.after.prev_epochs[0, 1:5].tolist() == [0, 0, 0, 0]
    assert step.ticks.transitions.cause[0].tolist() == [0, 5, 5, 5, 5, 0, 5, 0, 5]
    assert step.hosts_after.n_pruned.tolist() == [0, 0]


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


def test_the_next_step_is_the_first_of_a_segment():
    driver = Driver(1, 1, LifecycleConfig())
    driver.measure = lambda t, slots: Driver().measure(t, slots, val_loss=torch.tensor([1.0]))
    steps = driver.run({}, until=9, panic_at=3)
    first, second = steps[3].hosts, steps[4].hosts
    assert [step.hosts.segment.item() for step in steps] == [0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert (first.val_acc.item(), first.val_loss.item()) == (44.0, 1.0)
    assert math.isnan(first.prev_val_acc.item())
    assert math.isnan(first.prev_val_loss.item())
    assert torch.isnan(first.acc_hist[0, :4]).all()
    assert torch.isnan(first.loss_hist[0, :4]).all()
    assert (first.acc_hist[0, 4].item(), first.plateau_count.item()) == (44.0, 0)
    assert (second.prev_val_acc.item(), second.prev_val_loss.item()) == (44.0, 1.0)
    # counted in 2; not counted in 3 (panic) and 4 (nothing to compare with); 5 and 6 close the latch
    assert [step.hosts.stable_count.item() for step in steps[:6]] == [0, 1, 1, 1, 2, 3]
    assert steps[5].hosts.stabilized.item()


def test_fossils_survive_and_keep_their_clocks():
    script = {1: action(Op.GERMINATE, tempo=0), 6: action(Op.FOSSILIZE), 7: action(Op.GERMINATE, slot=1)}
    steps = Driver(1, 2, QUICK).run(script, until=10, panic_at=9)
    last = steps[-1].slots
    assert last.stage.tolist() == [[7, 9]]
    assert (last.age[0, 0].item(), last.epochs_in_stage[0, 0].item()) == (9, 3)  # 10 - 1, and 10 - 1 - 6
    assert (last.alpha[0, 0].item(), last.contribution[0, 0].item()) == (1.0, 2.0)
    assert steps[-1].hosts.n_fossilized.item() == 1
