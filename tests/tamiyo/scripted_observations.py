"""Observations and steps for scripted controllers: everything empty except what a test names."""

import dataclasses
from typing import get_type_hints

import torch

from esper.leyline.lifecycle import HostFamily, SeedStage
from esper.leyline.messages import EngineSpec, HostState, Observation, SlotState, StoredStep

BOOLS = {"has_gate", "grad_vanishing", "grad_exploding", "last_success", "stabilized"}
SLOT_FLOATS = {
    "alpha", "alpha_start", "alpha_target", "alpha_steepness", "acc_at_germination", "acc_at_stage_start",
    "acc_at_blending_start", "contribution", "contribution_velocity", "interaction_sum", "boost_received",
    "grad_norm", "grad_health", "grad_health_prev", "grad_ratio_ema",
}  # fmt: skip
HOST_FLOATS = {
    "val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss", "acc_hist", "loss_hist",
    "committed_acc", "cf_total", "best_acc", "compute",
}  # fmt: skip
EMPTY = {"stage": int(SeedStage.DORMANT), "blueprint": -1, "contribution_step": -1, "alpha": 0.0, "alpha_target": 0.0,
         "compute": 0.0}  # fmt: skip


def _record(cls, floats: set[str], shape: tuple[int, ...], given: dict[str, torch.Tensor]):
    fields = {}
    for name in get_type_hints(cls):
        dtype = torch.bool if name in BOOLS else torch.float32 if name in floats else torch.int64
        missing = float("nan") if name in floats else 0
        full = (*shape, 5) if name.endswith("_hist") else shape
        fields[name] = torch.full(full, EMPTY.get(name, missing), dtype=dtype)
        if name in given:
            fields[name] = torch.as_tensor(given[name], dtype=dtype).expand(full).clone()
    assert set(given) <= set(fields)
    return cls(**fields)


def observation(t: int, legal: torch.Tensor, *, hosts: dict | None = None, **slots) -> Observation:
    """Observation of step `t`; `slots` are fields of `SlotState`, `hosts` fields of `HostState`."""
    n, _, s = legal.shape
    return Observation(
        t=t,
        episode_length=60,
        slots=_record(SlotState, SLOT_FLOATS, (n, s), slots),
        hosts=_record(HostState, HOST_FLOATS, (n,), hosts or {}),
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


TRANSFORMER = {"family": HostFamily.TRANSFORMER, "selectable": (2, 3, 8, 9, 10, 11, 12)}
