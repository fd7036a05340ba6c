"""The reward as the engine sees it, and the registry through which users add their own.

@register_reward("accuracy_only", time_limit="terminate")
def build(config: RewardConfig) -> RewardProtocol: ...

reward = make_reward("objective")            # one of the nine modes, or a registered name
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError, RegistryError, nearest
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.leyline.protocols import RewardProtocol
from esper.leyline.record import replace
from esper.simic.compilation import CompileChoice, explained
from esper.simic.rewards.compilation import blank_inputs, kernel_for
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.rewards.compiled_rewards import RewardOutput as KernelOutput
from esper.simic.rewards.config import MODES, ModeTraits, RewardConfig, RewardMode, TimeLimit
from esper.simic.rewards.state import (
    RewardState,
    Step,
    initial_state,
    reset_hosts,
    reward_step,
    rollback_reward,
    without_ledger,
)
from esper.simic.rewards.terms import REWARD_TERMS

if TYPE_CHECKING:
    AnyReward: TypeAlias = RewardProtocol[Any]
else:  # a structural type cannot be checked while tests run
    AnyReward = object

RewardFactory = Callable[[RewardConfig], AnyReward]


def _as_it_is(kernel: Kernel) -> Kernel:
    return kernel


@final
class ContributionReward:
    """The nine built-in modes behind `RewardProtocol`: all that differs between them is in the configuration."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._pay: Kernel = compute_reward_batched
        self._step: Step | None = None

    def warm_up(
        self,
        choice: CompileChoice,
        n: int,
        slots: int,
        device: torch.device,
        *,
        replayed: Callable[[Kernel], Kernel] = _as_it_is,
        recorded: Callable[[Step], Step] | None = None,
    ) -> None:
        """Choose the form of the reward, and make it now rather than in the first step of a run of `n` hosts.

        `replayed` makes a kernel that is recorded in its first calls, which are made here too; `recorded` another form
        of the whole step but its ledger.

        Raises:
            ConfigError: the kernel cannot be compiled or recorded here.
        """
        kernel = kernel_for(choice, device)
        self._pay = replayed(kernel)
        blank, start = blank_inputs(n, slots, device), initial_state(n, slots, 2, device, self.config)
        try:
            if kernel is not compute_reward_batched:
                reward_step(blank, start, self.config, kernel)
        except (RuntimeError, ImportError) as error:  # what every part of the compiler raises; its insides may move
            raise explained("the reward kernel", error) from error
        if recorded is not None:
            self._step = recorded(partial(without_ledger, config=self.config, pay=kernel))
            for epoch in (1, 2):  # of two steps: before the last, and the last
                reward_step(replace(blank, epoch=epoch, max_epochs=2), start, self.config, kernel, self._step)
        if self._pay is not kernel:
            for _ in range(2):
                reward_step(blank, start, self.config, self._pay)

    @property
    def terms(self) -> Sequence[str]:
        """Names of the columns of a breakdown."""
        return REWARD_TERMS

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """Carried state at the start of an episode."""
        return initial_state(n, slots, steps, device, self.config)

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """Pay one step."""
        return reward_step(inputs, state, self.config, self.pay, self._step)

    def pay(self, **arguments: Any) -> KernelOutput:  # noqa: ANN401 -- those of `compute_reward_batched`
        """The kernel, eager or compiled as it was chosen."""
        return self._pay(**arguments)

    def rollback_reward(self, state: RewardState) -> Tensor:
        """[N]: what the last row of a host is paid instead when the host is rolled back now."""
        return rollback_reward(state, self.config)

    def reset_hosts(self, state: RewardState, mask: Tensor) -> RewardState:
        """Carried state with the masked hosts as at the start of an episode."""
        return reset_hosts(state, mask)


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """One registered reward: how it is built, and what the assembly of a run must know of it."""

    build: RewardFactory
    traits: ModeTraits


_REGISTRY: dict[str, RewardEntry] = {
    mode: RewardEntry(build=ContributionReward, traits=traits) for mode, traits in MODES.items()
}


def register_reward(
    name: str, *, summary: str = "", time_limit: TimeLimit = "truncate", fossils_as_players: bool = False
) -> Callable[[RewardFactory], RewardFactory]:
    """Make a reward known under `name`; decorates a function `RewardConfig -> RewardProtocol`.

    Raises:
        RegistryError: the name is taken.
    """
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
    """Time limit and measurements that the reward `name` asks for; raises RegistryError."""
    return _entry(name).traits


def make_reward(name: str, config: RewardConfig | None = None) -> AnyReward:
    """The reward `name`, with default numbers unless `config` is given.

    Raises:
        RegistryError: nobody registered the name. ConfigError: `config` is for another of the built-in modes.
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
