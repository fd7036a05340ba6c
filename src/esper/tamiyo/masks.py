"""Masks: which values each head may take.

    op                            any op that is legal on some slot
    slot       given op           where the op is legal; slot 0 for WAIT
    style      given op and slot  all values; SET_ALPHA_TARGET needs a gate network for GATED_GATE
    blueprint  given op           the selectable ones
    others     given op           all values

This holds where the op reads the head; elsewhere only the canonical value is allowed. WAIT is always legal, so no mask
is empty. The values of all heads are concatenated, and rows come last:

    mask [V, R]      slot       | x x x |
                     blueprint  | . x x x x x x x . . . . . |      x = 1, may be chosen; . = 0
                     ...

Masks are float32 with hosts as the innermost axis, because CPUs vectorize neither bool nor short inner axes.

Shape legend: S = slots, B = blueprints, V = values of all heads, R = rows: hosts, or hosts and steps.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import HEADS, NUM_OPS, RELEVANCE, Head, LifecycleOp, Style, head_sizes
from esper.leyline.tensor_dataclass import tensor_dataclass


def relevance(op: Int[Tensor, "*R"]) -> Bool[Tensor, "*R 8"]:
    """Which heads each op reads."""
    return _relevance(op.device)[op]


def forced(legal: Bool[Tensor, "*R 6 S"]) -> Bool[Tensor, "*R"]:
    """Whether WAIT is the only legal op."""
    return ~legal[..., LifecycleOp.WAIT + 1 :, :].any(dim=(-2, -1))


def legal_somewhere(legal: Bool[Tensor, "R 6 S"]) -> Float[Tensor, "6 R"]:
    """The mask of the op head."""
    return legal.any(dim=-1).t().to(torch.float32)


def choices_given_op(legal: Tensor, selectable: Tensor) -> Float[Tensor, "V 6"]:
    """Values of each head given the op, before the host's state restricts op, slot and style."""
    tables = tables_of(legal, selectable)
    choices = tables.choices.clone()
    for op in HEADS[Head.BLUEPRINT].used_by:
        choices[tables.values[Head.BLUEPRINT], op] = selectable.to(torch.float32)
    return choices


def masks_of(
    choices: Float[Tensor, "V 6"],
    legal: Bool[Tensor, "R 6 S"],
    has_gate: Bool[Tensor, "R S"],
    actions: Int[Tensor, "8 R"],
    tables: "HeadTables",
) -> Float[Tensor, "V R"]:
    """Masks of all heads given the op and slot of `actions`."""
    op, slot = actions[Head.OP], actions[Head.SLOT]
    mask = mask_given_op(choices, legal, legal_somewhere(legal), op, tables)
    return mask_given_slot(mask, has_gate, op, slot, tables)


def mask_given_op(
    choices: Tensor, legal: Tensor, op_mask: Tensor, op: Int[Tensor, " R"], tables: "HeadTables"
) -> Float[Tensor, "V R"]:
    """Masks of all heads; style still lacks its restriction by slot."""
    mask = choices.index_select(1, op)
    legal_slots = legal[_numbers(len(op), op.device), op]
    slots, ops = tables.values[Head.SLOT], tables.values[Head.OP]  # the first and the last head
    return torch.cat((mask[slots] * legal_slots.t(), mask[slots.stop : ops.start], op_mask))


def mask_given_slot(
    mask: Tensor, has_gate: Tensor, op: Tensor, slot: Tensor, tables: "HeadTables"
) -> Float[Tensor, "V R"]:
    """Remove GATED_GATE where SET_ALPHA_TARGET aims at a seed without a gate network; writes into `mask`."""
    gate_here = has_gate[_numbers(len(op), op.device), slot]
    mask[tables.gated_style].mul_(gate_here | (op != int(LifecycleOp.SET_ALPHA_TARGET)))
    return mask


def available_masks(choices: Tensor, legal: Tensor, has_gate: Tensor, tables: "HeadTables") -> Float[Tensor, "V R"]:
    """Union of the masks of each head over all legal ops and slots that read it; may be empty."""
    op_mask = legal_somewhere(legal)
    mask: Tensor = ((choices * tables.read) @ op_mask).clamp(max=1.0)
    mask[tables.values[Head.OP]] = op_mask
    reads_slot = _relevance(legal.device)[:, Head.SLOT, None]
    mask[tables.values[Head.SLOT]] = (legal & reads_slot).any(dim=-2).t().to(torch.float32)
    gated = (legal[:, LifecycleOp.SET_ALPHA_TARGET] & has_gate).any(dim=-1)
    mask[tables.gated_style] = torch.maximum(op_mask[LifecycleOp.GERMINATE], gated.to(torch.float32))
    return mask


@tensor_dataclass
class HeadTables:
    """Constants of one layout of the heads.

    `sizes` of the heads; `values`: their slices; `gated_style`: index of GATED_GATE; `choices` of each head given the
    op; `read`: whether the op reads the head; `inverse_log[n]`: 1 / ln n, 0 for n < 2.
    """

    sizes: tuple[int, ...]
    values: tuple[slice, ...]
    gated_style: int
    choices: Float[Tensor, "V 6"]
    read: Float[Tensor, "V 6"]
    inverse_log: Float[Tensor, " W"]


def tables_of(legal: Tensor, selectable: Tensor) -> HeadTables:
    """The constants for these numbers of slots and blueprints."""
    return _tables(legal.shape[-1], selectable.shape[0], legal.device)


@lru_cache(maxsize=64)
def _tables(num_slots: int, num_blueprints: int, device: torch.device) -> HeadTables:
    sizes = head_sizes(num_slots, num_blueprints)
    ends = list(accumulate(sizes))
    values = tuple(slice(end - size, end) for end, size in zip(ends, sizes, strict=True))
    read, choices = torch.zeros(ends[-1], NUM_OPS), torch.zeros(ends[-1], NUM_OPS)
    for spec, own in zip(HEADS, values, strict=True):
        for op in LifecycleOp:
            read[own, op] = float(op in spec.used_by)
            choices[own if op in spec.used_by else own.start + spec.canonical, op] = 1.0
    inverse_log = torch.arange(max(sizes) + 1).clamp(min=2).log().reciprocal()
    inverse_log[:2] = 0.0
    return HeadTables(
        sizes=sizes,
        values=values,
        gated_style=values[Head.STYLE].start + Style.GATED_GATE,
        choices=choices.to(device),
        read=read.to(device),
        inverse_log=inverse_log.to(device),
    )


@lru_cache(maxsize=16)
def _numbers(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1."""
    return torch.arange(count, device=device)


@lru_cache(maxsize=8)
def _relevance(device: torch.device) -> Bool[Tensor, "6 8"]:
    return torch.tensor(RELEVANCE, device=device)
