"""The losses of PPO on four steps worked out by hand, and their masks one by one."""

import math

import pytest
import torch

from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp
from esper.leyline.tensor_dataclass import replace
from esper.simic.ppo import (
    Losses,
    LossInputs,
    LossSums,
    LossWeights,
    approx_kl,
    clip_fraction,
    head_entropies,
    largest_change,
    loss_sums,
    packed,
    ppo_losses,
    unpacked,
)
from esper.tamiyo.heads import evaluate_heads, relevance
from toys import even_logits

OP, SLOT = Head.OP, Head.SLOT


def heads(**columns: list[float]) -> torch.Tensor:
    """`[1, 4, 8]` with the columns `op` and `slot`; zero elsewhere."""
    out = torch.zeros(1, 4, 8)
    out[0, :, OP], out[0, :, SLOT] = torch.tensor(columns["op"]), torch.tensor(columns["slot"])
    return out


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def four_steps(**changes) -> LossInputs:
    """Three decisions and a step without a choice; only the heads op and slot take part."""
    fields = {
        "log_prob": heads(op=[-0.5, -1.2, -0.9, -0.1], slot=[-1.0, -0.8, -1.1, 0.0]),
        "old_log_prob": heads(op=[-0.7, -1.0, -1.3, -0.1], slot=[-1.1, -0.5, -1.1, 0.0]),
        "entropy": heads(op=[0.6, 0.7, 0.5, 0.0], slot=[0.9, 0.8, 0.3, 0.0]),
        "entropy_avail": torch.zeros(1, 4, 8),
        "causal": heads(op=[1, 1, 1, 1], slot=[1, 1, 0, 0]).bool(),
        "choice": torch.ones(1, 4, 8, dtype=torch.bool),
        "available": torch.zeros(1, 4, 8, dtype=torch.bool),
        "advantages": row(1.0, -0.5, 0.8, -1.2),
        "values": row(0.2, 0.1, 0.5, 0.4),
        "returns": row(0.5, 0.0, 0.9, -0.2),
        "valid": torch.ones(1, 4, dtype=torch.bool),
        "forced": torch.tensor([[False, False, False, True]]),
    }
    return LossInputs(**fields | changes)


def sums(x: LossInputs, clip: float = 0.2) -> LossSums:
    return loss_sums(x, clip, forced_weight=0.2)


def weights(*, value: float = 1.0, entropy: float = 0.05, floor: float = 1.0) -> LossWeights:
    value_, entropy_, floor_ = (torch.tensor(x) for x in (value, entropy, floor))
    return LossWeights(value=value_, entropy=entropy_, floor=floor_)


def with_an_invalid_step(x: LossInputs) -> LossInputs:
    """The same steps and one more that is not valid and holds nonsense."""

    def grown(tensor: torch.Tensor, filler: float) -> torch.Tensor:
        return torch.cat((tensor, torch.full_like(tensor[:, :1], filler)), dim=1)

    names = ("log_prob", "old_log_prob", "entropy", "entropy_avail", "advantages", "values", "returns")
    changes = {name: grown(getattr(x, name), 3.0 + i) for i, name in enumerate(names)}
    changes |= {name: grown(getattr(x, name), True) for name in ("causal", "choice", "available", "forced")}
    return replace(x, valid=grown(x.valid, False), **changes)


def losses(x: LossInputs) -> Losses:
    """With all weights 1."""
    return ppo_losses(sums(x), weights(entropy=1.0))


def test_the_worked_example_of_all_terms():
    losses = ppo_losses(sums(four_steps()), weights())
    assert float(losses.policy) == pytest.approx(-0.936130, abs=1e-5)  # -0.583545 - 0.352585
    assert float(losses.value) == pytest.approx(0.051875, abs=1e-6)
    assert float(losses.entropy) == pytest.approx(-1.45, abs=1e-6)
    assert float(losses.floor) == 0.0
    assert float(losses.total) == pytest.approx(-0.956755, abs=1e-5)


def test_the_losses_of_two_parts_follow_from_the_sum_of_their_sums():
    x = four_steps()
    parts = [LossInputs(**{name: value[:, i : i + 2] for name, value in vars(x).items()}) for i in (0, 2)]
    packed_sums = torch.stack([packed(sums(part)) for part in parts]).sum(0)
    want, found = ppo_losses(sums(x), weights()), ppo_losses(unpacked(packed_sums), weights())
    for name, value in vars(want).items():
        assert float(getattr(found, name)) == pytest.approx(float(value), abs=1e-6), name


def test_the_worked_example_of_ratios():
    found = sums(four_steps())
    assert float(approx_kl(found)) == pytest.approx(0.029658, abs=1e-5)
    # log-ratios of op and slot: 0.2 + 0.1, -0.2 - 0.3, 0.4 + 0; the forced step is no decision
    assert float(clip_fraction(found)) == 1.0
    assert float(clip_fraction(sums(four_steps(), clip=0.45))) == pytest.approx(1 / 3)  # e^0.4 = 1.49
    assert float(largest_change(four_steps())) == pytest.approx(0.4)


def test_a_step_that_is_not_valid_changes_nothing():
    x = four_steps(available=heads(op=[1, 1, 1, 1], slot=[1, 1, 1, 1]).bool())
    longer = with_an_invalid_step(x)
    want, found = ppo_losses(sums(x), weights()), ppo_losses(sums(longer), weights())
    for name in ("policy", "value", "entropy", "floor", "total"):
        assert float(getattr(found, name)) == pytest.approx(float(getattr(want, name)), abs=1e-6), name
    assert float(clip_fraction(sums(longer))) == 1.0
    assert float(largest_change(longer)) == pytest.approx(0.4)


def test_the_clip_stops_the_gradient_on_the_side_of_the_advantage_only():
    # step 0: ratio 1.22 above the clip with A > 0: flat.   step 1 (op): ratio 0.82 with A < 0: inside, has a gradient
    # step 2: ratio 1.49 with A > 0: flat.                  step 1 (slot): ratio 0.74 with A < 0: clipped, flat
    log_prob = four_steps().log_prob.requires_grad_()
    losses(four_steps(log_prob=log_prob)).policy.backward()
    assert log_prob.grad[0, :, OP].nonzero().flatten().tolist() == [1]
    assert log_prob.grad[0, :, SLOT].nonzero().flatten().tolist() == [0]
    log_prob.grad = None  # with the opposite advantages all of them went the wrong way, and are called back
    losses(four_steps(log_prob=log_prob, advantages=-four_steps().advantages)).policy.backward()
    assert log_prob.grad[0, :, OP].nonzero().flatten().tolist() == [0, 1, 2]
    assert log_prob.grad[0, :, SLOT].nonzero().flatten().tolist() == [0, 1]


def test_refused_ops_and_canonical_heads_receive_no_policy_or_entropy_gradient():
    log_prob, entropy = four_steps().log_prob.requires_grad_(), four_steps().entropy.requires_grad_()
    x = four_steps(log_prob=log_prob, entropy=entropy, old_log_prob=log_prob.detach())
    (losses(x).policy + losses(x).entropy).backward()
    for gradient in (log_prob.grad, entropy.grad):
        assert gradient[0, 2, SLOT] == 0
        assert gradient[0, 2, OP] != 0
        assert not gradient[0, 3].any()


def test_extreme_ratios_stay_finite():
    found = ppo_losses(sums(four_steps(log_prob=torch.full((1, 4, 8), 1e30))), weights())
    assert math.isfinite(float(found.total))
    assert math.isfinite(float(approx_kl(sums(four_steps(log_prob=torch.full((1, 4, 8), -1e30))))))


def test_forced_steps_weigh_a_fifth_in_the_value_loss():
    # one free step with error 1 and one forced step with error 3: (1 + 0.2 * 9) / 1.2 / 2
    x = four_steps(
        values=row(1.0, 0.0, 0.0, 3.0), returns=torch.zeros(1, 4), valid=torch.tensor([[True, False, False, True]])
    )
    assert float(losses(x).value) == pytest.approx(2.8 / 1.2 / 2)


def test_the_entropy_bonus_weighs_the_heads():
    entropy, causal = torch.zeros(1, 4, 8), torch.zeros(1, 4, 8, dtype=torch.bool)
    entropy[0, 0, Head.BLUEPRINT], causal[0, 0, Head.BLUEPRINT] = 0.5, True
    entropy[0, 1, Head.STYLE], causal[0, 1, Head.STYLE] = 0.25, True
    x = four_steps(entropy=entropy, causal=causal)
    assert float(losses(x).entropy) == pytest.approx(-(1.3 * 0.5 + 1.2 * 0.25))


def test_the_floor_asks_for_entropy_where_a_head_is_available():
    # op: open on steps 0 and 1 with mean 0.2, floor 0.30, coefficient 0.3;  slot: mean 0.5, above its floor of 0.15
    entropy_avail = heads(op=[0.1, 0.3, 0.9, 0.9], slot=[0.5, 0.9, 0.9, 0.9])
    available = heads(op=[1, 1, 0, 1], slot=[1, 0, 0, 0]).bool()
    x = four_steps(entropy_avail=entropy_avail, available=available)
    assert float(losses(x).floor) == pytest.approx(0.3 * 0.1**2)
    assert float(ppo_losses(sums(x), weights(floor=1.5)).floor) == pytest.approx(1.5 * 0.3 * 0.1**2)


def test_a_minibatch_without_a_valid_step_costs_nothing():
    x = four_steps(valid=torch.zeros(1, 4, dtype=torch.bool))
    assert float(ppo_losses(sums(x), weights()).total) == 0.0
    assert float(approx_kl(sums(x))) == 0.0


def test_reported_entropies_are_means_over_the_steps_that_used_the_head_with_a_choice():
    x = four_steps()
    x.choice[0, 1, SLOT] = False  # as where one slot alone is legal for the op: it says nothing about exploration
    x.entropy[0, :, Head.BLUEPRINT] = torch.tensor([0.2, 0.7, 0.7, 0.7])
    x.causal[0, :, Head.BLUEPRINT] = torch.tensor([True, False, False, True])
    mean, steps = head_entropies(sums(x))
    # op 0.6, 0.7 and 0.5; slot 0.9; blueprint 0.2; all heads but op together 0.9 and 0.2; the forced step is left out
    assert mean[[OP, SLOT, Head.BLUEPRINT, -1]].tolist() == pytest.approx([0.6, 0.9, 0.2, 0.55])
    assert steps.tolist() == [1, 1, 0, 0, 0, 0, 0, 3, 2]


def test_a_head_that_no_decision_used_has_its_entropy_raised_where_it_could_have_been_used():
    # only WAIT was decided, but PRUNE was legal: nothing but the floor speaks to the speed of a prune
    logits = even_logits(1, 4, num_slots=2)
    logits[Head.ALPHA_SPEED][..., 0] = 8.0
    for head in logits:
        head.requires_grad_()
    legal = torch.zeros(1, 4, 6, 2, dtype=torch.bool)
    legal[:, :, [LifecycleOp.WAIT, LifecycleOp.PRUNE]] = True
    state = legal, torch.zeros(1, 4, 2, dtype=torch.bool), torch.ones(13, dtype=torch.bool)
    actions = torch.tensor(CANONICAL_ACTION).expand(1, 4, 8)

    def evaluated(heads):
        return evaluate_heads(tuple(heads), *state, actions)

    out = evaluated(logits)
    x = four_steps(
        log_prob=out.log_prob, old_log_prob=out.log_prob.detach(), entropy=out.entropy,
        entropy_avail=out.entropy_avail, available=out.available, causal=relevance(actions[..., Head.OP]),
        forced=torch.zeros(1, 4, dtype=torch.bool),
    )  # fmt: skip
    speed = logits[Head.ALPHA_SPEED]
    (elsewhere,) = torch.autograd.grad(losses(x).policy + losses(x).entropy, speed, retain_graph=True)
    assert not elsewhere.any()
    (gradient,) = torch.autograd.grad(losses(x).floor, speed)
    with torch.no_grad():
        moved = [head - gradient / gradient.norm() if head is speed else head for head in logits]
        assert (evaluated(moved).entropy_avail > out.entropy_avail)[..., Head.ALPHA_SPEED].all()
