"""Parts of the static executor: blending under masks, and the states of coalitions."""

import itertools

import pytest
import torch

from esper.kasmina.blending import blend
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.static.blending import BlendMasks, blend_masked, select
from esper.tolaria.executors.static.coalitions import static_states

B, C = 4, 2
ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)
CASES = [(a, active) for a in ALGORITHMS for active in (False, True)]


def masks(cases, trainable=True):
    def column(values):
        return torch.tensor(list(values)).view(-1, 1, 1, 1)

    return BlendMasks(
        active=column(active for _, active in cases),
        trainable=column(trainable for _ in cases),
        multiplies=column(a is Algorithm.MULTIPLY for a, _ in cases),
        gated=column(a is Algorithm.GATE for a, _ in cases),
        alpha=column(0.3 if active else 0.0 for _, active in cases),
    )


def tensors(num_hosts, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, num_hosts, C, 3, 3), (B, num_hosts, C, 3, 3), (B, num_hosts, 1, 1, 1))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def test_blending_under_masks_equals_the_rule_for_one_seed_in_value_and_gradient():
    h, delta, gate = tensors(len(CASES))
    weights = torch.randn(h.shape, dtype=torch.float64)
    out = blend_masked(h, delta, gate, masks(CASES))
    (out * weights).sum().backward()
    for n, (algorithm, active) in enumerate(CASES):
        one_h, one_delta, one_gate = (x[:, n].detach().clone().requires_grad_() for x in (h, delta, gate))
        # the seed's input is detached, so MULTIPLY scales h and nothing else reaches it
        want = blend(one_h, one_delta, algorithm, torch.tensor(0.3) if active else None, one_gate)
        (want * weights[:, n]).sum().backward()
        torch.testing.assert_close(out[:, n], want)
        torch.testing.assert_close(h.grad[:, n], one_h.grad)
        torch.testing.assert_close(delta.grad[:, n], one_delta.grad)
        if algorithm is Algorithm.GATE:
            torch.testing.assert_close(gate.grad[:, n], one_gate.grad)
        else:
            assert not gate.grad[:, n].any()


def test_nothing_of_a_hidden_seed_reaches_its_host():
    hidden = [(a, False) for a in ALGORITHMS]
    h, delta, gate = tensors(3)
    h = torch.cat((h[:, :2], torch.full_like(h[:, :1], -0.0)), dim=1).detach().requires_grad_()
    broken = [torch.full_like(x, torch.nan) for x in (delta, gate)]
    out = blend_masked(h, *broken, masks(hidden, trainable=False))
    assert torch.equal(out.view(torch.int64), h.detach().view(torch.int64))  # -0.0 stays -0.0
    out.sum().backward()
    assert torch.equal(h.grad, torch.ones_like(h))


def test_a_seed_that_is_not_trainable_gets_no_gradient_and_still_scales_its_host():
    h, delta, gate = tensors(len(CASES))
    blend_masked(h, delta, gate, masks(CASES, trainable=False)).sum().backward()
    assert not delta.grad.any()
    assert not gate.grad.any()
    scaled = 1.0 + 0.3 * torch.tanh(delta.detach()[:, 3])  # MULTIPLY, active
    torch.testing.assert_close(h.grad[:, 3], scaled)


def test_each_host_gets_the_output_of_its_own_blueprint_and_no_nan_of_another():
    deltas = [torch.full((B, 3, C, 1, 1), value, requires_grad=True) for value in (1.0, 2.0, float("nan"))]
    own = [torch.tensor(row).view(-1, 1, 1, 1) for row in ([True, False, False], [False, True, False], [False] * 3)]
    chosen = select(deltas, own)
    assert chosen[0, :, 0, 0, 0].tolist() == [1.0, 2.0, 0.0]
    chosen.sum().backward()
    assert [delta.grad[0, :, 0, 0, 0].tolist() for delta in deltas] == [[1, 0, 0], [0, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(("num_slots", "num_sets"), [(1, 1), (1, 2), (2, 3), (3, 8), (3, 5), (4, 6), (5, 1)])
def test_each_coalition_ends_in_the_state_of_its_set(num_slots, num_sets):
    num_hosts, order = 6, tuple(reversed(range(num_slots)))
    generator = torch.Generator().manual_seed(num_slots)
    subsets = torch.tensor(list(itertools.product([False, True], repeat=num_slots)))
    rows = torch.stack([torch.randperm(len(subsets), generator=generator)[:num_sets] for _ in range(num_hosts)])
    sets = subsets[rows]
    states = static_states(sets, order)
    # an active slot s adds 10**s; other hosts add other amounts
    h = torch.zeros(2, 1, num_hosts, 1)
    for i, s in enumerate(order):
        h = states.branch(i, h, h + 10.0**s * (1 + torch.arange(num_hosts)).view(1, 1, -1, 1))
        assert h.shape[1] <= max(num_sets, 1)
    assert h.shape[1] == states.num_states
    arrived = h[0, :, :, 0].t().gather(1, states.final)
    want = (sets * 10.0 ** torch.arange(num_slots)).sum(dim=2) * (1 + torch.arange(num_hosts))[:, None]
    assert torch.equal(arrived, want)
