"""One rule of the native executor in float64, beside the module that it stands for."""

import torch
from torch import Tensor, nn

from esper.kasmina.parameters.layout import parameter_layout
from esper.tolaria.executors.native.networks import Outcome, by_instructions, by_torch
from esper.tolaria.executors.native.program import RULES

DOUBLE = torch.float64


def check(
    module: nn.Module, shape: tuple[int, ...], *, input_grad=True, trainable=True, rule=None, reference=None, x=None
):
    """`module` (or its `rule`) agrees to 1e-9 with PyTorch (or with `reference`, of the same parameters in order)."""
    layout = parameter_layout(module)
    row = torch.randn(layout.total, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) * 0.5 + 0.1
    row.masked_fill_(layout.padding_mask, 0.0)
    x = random_features(*shape) if x is None else x
    rule = rule or RULES[type(module)]
    found = by_instructions(rule, module, layout, row, x, trainable=trainable, input_grad=input_grad and trainable)
    plain = module if reference is None else reference
    want = by_torch(plain, parameter_layout(plain), row, x, trainable=trainable, input_grad=input_grad and trainable)
    assert_same(found, want)


def assert_same(found: Outcome, want: Outcome) -> None:
    """Outputs and gradients, to 1e-9."""
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(found.y, want.y.view_as(found.y), **close)
    for ours, theirs in ((found.grad_input, want.grad_input), (found.grad_weights, want.grad_weights)):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, **close)


def random_features(*shape: int, seed: int = 1) -> Tensor:
    """Standard normal, float64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
