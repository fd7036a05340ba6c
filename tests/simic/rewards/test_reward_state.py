"""The step with memory: parity with the scalar reference, and each adjustment by hand-computed numbers."""

import dataclasses
import math

import pytest
import torch
from reward_toys import fresh_memory, named, random_hosts, reward_inputs

from esper.leyline.lifecycle import LifecycleOp as Op
from esper.leyline.tensor_dataclass import named_tensors
from esper.simic.rewards import (
    MODES,
    REWARD_TERMS,
    RewardConfig,
    initial_state,
    make_reward,
    reset_hosts,
    reward_step,
)
from reference.rewards.step import HostStep, SlotRow, step_of_host

CPU = torch.device("cpu")
NAN = math.nan
EMPTY = SlotRow()
STEPS = 6


def host(*slots, epoch=20, op=Op.WAIT, target=0, **more):
    values = {"max_epochs": 60, "val_acc": 60.0, "committed_acc": 55.0, "host_params": 10_000} | more
    return HostStep(epoch=epoch, op=int(op), target=target, slots=slots, **values)


def one_step(given, mode="shaped", state=None, **numbers):
    """Terms that are not zero, and the next state, of one host in one step."""
    config = RewardConfig(mode=mode, **numbers)
    state = state or initial_state(1, len(given.slots), given.max_epochs, CPU, config)
    out, state = reward_step(reward_inputs([given]), state, config)
    terms = {name: v for name, v in zip(REWARD_TERMS, out.breakdown[0].tolist(), strict=True) if v}
    assert out.total.item() == pytest.approx(sum(terms.values()))
    return terms, state


@pytest.mark.parametrize("mode", MODES)
def test_step_and_scalar_reference_agree_on_terms_and_memory_through_an_episode(mode):
    reward, config, count, slots = make_reward(mode), RewardConfig(mode=mode), 40, 3
    state = reward.initial_state(count, slots, STEPS, CPU)
    memories = [fresh_memory(slots) for _ in range(count)]
    for epoch in range(1, STEPS + 1):
        hosts = random_hosts(count, slots, epoch, STEPS, key=epoch)
        out, state = reward.step(reward_inputs(hosts), state)
        for n, (given, memory) in enumerate(zip(hosts, memories, strict=True)):
            want = step_of_host(given, memory, config)
            assert out.total[n].item() == pytest.approx(want.total, abs=1e-9)
            terms = dict(zip(reward.terms, out.breakdown[n].tolist(), strict=True))
            expected = dict.fromkeys(reward.terms, 0.0) | want.terms
            assert terms == pytest.approx(expected, abs=1e-9), given
            if mode == "objective":
                assert state.last[n].item() == pytest.approx(memory.potential, abs=1e-9)
                assert state.before[n].item() == pytest.approx(memory.potential_before, abs=1e-9)
                continue
            assert tuple(out.flags[n].tolist()) == want.flags
            for s, memo in enumerate(memory.slots):
                assert state.escrow[n, s].item() == pytest.approx(memo.escrow, abs=1e-9)
                assert state.deferred_scale[n, s].item() == pytest.approx(memo.deferred_scale, abs=1e-9)
                if state.ledger.shape[2]:
                    ledger = [memo.ledger.get(step, 0.0) for step in range(1, STEPS + 1)]
                    assert state.ledger[n, s].tolist() == pytest.approx(ledger, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_a_host_is_paid_the_same_in_any_company(mode):
    reward, hosts = make_reward(mode), random_hosts(9, 3, 2, 2, key=3)
    whole, _ = reward.step(reward_inputs(hosts), reward.initial_state(9, 3, 2, CPU))
    for n, given in enumerate(hosts):
        alone, _ = reward.step(reward_inputs([given]), reward.initial_state(1, 3, 2, CPU))
        torch.testing.assert_close(alone.breakdown[0], whole.breakdown[n], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_rewards_come_in_the_dtype_of_the_accuracies_while_memory_stays_exact(mode):
    reward, hosts = make_reward(mode), random_hosts(4, 3, 2, 3, key=4)
    out, state = reward.step(reward_inputs(hosts, torch.float32), reward.initial_state(4, 3, 3, CPU))
    assert out.total.dtype == out.breakdown.dtype == torch.float32
    assert {value.dtype for _, value in named_tensors(state)} == {torch.float64}


def test_the_state_that_is_handed_in_stays_as_it_was():
    config = RewardConfig(mode="escrow")
    state = initial_state(5, 3, 4, CPU, config)
    _, state = reward_step(reward_inputs(random_hosts(5, 3, 1, 4, key=5)), state, config)
    before = {name: value.clone() for name, value in named_tensors(state)}
    first, _ = reward_step(reward_inputs(random_hosts(5, 3, 2, 4, key=6)), state, config)
    again, _ = reward_step(reward_inputs(random_hosts(5, 3, 2, 4, key=6)), state, config)
    torch.testing.assert_close(first.breakdown, again.breakdown, rtol=0, atol=0)
    for name, value in named_tensors(state):
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_a_refused_operation_earns_and_pays_exactly_what_waiting_does():
    seedling = SlotRow(stage=3, prev_stage=2, epochs_in_stage=4, age=5, params=1000)
    waiting, _ = one_step(host(seedling, EMPTY))
    for op in Op:
        refused, _ = one_step(host(seedling, EMPTY, op=op, success=False))
        assert refused == waiting
    assert one_step(host(seedling, EMPTY, op=Op.FOSSILIZE))[0] != waiting


def test_blended_slots_occupy_their_alpha_share_and_a_base_share_of_the_host():
    # occupancy 0.0039 * 100 000 + 0.5 * 8 000 = 4 390; growth rent 0.5 * ln(1.0439)
    blending = SlotRow(stage=4, prev_stage=3, epochs_in_stage=2, age=14, alpha=0.5, params=8000)
    training = SlotRow(stage=3, prev_stage=2, epochs_in_stage=2, age=3, params=8000)
    terms, _ = one_step(host(blending, training, host_params=100_000))
    assert terms["rent"] == pytest.approx(-0.5 * math.log(1.0439))


def test_moving_alpha_is_charged_for_the_parameters_that_were_there_before():
    # (0.4 - 0.2)^2 * 8 000 / 100 000 = 0.0032; the first sight of a seed moves nothing
    slot = SlotRow(stage=4, prev_stage=3, epochs_in_stage=2, age=14, alpha=0.2, params=8000)
    terms, state = one_step(host(slot, host_params=100_000))
    assert "alpha_shock" not in terms
    terms, state = one_step(host(dataclasses.replace(slot, alpha=0.4), epoch=21, host_params=100_000), state=state)
    assert terms["alpha_shock"] == pytest.approx(-0.1958 * 0.0032)
    # pruned at once: (0 - 0.4)^2 * 8 000 / 100 000 = 0.0128, although the parameters are gone
    terms, state = one_step(host(SlotRow(stage=9, prev_stage=8), epoch=22, host_params=100_000), state=state)
    assert terms["alpha_shock"] == pytest.approx(-0.1958 * 0.0128)
    assert not state.prev_params.any()


def test_an_old_contribution_is_never_paid():
    held = SlotRow(stage=6, prev_stage=4, epochs_in_stage=1, prev_epochs=5, age=17, alpha=1.0, params=100,
                   acc_at_germination=50.0, contribution=NAN)  # fmt: skip
    terms, _ = one_step(host(held, cf_total=9.0))
    assert "attribution" not in terms
    terms, _ = one_step(host(dataclasses.replace(held, contribution=9.0), cf_total=9.0))
    # p = 60 - 50 = 10 > c = 9 -> 9 * timing(20 - 17 = 3) = 9 * 0.58
    assert terms["attribution"] == pytest.approx(5.22)


def test_an_escrow_account_ends_with_its_seed():
    held = SlotRow(stage=6, prev_stage=4, epochs_in_stage=1, age=17, alpha=1.0, params=100, acc_at_germination=50.0,
                   contribution=2.5)  # fmt: skip
    terms, state = one_step(host(EMPTY, held, target=1, cf_total=2.5, acc_hist=(60.0, 60.0, 60.0)), "escrow")
    # the contribution is below the progress of 10 and counts in full, but an account grows by 2 at most
    assert terms["attribution"] == pytest.approx(2.0)
    assert state.escrow.tolist() == [[0.0, 2.0]]
    _, state = one_step(host(EMPTY, SlotRow(stage=8, prev_stage=6), epoch=21), "escrow", state)
    assert state.escrow.tolist() == [[0.0, 0.0]]


def test_stable_accuracy_is_the_smallest_of_the_last_three():
    held = SlotRow(stage=6, prev_stage=4, epochs_in_stage=1, age=17, alpha=1.0, params=100, acc_at_germination=50.0,
                   contribution=0.9)  # fmt: skip
    # p = 50.5 - 50 = 0.5; sqrt(0.5 * 0.9); the 40 is three steps old
    terms, _ = one_step(host(held, cf_total=0.9, acc_hist=(NAN, 40.0, 53.0, 50.5, 60.0)), "escrow")
    assert terms["attribution"] == pytest.approx(math.sqrt(0.45))


def test_credit_of_a_seed_that_is_not_permanent_at_the_end_is_forfeited():
    held = SlotRow(stage=6, prev_stage=4, epochs_in_stage=5, age=17, alpha=1.0, params=100, contribution=4.0)
    fossil = dataclasses.replace(held, stage=7)
    config = RewardConfig(mode="escrow")
    state = dataclasses.replace(
        initial_state(1, 3, 60, CPU, config), escrow=torch.tensor([[0.0, 1.5, 2.5]], dtype=torch.float64)
    )
    terms, after = one_step(host(EMPTY, held, fossil, epoch=60), "escrow", state)
    assert terms["escrow_forfeit"] == pytest.approx(-1.5)
    # fossilizing in the last step is too late
    terms, _ = one_step(host(EMPTY, held, fossil, epoch=60, op=Op.FOSSILIZE, target=1, cf_total=4.0), "escrow", state)
    assert terms["escrow_forfeit"] == pytest.approx(-after.escrow[0, 1].item() - terms["attribution"])
    assert "escrow_forfeit" not in one_step(host(EMPTY, held, fossil, epoch=59), "escrow", state)[0]


@pytest.mark.parametrize("mode", ["shaped", "escrow"])
def test_the_potential_of_a_seed_that_never_blended_is_taken_back_at_the_end(mode):
    # lent: 0.3 * gamma at age 0, now twelve steps ago: -0.3 * gamma^(1 - 12) = -0.3170059
    young = SlotRow(stage=3, prev_stage=2, epochs_in_stage=10, age=12, params=10)
    terms, _ = one_step(host(EMPTY, young, epoch=60), mode)
    assert terms["germination_refund"] == pytest.approx(-0.3170059, abs=6e-8)
    assert "germination_refund" not in one_step(host(EMPTY, young, epoch=59), mode)[0]
    pruned, _ = one_step(host(EMPTY, young, epoch=60, op=Op.PRUNE, target=1), mode)
    assert "germination_refund" not in pruned
    assert "germination_refund" not in one_step(host(EMPTY, young, epoch=60), mode, disable_pbrs=True)[0]


def test_each_seed_lost_without_a_request_costs():
    for mode, expected in {"shaped": -0.4, "escrow": -0.4, "basic": 0.0}.items():
        assert one_step(host(EMPTY, auto_pruned=2), mode)[0].get("auto_prune", 0.0) == pytest.approx(expected)


def test_hindsight_is_bounded_needs_a_contribution_and_is_paid_once():
    ripe = SlotRow(stage=6, prev_stage=4, epochs_in_stage=5, age=17, alpha=1.0, params=100, contribution=9.0,
                   interactions=(NAN, 50.0))  # fmt: skip
    other = SlotRow(interactions=(50.0, NAN))
    state = None
    for epoch in (20, 21, 22):
        terms, state = one_step(host(ripe, other, epoch=epoch, cf_total=9.0), state=state)
        assert "hindsight" not in terms
    assert state.ledger[0, 0, 19:22].tolist() == [50.0] * 3
    output, after = one_step(host(ripe, other, epoch=23, op=Op.FOSSILIZE, cf_total=9.0), state=state)
    assert output["hindsight"] == pytest.approx(0.2)  # four times almost 0.1, capped
    assert not after.ledger.any()
    useless = dataclasses.replace(ripe, contribution=-1.0)
    assert "hindsight" not in one_step(host(useless, other, epoch=23, op=Op.FOSSILIZE, cf_total=9.0), state=state)[0]


def test_a_pool_opens_with_the_bonus_and_pays_from_the_next_step():
    ripe = SlotRow(stage=6, prev_stage=4, epochs_in_stage=5, age=17, alpha=1.0, params=100, contribution=2.0)
    terms, state = one_step(host(ripe, EMPTY, op=Op.FOSSILIZE, cf_total=2.0), "basic_plus")
    # full = 0.3 + 0.5 * 2 = 1.3; 30 % at once, 0.91 over 40 steps
    assert terms["action"] == pytest.approx(0.39)
    assert "deferred_bonus" not in terms
    assert state.deferred_scale.tolist() == [[pytest.approx(0.91 / 40), 0.0]]
    fossil = dataclasses.replace(ripe, stage=7, prev_stage=6, epochs_in_stage=0, prev_epochs=5, age=18)
    terms, state = one_step(host(fossil, EMPTY, epoch=21, target=1), "basic_plus", state)
    assert terms["deferred_bonus"] == pytest.approx(0.91 / 40 * 2)
    silent = dataclasses.replace(fossil, contribution=NAN)
    assert "deferred_bonus" not in one_step(host(silent, EMPTY, epoch=22), "basic_plus", state)[0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "objective"])
def test_a_rollback_replaces_a_reward_by_minus_ten(mode):
    reward = make_reward(mode)
    _, state = reward.step(reward_inputs(random_hosts(2, 3, 1, 4, key=7)), reward.initial_state(2, 3, 4, CPU))
    assert reward.rollback_reward(state).tolist() == [-10.0, -10.0]


def test_a_reset_forgets_the_masked_hosts_and_no_others():
    config = RewardConfig(mode="escrow")
    state = initial_state(3, 3, 4, CPU, config)
    for epoch in (1, 2):
        _, state = reward_step(reward_inputs(random_hosts(3, 3, epoch, 4, key=epoch)), state, config)
    fresh = initial_state(3, 3, 4, CPU, config)
    after = reset_hosts(state, torch.tensor([True, False, True]))
    for (name, value), (_, new), (_, old) in zip(
        named_tensors(after), named_tensors(fresh), named_tensors(state), strict=True
    ):
        torch.testing.assert_close(value[[0, 2]], new[[0, 2]], rtol=0, atol=0, msg=name)
        torch.testing.assert_close(value[1], old[1], rtol=0, atol=0, msg=name)


def test_restored_fossils_move_no_alpha_after_a_reset():
    fossil = SlotRow(stage=7, prev_stage=6, epochs_in_stage=9, prev_epochs=5, age=40, alpha=1.0, params=5000)
    _, state = one_step(host(fossil))
    terms, _ = one_step(host(fossil, epoch=21), state=reset_hosts(state, torch.tensor([True])))
    assert "alpha_shock" not in terms


def test_named_terms_of_an_idle_host_are_empty():
    config = RewardConfig(mode="shaped")
    out, _ = reward_step(reward_inputs([host(EMPTY)]), initial_state(1, 1, 60, CPU, config), config)
    assert named(out) == {}
