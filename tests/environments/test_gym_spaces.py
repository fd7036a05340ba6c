"""The spaces and masks of an environment, against every action of a small case."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from esper.gym import action_mask, legal_actions, observation_of, observation_space
from esper.kasmina.rules.slot_fields import empty_slots, new_hosts
from esper.leyline.lifecycle import CANONICAL_ACTION, HEADS, RELEVANCE, Head, LifecycleOp, SeedStage, Style, head_sizes
from esper.leyline.tensor_dataclass import replace
from esper.tamiyo.features import feature_dim
from tiny import CPU

Op, S, B = LifecycleOp, 2, 3
SIZES = head_sizes(S, B)
SELECTABLE = torch.tensor([False, True, True])


@st.composite
def states(draw):
    """Legal pairs of one host, WAIT among them, and its gates."""
    legal = torch.tensor(draw(st.lists(st.lists(st.booleans(), min_size=S, max_size=S), min_size=6, max_size=6)))
    legal[Op.WAIT] = True
    return legal[None], torch.tensor([draw(st.lists(st.booleans(), min_size=S, max_size=S))])


def allowed(action, legal, has_gate):
    """The rules of one action, head by head."""
    op, slot = action[Head.OP], action[Head.SLOT]
    if op == Op.WAIT:
        return True
    if op == Op.GERMINATE and not SELECTABLE[action[Head.BLUEPRINT]]:
        return False
    if op == Op.SET_ALPHA_TARGET and action[Head.STYLE] == Style.GATED_GATE and not has_gate[slot]:
        return False
    return bool(legal[op, slot])


@settings(max_examples=60, deadline=None)
@given(states())
def test_the_mask_of_a_head_holds_what_some_legal_action_has_there(state):
    legal, has_gate = state
    want = [set() for _ in SIZES]
    few = [range(size) if head in (Head.SLOT, Head.BLUEPRINT, Head.STYLE, Head.OP) else range(1)
           for head, size in enumerate(SIZES)]  # fmt: skip
    for action in itertools.product(*few):
        if allowed(action, legal[0], has_gate[0]):
            op = Op(action[Head.OP])
            for head, reads in enumerate(RELEVANCE[op]):
                if reads:
                    want[head] |= {action[head]} if len(few[head]) > 1 else set(range(SIZES[head]))
    want = [found or {HEADS[head].canonical} for head, found in enumerate(want)]
    heads = action_mask(legal, has_gate, SELECTABLE)[0].split(list(SIZES))
    assert [set(mask.nonzero().flatten().tolist()) for mask in heads] == want


@settings(max_examples=100, deadline=None)
@given(states(), st.tuples(*(st.integers(0, size - 1) for size in SIZES)))
def test_an_action_is_executed_as_it_is_or_becomes_wait(state, action):
    legal, has_gate = state
    taken, illegal = legal_actions(torch.tensor([action]), legal, has_gate, SELECTABLE)
    fine = allowed(action, legal[0], has_gate[0])
    assert illegal.tolist() == [not fine]
    reads = RELEVANCE[action[Head.OP]] if fine else RELEVANCE[Op.WAIT]
    want = [value if read else CANONICAL_ACTION[head] for head, (value, read) in enumerate(zip(action, reads))]  # noqa: B905
    assert taken.tolist() == [want if fine else list(CANONICAL_ACTION)]


def test_an_observation_is_the_features_and_one_column_for_each_blueprint_of_each_slot():
    spec = tiny.engine(num_envs=2).spec
    slots = empty_slots(2, spec.num_slots, CPU)
    slots = replace(slots, stage=slots.stage.clone(), blueprint=slots.blueprint.clone())
    slots.stage[1, 2], slots.blueprint[1, 2] = SeedStage.TRAINING, 5
    seen = observation_of(slots, new_hosts(2, 100, CPU), 1, 12, spec.num_blueprints)
    held = seen[:, feature_dim(spec.num_slots) :]
    assert held.nonzero().tolist() == [[1, 2 * spec.num_blueprints + 5]]
    assert held[1].sum() == 1.0
    space = observation_space(spec)
    assert space.shape == seen[0].shape
    assert all(space.contains(row.numpy()) for row in seen)
