"""The controllers of a run with its reward: the learner, a baseline, a policy file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.leyline.ranks import Ranks
from esper.leyline.tensor_dataclass import StateTree, below
from esper.runs.assembly.run_config import RunConfig
from esper.runs.state_file import read_state, write_state
from esper.simic.client import (
    POLICY_PARTS,
    PolicyFunction,
    PolicyStep,
    ScriptedClient,
    SimicClient,
    blank_inputs,
    policy_network,
)
from esper.simic.compilation import CompiledStep
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards import ContributionReward, ObjectiveReward, make_reward
from esper.simic.rewards.modes import Kernel, RewardOutput
from esper.simic.rewards.reward import AnyReward
from esper.tamiyo.baselines import make_baseline
from esper.tamiyo.network import initialize
from esper.tamiyo.policy_files import LEARNED_SUFFIX, read_policy, script_of
from esper.tamiyo.schedules import ScriptedPolicy
from esper.tolaria.runtime import host_read


def reward_of(config: RunConfig, spec: EngineSpec) -> AnyReward:
    """The reward function, compiled if the configuration says so; raises ConfigError if it cannot be."""
    reward = make_reward(config.reward_name, config.reward)
    if isinstance(reward, ContributionReward):
        if config.is_compiled(spec.device):
            reward.warm_up(compiled_reward, spec.num_envs, spec.num_slots, spec.device)
    elif config.compile == "on" and not isinstance(reward, ObjectiveReward):  # about twenty operators: always eager
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
        if not config.is_compiled(spec.device):
            return step
        decide = CompiledStep(step, name="the policy step")
        decide(blank_inputs(step.network, spec.num_envs, spec.num_slots, spec.device), False)
        return decide

    return wrap


LEARNED_FORMAT = "esper learned policy 1"
PRETRAINED = "pretrained"
POLICIES = Path(__file__).parents[2] / "policies"
"""Policies that come with esper."""
_REMEDY = "name a file that esper train wrote for several tasks, or train one."


def learner_of(config: RunConfig, spec: EngineSpec, ranks: Ranks | None = None) -> SimicClient:
    """A policy with its reward and optimizer: newly initialized, or that of the file that the run starts from."""
    assert spec.menu is not None, "a learner needs the menu of its engine"
    if config.policy:
        path = learned_path(config.policy)
        return learned_client(read_learned(path), path, config, spec, ranks)
    network = policy_network(spec.menu, config.ppo)
    initialize(network, config.seed)
    return SimicClient(
        network,
        reward_of(config, spec),
        config.ppo,
        spec,
        read=lambda metrics: host_read(metrics)[0].tolist(),
        device=spec.device,
        total_updates=config.schedule_rounds,
        policy_form=policy_form(config, spec),
        ranks=ranks,
    )


def learned_client(
    policy: StateTree, source: Path, config: RunConfig, spec: EngineSpec, ranks: Ranks | None = None
) -> SimicClient:
    """A learned policy (`SimicClient.policy`) for the hosts of any engine, with the reward of the run.

    Raises:
        CheckpointError: it has other parts than a policy of this version; `source` is where it was read.
    """
    client = learner_of(replace(config, policy="", ppo=with_sizes_of(policy, source, config.ppo)), spec, ranks)
    try:
        client.load_policy(policy)
    except CheckpointError as error:
        raise CheckpointError(f"{source} has no policy of this version: {error}") from error
    return client


def with_sizes_of_policy(config: RunConfig) -> RunConfig:
    """The configuration with the sizes of the policy that it starts from, if any; may raise CheckpointError."""
    if not config.policy:
        return config
    path = learned_path(config.policy)
    return replace(config, ppo=with_sizes_of(read_learned(path), path, config.ppo))


def with_sizes_of(policy: StateTree, source: Path, ppo: PPOConfig) -> PPOConfig:
    """The settings with the sizes of this policy; raises CheckpointError if it is none."""
    gates = [x for name, x in policy.items() if name.endswith(".recurrent_weight")]
    norm = policy.get("network.norm.weight")
    if not gates or norm is None:
        raise CheckpointError(f"{source} has no policy among {sorted(policy)[:3]}; {_REMEDY}")
    return replace(ppo, feature_width=len(norm), hidden_width=gates[0].shape[1], num_layers=len(gates))


def learned_path(name: str) -> Path:
    """The file of a learned policy: a path, or the name of one that comes with esper."""
    own = POLICIES / f"{name}{LEARNED_SUFFIX}"
    return own if name == PRETRAINED else Path(name)


def write_learned(path: Path, policy: StateTree, card: Mapping[str, Any]) -> None:
    """Write a learned policy as a whole, and how it was made; raises CheckpointError if that is impossible."""
    write_state(path, {"format": LEARNED_FORMAT, "card": dict(card)}, policy)


def read_learned(path: Path) -> StateTree:
    """The policy of a file or of a checkpoint; raises CheckpointError if it is missing, damaged, or something else."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder; name a file, such as a checkpoint of a run (RUN/checkpoints/...).")
    if not path.is_file():
        raise CheckpointError(f"there is no policy file {path}; {_REMEDY}")
    try:
        about, state = read_state(path)
    except CheckpointError as error:
        raise CheckpointError(f"{str(error).removesuffix('.')}; {_REMEDY}") from error
    if about.get("format") == LEARNED_FORMAT:
        return state
    inside = {name: x for name, x in below("policy", state).items() if name.startswith(POLICY_PARTS)}
    if not inside:
        raise CheckpointError(
            f"{path} is not a learned policy of this version (its format is {about.get('format')!r}, expected "
            f"{LEARNED_FORMAT!r}); {_REMEDY}"
        )
    return inside


def baseline_of(name: str, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """A baseline controller with the reward of the run."""
    return ScriptedClient(make_baseline(name, spec), reward_of(config, spec))


def policy_file_client(path: Path, config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    """The controller of a policy file, learned or scripted (`tamiyo.policy_files`), with the reward of the run.

    Raises:
        ConfigError, CheckpointError: the file cannot be used.
    """
    if path.suffix == LEARNED_SUFFIX:
        return learned_client(read_learned(path), path, replace(config, compile="off"), spec)
    script = script_of(read_policy(path, spec), spec)
    return ScriptedClient(ScriptedPolicy(script, spec), reward_of(config, spec))
