"""All seeds of a slot join their hosts as `kasmina.blending` says for each alone, in value and gradient."""

import pytest
import torch

from esper.kasmina.blending import blend
from esper.leyline.stages import Algorithm
from esper.tolaria.executors.fused import BlendSlice, GroupOutputs, blend_groups

BATCH, HOSTS, FEATURES = 3, 6, (2, 4, 4)
ALPHA = torch.tensor([0.25, 0.5, 0.75, 1.0, 0.4, 0.6])
ADD, MULTIPLY, GATE = Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE


def piece(algorithm, active, first, hosts):
    index = torch.tensor(hosts)
    return BlendSlice(algorithm, active, first, first + len(hosts), index, ALPHA[index].view(-1, 1, 1, 1))


def features(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, HOSTS, *FEATURES, generator=generator, dtype=torch.float64)


def alone(h, delta, gate, algorithm, alpha, active):
    """One host by the rules for one seed."""
    return blend(h, delta, algorithm, alpha if active else None, gate)


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("algorithm", [ADD, MULTIPLY, GATE])
def test_value_and_gradients_are_those_of_each_host_alone(algorithm, active):
    h, delta = features(1).requires_grad_(), features(2)[:, :3].clone().requires_grad_()
    gate = torch.rand(BATCH, 3, 1, 1, 1, dtype=torch.float64).requires_grad_() if algorithm is GATE else None
    hosts = [4, 0, 3]
    group = GroupOutputs((piece(algorithm, active, 0, hosts),), torch.tensor(hosts), h[:, hosts], delta, gate)
    together = blend_groups(h, [group])
    rows = list(h.unbind(1))
    for i, n in enumerate(hosts):
        rows[n] = alone(h[:, n], delta[:, i], gate[:, i] if gate is not None else None, algorithm, ALPHA[n], active)
    apart = torch.stack(rows, dim=1)
    torch.testing.assert_close(together, apart)
    leaves = [x for x in (h, delta, gate) if x is not None]
    grad_out = features(3)
    for ours, theirs in zip(
        torch.autograd.grad(together, leaves, grad_out), torch.autograd.grad(apart, leaves, grad_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_several_algorithms_in_one_group_and_several_groups_in_one_slot():
    h = features(4).requires_grad_()
    first, second = features(5)[:, :4].clone().requires_grad_(), features(6)[:, :2].clone().requires_grad_()
    gate = torch.rand(BATCH, 2, 1, 1, 1, dtype=torch.float64).requires_grad_()
    ways = [(ADD, True, 5), (MULTIPLY, True, 1), (GATE, False, 2), (GATE, True, 0)]
    pieces = tuple(piece(algorithm, active, i, [n]) for i, (algorithm, active, n) in enumerate(ways))
    mixed = GroupOutputs(pieces, torch.tensor([5, 1, 2, 0]), h[:, [5, 1, 2, 0]], first, gate)
    plain = GroupOutputs((piece(ADD, False, 0, [3, 4]),), torch.tensor([3, 4]), h[:, [3, 4]], second, None)
    together = blend_groups(h, [mixed, plain])
    rows = list(h.unbind(1))
    for i, (algorithm, active, n) in enumerate(ways):
        rows[n] = alone(h[:, n], first[:, i], gate[:, i - 2] if i >= 2 else None, algorithm, ALPHA[n], active)
    for i, n in enumerate((3, 4)):
        rows[n] = alone(h[:, n], second[:, i], None, ADD, ALPHA[n], False)
    apart = torch.stack(rows, dim=1)
    torch.testing.assert_close(together, apart)
    leaves, grad_out = (h, first, second, gate), features(7)
    torch.testing.assert_close(
        torch.autograd.grad(together, leaves, grad_out), torch.autograd.grad(apart, leaves, grad_out)
    )


@pytest.mark.parametrize("algorithm", [ADD, MULTIPLY])
def test_the_output_of_a_hidden_seed_is_not_read(algorithm):
    h, delta = features(8), torch.full((BATCH, 1, *FEATURES), torch.inf, dtype=torch.float64)
    group = GroupOutputs((piece(algorithm, False, 0, [2]),), torch.tensor([2]), h[:, [2]], delta, None)
    assert torch.equal(blend_groups(h, [group]), h)


def test_a_group_of_every_host_in_order_needs_no_index():
    h, delta = features(9), features(10)
    everyone = list(range(HOSTS))
    group = GroupOutputs((piece(ADD, True, 0, everyone),), None, h, delta, None)
    want = h + delta * ALPHA.double().view(-1, 1, 1, 1)
    torch.testing.assert_close(blend_groups(h, [group]), want)


def test_the_gradient_of_a_host_passes_a_seed_that_is_not_trained():
    h = features(11).requires_grad_()
    delta = features(12)[:, :1]
    group = GroupOutputs((piece(MULTIPLY, True, 0, [1]),), torch.tensor([1]), h[:, [1]], delta, None)
    (grad,) = torch.autograd.grad(blend_groups(h, [group]).sum(), h)
    torch.testing.assert_close(grad[:, 1], 1.0 + ALPHA[1].double() * torch.tanh(delta[:, 0]))
    assert torch.equal(grad[:, [0, 2, 3, 4, 5]], torch.ones_like(grad[:, [0, 2, 3, 4, 5]]))
