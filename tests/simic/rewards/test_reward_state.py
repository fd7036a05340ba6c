"""The step with memory: parity with the scalar reference, and what a rollback leaves."""

import math

import pytest
import torch
from reward_toys import fresh_memory, random_hosts, reward_inputs

from esper.leyline.lifecycle import LifecycleOp as Op
from esper.leyline.tensor_dataclass import named_tensors
from esper.simic.rewards import (
    MODES,
    REWARD_TERMS,
    RewardConfig,
    make_reward,
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
    state = state or make_reward(mode).initial_state(1, len(given.slots), given.max_epochs, CPU)
    out, state = reward_step(reward_inputs([given]), state, config)
    terms = {name: v for name, v in zip(REWARD_TERMS, out.breakdown[0].tolist(), strict=True) if v}
    assert out.total.item() == pytest.approx(sum(terms.values()))
    return terms, state


@pytest.mark.parametrize("mode", MODES)
def test_step_and_scalar_reference_agree_on_terms_and_memory_through_an_episode(mode):
    config, count, slots = RewardConfig(mode=mode, objective_flops_weight=2.0), 40, 3
    reward = make_reward(mode, config)
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
def test_rewards_come_in_the_dtype_of_the_accuracies_while_memory_stays_exact(mode):
    reward, hosts = make_reward(mode), random_hosts(4, 3, 2, 3, key=4)
    out, state = reward.step(reward_inputs(hosts, torch.float32), reward.initial_state(4, 3, 3, CPU))
    assert out.total.dtype == out.breakdown.dtype == torch.float32
    assert {value.dtype for _, value in named_tensors(state)} == {torch.float64}


def test_a_refused_operation_earns_and_pays_exactly_what_waiting_does():
    seedling = SlotRow(stage=3, prev_stage=2, epochs_in_stage=4, age=5, params=1000)
    waiting, _ = one_step(host(seedling, EMPTY))
    for op in Op:
        refused, _ = one_step(host(seedling, EMPTY, op=op, success=False))
        assert refused == waiting
    assert one_step(host(seedling, EMPTY, op=Op.FOSSILIZE))[0] != waiting


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "objective"])
def test_a_rollback_replaces_a_reward_by_minus_ten(mode):
    reward = make_reward(mode)
    _, state = reward.step(reward_inputs(random_hosts(2, 3, 1, 4, key=7)), reward.initial_state(2, 3, 4, CPU))
    assert reward.rollback_reward(state).tolist() == [-10.0, -10.0]


def test_a_rollback_in_step_2_of_4_leaves_the_return_at_the_discounted_objective():
    # the example of docs/rewards.md: potentials 0.40 and 0.30, J 0.50; row 2 is neutral
    # row 1: .995 * .4 = .398;  row 3: .995 * .3 - .4 / .995 = -.10351;  row 4: .5 - .3 = .2
    reward, rewards = make_reward("objective"), [0.0] * 5
    state = reward.initial_state(1, 1, 4, CPU)
    for step, accuracy in ((1, 40.0), (2, NAN), (3, 30.0), (4, 45.0)):
        if step == 2:
            rewards[1] = reward.rollback_reward(state).item()
        given = host(EMPTY, epoch=step, max_epochs=4, val_acc=accuracy, committed_acc=50.0)
        out, state = reward.step(reward_inputs([given]), state)
        rewards[step] = out.total.item()
        if step == 2:
            rewards[2], state = 0.0, reward.reset_hosts(state, torch.tensor([True]))
    assert rewards[1:] == pytest.approx([0.398, 0.0, -0.1035101, 0.2], abs=1e-6)
    assert sum(0.995 ** (t - 1) * r for t, r in enumerate(rewards) if t) == pytest.approx(0.995**3 * 0.5)


def test_restored_fossils_move_no_alpha_after_a_reset():
    fossil = SlotRow(stage=7, prev_stage=6, epochs_in_stage=9, prev_epochs=5, age=40, alpha=1.0, params=5000)
    _, state = one_step(host(fossil))
    terms, _ = one_step(host(fossil, epoch=21), state=make_reward("shaped").reset_hosts(state, torch.tensor([True])))
    assert "alpha_shock" not in terms
