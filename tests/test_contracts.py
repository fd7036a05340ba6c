"""Every part that ships, and every toy, satisfies its protocol."""

import dataclasses

import pytest
import torch

import tiny
from contracts import N, check_executor, check_policy, check_reward, check_sink
from esper.simic.agent.ppo import PPOConfig
from esper.simic.client import ScriptedClient, SimicClient
from esper.simic.rewards import make_reward, reward_names
from esper.tamiyo.baselines import BASELINES, make_baseline
from esper.tamiyo.network import TamiyoNetwork, initialize
from esper.tasks.null import NullSpec
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.runtime import host_read
from toys import ToyClient, ToyExecutor, ToyReward

WIDTH = 32


def learner(spec):
    network = TamiyoNetwork(
        num_slots=spec.num_slots, head_sizes=spec.head_sizes, feature_width=WIDTH, hidden_width=WIDTH, num_layers=1
    )
    initialize(network, spec.run_seed)
    config = PPOConfig(feature_width=WIDTH, hidden_width=WIDTH, num_minibatches=2)
    return SimicClient(
        network, ToyReward(), config, spec,
        read=lambda x: host_read(x)[0].tolist(), device=tiny.CPU, total_updates=2,
    )  # fmt: skip


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_is_a_policy(name):
    check_policy(lambda spec: make_baseline(name, spec))


def test_the_learner_is_a_policy():
    check_policy(learner)


def test_a_scripted_client_is_a_policy_and_a_reward():
    check_policy(lambda spec: ScriptedClient(make_baseline("heuristic", spec), ToyReward()))
    check_reward(ScriptedClient(make_baseline("wait_only", tiny.engine(N).spec), make_reward("shaped")))


def test_the_toy_client_is_a_policy_and_a_reward():
    check_policy(ToyClient)
    check_reward(ToyReward())
    check_reward(ToyClient(tiny.engine(N).spec))


@pytest.mark.parametrize("name", reward_names())
def test_a_reward_mode_is_a_reward(name):
    check_reward(make_reward(name))


def test_the_learner_hands_on_its_reward():
    check_reward(learner(tiny.engine(N).spec))


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_an_executor_of_networks_is_an_executor(executor):
    check_executor(lambda: tiny.engine(3, executor=executor).executor, 3)


def test_the_scripted_hosts_are_an_executor():
    script = NullSpec(sigma=1.0)
    check_executor(
        lambda: ScriptedExecutor(script, num_envs=3, num_slots=2, run_seed=1, device=tiny.CPU), 3
    )  # fmt: skip


def test_the_toy_executor_is_an_executor():
    check_executor(lambda: ToyExecutor(3, 2), 3)


class Notebook:
    """A sink that keeps what it is told."""

    def __init__(self):
        self.pages = []

    def write(self, kind, fields):
        self.pages.append((kind, dict(fields)))


def test_a_list_of_records_is_a_sink():
    notebook = Notebook()
    check_sink(notebook)
    assert [kind for kind, _ in notebook.pages] == ["update", "a kind of its own"]


# -- the contracts can be broken --------------------------------------------------------------------------------------


class Forgetful(ToyReward):
    """Pays by a counter of its own instead of the carried state."""

    paid = 0

    def step(self, inputs, state):
        self.paid += 1
        out, carried = super().step(inputs, state)
        return dataclasses.replace(out, total=out.total + self.paid), carried


class Gossip(ToyReward):
    """Pays every host by the mean over all of them."""

    def step(self, inputs, state):
        out, carried = super().step(inputs, state)
        breakdown = out.breakdown.mean(dim=0).expand_as(out.breakdown)
        return dataclasses.replace(out, total=breakdown.sum(dim=1), breakdown=breakdown), carried


class Hoarder(ToyReward):
    """Never starts anew."""

    def reset_hosts(self, state, mask):
        return state


@pytest.mark.parametrize("reward", [Forgetful(), Gossip(), Hoarder()])
def test_a_reward_that_breaks_the_contract_is_found(reward):
    with pytest.raises(AssertionError):
        check_reward(reward)


class Illegal(ToyClient):
    """Fossilizes empty slots."""

    def act(self, obs, *, deterministic=False):
        out = super().act(obs)
        return dataclasses.replace(out, actions=out.actions + torch.tensor([0, 0, 0, 0, 0, 0, 0, 4]))


class Restless(ToyClient):
    """Moves its recurrent state when asked for a bootstrap."""

    def bootstrap(self, obs):
        self.act(obs)
        return super().bootstrap(obs)


@pytest.mark.parametrize("client", [Illegal, Restless])
def test_a_policy_that_breaks_the_contract_is_found(client):
    with pytest.raises(AssertionError):
        check_policy(client)


class Touching(ToyExecutor):
    """Trains while it measures."""

    def evaluate(self, t, slots, coalitions):
        self.passes += 1
        return super().evaluate(t, slots, coalitions)


def test_an_executor_that_breaks_the_contract_is_found():
    with pytest.raises(AssertionError, match="trace"):
        check_executor(lambda: Touching(3, 2), 3)
