"""Measure many states of the network for several hosts in one forward pass; used by the fused and the static executor.

Shape legend: B = examples, P = states, g = hosts, K = coalitions.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from esper.tolaria.amp import LossScaler
from esper.tolaria.executors.fused.slots import Rows

_CHUNK_FLOATS = 2**24
"""Most floats of one activation (64 MiB); more examples are measured in several parts."""


def measure_states(
    host: Rows,
    apply: Callable[[int, str, Tensor], Tensor],
    scaler: LossScaler,
    state_of: Int[Tensor, "g K"],
    floats_per_example: int,
    x: Float[Tensor, "B C H W"],
    y: Int[Tensor, " B"],
) -> Iterator[tuple[Int[Tensor, "g K"], Float[Tensor, " g"]]]:
    """Hits of each coalition and summed loss of coalition 0, for one part of the examples after another.

    Args:
        host: the hosts.
        apply: B, slot id and features [B * P * g, ...] before a slot --> the features [B * P' * g, ...] after it.
        scaler: precision.
        state_of: the final state of each coalition.
        floats_per_example: of the largest activation, over all hosts and states.
        x: the examples, the same for all hosts.
        y: their labels.
    """
    num_hosts = len(state_of)
    size = max(1, _CHUNK_FLOATS // floats_per_example)
    column = torch.arange(num_hosts, device=state_of.device)
    for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
        batch = len(part_y)
        rows = part_x[:, None].expand(batch, num_hosts, *x.shape[1:]).flatten(0, 1)
        with scaler.autocast():
            logits = host(rows, partial(apply, batch))
        logits_BPg = logits.float().view(batch, -1, num_hosts, logits.shape[-1])
        hits_Pg = (logits_BPg.argmax(dim=-1) == part_y[:, None, None]).sum(dim=0)
        main_Bg = logits_BPg[:, state_of[:, 0], column]
        labels = part_y.repeat_interleave(num_hosts)
        loss_Bg = F.cross_entropy(main_Bg.flatten(0, 1), labels, reduction="none").view(batch, num_hosts)
        yield hits_Pg.t().gather(1, state_of), loss_Bg.sum(dim=0)
