"""Controllers that do not learn: a pure script wrapped in `ScriptedPolicy`.

    begin                  -> memory         a flat dataclass of tensors
    decide(obs, memory)    -> actions        eight head values per host
    remember(memory, step) -> memory         from the outcome of the step, because operations can be refused

Shape legend: N = hosts, S = slots.
"""

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar, final, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, in_words, is_own
from esper.leyline.lifecycle import HEAD_NAMES, NUM_HEADS, NUM_OPS, Head, LifecycleOp
from esper.leyline.lifecycle import canonical_action as canonical_action
from esper.leyline.messages import ActResult, EngineSpec, Hidden, Observation, StoredStep
from esper.leyline.tensor_dataclass import StateTree, blank, named_tensors, replace, restored, tensor_dataclass

M = TypeVar("M")


@tensor_dataclass
class NoMemory:
    """Memory of a stateless script."""


@runtime_checkable
class Script(Protocol[M]):
    """A rule that decides each step. `M` is a flat dataclass of tensors."""

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> M:
        """Memory at the start of an episode."""

    def decide(self, obs: Observation, memory: M) -> Int[Tensor, "N 8"]:
        """The actions of this step; each must be legal."""

    def remember(self, memory: M, step: StoredStep) -> M:
        """Memory after a step."""


class Stateless:
    """Base of a script that remembers nothing; what is left to write is `decide`."""

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> NoMemory:
        """Nothing."""
        del episode, hosts
        return NoMemory()

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """Nothing."""
        del step
        return memory


@final
class ScriptedPolicy(Generic[M]):
    """A controller that follows a script. `deterministic` has no effect: `random` stays random."""

    def __init__(self, script: Script[M], spec: EngineSpec) -> None:
        self.script = script
        self._device, self._sizes = spec.device, torch.tensor(spec.head_sizes)
        self.begin_rollout(0, spec.host_ids())

    def initial_hidden(self, n: int) -> Hidden:
        """Two tensors [1, n, 0]."""
        return Hidden(h=torch.zeros(1, n, 0, device=self._device), c=torch.zeros(1, n, 0, device=self._device))

    def begin_rollout(self, episode: int, hosts: Int[Tensor, " N"]) -> None:
        """Restart the script."""
        self._memory = self.script.begin(episode, hosts)
        self._blank = blank(ActResult, {"N": len(hosts), "D": 0, "L": 1, "H": 0}, hosts.device)
        self._blank.op_prob.fill_(torch.nan)

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        """The script's actions for all hosts; changes no state."""
        del deterministic
        actions = self._decided(obs) if is_own(self.script) else self.script.decide(obs, self._memory)
        return replace(self._blank, actions=actions)

    def _decided(self, obs: Observation) -> Int[Tensor, "N 8"]:
        """The actions of a script of the user's; raises ConfigError for others than int64 [N, 8] in the action space.

        Values are looked at on a CPU alone, where that is no read of a device.
        """
        name, wanted = type(self.script).__name__, (obs.num_envs, NUM_HEADS)
        try:
            actions = self.script.decide(obs, self._memory)
        except EsperError:
            raise
        except Exception as error:  # any error of the user's code
            raise ConfigError(f"the policy {name} fails in step {obs.t}: {in_words(error)}") from error
        if not isinstance(actions, Tensor) or actions.shape != wanted or actions.dtype != torch.int64:
            found = (
                f"{list(actions.shape)} of {actions.dtype}" if isinstance(actions, Tensor) else type(actions).__name__
            )
            raise ConfigError(
                f"the policy {name} gives actions {found}; they must be int64 {list(wanted)}: a row for each host, "
                f"with the values of {', '.join(HEAD_NAMES)}."
            )
        if actions.device.type == "cpu" and (outside := (actions < 0) | (actions >= self._sizes)).any():
            host, head = outside.nonzero()[0].tolist()
            raise ConfigError(
                f"the policy {name} gives host {host} {HEAD_NAMES[head]} = {int(actions[host, head])} in step {obs.t}; "
                f"it must be in 0 to {int(self._sizes[head]) - 1}."
            )
        return actions

    def store(self, step: StoredStep) -> None:
        """Update the script's memory."""
        self._memory = self.script.remember(self._memory, step)

    def bootstrap(self, obs: Observation) -> Float[Tensor, " N"]:
        """Zeros."""
        del obs
        return self._blank.value

    def rollback(self, mask: Bool[Tensor, " N"], reward: Float[Tensor, " N"]) -> None:
        """Nothing: no transition is stored."""

    def update(self) -> Mapping[str, float]:
        """No metrics."""
        return {}

    def state_dict(self) -> StateTree:
        """The script's memory."""
        return dict(named_tensors(self._memory))

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        self._memory = restored(self._memory, state, "scripted controller")


def canonical_actions(device: torch.device) -> Int[Tensor, "6 8"]:
    """The canonical action of each operation, one row per operation."""
    return torch.tensor([canonical_action(LifecycleOp(op)) for op in range(NUM_OPS)], device=device)


@final
class FirstWanted:
    """Gives each host the first operation that is wanted and legal, in the first slot where it is.

    `priority`: operations in their order, the last one WAIT. `slots`: all slots in their order.
    """

    def __init__(self, priority: Sequence[LifecycleOp], slots: Sequence[int], device: torch.device) -> None:
        self._priority, self._slots = torch.tensor(priority, device=device), torch.tensor(slots, device=device)
        self._canonical = canonical_actions(device)

    def actions(
        self, wanted: Bool[Tensor, "N O S"], legal: Bool[Tensor, "N 6 S"], blueprint: Int[Tensor, " N"], tempo: int
    ) -> Int[Tensor, "N 8"]:
        """`wanted` is in the order of `priority`; `blueprint` and `tempo` are those of a seed that germinates."""
        possible_NOS = wanted & legal.index_select(1, self._priority)
        first_N = possible_NOS.index_select(2, self._slots).flatten(1).to(torch.int8).argmax(dim=1)
        op_N, slot_N = self._priority[first_N // len(self._slots)], self._slots[first_N % len(self._slots)]
        actions, germinates_N = self._canonical[op_N], op_N == LifecycleOp.GERMINATE
        actions[:, Head.SLOT] = slot_N * (op_N != LifecycleOp.WAIT)
        actions[:, Head.BLUEPRINT] = blueprint * germinates_N
        actions[:, Head.TEMPO].masked_fill_(germinates_N, tempo)
        return actions
