"""Observations and steps for scripted controllers: everything empty except what a test names."""

import dataclasses
import math

import torch

from esper.leyline.lifecycle import HostFamily, SeedStage
from esper.leyline.messages import EngineSpec, HostState, Observation, SlotState, StoredStep
from esper.leyline.tensor_dataclass import blank

EMPTY = {"stage": int(SeedStage.DORMANT), "blueprint": -1, "contribution_step": -1, "alpha": 0.0, "alpha_target": 0.0,
         "compute": 0.0}  # fmt: skip


def _record(cls, sizes: dict[str, int], given: dict[str, torch.Tensor]):
    fields = {}
    for name, zeros in vars(blank(cls, sizes, torch.device("cpu"))).items():
        missing = EMPTY.get(name, math.nan if zeros.is_floating_point() else 0)
        value = torch.as_tensor(given.get(name, missing), dtype=zeros.dtype)
        fields[name] = value.expand_as(zeros).clone()
    assert set(given) <= set(fields)
    return cls(**fields)


def observation(t: int, legal: torch.Tensor, *, hosts: dict | None = None, **slots) -> Observation:
    """Observation of step `t`; `slots` are fields of `SlotState`, `hosts` fields of `HostState`."""
    n, _, s = legal.shape
    return Observation(
        t=t,
        episode_length=60,
        slots=_record(SlotState, {"N": n, "S": s}, slots),
        hosts=_record(HostState, {"N": n}, hosts or {}),
        legal=legal,
    )


def legal_only(num_envs: int, num_slots: int, *pairs: tuple[int, int]) -> torch.Tensor:
    """`legal` with WAIT everywhere and the given (op, slot) on every host."""
    legal = torch.zeros(num_envs, 6, num_slots, dtype=torch.bool)
    legal[:, 0] = True
    for op, slot in pairs:
        legal[:, op, slot] = True
    return legal


def step(
    obs: Observation, act, effective_op: torch.Tensor | None = None, valid: torch.Tensor | None = None
) -> StoredStep:
    """What the engine stores; every op took effect by default."""
    n = obs.num_envs
    never, zero = torch.zeros(n, dtype=torch.bool), torch.zeros(n)
    return StoredStep(
        t=obs.t,
        obs=obs,
        act=act,
        effective_op=act.actions[:, 7] if effective_op is None else effective_op,
        reward=zero,
        terminal=never,
        truncated=never,
        bootstrap_value=zero,
        valid=~never if valid is None else valid,
    )


def engine_spec(num_envs: int = 1, num_slots: int = 3, **changes) -> EngineSpec:
    """A convolutional engine with M = 10."""
    spec = EngineSpec(
        run_seed=3,
        num_envs=num_envs,
        slot_ids=tuple(f"r0c{i}" for i in range(num_slots)),
        episode_length=60,
        family=HostFamily.CNN,
        selectable=(1, 2, 3, 4, 5, 6, 7),
    )
    return dataclasses.replace(spec, **changes)


NAMES = ("noop", "conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy", *"abcde")
TRANSFORMER = {"family": HostFamily.TRANSFORMER, "selectable": (2, 3, 8, 9, 10, 11, 12)}
