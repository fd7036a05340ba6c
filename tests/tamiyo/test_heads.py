"""Eight heads as one distribution: masks by enumeration, sampling, entropies, exact zeros, and how errors show."""

import itertools
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from states import CNN, allowed, generator, random_legal

from esper.leyline.lifecycle import (
    CANONICAL_ACTION,
    HEADS,
    NUM_BUILTIN_BLUEPRINTS,
    Head,
    LifecycleOp,
    head_sizes,
)
from esper.tamiyo.heads import (
    check_logits,
    check_stored_actions,
    choices_given_op,
    evaluate_heads,
    forced,
    masks_of,
    relevance,
    sample_heads,
    tables_of,
)
from toys import even_logits

SELECTABLE = torch.tensor([index in CNN for index in range(NUM_BUILTIN_BLUEPRINTS)])
NUM_SLOTS = 3
TWENTY = tuple(range(1, 20))
OP, SLOT = Head.OP, Head.SLOT


def random_logits(g: torch.Generator, *shape: int, num_slots: int = NUM_SLOTS, scale: float = 1.5):
    return tuple(scale * torch.randn(x.shape, generator=g) for x in even_logits(*shape, num_slots=num_slots))


class Case:
    """Random states and logits of `shape`, and uniform numbers to decide with."""

    def __init__(self, seed: int, *shape: int, num_slots: int = NUM_SLOTS) -> None:
        g = generator(seed)
        n = math.prod(shape)
        self.legal = random_legal(g, n, num_slots).unflatten(0, shape)
        self.has_gate = torch.rand(*shape, num_slots, generator=g) < 0.5
        self.logits = random_logits(g, *shape, num_slots=num_slots)
        self.uniforms = torch.rand(*shape, 8, generator=g)

    @property
    def state(self):
        return self.legal, self.has_gate, SELECTABLE

    def sample(self):
        return sample_heads(self.logits, *self.state, self.uniforms)

    def evaluate(self, actions, logits=None):
        return evaluate_heads(self.logits if logits is None else logits, *self.state, actions)


def test_a_head_is_constrained_where_its_mask_leaves_out_values_of_the_operation():
    legal = torch.zeros(3, 6, NUM_SLOTS, dtype=torch.bool)
    legal[:, LifecycleOp.WAIT] = True
    legal[1, LifecycleOp.GERMINATE] = True
    legal[2, LifecycleOp.SET_ALPHA_TARGET, 1] = True
    logits = tuple(even_logits(3, num_slots=NUM_SLOTS))
    logits[OP][:, 1:3] = 9.0  # GERMINATE or SET_ALPHA_TARGET where they are legal
    drawn = sample_heads(logits, legal, torch.zeros(3, NUM_SLOTS, dtype=torch.bool), SELECTABLE, deterministic=True)
    assert drawn.actions[:, OP].tolist() == [0, 1, 2]
    found = [[head.name for head in Head if row[head]] for row in drawn.constrained.tolist()]
    assert found == [["OP"], ["OP"], ["SLOT", "STYLE", "OP"]]  # one slot, and no gate that GATED_GATE could use


def every_decision(legal, has_gate) -> list[tuple[int, ...]]:
    decisions = []
    for op in allowed(0, 0, legal, has_gate)[OP]:
        for slot in allowed(op, 0, legal, has_gate)[SLOT]:
            decisions += itertools.product({slot}, *allowed(op, slot, legal, has_gate)[1:OP], {op})
    return decisions


@pytest.mark.parametrize("seed", range(12))
def test_the_probabilities_of_all_legal_decisions_and_of_no_other_sum_to_one(seed):
    case = Case(seed, 1)
    decisions = torch.tensor(every_decision(case.legal[0].tolist(), case.has_gate[0].tolist()))
    count = len(decisions)
    assert count == len(decisions.unique(dim=0))
    state = case.legal.expand(count, -1, -1), case.has_gate.expand(count, -1), SELECTABLE
    logits = tuple(head.expand(count, *head.shape[1:]) for head in case.logits)
    log_prob = evaluate_heads(logits, *state, decisions).log_prob.double()
    assert check_stored_actions(decisions, *state)
    assert log_prob.sum(-1).exp().sum().item() == pytest.approx(1.0, abs=1e-5)


def test_a_value_is_accepted_exactly_where_the_rules_allow_it():
    # one head of a legal decision is exchanged for every value, in range or not
    case = Case(1, 40)
    drawn = case.sample().actions
    verdicts = {True: 0, False: 0}
    for n in range(40):
        legal, has_gate = case.legal[n].tolist(), case.has_gate[n].tolist()
        for head in Head:
            op, slot = drawn[n, OP].item(), drawn[n, SLOT].item()
            for value in range(-1, head_sizes(NUM_SLOTS)[head] + 1):
                changed = drawn[n : n + 1].clone()
                changed[0, head] = value
                if head not in (OP, SLOT):
                    want = value in allowed(op, slot, legal, has_gate)[head]
                else:
                    want = tuple(changed[0].tolist()) in every_decision(legal, has_gate)
                got = check_stored_actions(changed, case.legal[n : n + 1], case.has_gate[n : n + 1], SELECTABLE)
                assert bool(got) == want, (head, value)
                verdicts[want] += 1
    assert min(verdicts.values()) > 500


@settings(max_examples=40, deadline=None)
@drawn(
    st.integers(0, 2**31), st.sampled_from([1, 2, 3, 6]), st.sampled_from([CNN, (2, 3, 8, 9, 10, 11, 12), (5,), TWENTY])
)
def test_the_mask_of_every_head_holds_exactly_what_the_rules_allow(seed, num_slots, choice):
    g, n = generator(seed), 4
    selectable = torch.tensor([index in choice for index in range(20 if choice is TWENTY else 13)])
    legal, has_gate = random_legal(g, n, num_slots), torch.rand(n, num_slots, generator=g) < 0.5
    host, op, slot = legal.nonzero().unbind(1)
    said = (op != LifecycleOp.WAIT) | (slot == 0)  # WAIT is said of the first slot alone
    host, op, slot = host[said], op[said], slot[said]
    actions = torch.zeros(8, len(host), dtype=torch.int64)
    actions[OP], actions[SLOT] = op, slot
    tables = tables_of(legal, selectable)
    masks = masks_of(choices_given_op(legal, selectable), legal[host], has_gate[host], actions, tables)
    assert set(masks.unique().tolist()) <= {0.0, 1.0}
    for row, (i, o, s) in enumerate(zip(host.tolist(), op.tolist(), slot.tolist(), strict=True)):
        found = [set(masks[values, row].nonzero().flatten().tolist()) for values in tables.values]
        assert found == allowed(o, s, legal[i].tolist(), has_gate[i].tolist(), choice), (o, s)
        assert all(found)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 20), marks=pytest.mark.slow)])
def test_no_decision_of_a_million_is_illegal(seeds):
    for seed in seeds:
        case = Case(seed, 50_000)
        actions = case.sample().actions
        assert check_stored_actions(actions, *case.state)
        assert [len(values.unique()) for values in actions.t()] == [NUM_SLOTS, 8, 4, 3, 3, 4, 5, 6]


@pytest.mark.parametrize("u", [0.0, 1.0 - 2.0**-24])
@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 5000.0, 1e6])
def test_extreme_numbers_and_extreme_logits_stay_legal(u, scale):
    case = Case(3, 500)
    logits = tuple(scale * head for head in case.logits)
    actions = sample_heads(logits, *case.state, torch.full((500, 8), u)).actions
    assert check_stored_actions(actions, *case.state)
    assert check_stored_actions(sample_heads(logits, *case.state, deterministic=True).actions, *case.state)


def softmax(logits: list[float], valid: list[bool]) -> list[float]:
    top = max(x for x, ok in zip(logits, valid, strict=True) if ok)
    weights = [math.exp(x - top) if ok else 0.0 for x, ok in zip(logits, valid, strict=True)]
    return [w / sum(weights) for w in weights]


def scalar_draw(p: list[float], u: float) -> int:
    cumulative = 0.0
    for index, share in enumerate(p):
        cumulative += share
        if cumulative > u:
            return index
    return max(index for index, share in enumerate(p) if share > 0)


def given(logits, head: Head, slot: int):
    """The logits of a head once the slot is chosen."""
    return logits[head] if head in (OP, SLOT) else logits[head][..., slot, :]


def scalar_decision(case: Case, n: int) -> tuple[list[int], list[float], list[float]]:
    """Actions, log-probabilities and normalized entropies of one host, head after head."""
    legal, has_gate = case.legal[n].tolist(), case.has_gate[n].tolist()
    actions, log_prob, entropy = [0] * 8, [0.0] * 8, [0.0] * 8
    for head in (OP, SLOT, *(h for h in Head if h not in (OP, SLOT))):
        values = allowed(actions[OP], actions[SLOT], legal, has_gate)[head]
        logits = given(case.logits, head, actions[SLOT])[n].tolist()
        p = softmax(logits, [value in values for value in range(len(logits))])
        actions[head] = scalar_draw(p, case.uniforms[n, head].item())
        log_prob[head] = math.log(p[actions[head]])
        if len(values) > 1:
            entropy[head] = -sum(q * math.log(q) for q in p if q > 0) / math.log(len(values))
    return actions, log_prob, entropy


def test_decisions_agree_with_a_scalar_reference():
    case = Case(11, 300)
    drawn = sample_heads(case.logits, *case.state, case.uniforms).actions
    out = evaluate_heads(case.logits, *case.state, drawn)
    actions, log_prob, entropy = (
        torch.tensor(column) for column in zip(*(scalar_decision(case, n) for n in range(300)), strict=True)
    )
    assert torch.equal(drawn, actions)
    torch.testing.assert_close(out.log_prob, log_prob, atol=2e-6, rtol=0)
    torch.testing.assert_close(out.entropy, entropy, atol=2e-6, rtol=0)


def test_the_available_entropy_is_that_of_the_union_over_all_legal_ops_and_slots():
    case = Case(12, 200)
    actions = case.sample().actions
    out = case.evaluate(actions)
    for n in range(200):
        legal, has_gate = case.legal[n].tolist(), case.has_gate[n].tolist()
        for head in Head:
            union: set[int] = set()
            for op, slot in itertools.product(range(6), range(NUM_SLOTS)):
                if legal[op][slot] and op in HEADS[head].used_by:
                    union |= allowed(op, slot, legal, has_gate)[head]
            logits, want = given(case.logits, head, actions[n, SLOT])[n].tolist(), 0.0
            if len(union) > 1:
                p = softmax(logits, [value in union for value in range(len(logits))])
                want = -sum(q * math.log(q) for q in p if q > 0) / math.log(len(union))
            assert out.entropy_avail[n, head].item() == pytest.approx(want, abs=2e-6), (n, head)
            assert bool(out.available[n, head]) == (len(union) > 1)


def test_the_inverse_cdf_takes_the_first_value_whose_cumulative_probability_exceeds_u():
    # op probabilities 1/4, 1/4, 1/2 for WAIT, GERMINATE, FOSSILIZE: cumulative 0.25, 0.5, 1
    u = torch.tensor([0.0, 0.2499, 0.25, 0.4999, 0.5, 0.9999])
    n = len(u)
    legal = torch.zeros(n, 6, 1, dtype=torch.bool)
    legal[:, [0, 1, 4]] = True
    logits = even_logits(n, num_slots=1)
    logits[OP][:, 4] = math.log(2.0)
    uniforms = u[:, None].expand(-1, 8).contiguous()
    actions = sample_heads(tuple(logits), legal, torch.zeros(n, 1, dtype=torch.bool), SELECTABLE, uniforms).actions
    assert actions[:, OP].tolist() == [0, 0, 1, 1, 4, 4]


def test_the_deterministic_decision_is_the_most_probable_and_the_lowest_of_equals():
    legal = torch.ones(1, 6, 3, dtype=torch.bool)
    logits = even_logits(1, num_slots=3)
    logits[OP][0] = torch.tensor([0.0, 2.0, 2.0, 1.0, 0.0, 0.0])
    logits[Head.BLUEPRINT][0, :, 0] = 9.0  # not selectable
    logits[Head.BLUEPRINT][0, 1, 5] = 1.0
    logits[Head.BLUEPRINT][0, [0, 2], 4] = 2.0  # of slots that are not chosen
    logits[SLOT][0] = torch.tensor([0.0, 3.0, 3.0])
    state = legal, torch.ones(1, 3, dtype=torch.bool), SELECTABLE
    want = [1, 5, 0, 0, 0, 0, 0, LifecycleOp.GERMINATE]
    assert sample_heads(tuple(logits), *state, deterministic=True).actions[0].tolist() == want


@pytest.mark.parametrize("shape", [(24,), (4, 6)])
def test_what_was_sampled_is_evaluated_to_the_same_numbers_bit_for_bit(shape):
    case = Case(18, 24)
    sampled = case.sample()
    for name in ("legal", "has_gate"):
        setattr(case, name, getattr(case, name).unflatten(0, shape))
    case.logits = tuple(head.unflatten(0, shape) for head in case.logits)
    evaluated = case.evaluate(sampled.actions.unflatten(0, shape))
    assert evaluated.log_prob.shape == (*shape, 8)
    assert torch.equal(evaluated.log_prob.reshape(24, 8), sampled.log_prob)


@pytest.mark.parametrize("scale", [0.0, 1.0, 100.0, 1e6, 1e30])
def test_heads_that_the_op_does_not_read_are_exactly_zero_however_large_the_logits(scale):
    # the canonical value may be the least probable of its head by far
    case = Case(27, 200)
    logits = tuple((scale * head).requires_grad_() for head in case.logits)
    sampled = sample_heads(logits, *case.state, case.uniforms)
    out = case.evaluate(sampled.actions, logits)
    read = relevance(sampled.actions[:, OP])
    assert (~read).any(dim=0)[:OP].all()
    for values in (sampled.log_prob, out.log_prob, out.entropy):
        assert (values[~read] == 0).all()
    weights = torch.randn(200, 8, generator=generator(1))
    for call in (sampled.log_prob, out.log_prob + out.entropy):
        gradients = torch.autograd.grad((weights * call).sum(), logits, retain_graph=True)
        for head, gradient in enumerate(gradients):
            assert (gradient[~read[:, head]] == 0).all()
            assert gradient.isfinite().all()
            assert (gradient[read[:, head]] != 0).any() or scale > 100


def test_a_state_with_one_choice_only_teaches_nothing():
    case = Case(20, 10)
    case.legal[:, LifecycleOp.WAIT + 1 :] = False
    logits = tuple(head.requires_grad_() for head in case.logits)
    actions = case.sample().actions
    assert actions.unique(dim=0).tolist() == [list(CANONICAL_ACTION)]
    out = case.evaluate(actions, logits)
    assert (out.log_prob == 0).all()
    assert (out.entropy_avail == 0).all()
    assert not out.available.any()
    total = out.log_prob.sum() + out.entropy.sum() + out.entropy_avail.sum()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(total, logits))
    assert forced(case.legal).all()


def test_gradients_of_log_probability_and_entropy_agree_with_finite_differences():
    case = Case(21, 2)
    actions = case.sample().actions
    sizes = [head[0].numel() for head in case.logits]
    coefficients = torch.randn(3, 2, 8, generator=generator(2))

    def loss(flat: torch.Tensor) -> torch.Tensor:
        parts = zip(case.logits, flat.split(sizes, dim=-1), strict=True)
        out = case.evaluate(actions, tuple(part.view_as(head) for head, part in parts))
        return (coefficients * torch.stack((out.log_prob, out.entropy, out.entropy_avail))).sum()

    flat = torch.cat([head.flatten(1) for head in case.logits], dim=-1).requires_grad_()
    (gradient,) = torch.autograd.grad(loss(flat), flat)
    direction = torch.randn(flat.shape, generator=generator(3))
    step = 1e-2 * direction
    difference = (loss(flat + step) - loss(flat - step)) / 2e-2
    assert difference.item() == pytest.approx((gradient * direction).sum().item(), rel=2e-2)


def test_relevance_and_forced_have_the_shape_of_their_arguments():
    op = torch.tensor([[0, 1], [2, 3], [4, 5]])
    assert relevance(op).shape == (3, 2, 8)
    assert relevance(op)[0, 0].tolist() == [False] * 7 + [True]
    assert relevance(op)[1, 1].tolist() == [True, False, False, False, False, True, True, True]
    legal = torch.zeros(3, 2, 6, 4, dtype=torch.bool)
    legal[..., LifecycleOp.WAIT, :] = True
    legal[0, 1, LifecycleOp.ADVANCE, 3] = True
    assert forced(legal).tolist() == [[True, False], [True, True], [True, True]]


def test_a_stored_action_outside_its_mask_makes_the_log_probability_missing():
    case = Case(22, 30)
    actions = case.sample().actions
    wrong = actions.clone()
    wrong[4, Head.BLUEPRINT] = 12  # of another host family
    assert check_stored_actions(actions, *case.state)
    assert not check_stored_actions(wrong, *case.state)
    log_prob = case.evaluate(wrong).log_prob
    assert log_prob.isnan().nonzero().tolist() == [[4, int(Head.BLUEPRINT)]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_shows_in_the_log_probability_and_still_draws_a_legal_value(bad):
    case = Case(23, 50)
    assert check_logits(case.logits)
    case.logits[OP][7, LifecycleOp.WAIT] = bad
    assert not check_logits(case.logits)
    sampled = case.sample()
    assert check_stored_actions(sampled.actions, *case.state)
    assert sampled.log_prob.isfinite().all(dim=1).logical_not().nonzero().tolist() == [[7]]


def test_a_network_for_other_heads_is_refused():
    case = Case(24, 2)
    with pytest.raises(AssertionError, match="other heads"):
        sample_heads(random_logits(generator(0), 2, num_slots=4), *case.state, case.uniforms)


def test_sampling_without_numbers_is_refused():
    case = Case(25, 2)
    with pytest.raises(AssertionError, match="uniform"):
        sample_heads(case.logits, *case.state)
