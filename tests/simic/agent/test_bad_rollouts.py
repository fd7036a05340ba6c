"""An update in the face of numbers that should not be, and in the face of every decision that can be."""

import math

import pytest
import torch

from esper.leyline.lifecycle import NUM_HEADS, Head, LifecycleOp
from esper.simic.agent.losses import loss_sums, ppo_losses
from esper.simic.agent.ppo import evaluate_minibatch, loss_weights, run_ppo_updates
from esper.tamiyo.heads import forced, sample_heads
from esper.telemetry.anomalies import of_update
from toys import even_logits

HOSTS = [0, 1, 2, 3]
FLOATS = ("states", "raw_states", "log_probs", "values", "rewards", "bootstrap_values")


def learn(client):
    return run_ppo_updates(client.agent, client.buffer, client.config, update_index=0, run_seed=7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", FLOATS)
def test_a_bad_number_in_any_field_of_a_rollout_poisons_nothing_that_is_kept(make_client, make_engine, field, bad):
    client = make_client(HOSTS)
    make_engine(HOSTS).run(client, 0)
    values = getattr(client.buffer.rollout, field)
    values[2, 5 if field == "bootstrap_values" else 1] = bad
    before = [p.detach().clone() for p in client.agent.network.parameters()]
    metrics = learn(client)
    # every minibatch it reaches is left out and counted; raw features enter the statistics alone, and an infinite
    # log-probability counts as e^20 or e^-20, about which there is an alarm
    moved = any(not torch.equal(a, b) for a, b in zip(before, client.agent.network.parameters(), strict=True))
    assert moved == (metrics["optimizer_steps"] > 0)
    bounded = field == "log_probs" and not math.isnan(bad)
    assert (metrics["nonfinite_minibatches"] > 0) == (field != "raw_states" and not bounded)
    if bounded:
        assert {"approx_kl", "stored_log_prob_error"} & {alarm.name for alarm in of_update(metrics)}
    kept = (*client.agent.network.parameters(), client.agent.optimizer.exp_avg, client.agent.optimizer.exp_avg_sq)
    statistics = (*client.agent.observations.state_dict().values(), *client.agent.returns.state_dict().values())
    for tensor in (*kept, *statistics):
        assert tensor.isfinite().all()
    # and the next rollout is learned from as if nothing had been
    make_engine(HOSTS).run(client, 1)
    again = learn(client)
    assert again["nonfinite_minibatches"] == 0
    assert again["optimizer_steps"] > 0
    assert math.isfinite(again["policy_loss"])


def test_one_update_on_every_op_gives_every_parameter_a_finite_gradient_that_is_not_zero(make_client, make_engine):
    client = make_client(HOSTS * 8, steps=12)
    make_engine(HOSTS * 8, 12).run(client, 0)
    stored, generator = client.buffer.rollout, torch.Generator().manual_seed(3)
    # everything is legal and decided evenly, whatever the toy world allows
    stored.legal.fill_(True)
    stored.has_gate.fill_(True)
    stored.blueprint_index.copy_(torch.randint(-1, 13, stored.blueprint_index.shape, generator=generator))
    stored.states.copy_(torch.randn(stored.states.shape, generator=generator))
    even = tuple(even_logits(*stored.valid.shape, num_slots=2))
    uniforms = torch.rand(*stored.valid.shape, NUM_HEADS, generator=generator)
    drawn = sample_heads(even, stored.legal, stored.has_gate, client.agent.selectable, uniforms)
    stored.actions.copy_(drawn.actions)
    stored.effective_op.copy_(drawn.actions[..., Head.OP])
    stored.log_probs.copy_(drawn.log_prob)
    stored.forced.copy_(forced(stored.legal))
    stored.rewards.copy_(torch.randn(stored.rewards.shape, generator=generator))
    assert stored.effective_op.unique().tolist() == list(LifecycleOp)
    client.buffer.compute_advantages_and_returns()
    client.buffer.normalize_advantages()
    batch = client.buffer.sequences(torch.arange(len(HOSTS) * 8))
    x, finite_logits = evaluate_minibatch(client.agent, batch)
    assert finite_logits
    ppo_losses(loss_sums(x, 0.2, 0.2), loss_weights(client.agent, client.config, torch.device("cpu"))).total.backward()
    for name, parameter in client.agent.network.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
