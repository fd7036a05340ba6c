"""The masks of all heads by enumeration: for every legal op and slot, exactly the values that the rules allow."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings
from states import generator, random_legal

from esper.leyline.lifecycle import Head, LifecycleOp
from esper.tamiyo.heads import choices_given_op, masks_of, tables_of

WAIT, GERMINATE, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, ADVANCE = range(6)
CNN, TRANSFORMER, ALL_OF_TWENTY = (1, 2, 3, 4, 5, 6, 7), (2, 3, 8, 9, 10, 11, 12), tuple(range(1, 20))
RAMPS, FIRST_RAMP, BLENDS = (SET_ALPHA_TARGET, PRUNE), (GERMINATE,), (GERMINATE, SET_ALPHA_TARGET)


def allowed(op: int, slot: int, legal, has_gate, selectable: tuple[int, ...]) -> tuple[set[int], ...]:
    """What each head may say beside this op and slot, in the order of storage; nested lists of one host."""

    def all_of(size: int, ops: tuple[int, ...], canonical: int) -> set[int]:
        return set(range(size)) if op in ops else {canonical}

    style = all_of(4, BLENDS, 2)
    if op == SET_ALPHA_TARGET and not has_gate[slot]:
        style.remove(3)
    return (
        {s for s, ok in enumerate(legal[op]) if ok} if op != WAIT else {0},
        set(selectable) if op == GERMINATE else {0},
        style,
        all_of(3, FIRST_RAMP, 1),
        all_of(3, BLENDS, 2),
        all_of(4, RAMPS, 0),
        all_of(5, RAMPS, 0),
        {o for o in range(6) if any(legal[o])},
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 3, 6]), st.sampled_from([CNN, TRANSFORMER, ALL_OF_TWENTY, (5,)]))
def test_the_mask_of_every_head_holds_exactly_what_the_rules_allow(seed, num_slots, choice):
    g, n = generator(seed), 4
    blueprints = 20 if choice is ALL_OF_TWENTY else 13
    selectable = torch.tensor([index in choice for index in range(blueprints)])
    legal, has_gate = random_legal(g, n, num_slots), torch.rand(n, num_slots, generator=g) < 0.5
    host, op, slot = legal.nonzero().unbind(1)
    wait = op == LifecycleOp.WAIT
    host, op, slot = (x[~wait | (slot == 0)] for x in (host, op, slot))  # WAIT is said of the first slot alone
    actions = torch.zeros(8, len(host), dtype=torch.int64)
    actions[Head.OP], actions[Head.SLOT] = op, slot
    tables = tables_of(legal, selectable)
    masks = masks_of(choices_given_op(legal, selectable), legal[host], has_gate[host], actions, tables)
    assert set(masks.unique().tolist()) <= {0.0, 1.0}
    for row, (i, o, s) in enumerate(zip(host.tolist(), op.tolist(), slot.tolist(), strict=True)):
        want = allowed(o, s, legal[i].tolist(), has_gate[i].tolist(), choice)
        found = tuple(set(masks[values, row].nonzero().flatten().tolist()) for values in tables.values)
        assert found == want, (o, s)
        assert all(found)
