"""Eight masked heads as one joint distribution: sample, log-probability, entropy, by the same code everywhere.

    op  ->  slot given op  ->  style given op and slot
     `--->  blueprint, tempo, alpha_target, alpha_speed, alpha_curve given op

A head that the op does not read may only take its canonical value; its log-probability, entropy and gradient are then
exactly zero, because a softmax over one choice is constant.

Nothing here reads the device. What must never happen leaves a trace that does: a stored action outside its mask and a
logit that is not finite make the log-probability NaN, and with it the loss. `check_stored_actions` and `check_logits`
name the reason: their 0-dim answers are metrics of an update, which travel in the one read it makes.

Shape legend: S = slots, B = blueprints, V = values of all heads, one head after another; leading axes R are hosts, or
hosts and steps. Inside, R is one axis and comes last, see `masks.py`; H are the heads of a layout, all eight or one.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import Head, head_sizes
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.masks import (
    HeadTables,
    available_masks,
    choices_given_op,
    legal_somewhere,
    mask_given_op,
    mask_given_slot,
    masks_of,
    tables_of,
)
from esper.tamiyo.masks import forced as forced
from esper.tamiyo.masks import relevance as relevance

MIN_RELATIVE = -80.0
_FAR_BELOW = 3e38
"""Added to the logits of masked values, so that none is the largest."""
_BELOW_ONE = 1.0 - 2.0**-24
Logits = tuple[Float[Tensor, "*R _"], ...]
"""One tensor per head, in the order of `HEADS`."""


@tensor_dataclass
class SampledHeads:
    """A decision and the log-probability of each of its parts."""

    actions: Int[Tensor, "*R 8"]
    log_prob: Float[Tensor, "*R 8"]


@tensor_dataclass
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
    tables, rows = tables_of(legal, selectable), _rows(logits, legal, selectable)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    decision = _decide(rows, *state, _numbers(uniforms, deterministic), tables)
    layout = layout_of(tables.sizes, legal.device)
    log_prob = _log_prob(rows, decision, layout)
    return SampledHeads(actions=_restored(decision.actions, legal), log_prob=_restored(log_prob, legal))


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
    tables, rows = tables_of(legal, selectable), _rows(logits, legal, selectable)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    layout = layout_of(tables.sizes, legal.device)
    if actions is None:
        decision = _decide(rows, *state, _numbers(uniforms, deterministic), tables)
    else:
        columns = _columns(actions)
        mask = masks_of(*state, columns, tables)
        decision = _Decision(actions=columns, mask=mask, relative=_relative(rows, mask, layout))
    available = available_masks(*state, tables)
    count_avail = layout.member @ available
    entropy = _entropy(decision.relative, layout, layout.member @ decision.mask, tables.inverse_log)
    entropy_avail = _entropy(_relative(rows, available, layout), layout, count_avail, tables.inverse_log)
    return HeadsOutput(
        actions=_restored(decision.actions, legal),
        log_prob=_restored(_log_prob(rows, decision, layout), legal),
        entropy=_restored(entropy, legal),
        entropy_avail=_restored(entropy_avail, legal),
        available=_restored(count_avail >= 2, legal),
    )


def check_stored_actions(
    actions: Int[Tensor, "*R 8"],
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
) -> Bool[Tensor, ""]:
    """Whether every head of every row holds a value that its mask allows. Takes any integers; reads nothing."""
    tables, columns = tables_of(legal, selectable), _columns(actions)
    layout = layout_of(tables.sizes, legal.device)
    in_range = (columns >= 0) & (columns < layout.sizes)
    inside = torch.where(in_range, columns, 0)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    mask = masks_of(*state, inside, tables)
    return ((mask.gather(0, layout.first + inside) > 0) & in_range).all()


def check_logits(logits: Logits) -> Bool[Tensor, ""]:
    """Whether every logit is finite. Reads nothing."""
    return torch.cat(logits, dim=-1).isfinite().all()


@tensor_dataclass
class Layout:
    """How the values of some heads lie one after another; sums over a head are matrix products.

    `sizes`, `first`: how many values each head has, and where they begin. `head`: the head of each value. `member`: the
    same as a matrix. `padding`: the values of head after head as columns, short ones filled up with their first value.
    `real`: what is not filled up.
    """

    sizes: Int[Tensor, "H 1"]
    first: Int[Tensor, "H 1"]
    head: Int[Tensor, " V"]
    member: Float[Tensor, "H V"]
    padding: Int[Tensor, " P"]
    real: Float[Tensor, "W H 1"]

    def as_columns(self, values: Float[Tensor, "V R"]) -> Float[Tensor, "W H R"]:
        """The values of each head as a column as long as the longest."""
        columns: Tensor = values.index_select(0, self.padding).unflatten(0, (-1, self.sizes.shape[0]))
        return columns


@tensor_dataclass
class _Relative:
    """Logits minus `top`, the largest of their head, cut to [-80, 0]; their exponentials, 0 where masked; the sum."""

    logits: Float[Tensor, "V R"]
    weights: Float[Tensor, "V R"]
    top: Float[Tensor, "H R"]
    total: Float[Tensor, "H R"]


@tensor_dataclass
class _Decision:
    """Actions, the masks they were drawn under, and the logits under these masks."""

    actions: Int[Tensor, "8 R"]
    mask: Float[Tensor, "V R"]
    relative: _Relative


def _rows(logits: Logits, legal: Tensor, selectable: Tensor) -> Float[Tensor, "V R"]:
    """The logits of all heads in float32."""
    sizes = head_sizes(legal.shape[-1], selectable.shape[0])
    assert tuple(head.shape[-1] for head in logits) == sizes, "the network was built for other heads"
    return torch.cat(logits, dim=-1).to(torch.float32).flatten(0, -2).t().contiguous()


def _columns(per_row: Tensor) -> Tensor:
    """[*R, 8] as [8, R]."""
    return per_row.flatten(0, -2).t()


def _restored(columns: Tensor, like: Tensor) -> Tensor:
    """[8, R] as [*R, 8]; `like` is the legality [*R, 6, S]."""
    rows: Tensor = columns.t().unflatten(0, like.shape[:-2])
    return rows


def _numbers(uniforms: Tensor | None, deterministic: bool) -> Tensor | None:
    """The numbers to draw with [8, R], None for the most probable values."""
    assert deterministic or uniforms is not None, "sampling takes one uniform number per head"
    if deterministic or uniforms is None:
        return None
    return _columns(uniforms).to(torch.float64).clamp(max=_BELOW_ONE)


def _decide(
    rows: Tensor, choices: Tensor, legal: Tensor, has_gate: Tensor, u_8R: Tensor | None, tables: HeadTables
) -> _Decision:
    """Op, then slot, then what depends on both."""

    def draw(head: Head, mask: Tensor) -> Tensor:
        return _draw(rows[tables.values[head]], mask, None if u_8R is None else u_8R[head])

    op_mask = legal_somewhere(legal)
    op = draw(Head.OP, op_mask)
    mask = mask_given_op(choices, legal, op_mask, op, tables)
    slot = draw(Head.SLOT, mask[tables.values[Head.SLOT]])
    mask = mask_given_slot(mask, has_gate, op, slot, tables)
    between = slice(tables.values[Head.SLOT].stop, tables.values[Head.OP].start)  # the first and the last head
    layout = layout_of(tables.sizes[Head.BLUEPRINT : Head.OP], mask.device)
    others = _draw(
        layout.as_columns(rows[between]),
        layout.as_columns(mask[between]) * layout.real,
        None if u_8R is None else u_8R[Head.BLUEPRINT : Head.OP],
    )
    actions = torch.cat((slot[None], others, op[None]))
    return _Decision(actions=actions, mask=mask, relative=_relative(rows, mask, layout_of(tables.sizes, mask.device)))


@torch.no_grad()
def _draw(logits: Float[Tensor, "W *H_R"], mask: Float[Tensor, "W *H_R"], u: Tensor | None) -> Int[Tensor, "*H_R"]:
    """Inverse CDF in float64: the smallest index whose cumulative probability exceeds u; never a masked one.

    Without `u`, the most probable value.
    """
    # a broken network still decides something legal
    exact = logits.to(torch.float64).nan_to_num_(nan=0.0).masked_fill_(mask == 0.0, -torch.inf)
    weights = exact.sub_(exact.amax(dim=0)).exp_()
    if u is None:
        return weights.argmax(dim=0)
    up_to = weights.cumsum(dim=0)
    return (up_to <= u * up_to[-1]).sum(dim=0)


def _below_top(rows: Tensor, mask: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The logits minus the largest of their head that is not masked, cut to [-80, 0], and that largest.

    A smaller weight exp(x) would not be seen beside the largest, and exponentials that underflow are slow on CPUs.
    """
    top = layout.as_columns(torch.add(rows.detach(), mask - 1.0, alpha=_FAR_BELOW)).amax(dim=0)
    return (rows - top.index_select(0, layout.head)).clamp(MIN_RELATIVE, 0.0), top


def _relative(rows: Tensor, mask: Tensor, layout: Layout) -> _Relative:
    below, top = _below_top(rows, mask, layout)
    weights = below.exp() * mask
    total = (layout.member @ weights).clamp(min=1.0)  # the largest alone has weight 1; less is only where all is masked
    return _Relative(logits=below, weights=weights, top=top, total=total)


def _entropy(relative: _Relative, layout: Layout, count: Tensor, inverse_log: Tensor) -> Float[Tensor, "8 R"]:
    """`-sum p ln p / ln n` of p = w / sum w; 0 where there are fewer than two choices."""
    raw = relative.total.log() - (layout.member @ (relative.weights * relative.logits)) / relative.total
    return raw * inverse_log[count.to(torch.int64)]


def _log_prob(rows: Tensor, decision: _Decision, layout: Layout) -> Float[Tensor, "8 R"]:
    """`x - top - ln(sum exp(x - top))` of each action, NaN for one that is masked; exactly 0 for an only choice."""
    index, relative = layout.first + decision.actions, decision.relative
    log_p = (rows.gather(0, index) - relative.top) - relative.total.log()
    return log_p.masked_fill(decision.mask.gather(0, index) == 0.0, torch.nan)


@lru_cache(maxsize=64)
def layout_of(sizes: tuple[int, ...], device: torch.device) -> Layout:
    """The constants of heads of these sizes, made once."""
    size = torch.tensor(sizes)
    first = size.cumsum(0) - size
    head = torch.tensor([h for h, n in enumerate(sizes) for _ in range(n)])
    place = torch.arange(max(sizes))[:, None]
    member = (head == torch.arange(len(sizes))[:, None]).to(device, torch.float32)
    return Layout(
        sizes=size[:, None].to(device),
        first=first[:, None].to(device),
        head=head.to(device),
        member=member,
        padding=(first + place * (place < size)).flatten().to(device),
        real=(place < size)[..., None].to(device, torch.float32),
    )
