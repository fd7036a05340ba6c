"""Guards: which operation is legal on which slot. The only code that decides this.

op                stage of the slot            alpha_mode   further condition
WAIT              any                          any
GERMINATE         DORMANT                      any          room for a seed; sequential: nothing young or cooling
SET_ALPHA_TARGET  BLENDING, HOLDING            HOLD
PRUNE             GERMINATED..HOLDING          HOLD         age >= min_prune_age
FOSSILIZE         HOLDING                      HOLD
ADVANCE           stages whose gate is manual  HOLD, UP
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from esper.kasmina.config import LifecycleConfig
from esper.leyline.actions import NUM_OPS, Head, LifecycleOp
from esper.leyline.messages import SlotState
from esper.leyline.stages import (
    COOLDOWN,
    GROWING,
    HAS_MODULE,
    NUM_STAGE_VALUES,
    AlphaMode,
    SeedStage,
    stages_mask,
)

_S, _M = SeedStage, AlphaMode
_ANY_MODE = frozenset(AlphaMode)
_STILL = frozenset({_M.HOLD})

_BLOCKS_GERMINATION = frozenset({_S.GERMINATED, _S.TRAINING}) | COOLDOWN
"""Stages that keep other slots from germinating when `sequential`: attribution stays readable."""


@lru_cache(maxsize=64)
def stage_table(stages: frozenset[SeedStage], device: torch.device) -> Tensor:
    """Membership of each stage value, bool [11]."""
    return torch.tensor(stages_mask(stages), device=device)


def in_stages(stage: Int[Tensor, "N S"], stages: frozenset[SeedStage]) -> Bool[Tensor, "N S"]:
    """Whether each slot's stage is one of `stages`."""
    return stage_table(stages, stage.device)[stage]


def _rules(auto: tuple[bool, bool, bool]) -> dict[LifecycleOp, tuple[frozenset[SeedStage], frozenset[AlphaMode]]]:
    manual = {
        stage
        for stage, opens_itself in zip((_S.GERMINATED, _S.TRAINING, _S.BLENDING), auto, strict=True)
        if not opens_itself
    }
    return {
        LifecycleOp.WAIT: (frozenset(SeedStage), _ANY_MODE),
        LifecycleOp.GERMINATE: (frozenset({_S.DORMANT}), _ANY_MODE),
        LifecycleOp.SET_ALPHA_TARGET: (frozenset({_S.BLENDING, _S.HOLDING}), _STILL),
        LifecycleOp.PRUNE: (GROWING, _STILL),
        LifecycleOp.FOSSILIZE: (frozenset({_S.HOLDING}), _STILL),
        LifecycleOp.ADVANCE: (frozenset(manual), frozenset({_M.HOLD, _M.UP})),
    }


@lru_cache(maxsize=64)
def _rule_table(auto: tuple[bool, bool, bool], device: torch.device) -> Tensor:
    """`[stage * 3 + mode, op]`, bool: the columns "stage" and "alpha_mode" of the table above."""
    rules = _rules(auto)
    rows = [
        [stage in rules[op][0] and mode in rules[op][1] for op in LifecycleOp]
        for stage in range(NUM_STAGE_VALUES)
        for mode in AlphaMode
    ]
    return torch.tensor(rows, device=device)


def legal_ops(slots: SlotState, config: LifecycleConfig) -> Bool[Tensor, "N 6 S"]:
    """`legal[n, op, s]`. Masks, execution, effective ops and baselines all read this and nothing else."""
    num_slots = slots.stage.shape[1]
    table = _rule_table((config.auto_g1, config.auto_g2, config.auto_g3), slots.stage.device)
    legal = table[slots.stage * 3 + slots.alpha_mode].transpose(1, 2).contiguous()
    assert legal.shape[1] == NUM_OPS
    max_seeds = num_slots if config.max_seeds is None else config.max_seeds
    if config.sequential:
        free = ~in_stages(slots.stage, _BLOCKS_GERMINATION).any(dim=1)
        legal[:, LifecycleOp.GERMINATE] &= free[:, None]
    if 0 < max_seeds < num_slots:  # with one seed per slot a DORMANT slot is room enough
        room = in_stages(slots.stage, HAS_MODULE).sum(dim=1) < max_seeds
        legal[:, LifecycleOp.GERMINATE] &= room[:, None]
    legal[:, LifecycleOp.PRUNE] &= slots.age >= config.min_prune_age
    return legal


def resolve_target_slot(
    actions: Int[Tensor, "N 8"], legal: Bool[Tensor, "N 6 S"]
) -> tuple[Int[Tensor, " N"], Bool[Tensor, " N"]]:
    """The slot each host's op aims at (the slot head), and whether the op is legal there."""
    target_N, op_N = actions[:, Head.SLOT], actions[:, Head.OP]
    flat = legal.flatten(1)
    valid = flat.gather(1, (op_N * legal.shape[2] + target_N)[:, None]).squeeze(1)
    return target_N, valid


def advance_active_seed(slots: SlotState, target: Int[Tensor, " N"], where: Bool[Tensor, " N"]) -> Bool[Tensor, "N S"]:
    """The slots that ask their gate to open in this step's tick: `target[n]` of the hosts in `where`.

    The request is handed to `lifecycle.tick` and lives no longer; it succeeds if the transition happens there.
    """
    return at_target(target, slots.stage.shape[1]) & where[:, None]


def at_target(target: Int[Tensor, " N"], num_slots: int) -> Bool[Tensor, "N S"]:
    """One-hot of the target slot."""
    return target[:, None] == torch.arange(num_slots, device=target.device)
