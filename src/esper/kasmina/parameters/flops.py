"""Floating-point operations of a forward pass: matrix products and convolutions, a multiply-add as two.

One rule for all that counts compute: the price in J, the budget of a host, comparisons, growth, and exported networks.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BACKWARD = 2
"""Forward passes that one backward pass counts as."""


def flops(forward: Callable[[], object]) -> int:
    """Floating-point operations of a call. Those of attention are counted without its mask."""
    # with gradients, because without them the counter rejects a view of a parameter as the input of a layer; and with
    # attention as matrix products, because it does not know the fused kernels of a CPU
    known = {torch.ops.aten.mkldnn_rnn_layer: _flops_of_lstm}
    counter = FlopCounterMode(display=False, custom_mapping=known)
    with counter, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        forward()
    return int(counter.get_total_flops())


def flops_of_example(run: Callable[[Tensor], object], x: Tensor, batch: int) -> int:
    """Those of one example of x [n, ...].

    Where they depend on the example, as by its length, or on the size of the batch, as for weights that are computed
    in each pass, they are the mean over full batches of these examples in turn.
    """
    first = flops(lambda: run(x[:1]))
    if flops(lambda: run(x)) == len(x) * first:
        return first
    rows = torch.arange(batch * -(-len(x) // batch)) % len(x)
    return round(sum(flops(lambda x=x[some]: run(x)) for some in rows.split(batch)) / len(rows))  # type: ignore[misc]


def _flops_of_lstm(
    x: Sequence[int], of_inputs: Sequence[int], of_hidden: Sequence[int], *_: object, **__: object
) -> int:
    """Of one layer of nn.LSTM on a CPU, in one direction, from the shapes of its inputs [T, B, I] and weights."""
    return 2 * x[0] * x[1] * (math.prod(of_inputs) + math.prod(of_hidden))
