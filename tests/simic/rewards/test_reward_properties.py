"""What must hold for every history: telescoping sums, ranking by the objective, signs and bounds."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_toys import host_row, random_rows, reward_inputs, seed

from esper.leyline.lifecycle import STAGE_POTENTIAL
from esper.leyline.lifecycle import LifecycleOp as Op
from esper.simic.rewards import REWARD_TERMS, RewardConfig, make_reward
from reference.rewards.golden import outputs_of
from reference.rewards.modes import reward_of_row
from reference.rewards.step import HostStep, SlotRow

GAMMA = 0.995
CPU = torch.device("cpu")
POTENTIAL, ACTION = REWARD_TERMS.index("potential"), REWARD_TERMS.index("action")
few = settings(max_examples=25, deadline=None)

stays = st.lists(st.tuples(st.sampled_from([2, 3, 4, 6, 7]), st.integers(1, 12)), min_size=1, max_size=5)
"""Stages in the order a seed goes through them, and the observations made in each."""


def observations(path, *, first_epoch=12):
    """Rows of a seed that is observed in every step after its germination in `first_epoch`."""
    path = [(stage, stay) for k, (stage, stay) in enumerate(path) if k == 0 or stage != path[k - 1][0]]
    rows, before, age = [], (2, 0), 1
    for stage, stay in path:
        for epochs in range(stay):
            clocks = seed(stage, epochs, *before, age)
            rows.append(host_row(action=int(Op.WAIT), epoch=first_epoch + age, max_epochs=200, val_acc=50, **clocks))
            age += 1
        before = (stage, stay - 1)
    return rows


def potential_of(row):
    return STAGE_POTENTIAL[row.stage] + min(0.3 * row.epochs_in_stage, 2.0)


def germinated(first_epoch=12):
    return host_row(action=int(Op.GERMINATE), epoch=first_epoch, max_epochs=200, val_acc=50)


@few
@given(stays, st.sampled_from(["shaped", "escrow"]))
def test_the_shaping_of_a_seed_telescopes_to_its_last_potential(path, mode):
    rows = observations(path)
    config = RewardConfig(mode=mode)
    lent = outputs_of([germinated()], config).breakdown[0, ACTION].item() + 0.15
    rewards = outputs_of(rows, config).breakdown[:, POTENTIAL].tolist()
    total = lent + sum(GAMMA**k * value for k, value in enumerate(rewards, start=1))
    assert total == pytest.approx(0.3 * GAMMA ** (len(rows) + 1) * potential_of(rows[-1]), abs=1e-10)


@few
@given(stays, st.sampled_from(["shaped", "escrow", "basic"]))
def test_a_prune_pays_back_what_the_shaping_lent(path, mode):
    rows, config = observations(path), RewardConfig(mode=mode)
    m, last = len(rows), potential_of(rows[-1])
    before = potential_of(rows[-2]) if m > 1 else STAGE_POTENTIAL[2]
    rows[-1] = host_row(**(vars(rows[-1]) | {"action": int(Op.PRUNE)}))
    total = sum(GAMMA**k * v for k, v in enumerate(outputs_of(rows, config).breakdown[:, POTENTIAL].tolist(), start=1))
    if mode == "basic":
        assert total == pytest.approx(0.3 * GAMMA**m * (before - last) - 0.3 * GAMMA, abs=1e-10)
        return
    lent = outputs_of([germinated()], config).breakdown[0, ACTION].item() + 0.15
    repaid = -0.3 * last  # the part of PRUNE's action term that is potential
    on, off = reward_of_row(rows[-1], config), reward_of_row(rows[-1], RewardConfig(mode=mode, disable_pbrs=True))
    assert on.terms["action"] - off.terms["action"] == pytest.approx(repaid)
    assert lent + total + GAMMA**m * repaid == pytest.approx(-0.3 * GAMMA**m * (1 - GAMMA) * last, abs=1e-10)


accuracies = st.lists(st.floats(5, 95), min_size=2, max_size=25)


def objective_episode(values, committed, grown, fossilized, price=0.0):
    """Rewards and potential terms of one host with the measurements of `values`, and the J it should get.

    In step t its seeds have cost the FLOPs of t / 8 steps of the host.
    """
    reward, steps = make_reward("objective", RewardConfig(objective_flops_weight=price)), len(values)
    state, rewards, shaping = reward.initial_state(1, 2, steps, CPU), [], []
    fossil = SlotRow(stage=7, prev_stage=6, age=9, alpha=1.0, params=fossilized)
    for t, value in enumerate(values, start=1):
        growing = SlotRow(stage=3, prev_stage=2, age=t, params=grown * t)
        given_host = HostStep(epoch=t, max_epochs=steps, op=0, target=0, val_acc=value, committed_acc=committed,
                              host_params=6418, compute_of_seeds=t / 8, slots=(fossil, growing))  # fmt: skip
        out, state = reward.step(reward_inputs([given_host]), state)
        rewards.append(out.total.item())
        shaping.append(out.breakdown[0, 0].item())
    worth = committed / 100 - 0.03 * math.log(1 + fossilized / 6418) - price / 100 * math.log2(9 / 8)
    return rewards, shaping, worth


def discounted(values):
    return sum(GAMMA**k * value for k, value in enumerate(values))


@few
@given(accuracies, st.floats(0, 100), st.integers(0, 900), st.integers(0, 50_000), st.just(0.0) | st.floats(1e-30, 9))
def test_the_objective_pays_its_value_discounted_once_whatever_was_before(values, committed, grown, fossil, price):
    rewards, shaping, worth = objective_episode(values, committed, grown, fossil, price)
    assert discounted(shaping) == pytest.approx(0, abs=1e-10)
    assert discounted(rewards) == pytest.approx(GAMMA ** (len(values) - 1) * worth, abs=1e-10)


@few
@given(st.floats(-3, 3), st.floats(-3, 3))
def test_a_higher_loss_is_never_paid_better_and_a_regression_never_rewarded(one, other):
    low, high = sorted((one, other))
    rows = [host_row(action=0, epoch=4, max_epochs=9, val_acc=0, loss_delta=delta) for delta in (low, high)]
    rewards = outputs_of(rows, RewardConfig(mode="loss")).total.tolist()
    assert rewards[0] >= rewards[1]
    assert high <= 0 or rewards[1] <= 0


@pytest.mark.parametrize("mode", ["shaped", "escrow"])
def test_costs_never_pay_and_no_single_term_dwarfs_the_others(mode):
    rows = random_rows(10_000, 12, legal=True)
    breakdown = outputs_of(rows, RewardConfig(mode=mode)).breakdown
    for name in ("blending_warning", "holding_warning", "rent", "alpha_shock", "occupancy", "fossil_upkeep"):
        assert (breakdown[:, REWARD_TERMS.index(name)] <= 0).all(), name
    unbounded = [REWARD_TERMS.index(name) for name in ("attribution", "terminal")]
    bounded = [index for index in range(len(REWARD_TERMS)) if index not in unbounded]
    assert breakdown[:, bounded].abs().max() <= 4
