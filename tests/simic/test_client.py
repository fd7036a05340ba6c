"""The learner in front of a toy engine: decisions, rollbacks, restarts, and that it learns."""

import pytest
import torch

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.leyline.random import Stream, uniform
from esper.simic.advantages import normalized
from esper.simic.client import SimicClient, compute_batched_bootstrap, policy_uniforms
from esper.tamiyo.features import observe
from esper.tamiyo.heads import sample_heads
from rollouts import open_ends

HOSTS = [0, 1, 2, 3]


def weights(client) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in client.agent.network.parameters()])


def played(client, make_engine, episodes: int, hosts=HOSTS) -> list[dict[str, float]]:
    return [(make_engine(hosts).run(client, k), client.update())[1] for k in range(episodes)]


def test_every_random_number_is_that_of_its_host_step_and_head():
    found = policy_uniforms(run_seed=11, hosts=torch.tensor([4, 9]), episode=3, steps=5)
    want = uniform(11, Stream.POLICY_SAMPLING, torch.tensor(9), episode=3, t=2, block=int(Head.TEMPO))
    assert found[1, 1, Head.TEMPO] == want
    assert torch.equal(found[:, 1], policy_uniforms(11, torch.tensor([9]), 3, 5)[:, 0])
    assert found.unique().numel() == found.numel()


def test_a_decision_uses_the_random_numbers_of_its_own_step(make_client, make_engine):
    client, engine = make_client(HOSTS, run_seed=3), make_engine(HOSTS)
    hidden = client.initial_hidden(4)
    for t, act in enumerate(engine.run(client, 2), start=1):
        obs = engine.observation(t)
        raw, blueprints = observe(obs)
        with torch.no_grad():
            out = client.agent.network.step(normalized(raw, client.agent.observations.of_slots(2)), blueprints, hidden)
        u = policy_uniforms(3, torch.tensor(HOSTS), 2, 6)[t - 1]
        want = sample_heads(out.logits, obs.legal, obs.has_gate, client.agent.selectable, u, False)
        assert torch.equal(act.actions, want.actions)
        assert torch.equal(act.raw_features, raw), "the step is among the features"
        hidden = act.hidden


@pytest.mark.parametrize("step", [1, 3, 6])
def test_a_rollback_marks_the_row_before_it_and_resets_the_row_after_it(make_client, make_engine, step):
    client = make_client(HOSTS)
    make_engine(HOSTS).run(client, 0, {step: [2]})
    stored, row = client.buffer.rollout, step - 1
    assert (~stored.valid).nonzero().tolist() == [[2, row]]
    assert stored.reset.nonzero().tolist() == ([[2, row + 1]] if step < 6 else [])
    assert stored.terminal.nonzero().tolist() == ([[2, row - 1]] if step > 1 else [])
    assert (stored.rewards == -10).nonzero().tolist() == ([[2, row - 1]] if step > 1 else [])
    assert stored.truncated.nonzero().tolist() == [[n, 5] for n in HOSTS if step < 6 or n != 2]
    assert bool((stored.bootstrap_values[:, 5] != 0).sum() == stored.truncated.sum())
    assert open_ends(client.buffer) == []


def test_an_episode_reward_needs_a_terminal_term(make_client):
    class Nameless(type(make_client(HOSTS).reward)):
        def final_reward(self, kept):
            return kept.accuracy

    client = make_client(HOSTS)
    with pytest.raises(ConfigError, match=r"no term 'terminal' among \['reward'\]"):
        SimicClient(client.agent.network, Nameless(), client.config, client.spec, read=client._read, device="cpu",
                    total_updates=1)  # fmt: skip


def test_two_rollbacks_in_a_row_pay_one_penalty(make_client, make_engine):
    client = make_client(HOSTS)
    make_engine(HOSTS).run(client, 0, {3: [1], 4: [1]})
    stored = client.buffer.rollout
    assert (~stored.valid).nonzero().tolist() == [[1, 2], [1, 3]]
    assert stored.terminal.nonzero().tolist() == [[1, 1]]
    assert stored.reset.nonzero().tolist() == [[1, 3], [1, 4]]
    assert open_ends(client.buffer) == []


def test_the_recurrent_state_is_zero_after_a_rollback_and_carried_otherwise(make_client, make_engine):
    client = make_client(HOSTS)
    make_engine(HOSTS).run(client, 0, {2: [1]}, last_step=2)
    assert not client.hidden.h[:, 1].any()
    assert not client.hidden.c[:, 1].any()
    assert bool(client.hidden.h[:, [0, 2, 3]].any(-1).all())


def test_the_bootstrap_is_the_value_after_the_last_step_and_leaves_the_state_alone(make_client, make_engine):
    client, engine = make_client(HOSTS), make_engine(HOSTS)
    engine.run(client, 0, last_step=5)
    before = client.hidden
    h = before.h.clone()
    found = client.bootstrap(engine.observation(6))
    assert torch.equal(client.hidden.h, h)
    raw, blueprints = observe(engine.observation(6))
    want = client.agent.network.step(normalized(raw, client.agent.observations.of_slots(2)), blueprints, before).value
    assert torch.equal(found, want.detach())
    forgetful = compute_batched_bootstrap(client.agent, engine.observation(6), client.initial_hidden(4))
    assert not torch.equal(found, forgetful)
    assert not found.requires_grad


def test_every_row_of_a_rollout_is_normalized_by_the_statistics_of_the_rollouts_before_it(make_client, make_engine):
    client = make_client(HOSTS)
    first = make_engine(HOSTS).run(client, 0)[0]
    assert torch.equal(first.features, first.raw_features.clamp(-10, 10))
    client.update()
    frozen = client.agent.observations.state_dict()
    make_engine(HOSTS).run(client, 1, {2: [1], 4: [0]})
    stored = client.buffer.rollout
    want = normalized(stored.raw_states, client.agent.observations.of_slots(2))
    assert torch.equal(stored.states[stored.valid], want[stored.valid])
    assert not torch.equal(want, stored.raw_states.clamp(-10, 10))
    assert all(torch.equal(value, frozen[name]) for name, value in client.agent.observations.state_dict().items())
    client.update()
    assert not torch.equal(client.agent.observations.host.mean, frozen["host.mean"])


def test_deterministic_decisions_repeat_and_need_no_random_numbers(make_client, make_engine):
    a, b, engine = make_client(HOSTS), make_client(HOSTS), make_engine(HOSTS)
    a.begin_rollout(0, torch.tensor(HOSTS))
    b.begin_rollout(5, torch.tensor(HOSTS))
    obs = engine.observation(1)
    assert torch.equal(a.act(obs, deterministic=True).actions, b.act(obs, deterministic=True).actions)


def test_a_step_reads_nothing(make_client, make_engine, monkeypatch):
    client, engine, reads = make_client(HOSTS), make_engine(HOSTS), []
    engine.run(client, 0, last_step=1)
    obs = engine.observation(2)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, m=name, **k: reads.append(m))
    client.act(obs)
    client.bootstrap(obs)
    client.rollback(torch.zeros(4, dtype=torch.bool), torch.zeros(4))
    assert reads == []


def test_a_restored_client_goes_on_bit_for_bit(make_client, make_engine):
    client, other = make_client(HOSTS), make_client(HOSTS, run_seed=7)
    played(client, make_engine, 2)
    state = {name: value.clone() for name, value in client.state_dict().items()}
    assert not any(name.startswith("rollout.") for name in state)
    other.load_state_dict(state)
    for c in (client, other):
        make_engine(HOSTS).run(c, 2, {2: [0]})
    assert torch.equal(client.buffer.rollout.actions, other.buffer.rollout.actions)
    assert str(client.update()) == str(other.update())
    assert torch.equal(weights(client), weights(other))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in client.state_dict().items())


def test_every_counter_of_the_learner_survives_a_restart(make_client):
    client, other = make_client(HOSTS), make_client(HOSTS)
    client.updates, client.agent.schedule_position, client.agent.failed_updates = 7, 5, 2
    other.load_state_dict(client.state_dict())
    assert (other.updates, other.agent.schedule_position, other.agent.failed_updates) == (7, 5, 2)


def test_a_state_that_is_kept_does_not_change_with_the_client(make_client, make_engine):
    client = make_client(HOSTS)
    state = client.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    played(client, make_engine, 1)
    assert all(torch.equal(value, before[name]) for name, value in state.items())


def test_a_state_with_other_names_or_shapes_is_refused(make_client):
    client = make_client(HOSTS)
    state = client.state_dict()
    with pytest.raises(CheckpointError, match="counters"):
        client.load_state_dict({name: value for name, value in state.items() if name != "counters"})
    with pytest.raises(CheckpointError, match="surplus"):
        client.load_state_dict(state | {"surplus": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"observations|network"):
        client.load_state_dict(make_client(HOSTS, width=16).state_dict())


def test_the_client_learns_the_best_decision_of_the_toy_world(make_client, make_engine):
    hosts = list(range(16))
    client = make_client(hosts, width=16, total_updates=15, lr=1.5e-2, update_epochs=2)
    engine = make_engine(hosts)

    def share_of_favourites() -> float:
        stored = client.buffer.rollout
        free = ~stored.forced
        chosen = (stored.actions[..., Head.OP] == LifecycleOp.GERMINATE) & (stored.actions[..., Head.SLOT] == 1)
        return float(chosen[free].float().mean())

    engine.run(client, 0)
    assert share_of_favourites() < 0.4
    for episode in range(15):
        engine.run(client, episode)
        client.update()
    engine.run(client, 15)
    assert share_of_favourites() > 0.9
