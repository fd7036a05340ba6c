"""The two calls of the policy see the same: what `act` decided in a rollout is what an update evaluates.

The policies here are far from uniform, so that heads, recurrent state and values depend strongly on the features.
"""

import pytest
import torch

from esper.leyline.lifecycle import Head
from esper.simic.ppo import evaluate_minibatch
from esper.simic.rollout_buffer import SequenceBatch

HOSTS = [0, 1, 2, 3, 4, 5]
PANICS = {1: [1], 3: [0, 4], 4: [0, 2], 6: [3]}
"""Step -> hosts that are rolled back in it: in the first step, in the last, twice in a row, and in between."""


@pytest.fixture
def sharp(make_client):
    """A client whose decisions depend on all that it saw; equal for equal hosts, whatever their order."""

    def build(hosts=HOSTS, **settings):
        client = make_client(hosts, **settings)
        with torch.no_grad():
            network = client.agent.network
            for output in (network.head_op, network.head_slot, network.head_values, network.head_blueprint):
                output.weight.mul_(200.0)
            network.value_net[-1].weight.mul_(30.0)
        return client

    return build


@pytest.fixture
def rolled_out(sharp, make_engine):
    """Such a client after an episode with rollbacks."""
    client = sharp()
    make_engine(HOSTS).run(client, 0, PANICS)
    return client


def stored(client) -> SequenceBatch:
    return client.buffer.sequences(torch.arange(client.spec.num_envs))


def test_an_update_evaluates_what_was_decided_through_resets_rollbacks_and_padding(rolled_out):
    batch = stored(rolled_out)
    padding = (~batch.valid).nonzero().tolist()
    assert padding == [[0, 2], [0, 3], [1, 0], [2, 3], [3, 5], [4, 2]]
    assert batch.reset.nonzero().tolist() == [[0, 3], [0, 4], [1, 1], [2, 4], [4, 3]]
    x, _ = evaluate_minibatch(rolled_out.agent, batch)
    keep = batch.valid
    torch.testing.assert_close(x.log_prob[keep], batch.log_probs[keep], atol=1e-5, rtol=0)
    torch.testing.assert_close(x.values[keep], batch.values[keep], atol=1e-5, rtol=0)
    # and it would show if one of them saw another past
    assert batch.log_probs[keep].std() > 0.3
    assert batch.values[keep].std() > 0.1
    forgotten = batch.reset.clone()
    forgotten[1, 1] = False
    logits, _ = rolled_out.agent.network.unroll(batch.states, batch.blueprint_index, batch.hidden0, batch.reset)
    other, _ = rolled_out.agent.network.unroll(batch.states, batch.blueprint_index, batch.hidden0, forgotten)
    assert (logits[Head.OP] - other[Head.OP])[1, 1:].abs().max() > 1e-3


@pytest.mark.parametrize("order", [[5, 3, 1, 0, 2, 4], [2, 5], [4]])
def test_what_an_update_evaluates_of_a_host_does_not_depend_on_the_others(rolled_out, order):
    together, _ = evaluate_minibatch(rolled_out.agent, stored(rolled_out))
    hosts = torch.tensor(order)
    some, _ = evaluate_minibatch(rolled_out.agent, rolled_out.buffer.sequences(hosts))
    for name in ("log_prob", "entropy", "entropy_avail", "values"):
        found, want = getattr(some, name), getattr(together, name)[hosts]
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0, equal_nan=True)
    assert torch.equal(some.available, together.available[hosts])


def test_a_host_decides_the_same_whoever_stands_beside_it_and_whatever_happens_to_them(sharp, make_engine):
    # host 7 and its rollback stay; the others are exchanged, replaced, rolled back elsewhere, and more or fewer
    worlds = (
        ([0, 1, 7, 3], {4: [2]}),
        ([3, 0, 7, 1], {4: [2]}),
        ([9, 7, 2, 8], {2: [0, 2], 4: [1, 3]}),
        ([7], {4: [0]}),
    )
    decided = []
    for hosts, panics in worlds:
        client, place = sharp(hosts), hosts.index(7)
        make_engine(hosts).run(client, 1, panics)
        stored = client.buffer.rollout
        decided.append({name: getattr(stored, name)[place] for name in ("actions", "log_probs", "values")})
    for other in decided[1:]:
        assert torch.equal(other["actions"], decided[0]["actions"])
        torch.testing.assert_close(other["log_probs"], decided[0]["log_probs"], atol=1e-5, rtol=0)
        torch.testing.assert_close(other["values"], decided[0]["values"], atol=1e-5, rtol=0)


def test_values_are_the_same_to_the_bit_whatever_was_drawn(sharp, make_engine):
    # what the toy world shows does not depend on decisions, so the values of two episodes must be equal
    one, another = sharp(), sharp()
    make_engine(HOSTS).run(one, 0, PANICS)
    make_engine(HOSTS).run(another, 1, PANICS)
    assert not torch.equal(one.buffer.rollout.actions, another.buffer.rollout.actions)
    assert torch.equal(one.buffer.rollout.values, another.buffer.rollout.values)
    assert torch.equal(one.buffer.rollout.bootstrap_values, another.buffer.rollout.bootstrap_values)
