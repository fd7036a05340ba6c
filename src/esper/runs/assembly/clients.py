"""The controllers of a run with its reward: the learner, a baseline, a policy file."""

from collections.abc import Callable
from pathlib import Path

import torch

from esper.leyline.errors import ConfigError
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.runs.assembly.run_config import RunConfig
from esper.simic.client import PolicyFunction, PolicyStep, ScriptedClient, SimicClient, blank_inputs
from esper.simic.compilation import CompiledStep, is_compiled
from esper.simic.rewards import ContributionReward, ObjectiveReward, make_reward
from esper.simic.rewards.modes import Kernel, RewardOutput
from esper.simic.rewards.reward import AnyReward
from esper.tamiyo.baselines import make_baseline
from esper.tamiyo.network import TamiyoNetwork, initialize
from esper.tamiyo.policy_files import read_policy, script_of
from esper.tamiyo.scripted import ScriptedPolicy
from esper.tolaria.runtime import host_read


def read_floats(metrics: torch.Tensor) -> list[float]:
    """The single host read of a PPO update."""
    values: list[float] = host_read(metrics)[0].tolist()
    return values


def reward_of(config: RunConfig, spec: EngineSpec) -> AnyReward:
    """The reward function, compiled if the configuration says so; raises ConfigError if it cannot be."""
    reward = make_reward(config.reward_name, config.reward)
    if isinstance(reward, ContributionReward):
        if is_compiled(config.compile, spec.device):
            reward.warm_up(compiled_reward, spec.num_envs, spec.num_slots, spec.device)
    elif isinstance(reward, ObjectiveReward):
        pass  # about twenty operators: always eager
    elif config.compile == "on":
        raise ConfigError(
            "compile is 'on', but only rewards built on ContributionReward can be compiled, and "
            f"{config.reward_name!r} is not; leave compile out."
        )
    return reward


def compiled_reward(kernel: Kernel) -> Kernel:
    """The compiled kernel: one graph per reward mode, attribution formula and number of hosts."""
    step = CompiledStep(lambda given: _transposed(kernel(**given)), name="the reward kernel")
    return lambda **given: _transposed(step(given))


def _transposed(output: RewardOutput) -> RewardOutput:
    """The output with a row for each column: a graph writes one contiguously, and a table only by transposing it."""
    total, breakdown, escrow_next, deferred_opened, flags = output
    return RewardOutput(total, breakdown.T, escrow_next, deferred_opened, flags.T)


def policy_form(config: RunConfig, spec: EngineSpec) -> Callable[[PolicyStep], PolicyFunction]:
    """Compiles the policy step if the configuration says so; raises ConfigError if it cannot be compiled."""

    def wrap(step: PolicyStep) -> PolicyFunction:
        if not is_compiled(config.compile, spec.device):
            return step
        decide = CompiledStep(step, name="the policy step")
        decide(blank_inputs(step.network, spec.num_envs, spec.num_slots, spec.device), False)
        return decide

    return wrap


def learner_of(config: RunConfig, spec: EngineSpec) -> SimicClient:
    """A newly initialized policy with its reward and optimizer."""
    network = TamiyoNetwork(
        num_slots=spec.num_slots,
        head_sizes=spec.head_sizes,
        feature_width=config.ppo.feature_width,
        hidden_width=config.ppo.hidden_width,
        num_layers=config.ppo.num_layers,
    )
    initialize(network, config.seed)
    return SimicClient(
        network,
        reward_of(config, spec),
        config.ppo,
        spec,
        read=read_floats,
        device=spec.device,
        total_updates=config.schedule_rounds,
        policy_form=policy_form(config, spec),
    )


def baseline_of(name: str, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """A baseline controller with the reward of the run."""
    return ScriptedClient(make_baseline(name, spec), reward_of(config, spec))


def policy_file_client(path: Path, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """The controller of a policy file (`tamiyo.policy_files`) with the reward of the run; may raise ConfigError."""
    script = script_of(read_policy(path, spec), spec)
    return ScriptedClient(ScriptedPolicy(script, spec), reward_of(config, spec))
