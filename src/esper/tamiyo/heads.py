"""Eight masked heads as one joint distribution: sample, log-probability, entropy, by the same code everywhere.

    op  ->  slot given op  ->  style given op and slot
     `--->  blueprint, tempo, alpha_target, alpha_speed, alpha_curve given op

A head that the op does not read may only take its canonical value; its log-probability, entropy and gradient are then
exactly zero, because a softmax over one choice is constant. All heads are laid out side by side, padded to the widest:

    logits, mask   [..., 8, V]     slot        | x x x . . . . |
                                   blueprint   | . x x x x x x |     x = may be chosen
                                   ...
Nothing here reads the device. What must never happen leaves a trace that does: a stored action outside its mask and a
logit that is not finite make the log-probability NaN, and with it the loss. `check_stored_actions` and `check_logits`
name the reason; they answer with a 0-dim tensor for the caller to fold into a read it makes anyway.

Shape legend: S = slots, B = blueprints, V = values of the widest head; leading axes are hosts, or hosts and steps.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import (
    HEADS,
    NUM_HEADS,
    NUM_OPS,
    RELEVANCE,
    Head,
    LifecycleOp,
    Style,
    head_sizes,
)
from esper.leyline.record import record

MASKED_LOGIT = -1e4
Logits = tuple[Float[Tensor, "*R _"], ...]
"""One tensor per head, in the order of `HEADS`."""


@record
class SampledHeads:
    """A decision and the log-probability of each of its parts."""

    actions: Int[Tensor, "*R 8"]
    log_prob: Float[Tensor, "*R 8"]


@record
class HeadsOutput:
    """A decision under the current policy.

    `entropy` is that of each head given the op and slot of `actions`, `entropy_avail` the same under all values that
    are possible for some legal op and slot. Both are divided by the logarithm of the number of choices, so they are in
    [0, 1], and 0 where there is no choice. `available`: the head has two or more choices for some legal op and slot.
    """

    actions: Int[Tensor, "*R 8"]
    log_prob: Float[Tensor, "*R 8"]
    entropy: Float[Tensor, "*R 8"]
    entropy_avail: Float[Tensor, "*R 8"]
    available: Bool[Tensor, "*R 8"]


def sample_heads(
    logits: Logits,
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
    uniforms: Float[Tensor, "*R 8"] | None = None,
    deterministic: bool = False,
) -> SampledHeads:
    """Decide, without entropies: what a rollout needs.

    `selectable` are the blueprints a controller may choose, `uniforms` one number in [0, 1) per head, read unless
    `deterministic`, which takes the most probable value of each head (the lowest index of equals).
    """
    rows, choices = _rows(logits, legal, selectable), _choices(legal, selectable)
    actions, mask = _decide(rows, choices, legal, has_gate, None if deterministic else uniforms)
    return SampledHeads(actions=actions, log_prob=_of_actions(_log_softmax(rows, mask), mask, actions))


def evaluate_heads(
    logits: Logits,
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
    actions: Int[Tensor, "*R 8"] | None = None,
    uniforms: Float[Tensor, "*R 8"] | None = None,
    deterministic: bool = False,
) -> HeadsOutput:
    """Evaluate stored `actions`, or decide as `sample_heads` does; differentiable in `logits`.

    The log-probability of a stored action outside its mask is NaN.
    """
    rows, choices = _rows(logits, legal, selectable), _choices(legal, selectable)
    if actions is None:
        actions, mask = _decide(rows, choices, legal, has_gate, None if deterministic else uniforms)
    else:
        mask = _masks(choices, legal, has_gate, actions)
    both = torch.stack((mask, _available_masks(choices, legal, has_gate)))
    log_p = _log_softmax(rows, both)
    count = both.sum(dim=-1)
    entropy, entropy_avail = (_entropy(log_p) * _tables_of(legal, selectable).inverse_log[count]).unbind(0)
    return HeadsOutput(
        actions=actions,
        log_prob=_of_actions(log_p[0], mask, actions),
        entropy=entropy,
        entropy_avail=entropy_avail,
        available=count[1] >= 2,
    )


def relevance(op: Int[Tensor, "*R"]) -> Bool[Tensor, "*R 8"]:
    """Which heads each op reads."""
    return _relevance(op.device)[op]


def forced(legal: Bool[Tensor, "*R 6 S"]) -> Bool[Tensor, "*R"]:
    """Whether WAIT is the only legal op."""
    return ~legal[..., LifecycleOp.WAIT + 1 :, :].flatten(-2).any(dim=-1)


def check_stored_actions(
    actions: Int[Tensor, "*R 8"],
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
) -> Bool[Tensor, ""]:
    """Whether every head of every row holds a value that its mask allows. Takes any integers; reads nothing."""
    tables = _tables_of(legal, selectable)
    in_range = (actions >= 0) & (actions < tables.sizes)
    inside = torch.where(in_range, actions, 0)
    mask = _masks(_choices(legal, selectable), legal, has_gate, inside)
    return (mask.gather(-1, inside[..., None]).squeeze(-1) & in_range).all()


def check_logits(logits: Logits) -> Bool[Tensor, ""]:
    """Whether every logit is finite. Reads nothing."""
    return torch.cat(logits, dim=-1).isfinite().all()


# Masks ----------------------------------------------------------------------------------------------------------------


def _choices(legal: Tensor, selectable: Tensor) -> Bool[Tensor, "6 8 V"]:
    """Values of each head given the op, before the state of the host restricts op, slot and style."""
    choices = _tables_of(legal, selectable).choices.clone()
    for op in HEADS[Head.BLUEPRINT].used_by:
        choices[op, Head.BLUEPRINT, : selectable.shape[0]] = selectable
    return choices


def _masks(choices: Tensor, legal: Tensor, has_gate: Tensor, actions: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """What each head could have chosen, given the op and slot that were."""
    op, slot = actions[..., Head.OP], actions[..., Head.SLOT]
    return _given_slot(_given_op(choices, legal, legal.any(dim=-1), op), has_gate, op, slot)


def _given_op(choices: Tensor, legal: Tensor, op_mask: Tensor, op: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """The masks of all heads but style, which also depends on the slot."""
    num_slots = legal.shape[-1]
    mask = choices[op]
    mask[..., Head.OP, :NUM_OPS] = op_mask
    legal_slots = legal.gather(-2, op[..., None, None].expand(*op.shape, 1, num_slots)).squeeze(-2)
    mask[..., Head.SLOT, :num_slots] &= legal_slots
    return mask


def _given_slot(mask: Tensor, has_gate: Tensor, op: Tensor, slot: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """`mask`, changed in place: a seed without a gate network cannot be retargeted to the style that needs one."""
    gate_here = has_gate.gather(-1, slot[..., None]).squeeze(-1)
    mask[..., Head.STYLE, Style.GATED_GATE] &= gate_here | (op != LifecycleOp.SET_ALPHA_TARGET)
    return mask


def _available_masks(choices: Tensor, legal: Tensor, has_gate: Tensor) -> Bool[Tensor, "*R 8 V"]:
    """Union of the masks of each head over all legal ops and slots that read it; empty where there are none."""
    read_6h = _relevance(legal.device)
    op_mask = legal.any(dim=-1)
    read_choices = (choices & read_6h[..., None]).to(torch.float32).flatten(1)
    mask = (op_mask.to(torch.float32) @ read_choices > 0).unflatten(-1, choices.shape[1:])
    mask[..., Head.OP, :NUM_OPS] = op_mask
    mask[..., Head.SLOT, : legal.shape[-1]] = (legal & read_6h[:, Head.SLOT, None]).any(dim=-2)
    gated = (legal[..., LifecycleOp.SET_ALPHA_TARGET, :] & has_gate).any(dim=-1)
    mask[..., Head.STYLE, Style.GATED_GATE] = op_mask[..., LifecycleOp.GERMINATE] | gated
    return mask


# Distributions --------------------------------------------------------------------------------------------------------


def _rows(logits: Logits, legal: Tensor, selectable: Tensor) -> Float[Tensor, "*R 8 V"]:
    """The heads side by side in float32; padding repeats some logit and is always masked."""
    sizes = head_sizes(legal.shape[-1], selectable.shape[0])
    assert tuple(head.shape[-1] for head in logits) == sizes, "the network was built for other heads"
    padding = _tables_of(legal, selectable).padding
    flat = torch.cat(logits, dim=-1).to(torch.float32)
    return flat.index_select(-1, padding).unflatten(-1, (NUM_HEADS, max(sizes)))


def _decide(
    rows: Tensor, choices: Tensor, legal: Tensor, has_gate: Tensor, uniforms: Tensor | None
) -> tuple[Int[Tensor, "*R 8"], Bool[Tensor, "*R 8 V"]]:
    """Op, then slot, then what depends on both; the actions and the masks they were drawn under."""
    num_slots = legal.shape[-1]
    # A view of each head's number: without any, the most probable value is taken.
    u = (None,) * NUM_HEADS if uniforms is None else uniforms.unbind(-1)
    op_mask = legal.any(dim=-1)
    op = _draw(rows[..., Head.OP, :NUM_OPS], op_mask, u[Head.OP])
    mask = _given_op(choices, legal, op_mask, op)
    slot = _draw(rows[..., Head.SLOT, :num_slots], mask[..., Head.SLOT, :num_slots], u[Head.SLOT])
    mask = _given_slot(mask, has_gate, op, slot)
    actions = _draw(rows, mask, uniforms)
    actions[..., Head.OP], actions[..., Head.SLOT] = op, slot
    return actions, mask


def _draw(logits: Tensor, mask: Tensor, u: Tensor | None) -> Int[Tensor, "*R"]:
    """Inverse CDF in float64: the smallest index whose cumulative probability exceeds u, else the last valid index.

    Masked probabilities are zero whatever the logits are, hence never drawn.
    """
    masked = torch.where(mask, logits, -torch.inf)
    if u is None:
        return masked.argmax(dim=-1)
    cumulative = masked.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    size = mask.shape[-1]
    last_valid = (mask * _indices(size, mask.device)).amax(dim=-1)
    return torch.minimum(size - (cumulative > u[..., None]).sum(dim=-1), last_valid)


def _log_softmax(rows: Tensor, mask: Tensor) -> Float[Tensor, "*M 8 V"]:
    """Log-probabilities under a mask; finite everywhere, so that `p log p` has a gradient."""
    return torch.where(mask, rows, MASKED_LOGIT).log_softmax(dim=-1)


def _of_actions(log_p: Tensor, mask: Tensor, actions: Tensor) -> Float[Tensor, "*R 8"]:
    """Log-probability of each action, NaN for one that is masked."""
    index = actions[..., None]
    return torch.where(mask.gather(-1, index), log_p.gather(-1, index), torch.nan).squeeze(-1)


def _entropy(log_p: Tensor) -> Float[Tensor, "*M 8"]:
    """`-sum p ln p`."""
    return -(log_p.exp() * log_p).sum(dim=-1)


# Constants ------------------------------------------------------------------------------------------------------------


@record
class _Tables:
    """Constants of one head layout: see `_choices`; index of each padded logit; 1 / ln(count), 0 below two choices."""

    sizes: Int[Tensor, " 8"]
    choices: Bool[Tensor, "6 8 V"]
    padding: Int[Tensor, " P"]
    inverse_log: Float[Tensor, " W"]


def _tables_of(legal: Tensor, selectable: Tensor) -> _Tables:
    return _tables(legal.shape[-1], selectable.shape[0], legal.device)


@lru_cache(maxsize=64)
def _tables(num_slots: int, num_blueprints: int, device: torch.device) -> _Tables:
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
    return _Tables(
        sizes=torch.tensor(sizes, device=device),
        choices=choices.to(device),
        padding=padding.flatten().to(device),
        inverse_log=inverse_log.to(device),
    )


def _one_hot(index: int, width: int) -> Tensor:
    return torch.arange(width) == index


@lru_cache(maxsize=64)
def _indices(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, device=device)


@lru_cache(maxsize=8)
def _relevance(device: torch.device) -> Bool[Tensor, "6 8"]:
    return torch.tensor(RELEVANCE, device=device)
