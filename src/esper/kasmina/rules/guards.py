"""Guards: which operation is legal on which slot. No other code decides this.

op                stage of the slot            alpha_mode   further condition
WAIT              any                          any
GERMINATE         DORMANT                      any          room for a seed; sequential: no young seed, no cooldown
SET_ALPHA_TARGET  BLENDING, HOLDING            HOLD         a gated style only where the seed has a gate network
PRUNE             GERMINATED..HOLDING          HOLD         age >= min_prune_age
FOSSILIZE         HOLDING                      HOLD
ADVANCE           stages whose gate is manual  HOLD, UP
"""

import itertools
from functools import lru_cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from esper.kasmina.rules.gates import LifecycleConfig
from esper.leyline.lifecycle import (
    COOLDOWN,
    GROWING,
    HAS_MODULE,
    NUM_STAGE_VALUES,
    STYLE_ALGORITHM,
    Algorithm,
    AlphaMode,
    Head,
    LifecycleOp,
    SeedStage,
    stages_mask,
)
from esper.leyline.messages import SlotState

_S, _M = SeedStage, AlphaMode
_ANY_MODE = frozenset(AlphaMode)
_STILL = frozenset({_M.HOLD})

_BLOCKS_GERMINATION = frozenset({_S.GERMINATED, _S.TRAINING}) | COOLDOWN
"""With `sequential`, no slot may germinate while another one is in these stages."""


@lru_cache(maxsize=64)
def stage_table(stages: frozenset[SeedStage], device: torch.device) -> Tensor:
    """Membership of each stage value, bool [11]."""
    return torch.tensor(stages_mask(stages), device=device)


def in_stages(stage: Int[Tensor, "N S"], stages: frozenset[SeedStage]) -> Bool[Tensor, "N S"]:
    """Whether each slot's stage is one of `stages`."""
    return stage_table(stages, stage.device)[stage]


def _rules(auto: tuple[bool, bool, bool]) -> dict[LifecycleOp, tuple[frozenset[SeedStage], frozenset[AlphaMode]]]:
    gated = zip((_S.GERMINATED, _S.TRAINING, _S.BLENDING), auto, strict=True)
    manual = frozenset(stage for stage, automatic in gated if not automatic)
    return {
        LifecycleOp.WAIT: (frozenset(SeedStage), _ANY_MODE),
        LifecycleOp.GERMINATE: (frozenset({_S.DORMANT}), _ANY_MODE),
        LifecycleOp.SET_ALPHA_TARGET: (frozenset({_S.BLENDING, _S.HOLDING}), _STILL),
        LifecycleOp.PRUNE: (GROWING, _STILL),
        LifecycleOp.FOSSILIZE: (frozenset({_S.HOLDING}), _STILL),
        LifecycleOp.ADVANCE: (manual, frozenset({_M.HOLD, _M.UP})),
    }


@lru_cache(maxsize=64)
def _rule_table(auto: tuple[bool, bool, bool], device: torch.device) -> Tensor:
    """`[((stage * 3 + mode) * 2 + aged) * 2 + free, op]`, bool: the rules above, one row per slot state.

    `aged`: old enough for PRUNE; `free`: the host may germinate.
    """
    rules = _rules(auto)

    def allowed(op: LifecycleOp, stage: int, mode: AlphaMode, aged: bool, free: bool) -> bool:
        blocked = (op is LifecycleOp.PRUNE and not aged) or (op is LifecycleOp.GERMINATE and not free)
        return stage in rules[op][0] and mode in rules[op][1] and not blocked

    states = itertools.product(range(NUM_STAGE_VALUES), AlphaMode, (False, True), (False, True))
    return torch.tensor([[allowed(op, *state) for op in LifecycleOp] for state in states], device=device)


def legal_ops(slots: SlotState, config: LifecycleConfig) -> Bool[Tensor, "N 6 S"]:
    """`legal[n, op, s]`, which masks, execution, effective ops and baselines all use."""
    table = _rule_table((config.auto_g1, config.auto_g2, config.auto_g3), slots.stage.device)
    aged = slots.age >= config.min_prune_age
    state = (slots.stage * 3 + slots.alpha_mode) * 4 + aged * 2 + _may_germinate(slots, config)[:, None]
    return table[state].transpose(1, 2).contiguous()


def _may_germinate(slots: SlotState, config: LifecycleConfig) -> Bool[Tensor, " N"]:
    """Hosts that may germinate another seed, if a slot is DORMANT."""
    num_slots = slots.stage.shape[1]
    max_seeds = num_slots if config.max_seeds is None else config.max_seeds
    free = torch.ones_like(slots.stage[:, 0], dtype=torch.bool)
    if config.sequential:
        free = ~in_stages(slots.stage, _BLOCKS_GERMINATION).any(dim=1)
    if 0 < max_seeds < num_slots:  # otherwise a DORMANT slot suffices
        free = free & (in_stages(slots.stage, HAS_MODULE).sum(dim=1) < max_seeds)
    return free


def resolve_target_slot(
    actions: Int[Tensor, "N 8"], legal: Bool[Tensor, "N 6 S"], has_gate: Bool[Tensor, "N S"]
) -> tuple[Int[Tensor, " N"], Bool[Tensor, " N"]]:
    """The slot each host's op aims at (the slot head), and whether the op is legal there with its style."""
    target_N, op_N, hosts_N = actions[:, Head.SLOT], actions[:, Head.OP], numbers(len(legal), legal.device)
    wants_gate = (op_N == LifecycleOp.SET_ALPHA_TARGET) & _gated_styles(op_N.device)[actions[:, Head.STYLE]]
    return target_N, legal[hosts_N, op_N, target_N] & (has_gate[hosts_N, target_N] | ~wants_gate)


@lru_cache(maxsize=8)
def _gated_styles(device: torch.device) -> Tensor:
    return torch.tensor([algorithm == Algorithm.GATE for algorithm in STYLE_ALGORITHM], device=device)


def advance_active_seed(slots: SlotState, target: Int[Tensor, " N"], where: Bool[Tensor, " N"]) -> Bool[Tensor, "N S"]:
    """The slots whose gate is asked in this step's tick: `target[n]` of the hosts in `where`."""
    return at_target(target, slots.stage.shape[1]) & where[:, None]


def at_target(target: Int[Tensor, " N"], num_slots: int) -> Bool[Tensor, "N S"]:
    """One-hot of the target slot."""
    return target[:, None] == numbers(num_slots, target.device)


@lru_cache(maxsize=64)
def numbers(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1."""
    return torch.arange(count, device=device)
