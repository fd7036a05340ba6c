"""Every worked example, by number, for the kernel and for the scalar reference."""

import dataclasses

import pytest
import torch
from reward_toys import host_row, named, reward_inputs, seed

from esper.leyline.lifecycle import LifecycleOp as Op
from esper.simic.rewards import LOSS_PRESETS, RewardConfig, initial_state, make_reward, reward_step
from reference.rewards.golden import info_of, outputs_of
from reference.rewards.modes import reward_of_row
from reference.rewards.row import DeferredPool
from reference.rewards.step import HostStep, SlotRow

SHAPED, ESCROW = RewardConfig(mode="shaped"), RewardConfig(mode="escrow")
BASIC, PLUS = RewardConfig(mode="basic"), RewardConfig(mode="basic_plus")
LOSS = RewardConfig(mode="loss", loss=LOSS_PRESETS["cifar10"])


def row(op, epoch, seed=None, *, c=None, g=None, p=None, o=0.0, **more):
    nan = float("nan")
    known = {"seed_contribution": c, "counterfactual_improvement": g, "total_improvement": p}
    values = {
        "action": int(op),
        "epoch": epoch,
        "max_epochs": 150,
        "host_params": 100_000.0,
        "val_acc": 0.0,
        "effective_seed_params": o,
        **{name: nan if value is None else value for name, value in known.items()},
        **(seed or {}),
    }
    return host_row(**(values | more))


HELD = seed(6, 4, 4, 5, 22)
RIPE = seed(6, 3, 4, 5, 24)
BLENDED = seed(4, 3, 3, 10, 14)
ESCROWED = row(
    Op.WAIT, 40, BLENDED, c=3, g=3, val_acc=64, stable_val_acc=63.5, p=2, escrow_credit=0.4, num_active=1, o=6390
)
PLUS_POOL = DeferredPool(scale=0.84 / 110, contribution=3.0)
FOSSILIZE_BASIC = row(Op.FOSSILIZE, 60, seed(6, 3, 4, 5, 0), c=2.4, g=2, o=8390)
change = dataclasses.replace

EXAMPLES = {
    1: (SHAPED, row(Op.WAIT, 20), {}, 0.0),
    2: (SHAPED, row(Op.GERMINATE, 20), {"action": 0.1485}, 0.1485),
    3: (SHAPED, row(Op.GERMINATE, 4, num_active=1), {"action": 0.04104}, 0.04104),
    4: (SHAPED, row(Op.GERMINATE, 150, val_acc=70), {"action": -0.15, "terminal": 3.5}, 3.35),
    5: (
        SHAPED,
        row(Op.WAIT, 25, seed(3, 4, 2, 1, 5), p=1.5, stage_improvement=1.2, num_active=1),
        {"potential": 0.0852},
        0.0852,
    ),
    6: (
        SHAPED,
        row(Op.WAIT, 30, seed(4, 0, 3, 10, 12), stage_improvement=0.6, num_active=1, o=390),
        {"attribution": 0.18, "potential": -0.15525, "rent": -0.0019462},
        0.0228038,
    ),
    7: (
        SHAPED,
        row(
            Op.WAIT, 40, BLENDED, c=3, g=4, p=2, interaction_sum=2.5, num_active=2, num_fossilized=1, o=6390,
            alpha_delta_sq_sum=0.0032,
        ),
        {
            "attribution": 2.4, "potential": 0.0834, "synergy": 0.0848284, "rent": -0.0309707,
            "alpha_shock": -0.0006266, "occupancy": -0.02, "fossil_upkeep": -0.002,
        },
        2.5146311,
    ),
    8: (
        SHAPED,
        row(Op.WAIT, 33, seed(4, 4, 3, 8, 13), c=4, g=-0.4, p=0.5, num_active=1, o=4390),
        {"attribution": 0.2057557, "blending_warning": -0.3, "potential": 0.08295, "rent": -0.0214818},
        -0.0327761,
    ),
    9: (
        SHAPED,
        row(Op.WAIT, 50, HELD, c=6, g=0.8, p=2, num_active=1, o=8390),
        {"attribution": 2.95, "holding_warning": -0.2, "potential": 0.07995, "rent": -0.0402828},
        2.7896672,
    ),
    10: (
        SHAPED,
        row(Op.SET_ALPHA_TARGET, 50, HELD, c=2, g=2, p=2, num_active=1, o=8390),
        {
            "attribution": 2.0, "holding_warning": -0.2, "potential": 0.07995, "rent": -0.0402828, "action": -0.005,
        },
        1.8346672,
    ),
    11: (
        SHAPED,
        row(Op.FOSSILIZE, 60, RIPE, c=2.4, g=2.4, p=3.2, num_active=1, o=8390),
        {"attribution": 2.4, "potential": 0.0804, "rent": -0.0402828, "action": 1.0127229},
        3.4528401,
    ),
    12: (
        SHAPED,
        row(Op.FOSSILIZE, 60, seed(6, 5, 4, 5, 24), c=1.4, g=-1.2, p=-1.2, num_active=1, o=8390),
        {"potential": 0.0795, "rent": -0.0402828, "action": -1.05},
        -1.0107828,
    ),
    13: (
        SHAPED,
        row(Op.FOSSILIZE, 24, seed(3, 2, 2, 1, 3), p=0.5, num_active=1),
        {"potential": 0.0861, "action": -1.01},
        -0.9239,
    ),
    14: (
        SHAPED,
        row(Op.PRUNE, 45, seed(4, 6, 3, 10, 17), c=-1.5, g=-1.5, p=-0.9, num_active=1, o=8390),
        {
            "attribution": 1.5, "blending_warning": -0.4, "potential": 0.08205, "rent": -0.0402828, "action": -1.445,
        },
        -0.3032328,
    ),
    15: (
        SHAPED,
        row(Op.PRUNE, 45, seed(6, 2, 4, 6, 20), c=2, g=2, p=3, num_active=1, o=8390),
        {"attribution": -2.0, "potential": 0.08085, "rent": -0.0402828, "action": -2.235},
        -4.1944328,
    ),
    16: (
        SHAPED,
        row(Op.PRUNE, 45, seed(3, 2, 2, 1, 3), num_active=1),
        {"potential": 0.0861, "action": -1.385},
        -1.2989,
    ),
    17: (
        SHAPED,
        row(Op.ADVANCE, 45, seed(3, 10, 2, 1, 11), stage_improvement=0.2, num_active=1),
        {"potential": -0.006, "action": -0.1},
        -0.106,
    ),
    18: (
        SHAPED,
        row(
            Op.WAIT, 150, seed(7, 30, 6, 5, 60), c=1.1, g=3, val_acc=71.25, num_active=1, num_fossilized=2, o=16780
        ),
        {
            "potential": -0.012, "rent": -0.0775608, "occupancy": -0.02, "fossil_upkeep": -0.004, "terminal": 3.5625,
        },
        3.4489392,
    ),
    19: (
        ESCROW,
        ESCROWED,
        {"attribution": 1.7213203, "potential": 0.0834, "rent": -0.0309707},
        1.7737496,
    ),
    20: (
        ESCROW,
        change(
            ESCROWED, seed_contribution=9.0, counterfactual_improvement=9.0, val_acc=70.0, stable_val_acc=68.0,
            total_improvement=8.0, escrow_credit=0.0,
        ),
        {"attribution": 2.0, "potential": 0.0834, "rent": -0.0309707},
        2.0524293,
    ),
    21: (
        ESCROW,
        change(ESCROWED, action=int(Op.PRUNE), escrow_credit=1.7),
        {"attribution": -1.7, "potential": 0.0834, "rent": -0.0309707, "action": -1.775},
        -3.4225707,
    ),
    22: (
        ESCROW,
        change(ESCROWED, seed_contribution=-0.6, counterfactual_improvement=-0.6, escrow_credit=1.7),
        {"attribution": -2.3, "blending_warning": -0.25, "potential": 0.0834, "rent": -0.0309707},
        -2.4975707,
    ),
    23: (
        BASIC,
        row(Op.WAIT, 20, seed(4, 2, 3, 8, 0), g=1, acc_delta=1.3, o=8390),
        {"potential": 0.08385, "rent": -0.001678},
        0.082172,
    ),
    24: (BASIC, FOSSILIZE_BASIC, {"potential": 0.0804, "rent": -0.001678, "action": 0.8345455}, 0.9132675),
    25: (
        PLUS,
        change(FOSSILIZE_BASIC, deferred_pools=(PLUS_POOL,)),
        {"potential": 0.0804, "rent": -0.001678, "action": 0.2503636, "deferred_bonus": 0.0229091},
        0.3519947,
    ),
    26: (
        PLUS,
        row(Op.WAIT, 150, acc_delta=7, o=8390, deferred_pools=(change(PLUS_POOL, contribution=-9.0),)),
        {"terminal": 0.35, "rent": -0.001678, "deferred_bonus": -0.05},
        0.298322,
    ),
    27: (
        RewardConfig(mode="sparse"),
        row(Op.WAIT, 150, committed_acc=70, fossilized_params=50_000),
        {"terminal": 0.69},
        0.69,
    ),
    28: (
        RewardConfig(mode="minimal"),
        row(Op.PRUNE, 20, seed(3, 2, 2, 0, 3)),
        {"early_prune": -0.1},
        -0.1,
    ),
    29: (
        RewardConfig(mode="simplified"),
        row(Op.SET_ALPHA_TARGET, 150, seed(4, 2, 3, 8, 0), val_acc=70, num_contributing=1),
        {"potential": 0.08385, "action": -0.01, "terminal": 4.1},
        4.17385,
    ),
    30: (
        LOSS,
        row(Op.WAIT, 20, loss_delta=0.08, total_params=108_000),
        {"loss_delta": -4.0, "rent": -0.0038481},
        -4.0038481,
    ),
    31: (
        LOSS,
        row(Op.WAIT, 150, seed(4, 0, 3, 0, 12), loss_delta=-0.3, val_loss=1.9, total_params=108_000),
        {"loss_delta": 25.0, "rent": -0.0038481, "potential": 0.14825, "terminal": 0.2},
        25.3444019,
    ),
}  # fmt: skip


@pytest.mark.parametrize("number", EXAMPLES)
def test_a_worked_example_is_paid_by_kernel_and_scalar_reference(number):
    config, given, terms, total = EXAMPLES[number]
    batched, scalar = outputs_of([given], config), reward_of_row(given, config)
    assert batched.total.item() == pytest.approx(total, abs=6e-8)
    assert named(batched) == pytest.approx(terms, abs=6e-8)
    assert scalar.total == pytest.approx(total, abs=6e-8)
    assert {name: value for name, value in scalar.terms.items() if value} == pytest.approx(terms, abs=6e-8)


def test_the_discount_of_example_8_is_the_sigmoid_of_three_times_the_gate_signal():
    config, given, _, _ = EXAMPLES[8]
    assert info_of([given], config)["discount"].item() == pytest.approx(0.2314752, abs=6e-8)


def test_examples_19_to_21_leave_the_account_at_its_target_at_the_bound_and_empty():
    out = outputs_of([EXAMPLES[number][1] for number in (19, 20, 21)], ESCROW)
    assert out.escrow_next.tolist() == pytest.approx([2.1213203, 2.0, 0.0], abs=6e-8)


def test_example_25_opens_a_pool_that_pays_over_the_ninety_steps_that_are_left():
    config, given, _, _ = EXAMPLES[25]
    for opened in (outputs_of([given], config).deferred_opened.item(), reward_of_row(given, config).deferred_opened):
        assert opened == pytest.approx(0.0064909, abs=6e-8)
        assert opened * 90 == pytest.approx(0.5841818, abs=6e-7)


def test_example_32_thanks_a_seed_for_help_it_gave_ten_steps_before_it_was_fossilized():
    helper = SlotRow(stage=6, prev_stage=4, epochs_in_stage=3, age=20, alpha=1.0, interactions=(float("nan"), 1.5))
    silent = dataclasses.replace(helper, interactions=(float("nan"), 0.0))
    idle = SlotRow(interactions=(float("nan"), float("nan")))
    state = initial_state(1, 2, 60, torch.device("cpu"), SHAPED)
    for step in range(20, 31):
        op = Op.FOSSILIZE if step == 30 else Op.WAIT
        slot = helper if step == 20 else silent
        slot = dataclasses.replace(slot, contribution=2.0 if step == 30 else float("nan"))
        host = HostStep(epoch=step, max_epochs=60, op=int(op), target=0, val_acc=60.0, slots=(slot, idle))
        out, state = reward_step(reward_inputs([host]), state, SHAPED)
    assert named(out)["hindsight"] == pytest.approx(0.0277070, abs=6e-8)
    assert not state.ledger.any()


def test_a_rollback_in_step_2_of_4_leaves_the_return_at_the_discounted_objective():
    # the example of docs/rewards.md: potentials 0.40 and 0.30, J 0.50; row 2 is neutral
    # row 1: .995 * .4 = .398;  row 3: .995 * .3 - .4 / .995 = -.10351;  row 4: .5 - .3 = .2
    reward, rewards = make_reward("objective"), [0.0] * 5
    state = reward.initial_state(1, 1, 4, torch.device("cpu"))
    for step, accuracy in ((1, 40.0), (2, float("nan")), (3, 30.0), (4, 45.0)):
        if step == 2:
            rewards[1] = reward.rollback_reward(state).item()
        host = HostStep(
            epoch=step, max_epochs=4, op=0, target=0, val_acc=accuracy, committed_acc=50.0, host_params=6418,
            slots=(SlotRow(),),
        )  # fmt: skip
        out, state = reward.step(reward_inputs([host]), state)
        rewards[step] = out.total.item()
        if step == 2:
            rewards[2], state = 0.0, reward.reset_hosts(state, torch.tensor([True]))
    assert rewards[1:] == pytest.approx([0.398, 0.0, -0.1035101, 0.2], abs=1e-6)
    assert sum(0.995 ** (t - 1) * r for t, r in enumerate(rewards) if t) == pytest.approx(0.995**3 * 0.5)


def test_example_33_earns_exactly_the_discounted_accuracy_of_a_host_that_never_changes():
    reward = make_reward("objective")
    state, rewards = reward.initial_state(1, 1, 60, torch.device("cpu")), []
    for step in range(1, 61):
        host = HostStep(
            epoch=step, max_epochs=60, op=0, target=0, val_acc=50.0, committed_acc=50.0, host_params=6418,
            slots=(SlotRow(),),
        )  # fmt: skip
        out, state = reward.step(reward_inputs([host]), state)
        rewards.append(out.total.item())
    assert rewards[0] == pytest.approx(0.4975)
    assert rewards[1:59] == pytest.approx([-0.0025] * 58)
    assert rewards[59] == pytest.approx(0.0)
    assert sum(0.995**k * r for k, r in enumerate(rewards)) == pytest.approx(0.3719904, abs=6e-8)
