"""An update in the face of numbers that should not be."""

import math

import pytest
import torch

from esper.simic.ppo import run_ppo_updates
from esper.telemetry.anomalies import of_update

HOSTS = [0, 1, 2, 3]
FLOATS = ("states", "raw_states", "log_probs", "values", "rewards", "bootstrap_values")


def learn(client):
    return run_ppo_updates(client.agent, client.buffer, client.config, update_index=0, run_seed=7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("field", FLOATS)
def test_a_bad_number_in_any_field_of_a_rollout_poisons_nothing_that_is_kept(make_client, make_engine, field, bad):
    client = make_client(HOSTS, update_epochs=2)
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
