"""Rewards as `RewardProtocol`, and the registry in which users add their own.

@register_reward("accuracy_only", time_limit="terminate")
def build(config: RewardConfig) -> RewardProtocol: ...

reward = make_reward("objective")            # one of the nine modes, or a registered name
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError, RegistryError, nearest
from esper.leyline.messages import HostState, RewardInputs, RewardOutput, RewardProtocol, SlotState
from esper.leyline.tensor_dataclass import blank
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.rewards.config import MODES, ModeTraits, RewardConfig, RewardMode, TimeLimit
from esper.simic.rewards.objective import ObjectiveReward
from esper.simic.rewards.state import RewardState, initial_state, reset_hosts, reward_step, rollback_reward
from esper.simic.rewards.terms import REWARD_TERMS

if TYPE_CHECKING:
    AnyReward: TypeAlias = RewardProtocol[Any]
else:  # a structural type cannot be checked while tests run
    AnyReward = object

RewardFactory = Callable[[RewardConfig], AnyReward]


@final
class ContributionReward:
    """All built-in modes except `objective`, chosen by the configuration."""

    terms: Sequence[str] = REWARD_TERMS

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._kernel: Kernel = compute_reward_batched

    def warm_up(self, form: Callable[[Kernel], Kernel], n: int, slots: int, device: torch.device) -> None:
        """Compile the kernel for `n` hosts with `form`; raises ConfigError where that is impossible."""
        blank, start = _blank_inputs(n, slots, device), self.initial_state(n, slots, 1, device)
        self._kernel = form(compute_reward_batched)
        reward_step(blank, start, self.config, self._kernel)

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """Carried state at the start of an episode."""
        return initial_state(n, slots, steps, device, self.config)

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """Reward one step."""
        return reward_step(inputs, state, self.config, self._kernel)

    def rollback_reward(self, state: RewardState) -> Tensor:
        """[N]: reward of the last row of a host that is rolled back now."""
        return rollback_reward(state, self.config)

    def reset_hosts(self, state: RewardState, mask: Tensor) -> RewardState:
        """Carried state with the masked hosts as at the start of an episode."""
        return reset_hosts(state, mask)


def _blank_inputs(n: int, slots: int, device: torch.device) -> RewardInputs:
    """Inputs of a step without operation or measurement, to compile with."""
    sizes = {"N": n, "S": slots}
    whole = torch.zeros(n, dtype=torch.int64, device=device)
    return RewardInputs(
        epoch=1,
        max_epochs=1,
        slots=blank(SlotState, sizes, device),
        hosts=blank(HostState, sizes, device),
        interactions=torch.zeros(n, slots, slots, device=device),
        ops=whole,
        target=whole,
        success=whole.bool(),
        auto_pruned=whole,
    )


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """One registered reward."""

    build: RewardFactory
    traits: ModeTraits


_REGISTRY: dict[str, RewardEntry] = {
    mode: RewardEntry(build=ObjectiveReward if mode == "objective" else ContributionReward, traits=traits)
    for mode, traits in MODES.items()
}


def register_reward(
    name: str, *, summary: str = "", time_limit: TimeLimit = "truncate", fossils_as_players: bool = False
) -> Callable[[RewardFactory], RewardFactory]:
    """Register a function `RewardConfig -> RewardProtocol` as `name`; raises RegistryError if it is taken."""
    if name in _REGISTRY:
        raise RegistryError(f"a reward named {name!r} is registered already; choose another name.")

    def register(build: RewardFactory) -> RewardFactory:
        traits = ModeTraits(summary=summary, time_limit=time_limit, fossils_as_players=fossils_as_players)
        _REGISTRY[name] = RewardEntry(build=build, traits=traits)
        return build

    return register


def reward_names() -> tuple[str, ...]:
    """All names that `make_reward` takes."""
    return tuple(_REGISTRY)


def reward_traits(name: str) -> ModeTraits:
    """Time limit and measurements that the reward `name` needs; raises RegistryError."""
    return _entry(name).traits


def make_reward(name: str, config: RewardConfig | None = None) -> AnyReward:
    """The reward `name`, with default numbers unless `config` is given.

    Raises:
        RegistryError: unknown name. ConfigError: `config` is for another built-in mode.
    """
    entry = _entry(name)
    if config is None:
        config = RewardConfig(mode=cast(RewardMode, name)) if name in MODES else RewardConfig()
    elif name in MODES and config.mode != name:
        raise ConfigError(
            f"reward {name!r} was given a configuration of mode {config.mode!r}; use config.with_mode({name!r})."
        )
    return entry.build(config)


def _entry(name: str) -> RewardEntry:
    if name not in _REGISTRY:
        raise RegistryError(f"no reward is named {name!r}; {nearest(name, _REGISTRY)}")
    return _REGISTRY[name]
