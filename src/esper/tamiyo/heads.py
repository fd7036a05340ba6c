"""Eight masked heads as one joint distribution: sample, log-probability, entropy, by the same code everywhere.

    op  ->  slot given op  ->  style given op and slot
     `--->  blueprint, tempo, alpha_target, alpha_speed, alpha_curve given op

A head that the op does not read may only take its canonical value; its log-probability, entropy and gradient are then
exactly zero, because a softmax over one choice is constant. The heads lie side by side, padded to the widest.

Nothing here reads the device. What must never happen leaves a trace that does: a stored action outside its mask and a
logit that is not finite make the log-probability NaN, and with it the loss. `check_stored_actions` and `check_logits`
name the reason: their 0-dim answers are metrics of an update, which travel in the one read it makes.

Shape legend: S = slots, B = blueprints, V = values of the widest head; leading axes R are hosts, or hosts and steps.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import NUM_HEADS, NUM_OPS, Head, head_sizes
from esper.leyline.record import record
from esper.tamiyo.masks import (
    available_masks,
    choices_given_op,
    mask_given_op,
    mask_given_slot,
    masks_of,
    tables_of,
)
from esper.tamiyo.masks import forced as forced
from esper.tamiyo.masks import relevance as relevance

MASKED_LOGIT = -1e4
MIN_RELATIVE = -80.0
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
    rows, choices = _rows(logits, legal, selectable), choices_given_op(legal, selectable)
    decision = _decide(rows, choices, legal, has_gate, _numbers(uniforms, deterministic))
    relative = _relative(rows, decision.mask)
    log_prob = _log_prob(rows, decision, relative.top, relative.logits.exp().sum(dim=-1))
    return SampledHeads(actions=decision.actions, log_prob=log_prob)


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
    rows, choices = _rows(logits, legal, selectable), choices_given_op(legal, selectable)
    if actions is None:
        decision = _decide(rows, choices, legal, has_gate, _numbers(uniforms, deterministic))
    else:
        decision = _Decision(actions=actions, mask=masks_of(choices, legal, has_gate, actions))
    both = torch.stack((decision.mask, available_masks(choices, legal, has_gate)))
    relative, count = _relative(rows, both), both.sum(dim=-1)
    weights = relative.logits.exp()
    total = weights.sum(dim=-1)
    # -sum p ln p of p = w / sum w
    raw_entropy = total.log() - (weights * relative.logits).sum(dim=-1) / total
    entropy, entropy_avail = (raw_entropy * tables_of(legal, selectable).inverse_log[count]).unbind(0)
    return HeadsOutput(
        actions=decision.actions,
        log_prob=_log_prob(rows, decision, relative.top[0], total[0]),
        entropy=entropy,
        entropy_avail=entropy_avail,
        available=count[1] >= 2,
    )


def check_stored_actions(
    actions: Int[Tensor, "*R 8"],
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
) -> Bool[Tensor, ""]:
    """Whether every head of every row holds a value that its mask allows. Takes any integers; reads nothing."""
    tables = tables_of(legal, selectable)
    in_range = (actions >= 0) & (actions < tables.sizes)
    inside = torch.where(in_range, actions, 0)
    mask = masks_of(choices_given_op(legal, selectable), legal, has_gate, inside)
    return (mask.gather(-1, inside[..., None]).squeeze(-1) & in_range).all()


def check_logits(logits: Logits) -> Bool[Tensor, ""]:
    """Whether every logit is finite. Reads nothing."""
    return torch.cat(logits, dim=-1).isfinite().all()


@record
class _Decision:
    """Actions, and the masks they were drawn under."""

    actions: Int[Tensor, "*R 8"]
    mask: Bool[Tensor, "*R 8 V"]


@record
class _Relative:
    """Masked logits minus `top`, the largest of their head."""

    logits: Float[Tensor, "*R V"]
    top: Float[Tensor, "*R 1"]


def _rows(logits: Logits, legal: Tensor, selectable: Tensor) -> Float[Tensor, "*R 8 V"]:
    """The heads side by side in float32; padding repeats some logit and is always masked."""
    sizes = head_sizes(legal.shape[-1], selectable.shape[0])
    assert tuple(head.shape[-1] for head in logits) == sizes, "the network was built for other heads"
    padding = tables_of(legal, selectable).padding
    flat = torch.cat(logits, dim=-1).to(torch.float32)
    rows: Tensor = flat.index_select(-1, padding).unflatten(-1, (NUM_HEADS, max(sizes)))
    return rows


def _numbers(uniforms: Tensor | None, deterministic: bool) -> Tensor | None:
    """The numbers to draw with, None for the most probable values."""
    assert deterministic or uniforms is not None, "sampling takes one uniform number per head"
    return None if deterministic else uniforms


def _decide(rows: Tensor, choices: Tensor, legal: Tensor, has_gate: Tensor, uniforms: Tensor | None) -> _Decision:
    """Op, then slot, then what depends on both."""
    num_slots = legal.shape[-1]
    u = (None,) * NUM_HEADS if uniforms is None else uniforms.unbind(-1)
    op_mask = legal.any(dim=-1)
    op = _draw(rows[..., Head.OP, :NUM_OPS], op_mask, u[Head.OP])
    mask = mask_given_op(choices, legal, op_mask, op)
    slot = _draw(rows[..., Head.SLOT, :num_slots], mask[..., Head.SLOT, :num_slots], u[Head.SLOT])
    mask = mask_given_slot(mask, has_gate, op, slot)
    actions = _draw(rows, mask, uniforms)
    # The masks belong to these; a draw among padded values might round the same probabilities another way.
    actions[..., Head.OP], actions[..., Head.SLOT] = op, slot
    return _Decision(actions=actions, mask=mask)


def _draw(logits: Tensor, mask: Tensor, u: Tensor | None) -> Int[Tensor, "*R"]:
    """Inverse CDF in float64: the smallest index whose cumulative probability exceeds u, else the last valid index.

    Masked probabilities are zero whatever the logits are, hence never drawn. Without `u`, the most probable value.
    """
    relative = _relative(logits, mask).logits
    if u is None:
        return relative.masked_fill(~mask, -torch.inf).argmax(dim=-1)
    cumulative = (relative.to(torch.float64).exp() * mask).cumsum(dim=-1)
    above = cumulative > u[..., None] * cumulative[..., -1:]
    size = mask.shape[-1]
    last_valid = (mask * _indices(size, mask.device)).amax(dim=-1)
    return torch.minimum(size - above.sum(dim=-1), last_valid)


def _relative(logits: Tensor, mask: Tensor) -> _Relative:
    """The masked logits below their maximum, at least -80.

    A smaller weight exp(x) would not be seen beside the largest, and exponentials that underflow are slow on CPUs.
    """
    masked = logits.masked_fill(~mask, MASKED_LOGIT)
    top = masked.detach().amax(dim=-1, keepdim=True)
    return _Relative(logits=(masked - top).clamp(min=MIN_RELATIVE), top=top)


def _log_prob(rows: Tensor, decision: _Decision, top: Tensor, total: Tensor) -> Float[Tensor, "*R 8"]:
    """`x - top - ln(sum exp(x - top))` of each action, NaN for one that is masked; exactly 0 for an only choice."""
    index = decision.actions[..., None]
    log_p = (rows.gather(-1, index) - top).squeeze(-1) - total.log()
    return torch.where(decision.mask.gather(-1, index).squeeze(-1), log_p, torch.nan)


@lru_cache(maxsize=64)
def _indices(size: int, device: torch.device) -> Tensor:
    return torch.arange(size, dtype=torch.int16, device=device)
