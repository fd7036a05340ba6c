"""Eight masked heads as one joint distribution: sample, log-probability, entropy, by the same code everywhere.

    op  ->  slot given op  ->  blueprint, style, tempo, alpha_target, alpha_speed, alpha_curve given op and slot

A head that the op does not read has one allowed value, the canonical one; its log-probability, entropy and gradient are
exactly zero.

Nothing here reads the device. A stored action outside its mask, or a logit that is not finite, makes the loss NaN;
`check_stored_actions` and `check_logits` give the reason as metrics of the update.

Shape legend: S = slots, B = blueprints, V = values of all heads, concatenated; leading axes R are hosts, or hosts and
steps. Inside, R is one axis and comes last; H are the heads of a layout.
"""

from functools import lru_cache
from itertools import accumulate

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.lifecycle import HEADS, NUM_OPS, RELEVANCE, Head, LifecycleOp, Style, head_sizes
from esper.leyline.tensor_dataclass import numbers, tensor_dataclass


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
    legal_slots = legal[numbers(len(op), op.device), op]
    slots, ops = tables.values[Head.SLOT], tables.values[Head.OP]  # the first and the last head
    return torch.cat((mask[slots] * legal_slots.t(), mask[slots.stop : ops.start], op_mask))


def mask_given_slot(
    mask: Tensor, has_gate: Tensor, op: Tensor, slot: Tensor, tables: "HeadTables"
) -> Float[Tensor, "V R"]:
    """Remove GATED_GATE where SET_ALPHA_TARGET aims at a seed without a gate network; writes into `mask`."""
    gate_here = has_gate[numbers(len(op), op.device), slot]
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


@lru_cache(maxsize=8)
def _relevance(device: torch.device) -> Bool[Tensor, "6 8"]:
    return torch.tensor(RELEVANCE, device=device)


MIN_RELATIVE = -80.0
_FAR_BELOW = 3e38  # added to the logits of masked values, so that none is the largest
Logits = tuple[Float[Tensor, "..."], ...]
"""Of each head, in the order of `HEADS`: [*R, S] of the slot, [*R, 6] of the operation, and [*R, S, size] of the other
heads, whose values are chosen given the slot; slot 0 for WAIT, which reads none."""


@tensor_dataclass
class SampledHeads:
    """Actions, the log-probability of each head, and the probability of every operation, 0 where it is illegal.

    `constrained`: the mask of the head left out values that the drawn operation could have taken in another state.
    """

    actions: Int[Tensor, "*R 8"]
    log_prob: Float[Tensor, "*R 8"]
    op_prob: Float[Tensor, "*R 6"]
    constrained: Bool[Tensor, "*R 8"]


@tensor_dataclass
class HeadsOutput:
    """Stored actions evaluated under the current policy.

    `entropy` of each head is given the op and slot of `actions`; `entropy_avail` is over all values possible for some
    legal op and slot. Both are divided by ln(number of choices): in [0, 1], 0 where there is no choice. `choice`: the
    head has two or more values for the op and slot of `actions`; `available`: for some legal op and slot.
    """

    log_prob: Float[Tensor, "*R 8"]
    entropy: Float[Tensor, "*R 8"]
    entropy_avail: Float[Tensor, "*R 8"]
    choice: Bool[Tensor, "*R 8"]
    available: Bool[Tensor, "*R 8"]


def sample_heads(
    logits: Logits,
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
    uniforms: Float[Tensor, "*R 8"] | None = None,
    deterministic: bool = False,
) -> SampledHeads:
    """Draw actions for a rollout.

    `selectable`: blueprints a controller may choose. `uniforms`: one number in [0, 1) per head. `deterministic` takes
    the most probable value of each head instead, the lowest index among equals.
    """
    tables, columns = tables_of(legal, selectable), _columns_of(logits, legal, selectable)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    u_8R = None if uniforms is None or deterministic else _columns(uniforms).to(torch.float64)
    assert deterministic or u_8R is not None, "sampling takes one uniform number per head"
    decision, rows = _decide(columns, *state, u_8R, tables)
    layout = layout_of(tables.sizes, legal.device)
    log_prob, _ = _log_prob(rows, decision, layout)
    left_out = layout.member @ (state[0].index_select(1, decision.actions[Head.OP]) - decision.mask)
    op_prob = decision.relative.weights[tables.values[Head.OP]] / decision.relative.total[Head.OP]
    return SampledHeads(
        actions=_restored(decision.actions, legal),
        log_prob=_restored(log_prob, legal),
        op_prob=_restored(op_prob, legal),
        constrained=_restored(left_out > 0.0, legal),
    )


def evaluate_heads(
    logits: Logits,
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
    actions: Int[Tensor, "*R 8"],
) -> HeadsOutput:
    """Evaluate stored `actions`; differentiable in `logits`.

    The log-probability of a stored action outside its mask is NaN.
    """
    tables, given = tables_of(legal, selectable), _columns_of(logits, legal, selectable)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    layout = layout_of(tables.sizes, legal.device)
    columns = _columns(actions)
    rows = given.at(columns[Head.SLOT])
    mask = masks_of(*state, columns, tables)
    decision = _Choice(actions=columns, mask=mask, relative=_relative(rows, mask, layout))
    available = available_masks(*state, tables)
    count, count_avail = layout.member @ decision.mask, layout.member @ available
    entropy = _entropy(decision.relative, layout, count, tables.inverse_log)
    entropy_avail = _entropy(_relative(rows, available, layout), layout, count_avail, tables.inverse_log)
    log_prob, index = _log_prob(rows, decision, layout)
    log_prob = log_prob.masked_fill(decision.mask.gather(0, index) == 0.0, torch.nan)
    return HeadsOutput(
        log_prob=_restored(log_prob, legal),
        entropy=_restored(entropy, legal),
        entropy_avail=_restored(entropy_avail, legal),
        choice=_restored(count >= 2, legal),
        available=_restored(count_avail >= 2, legal),
    )


def check_stored_actions(
    actions: Int[Tensor, "*R 8"],
    legal: Bool[Tensor, "*R 6 S"],
    has_gate: Bool[Tensor, "*R S"],
    selectable: Bool[Tensor, " B"],
) -> Bool[Tensor, ""]:
    """Whether every stored value, any integer, is allowed by its mask; 0-dim, no device read."""
    tables, columns = tables_of(legal, selectable), _columns(actions)
    layout = layout_of(tables.sizes, legal.device)
    in_range = (columns >= 0) & (columns < layout.sizes)
    inside = torch.where(in_range, columns, 0)
    state = choices_given_op(legal, selectable), legal.flatten(0, -3), has_gate.flatten(0, -2)
    mask = masks_of(*state, inside, tables)
    return ((mask.gather(0, layout.first + inside) > 0) & in_range).all()


def check_logits(logits: Logits) -> Bool[Tensor, ""]:
    """Whether every logit is finite; 0-dim, no device read."""
    return torch.stack([head.isfinite().all() for head in logits]).all()


@tensor_dataclass
class Layout:
    """Positions of the concatenated values of some heads; sums over a head are matrix products.

    `sizes`, `first`: number of values of each head, index of the first. `head`: head of each value; `member`: the same
    as a 0/1 matrix. `padding`: indices that gather the heads as columns of equal length, padded with the first value;
    `real`: 0 at padding, else 1.
    """

    sizes: Int[Tensor, "H 1"]
    first: Int[Tensor, "H 1"]
    head: Int[Tensor, " V"]
    member: Float[Tensor, "H V"]
    padding: Int[Tensor, " P"]
    real: Float[Tensor, "W H 1"]

    def as_columns(self, values: Float[Tensor, "V R"]) -> Float[Tensor, "W H R"]:
        """One column per head, padded to the longest."""
        columns: Tensor = values.index_select(0, self.padding).unflatten(0, (-1, self.sizes.shape[0]))
        return columns


@tensor_dataclass
class _Relative:
    """Logits minus `top`, the largest of their head, in [-80, 0]; their exponentials, 0 where masked; the sums."""

    logits: Float[Tensor, "V R"]
    weights: Float[Tensor, "V R"]
    top: Float[Tensor, "H R"]
    total: Float[Tensor, "H R"]


@tensor_dataclass
class _Choice:
    """Actions, their masks, and the masked logits."""

    actions: Int[Tensor, "8 R"]
    mask: Float[Tensor, "V R"]
    relative: _Relative


@tensor_dataclass
class _Given:
    """The logits, float32: of the slots and of the operations, and of the other heads for each slot."""

    slot: Float[Tensor, "S R"]
    op: Float[Tensor, "6 R"]
    others: Float[Tensor, "R S W"]

    def at(self, slot: Int[Tensor, " R"]) -> Float[Tensor, "V R"]:
        """The logits of all heads, given the slot."""
        inside = slot.clamp(0, self.others.shape[1] - 1)  # a stored action outside its mask gives NaN later
        of_slot = self.others[numbers(len(slot), slot.device), inside]
        return torch.cat((self.slot, of_slot.t(), self.op))


def _columns_of(logits: Logits, legal: Tensor, selectable: Tensor) -> _Given:
    """The logits in the layout in which they are summed."""
    sizes = head_sizes(legal.shape[-1], selectable.shape[0])
    assert tuple(head.shape[-1] for head in logits) == sizes, "the network was built for other heads"
    slot, *others, op = logits
    slot, op = (head.to(torch.float32).flatten(0, -2).t().contiguous() for head in (slot, op))
    return _Given(slot=slot, op=op, others=torch.cat(others, dim=-1).to(torch.float32).flatten(0, -3))


def _columns(per_row: Tensor) -> Tensor:
    return per_row.flatten(0, -2).t()


def _restored(columns: Tensor, like: Tensor) -> Tensor:
    """[V, R] as [*R, V]; `like` is the legality [*R, 6, S]."""
    rows: Tensor = columns.t().unflatten(0, like.shape[:-2])
    return rows


def _decide(
    given: _Given, choices: Tensor, legal: Tensor, has_gate: Tensor, u_8R: Tensor | None, tables: HeadTables
) -> tuple[_Choice, Float[Tensor, "V R"]]:
    """Op, then slot given op, then the other heads; and the logits of all heads given the slot."""

    def exact(logits: Tensor) -> Tensor:  # broken logits still give a legal action
        return logits.detach().to(torch.float64).nan_to_num_(nan=0.0)

    def draw(logits: Tensor, head: Head, mask: Tensor) -> Tensor:
        return _draw(exact(logits), mask, None if u_8R is None else u_8R[head])

    op_mask = legal_somewhere(legal)
    op = draw(given.op, Head.OP, op_mask)
    mask = mask_given_op(choices, legal, op_mask, op, tables)
    slot = draw(given.slot, Head.SLOT, mask[tables.values[Head.SLOT]])
    mask, rows = mask_given_slot(mask, has_gate, op, slot, tables), given.at(slot)
    between = slice(tables.values[Head.SLOT].stop, tables.values[Head.OP].start)  # the first and the last head
    layout = layout_of(tables.sizes[Head.BLUEPRINT : Head.OP], mask.device)
    others = _draw(
        layout.as_columns(exact(rows[between])),
        layout.as_columns(mask[between]) * layout.real,
        None if u_8R is None else u_8R[Head.BLUEPRINT : Head.OP],
    )
    actions = torch.cat((slot[None], others, op[None]))
    relative = _relative(rows, mask, layout_of(tables.sizes, mask.device))
    return _Choice(actions=actions, mask=mask, relative=relative), rows


def _draw(logits: Float[Tensor, "W *H_R"], mask: Float[Tensor, "W *H_R"], u: Tensor | None) -> Int[Tensor, "*H_R"]:
    """Inverse CDF in float64: the smallest unmasked index whose cumulative probability exceeds u.

    Without `u`, the most probable value.
    """
    legal = logits.masked_fill(mask == 0.0, -torch.inf)
    weights = legal.sub_(legal.amax(dim=0)).exp_()
    if u is None:
        return weights.argmax(dim=0)
    up_to = weights.cumsum(dim=0)
    return (up_to <= u * up_to[-1]).sum(dim=0)


def _relative(rows: Tensor, mask: Tensor, layout: Layout) -> _Relative:
    """The masked softmax in parts. The clamp to -80 changes no float32 sum; exponentials that underflow are slow."""
    top = layout.as_columns(torch.add(rows.detach(), mask - 1.0, alpha=_FAR_BELOW)).amax(dim=0)
    below = (rows - top.index_select(0, layout.head)).clamp(MIN_RELATIVE, 0.0)
    weights = below.exp() * mask
    total = (layout.member @ weights).clamp(min=1.0)  # at least the weight of the largest; 0 only where all is masked
    return _Relative(logits=below, weights=weights, top=top, total=total)


def _entropy(relative: _Relative, layout: Layout, count: Tensor, inverse_log: Tensor) -> Float[Tensor, "8 R"]:
    """`-sum p ln p / ln n` of p = w / sum w; 0 where there are fewer than two choices."""
    raw = relative.total.log() - (layout.member @ (relative.weights * relative.logits)) / relative.total
    return raw * inverse_log[count.to(torch.int64)]


def _log_prob(rows: Tensor, decision: _Choice, layout: Layout) -> tuple[Float[Tensor, "8 R"], Int[Tensor, "8 R"]]:
    """`x - top - ln(sum exp(x - top))` of each action, exactly 0 for an only choice; and its row in `rows`."""
    index, relative = layout.first + decision.actions, decision.relative
    return (rows.gather(0, index) - relative.top) - relative.total.log(), index


@lru_cache(maxsize=64)
def layout_of(sizes: tuple[int, ...], device: torch.device) -> Layout:
    """The layout of heads of these sizes."""
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
