"""The learner in the engine it was made for: what is stored at the end, whose hosts they are, and who draws."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import small_runs
from esper.kasmina.rules.conditions import legal_ops
from esper.leyline.tensor_dataclass import state_digest, with_prefix
from esper.runs.assembly.assemble import assemble, device_of, engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import config_of_run, resolve
from esper.runs.assembly.run_config import RunConfig
from esper.simic.client import SimicClient, compute_batched_bootstrap
from esper.simic.ppo import evaluate_minibatch
from esper.simic.rewards import MODES
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tasks.registry import register_task
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.phases import observation
from rollouts import open_ends
from tiny import CPU

E, NAN = 8, float("nan")
register_task(replace(NULL, name="late_fault", script=NullSpec(sigma=1.0, faults=(Fault(1, 3, NAN), Fault(2, E, NAN)))))
BROKEN = tuple(Fault(n, t, loss) for n, loss in enumerate((NAN, float("inf"), -float("inf"))) for t in (1, 4, 5))
register_task(replace(NULL, name="broken_losses", script=NullSpec(sigma=1.0, faults=BROKEN)))
register_task(replace(NULL, name="noisy", script=NullSpec(sigma=1.0)))


def config(task: str = "noisy", num_envs: int = 3, **told: object) -> RunConfig:
    young = {"min_training_epochs": 1, "min_prune_age": 1, "min_blending_epochs": 1, "embargo_epochs": 1}
    small = {"feature_width": 64, "hidden_width": 64, "update_epochs": 1, "num_minibatches": 1}
    return resolve({"task": task, "num_envs": num_envs, "episode_length": E, "lifecycle": young, "ppo": small, **told})


def played(chosen: RunConfig, *, rounds: int = 1) -> tuple[VectorizedEngine, SimicClient]:
    """An engine and its learner after some episodes; there was an update after each but the last."""
    engine = engine_of(chosen, None, CPU)
    client = learner_of(chosen, engine.spec)
    for episode in range(rounds):
        if episode:
            client.update()
        engine.reset(client, episode)
        engine.rollout(client)
    return engine, client


# -- the end of an episode ------------------------------------------------------------------------------------------


def test_what_is_stored_at_the_time_limit_is_the_value_of_the_state_after_the_last_tick():
    chosen = config(num_envs=6, time_limit="truncate")
    engine, client = played(chosen, rounds=2)
    stored = client.buffer.rollout
    assert stored.truncated.nonzero().tolist() == [[n, E - 1] for n in range(6)]
    now = legal_ops(engine.state.slots, engine.config.lifecycle)
    after = observation(engine.state, now, E, engine.config)
    want = compute_batched_bootstrap(client.agent, after, client.hidden)
    assert torch.equal(stored.bootstrap_values[:, -1], want)
    assert not stored.bootstrap_values[:, :-1].any()
    # neither the state before the last decision nor another recurrent state has this value
    batch = client.buffer.sequences(torch.arange(6))
    raw_before = client.agent.network.step(batch.states[:, -1], batch.blueprint_index[:, -1], client.hidden)
    forgetful = compute_batched_bootstrap(client.agent, after, client.initial_hidden(6))
    for other in (stored.values[:, -1], raw_before.value.detach(), forgetful, want.flip(0)):
        assert not torch.allclose(want, other, atol=1e-6)


def test_an_episode_that_truly_ends_stores_no_value_of_a_state_after_it():
    _, client = played(config(time_limit="terminate"), rounds=2)
    stored = client.buffer.rollout
    assert stored.terminal.nonzero().tolist() == [[n, E - 1] for n in range(3)]
    assert not stored.truncated.any()
    assert not stored.bootstrap_values.any()
    assert open_ends(client.buffer) == []
    advantages, _ = client.buffer.compute_advantages_and_returns()
    assert torch.equal(advantages[:, -1], stored.rewards[:, -1] - stored.values[:, -1])


@pytest.mark.parametrize("time_limit", ["truncate", "terminate"])
def test_a_rollback_in_the_last_step_makes_the_row_before_the_end_and_one_before_ends_nothing(time_limit):
    _, client = played(config("late_fault", time_limit=time_limit))
    stored = client.buffer.rollout
    ends = {"truncate": stored.truncated, "terminate": stored.terminal}[time_limit]
    assert (~stored.valid).nonzero().tolist() == [[1, 2], [2, E - 1]]
    assert stored.terminal.nonzero().tolist() == sorted(
        [[2, E - 2], *([[0, E - 1], [1, E - 1]] if time_limit == "terminate" else [])]
    )
    assert ends[:, -1].tolist() == [True, True, False]
    assert stored.reset.nonzero().tolist() == [[1, 3]]
    assert (stored.bootstrap_values[:, -1] != 0).tolist() == [time_limit == "truncate"] * 2 + [False]
    assert open_ends(client.buffer) == []


@pytest.mark.parametrize("rounds", [1, 3])
def test_the_update_sees_the_decisions_of_the_rollout_whatever_statistics_they_were_made_with(rounds):
    _, client = played(config("late_fault", num_envs=6, time_limit="truncate"), rounds=rounds)
    assert bool(client.agent.observations.host.started) == (rounds > 1)
    batch = client.buffer.sequences(torch.arange(6))
    assert (~batch.valid).nonzero().tolist() == [[1, 2], [2, E - 1]]
    assert batch.reset.nonzero().tolist() == [[1, 3]]
    evaluated, finite = evaluate_minibatch(client.agent, batch)
    assert finite
    torch.testing.assert_close(evaluated.log_prob[batch.valid], batch.log_probs[batch.valid], atol=1e-5, rtol=0)
    torch.testing.assert_close(evaluated.values[batch.valid], batch.values[batch.valid], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_that_is_no_number_reaches_neither_reward_nor_learner_under_any_mode(mode):
    chosen = config("broken_losses", num_envs=4, reward={"mode": mode}, compile="off")
    engine, client = played(chosen)
    assert (~client.buffer.rollout.valid).nonzero().tolist() == [[n, t] for n in range(3) for t in (0, 3, 4)]
    for name in ("states", "raw_states", "values", "rewards", "log_probs", "bootstrap_values"):
        assert getattr(client.buffer.rollout, name).isfinite().all(), name
    assert np.isfinite(engine.rollout(client).returns).all()
    metrics = client.update()
    assert metrics["nonfinite_minibatches"] == 0
    assert metrics["optimizer_steps"] == 1
    assert all(parameter.isfinite().all() for parameter in client.agent.network.parameters())


# -- hosts do not know each other -----------------------------------------------------------------------------------

EXACT = ("actions", "effective_op", "rewards", "raw_states", "legal", "valid", "reset", "terminal", "truncated")
ROUNDED = ("values", "log_probs", "bootstrap_values")
"""Products of matrices of other sizes are rounded otherwise."""


def assert_rows_equal(found: SimicClient, want: SimicClient, found_rows: list[int], want_rows: list[int]) -> None:
    for name in (*EXACT, *ROUNDED):
        mine, theirs = (getattr(client.buffer.rollout, name) for client in (found, want))
        atol = 0.0 if name in EXACT else 1e-6
        torch.testing.assert_close(mine[found_rows], theirs[want_rows], atol=atol, rtol=0, msg=name)


def test_hosts_together_are_as_many_runs_of_one_host():
    whole = config(num_envs=4)
    _, together = played(whole)
    assert together.buffer.rollout.effective_op.unique().numel() > 2
    for n in range(4):
        engine = engine_of(whole, None, CPU, engine_config=replace(whole.engine(), num_envs=1, host_offset=n))
        alone = learner_of(whole, engine.spec)
        engine.reset(alone, 0)
        engine.rollout(alone)
        assert_rows_equal(alone, together, [0], [n])


# -- nothing but the run seed decides -------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["null", "tiny"])
def active(request, tmp_path_factory):
    """One of the small runs, recorded as usual."""
    path = tmp_path_factory.mktemp("active") / request.param
    torch.manual_seed(1)
    np.random.seed(1)
    assert small_runs.train(path, request.param, 2) == 0
    return path


def test_a_run_of_which_nobody_hears_comes_to_the_same_state_whatever_the_generators_of_the_process_hold(active):
    # no runner: no listener, no record, no file; and generators in another state, which stays as it is
    chosen = config_of_run(active)
    torch.manual_seed(2)
    np.random.seed(2)
    random.seed(2)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    parts = assemble(chosen, device_of(chosen))
    assert parts.engine.listeners == []
    parts.engine.train(parts.client, range(2), on_round=lambda stats, metrics: None)
    parts.engine.test()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    population = with_prefix("population", parts.engine.executor.state_dict())
    found = state_digest({**with_prefix("policy", parts.client.state_dict()), **population})
    assert found == small_runs.summary(active)["state_digest"]
