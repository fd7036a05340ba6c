"""Controllers to compare a learned one with, by name.

    wait_only             never grows: the score of the host alone
    random                any legal action, uniformly
    fixed_schedule        one seed at fixed steps (schedule `single`)
    fixed_schedule_fill   one seed in every slot at fixed steps (schedule `fill`)
    heuristic             hand-written rules
    explore_then_commit   measures some blueprints on each host, then grows the best of them
    static_final          waits, on hosts that start with the final structure of another controller

Shape legend: N = hosts, S = slots, V = values of a head.
"""

from collections.abc import Callable
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import HEADS, NUM_HEADS, Head, LifecycleOp, Style
from esper.leyline.errors import RegistryError, nearest
from esper.leyline.messages import EngineSpec, Observation, PolicyProtocol, StoredStep
from esper.leyline.random import Stream, uniform
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.explore_then_commit import ExploreThenCommit
from esper.tamiyo.heuristic import Heuristic
from esper.tamiyo.schedules import FixedSchedules, Remaining, Schedule, ScheduleTable, fill, single
from esper.tamiyo.scripted import NoMemory, Script, ScriptedPolicy, canonical_actions

STATIC = "static_final"


@final
class WaitOnly:
    """Always waits."""

    def __init__(self, spec: EngineSpec) -> None:
        self._wait = canonical_actions(spec.device)[LifecycleOp.WAIT]

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> NoMemory:
        """No memory."""
        del episode, hosts
        return NoMemory()

    def decide(self, obs: Observation, memory: NoMemory) -> Int[Tensor, "N 8"]:
        """WAIT."""
        del memory
        return self._wait.expand(obs.num_envs, -1).clone()

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """No memory."""
        del step
        return memory


@tensor_dataclass
class Draws:
    """Keys of the random draws: global host numbers and the episode."""

    hosts: Int[Tensor, " N"]
    episode: Int[Tensor, ""]


@final
class UniformRandom:
    """Draws op, slot and each head that the op reads uniformly among the legal values."""

    def __init__(self, spec: EngineSpec) -> None:
        self._run_seed = spec.run_seed
        self._heads = torch.arange(NUM_HEADS, device=spec.device)
        self._masks = _value_masks(spec)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Draws:
        """Keys of the draws of this episode."""
        return Draws(hosts=hosts, episode=torch.tensor(episode, device=hosts.device))

    def decide(self, obs: Observation, memory: Draws) -> Int[Tensor, "N 8"]:
        """One uniform per host and head: op, then slot given op, then the other heads."""
        u_N8 = uniform(
            self._run_seed, Stream.RANDOM_BASELINE, memory.hosts[:, None],
            episode=memory.episode, t=obs.t, block=self._heads,
        ).to(torch.float64)  # fmt: skip
        op_N = pick(obs.legal.any(dim=2), u_N8[:, Head.OP])
        row_N1S = op_N[:, None, None].expand(-1, 1, obs.num_slots)
        slot_N = pick(obs.legal.gather(1, row_N1S).squeeze(1), u_N8[:, Head.SLOT]) * (op_N != LifecycleOp.WAIT)
        masks_N8V = self._masks[op_N]
        has_gate_N = obs.has_gate.gather(1, slot_N[:, None]).squeeze(1)
        masks_N8V[:, Head.STYLE, Style.GATED_GATE] &= has_gate_N | (op_N != LifecycleOp.SET_ALPHA_TARGET)
        actions = pick(masks_N8V, u_N8)
        actions[:, Head.SLOT], actions[:, Head.OP] = slot_N, op_N
        return actions

    def remember(self, memory: Draws, step: StoredStep) -> Draws:
        """Unchanged: draws are keyed by the step."""
        del step
        return memory


def _value_masks(spec: EngineSpec) -> Bool[Tensor, "6 8 V"]:
    """Values of each head given the op: all where the op reads it (never op, slot), else the canonical one."""
    values = max(spec.head_sizes)

    def mask(op: LifecycleOp, head: Head) -> list[bool]:
        allowed: set[int] = {HEADS[head].canonical}
        if op in HEADS[head].used_by and head not in (Head.SLOT, Head.OP):
            allowed = set(spec.selectable) if head is Head.BLUEPRINT else set(range(HEADS[head].size))
        return [value in allowed for value in range(values)]

    return torch.tensor([[mask(op, head) for head in Head] for op in LifecycleOp], device=spec.device)


def pick(mask: Bool[Tensor, "*N V"], u: Float[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """Inverse CDF of the uniform distribution over a mask: the value number floor(u * count) of the allowed ones.

    Exact in float64, because u is a multiple of 2^-24 and counts are small.
    """
    rank = mask.cumsum(dim=-1)
    return (rank <= (u * rank[..., -1]).unsqueeze(-1)).sum(dim=-1)


def scheduled(schedule: Schedule, spec: EngineSpec) -> ScriptedPolicy[Remaining]:
    """A controller that follows `schedule`."""
    return ScriptedPolicy(FixedSchedules(ScheduleTable([schedule], spec)), spec)


PolicyMaker = Callable[[EngineSpec], PolicyProtocol | Script[Any]]
_MAKERS: dict[str, PolicyMaker] = {
    "wait_only": WaitOnly,
    "random": UniformRandom,
    "fixed_schedule": lambda spec: scheduled(single(spec), spec),
    "fixed_schedule_fill": lambda spec: scheduled(fill(spec), spec),
    "heuristic": Heuristic,
    "explore_then_commit": ExploreThenCommit,
    STATIC: WaitOnly,  # the comparison plants the structure (`VectorizedEngine.plant`)
}
BASELINES = tuple(_MAKERS)
"""Those of this package."""


def register_policy(name: str) -> Callable[[PolicyMaker], PolicyMaker]:
    """Decorate a class, or a function of the `EngineSpec`, that gives a script or a policy, to be used like a baseline.

    Raises:
        RegistryError: the name is taken.
    """
    if name in _MAKERS:
        raise RegistryError(f"a policy named {name!r} is registered already; choose another name.")

    def register(make: PolicyMaker) -> PolicyMaker:
        _MAKERS[name] = make
        return make

    return register


def policy_names() -> tuple[str, ...]:
    """All names that `make_baseline` knows."""
    return tuple(_MAKERS)


def make_baseline(name: str, spec: EngineSpec) -> PolicyProtocol:
    """The baseline or registered policy `name` for the engine of `spec`; raises RegistryError if there is none."""
    if name not in _MAKERS:
        raise RegistryError(f"unknown baseline {name!r}; {nearest(name, _MAKERS)}")
    return as_policy(_MAKERS[name](spec), spec)


def as_policy(made: PolicyProtocol | Script[Any], spec: EngineSpec) -> PolicyProtocol:
    """A policy as it is, a script as a policy."""
    return made if isinstance(made, PolicyProtocol) else ScriptedPolicy(made, spec)
