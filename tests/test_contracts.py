"""Every part that ships satisfies its protocol."""

import pytest

import tiny
from contracts import N, check_executor, check_policy, check_reward
from esper.simic.client import ScriptedClient, SimicClient
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards import make_reward, reward_names
from esper.tamiyo.baselines import BASELINES, make_baseline
from esper.tamiyo.network import TamiyoNetwork, initialize
from esper.tasks.null import NullSpec
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.runtime import host_read
from toys import ToyReward, menu

WIDTH = 32


def learner(spec):
    network = TamiyoNetwork(menu(spec.num_slots), feature_width=WIDTH, hidden_width=WIDTH)
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
