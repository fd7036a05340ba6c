"""In mode `objective` the learner is paid the objective of the network that is kept, whatever was rolled back."""

import math
from dataclasses import replace as data_replace
from itertools import product

import pytest
import torch

from esper.leyline.lifecycle import Head, LifecycleOp
from esper.leyline.tensor_dataclass import replace
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.simic.advantages import compute_gae, discounted_returns, masked_moments
from esper.simic.client import PolicyInputs, PolicyOutput
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tasks.registry import register_task
from rollouts import open_ends
from tiny import CPU

E, GAMMA = 11, 0.995
STEPS = (1, 2, 3, 5, 8, 9, 10, 11)
PATTERNS = [
    [t in STEPS and falls[STEPS.index(t)] for t in range(1, E + 1)] for falls in product((False, True), repeat=8)
]
"""Every way to be rolled back in these steps: one host for each."""
FAULTS = [Fault(n, t, math.nan) for n, falls in enumerate(PATTERNS) for t in STEPS if falls[t - 1]]
register_task(data_replace(NULL, name="every_rollback", script=NullSpec(sigma=1.0, faults=tuple(FAULTS))))


def keeping(decide):
    """Decisions that germinate in slot 0 when they may, and fossilize it when they may."""

    def decided(inputs: PolicyInputs, deterministic: bool) -> PolicyOutput:
        decision, op = decide(inputs, deterministic), torch.zeros(len(PATTERNS), dtype=torch.int64)
        for wanted in (LifecycleOp.GERMINATE, LifecycleOp.FOSSILIZE):
            op[inputs.legal[:, wanted, 0]] = wanted
        actions = decision.act.actions.clone()
        actions[:, Head.OP], actions[:, Head.SLOT], actions[:, Head.TEMPO] = op, 0, 0
        return replace(decision, act=replace(decision.act, actions=actions))

    return decided


@pytest.fixture(scope="module", params=[None, 0.9], ids=["to the end", "until the compute is spent"])
def budget(request):
    """Of compute; a host without seeds trains 9 of 11 steps with 0.9, others fewer."""
    return request.param


@pytest.fixture(scope="module")
def finished(budget):
    """The learner after an episode of all hosts, J of what is kept of each, worked out here, and what was kept."""
    lenient = {"min_training_epochs": 1, "min_blending_epochs": 1, "embargo_epochs": 0, "g5_contribution": -100.0}
    small = {"feature_width": 64, "hidden_width": 64}
    config = resolve(
        {"task": "every_rollback", "num_envs": len(PATTERNS), "episode_length": E, "compile": "off", "ppo": small,
         "reward": {"objective_flops_weight": 20.0}, **({"compute_budget": budget} if budget else {}),
         "lifecycle": lenient | {"g2_health": 0.0, "g2_improvement": -100.0, "g2_ratio": 0.0}}
    )  # fmt: skip
    engine = engine_of(config, None, CPU)
    client = learner_of(config, engine.spec)
    client._decide = keeping(client._decide)
    engine.reset(client, 0)
    engine.rollout(client)
    kept = engine.kept_network()
    worth = [
        accuracy / 100 - 0.03 * math.log(1 + grown / max(host, 200)) - 0.2 * math.log2(compute)
        for accuracy, grown, host, compute in zip(
            kept.accuracy.tolist(),
            kept.fossil_params.tolist(),
            kept.host_params.tolist(),
            kept.compute.tolist(),
            strict=True,
        )
    ]
    return client.buffer, torch.tensor(worth, dtype=torch.float64), kept


def test_the_discounted_return_of_the_learner_is_the_objective_for_every_pattern_of_rollbacks(finished, budget):
    buffer, worth, kept = finished
    stored = buffer.rollout
    fossilized = stored.effective_op == LifecycleOp.FOSSILIZE
    if budget is None:
        assert (~stored.valid).tolist() == PATTERNS
        assert fossilized[:, -1].any()
    else:
        assert not stored.valid[:, -2:].any()
        assert torch.equal(~stored.valid[:, :5], torch.tensor(PATTERNS)[:, :5])
        assert (kept.compute <= budget).all()
        assert (kept.compute > budget - 1.5 / E).all()
    assert len(kept.compute.unique()) > 5
    assert (kept.fossil_params > 0)[~stored.valid[:, -1]].any()
    accumulated = discounted_returns(stored.rewards, stored.terminal, stored.truncated, stored.valid, GAMMA)
    scale = masked_moments(accumulated, stored.valid).var.sqrt()
    discount = GAMMA ** torch.arange(E, dtype=torch.float64)
    learned = ((stored.rewards / scale).double() * discount).sum(1) * scale
    torch.testing.assert_close(learned, GAMMA ** (E - 1) * worth, atol=2e-6, rtol=0)
    apart = worth[:, None] - worth
    assert ((learned[:, None] - learned).sign() == apart.sign())[apart.abs() > 1e-5].all()


def test_every_decision_is_credited_with_the_end_across_all_rollbacks_after_it(finished):
    # without a critic and with an unbroken trace the advantage is what is still to come: gamma^(E - t) * J - Phi_{t-1};
    # after a rollback Phi_{t-1} is that of the last valid row, whose step is k earlier, divided by gamma^(k - 1)
    buffer, worth, _ = finished
    stored, none = buffer.rollout, torch.zeros_like(buffer.rollout.values)
    found = compute_gae(stored.rewards, none, none, stored.terminal, stored.truncated, stored.valid, GAMMA, 1.0)
    carried, want = torch.zeros(len(PATTERNS), dtype=torch.float64), []
    for t in range(E):
        want.append(worth * GAMMA ** (E - 1 - t) - carried)
        carried = torch.where(stored.valid[:, t], (stored.rewards[:, t] + carried) / GAMMA, carried / GAMMA)
    torch.testing.assert_close(found.double(), torch.stack(want, 1) * stored.valid, atol=2e-6, rtol=0)


def test_no_reward_around_a_rollback_is_larger_than_what_changed(finished, budget):
    # accuracies are between 0 and 40 points; the first valid row is paid its whole potential, the others differences
    stored = finished[0].rollout
    later = stored.valid & (stored.valid.cumsum(1) > 1)
    around = later & ~(stored.valid.roll(1, 1) & stored.valid.roll(-1, 1))
    assert around.sum() > 400
    assert stored.rewards[around].abs().max() < 0.3
    # the row before a stop is paid the end of the episode
    assert (stored.rewards[around].std() / stored.rewards[later & ~around].std()).item() < (2.5 if budget else 2.0)


def test_an_episode_has_one_end_and_as_many_fresh_recurrent_states_as_rollbacks(finished):
    stored = finished[0].rollout
    ends = [row.nonzero().max().item() for row in stored.valid]
    assert stored.terminal.nonzero().tolist() == [[n, end] for n, end in enumerate(ends)]
    assert torch.equal(stored.reset[:, 1:], ~stored.valid[:, :-1])
    assert open_ends(finished[0]) == []
