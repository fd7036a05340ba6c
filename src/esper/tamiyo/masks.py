"""Which values each head may take: the rules of legality, turned into masks over the values of the heads.

    op                            any op that is legal on some slot
    slot       given op           where the op is legal; slot 0 for WAIT
    style      given op and slot  all values; but SET_ALPHA_TARGET cannot give a gate to a seed that has none
    blueprint  given op           the selectable ones
    others     given op           all values

That is where the op reads the head; elsewhere the head may only take its canonical value. As WAIT is always legal, no
mask is empty. The heads lie side by side, padded to the widest:

    mask [..., 8, V]    slot        | x x x . . . . |
                        blueprint   | . x x x x x x |     x = may be chosen
                        ...

Shape legend: S = slots, B = blueprints, V = values of the widest head; leading axes R are hosts, or hosts and steps.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import HEADS, NUM_HEADS, NUM_OPS, RELEVANCE, Head, LifecycleOp, Style, head_sizes
from esper.leyline.record import record


def relevance(op: Int[Tensor, "*R"]) -> Bool[Tensor, "*R 8"]:
    """Which heads each op reads."""
    return _relevance(op.device)[op]


def forced(legal: Bool[Tensor, "*R 6 S"]) -> Bool[Tensor, "*R"]:
    """Whether WAIT is the only legal op."""
    return ~legal[..., LifecycleOp.WAIT + 1 :, :].flatten(-2).any(dim=-1)


def choices_given_op(legal: Tensor, selectable: Tensor) -> Bool[Tensor, "6 8 V"]:
    """Values of each head given the op alone, before the state of the host restricts op, slot and style."""
    choices = tables_of(legal, selectable).choices.clone()
    for op in HEADS[Head.BLUEPRINT].used_by:
        choices[op, Head.BLUEPRINT, : selectable.shape[0]] = selectable
    return choices


def masks_of(choices: Tensor, legal: Tensor, has_gate: Tensor, actions: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """What each head could have chosen, given the op and slot that were."""
    op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
    return mask_given_slot(mask_given_op(choices, legal, legal.any(dim=-1), op), has_gate, op, slot)


def mask_given_op(choices: Tensor, legal: Tensor, op_mask: Tensor, op: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """The masks of all heads but style, which also depends on the slot."""
    num_slots = legal.shape[-1]
    mask: Tensor = choices[op]
    mask[..., Head.OP, :NUM_OPS] = op_mask
    legal_slots = legal.gather(-2, op[..., None, None].expand(*op.shape, 1, num_slots)).squeeze(-2)
    mask[..., Head.SLOT, :num_slots] &= legal_slots
    return mask


def mask_given_slot(mask: Tensor, has_gate: Tensor, op: Tensor, slot: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """`mask`, changed in place: a seed without a gate network cannot be retargeted to the style that needs one."""
    gate_here = has_gate.gather(-1, slot[..., None]).squeeze(-1)
    mask[..., Head.STYLE, Style.GATED_GATE] &= gate_here | (op != int(LifecycleOp.SET_ALPHA_TARGET))
    return mask


def available_masks(choices: Tensor, legal: Tensor, has_gate: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """Union of the masks of each head over all legal ops and slots that read it; empty where there are none."""
    read_6h = _relevance(legal.device)
    op_mask = legal.any(dim=-1)
    read_choices = (choices & read_6h[..., None]).to(torch.float32).flatten(1)
    count = op_mask.to(torch.float32) @ read_choices
    mask: Tensor = (count > 0).unflatten(-1, choices.shape[1:])
    mask[..., Head.OP, :NUM_OPS] = op_mask
    mask[..., Head.SLOT, : legal.shape[-1]] = (legal & read_6h[:, Head.SLOT, None]).any(dim=-2)
    gated = (legal[..., LifecycleOp.SET_ALPHA_TARGET, :] & has_gate).any(dim=-1)
    mask[..., Head.STYLE, Style.GATED_GATE] = op_mask[..., LifecycleOp.GERMINATE] | gated
    return mask


@record
class HeadTables:
    """Constants of one layout of the heads.

    `sizes` of the heads; `choices` of each head given the op; `padding`, the place of each padded logit among all
    logits; `inverse_log[n]`, 1 / ln n, and 0 below two choices.
    """

    sizes: Int[Tensor, " 8"]
    choices: Bool[Tensor, "6 8 V"]
    padding: Int[Tensor, " P"]
    inverse_log: Float[Tensor, " W"]


def tables_of(legal: Tensor, selectable: Tensor) -> HeadTables:
    """The constants for as many slots and blueprints as the masks have."""
    return _tables(legal.shape[-1], selectable.shape[0], legal.device)


@lru_cache(maxsize=64)
def _tables(num_slots: int, num_blueprints: int, device: torch.device) -> HeadTables:
    sizes = head_sizes(num_slots, num_blueprints)
    width = max(sizes)
    choices = torch.zeros(NUM_OPS, NUM_HEADS, width, dtype=torch.bool)
    padding, start = torch.zeros(NUM_HEADS, width, dtype=torch.int64), 0
    for head, (spec, size) in enumerate(zip(HEADS, sizes, strict=True)):
        for op in LifecycleOp:
            choices[op, head] = torch.arange(width) < size if op in spec.used_by else _one_hot(spec.canonical, width)
        padding[head, :size] = torch.arange(start, start + size)
        start += size
    inverse_log = torch.arange(width + 1).clamp(min=2).log().reciprocal()
    inverse_log[:2] = 0.0
    return HeadTables(
        sizes=torch.tensor(sizes, device=device),
        choices=choices.to(device),
        padding=padding.flatten().to(device),
        inverse_log=inverse_log.to(device),
    )


def _one_hot(index: int, width: int) -> Tensor:
    return torch.arange(width) == index


@lru_cache(maxsize=8)
def _relevance(device: torch.device) -> Bool[Tensor, "6 8"]:
    return torch.tensor(RELEVANCE, device=device)
