"""What somebody does without growing anything: a loop with AdamW and a cosine, in plain PyTorch.

Cost in FLOPs, by `torch.utils.flop_counter` (matrix products and convolutions, a multiply-add as two):

    cost = forward * (3 * examples trained + examples measured)     a backward pass counts as two forward passes

Only the last state of a run is measured, on the validation split; the best of several runs is tested once.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from practice_hosts import WIDER, Data, Host

TRAINING = 3
"""Forward passes that a forward and a backward pass count as."""
_TRIED = 30
"""Batches of a trial of the threads."""
ENOUGH, SMALLEST = 2_000, 8
"""Batches that a long run by small ones has at least, unless they would be smaller than the second number."""
MEASURED = 1_000
"""Examples of a batch without gradients."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a method found for a host: accuracies in percent, of the network that is kept; cost in FLOPs."""

    test: float
    val: float
    params: int
    flops: float
    chosen: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Training runs of one network that together cost as much as allowed."""

    width: float
    rates: tuple[float, ...]
    steps: int
    cost: float
    batch: int


def num_params(net: nn.Module) -> int:
    """Trained numbers."""
    return sum(p.numel() for p in net.parameters())


def forward_flops(host: Host, data: Data, width: float) -> float:
    """FLOPs of a forward pass of one example; attention as its matrix products, which the counter knows."""
    net, x = host.net(width).eval(), data.train[0][:2]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        net(x if data.inputs is None else data.inputs(x))
    return counter.get_total_flops() / 2


def budget_of(host: Host, data: Data, epochs: float) -> float:
    """Three runs of the network as it is, each of `epochs` and measured once."""
    return _cost(host, data, 1.0, runs=3, steps=max(1, round(epochs * len(data.train[1]) / host.batch)))


def plans(host: Host, data: Data, budget: float) -> dict[str, Plan]:
    """The network as it is and a wider one, each by its best of three learning rates or in one long run.

    Long runs by small batches have lower learning rates (Malladi et al. 2022, arXiv 2205.10287).
    """

    def plan(width: float, rates: tuple[float, ...], batch: int = host.batch) -> Plan:
        this = replace(host, batch=batch)
        fixed, each = (_cost(this, data, width, runs=len(rates), steps=steps) for steps in (0, 1))
        steps = math.floor((budget - fixed) / (each - fixed) + 1e-6)
        return Plan(width=width, rates=rates, steps=steps, cost=fixed + steps * (each - fixed), batch=batch)

    long = plan(1.0, host.rates[1:2])
    small = host.batch
    while long.steps * host.batch < ENOUGH * small and small // 2 >= SMALLEST:
        small //= 2
    rates_of_small = (host.rates[1] * math.sqrt(small / host.batch),)
    return {
        "plain": plan(1.0, host.rates),
        "plain, long": long,
        "plain, long, small batches": plan(1.0, rates_of_small, small),
        "wider": plan(WIDER, host.rates),
        "wider, long": plan(WIDER, host.rates[1:2]),
        "wider, long, small batches": plan(WIDER, rates_of_small, small),
    }


def _cost(host: Host, data: Data, width: float, *, runs: int, steps: int) -> float:
    examples = TRAINING * steps * host.batch + len(data.val[1])
    return runs * forward_flops(host, data, width) * examples


def run(host: Host, data: Data, plan: Plan, seed: int) -> Found:
    """Train by every rate of the plan, and test the network that is best on the validation split."""
    host = replace(host, batch=plan.batch)
    nets = [trained(host, data, plan.width, rate, plan.steps, seed) for rate in plan.rates]
    vals = [accuracy(net, data, data.val) for net in nets]
    best = max(range(len(nets)), key=vals.__getitem__)
    return Found(
        test=accuracy(nets[best], data, data.test),
        val=vals[best],
        params=num_params(nets[best]),
        flops=plan.cost,
        chosen=f"lr {plan.rates[best]:g}",
    )


def fastest_threads(host: Host, data: Data, plan: Plan, most: int) -> int:
    """The number of threads, one or `most`, by which some batches of the plan are trained sooner."""
    seconds = {}
    for threads in (1, most, 1, most):
        torch.set_num_threads(threads)
        began = time.perf_counter()
        trained(replace(host, batch=plan.batch), data, plan.width, plan.rates[0], min(plan.steps, _TRIED), seed=0)
        seconds[threads] = time.perf_counter() - began  # the second time counts
    return min(seconds, key=seconds.__getitem__)


def trained(host: Host, data: Data, width: float, lr: float, steps: int, seed: int) -> nn.Module:
    """A new network after `steps` batches; channels last, which is faster on a CPU too."""
    torch.manual_seed(seed)
    net = host.net(width)
    net.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(step, steps, host.warmup))
    x, y = data.train
    batches: Sequence[Tensor] = ()
    for step in range(steps):
        if (place := step % (len(y) // host.batch)) == 0:
            batches = torch.randperm(len(y)).split(host.batch)
        chosen = batches[place]
        loss = F.cross_entropy(_outputs(net, data, x[chosen]).flatten(0, -2), y[chosen].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return net


def factor(step: int, steps: int, warmup: float) -> float:
    """What multiplies the learning rate in a step from 0 on: a cosine down to 0, behind a straight line up."""
    rising = warmup * steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.5 * (1.0 + math.cos(math.pi * (step - rising) / (steps - rising)))


@torch.no_grad()
def accuracy(net: nn.Module, data: Data, examples: tuple[Tensor, Tensor]) -> float:
    """Percent of right classes or tokens."""
    net.eval()
    x, y = examples
    parts = zip(x.split(MEASURED), y.split(MEASURED), strict=True)
    right = sum(int((_outputs(net, data, some_x).argmax(-1) == some_y).sum()) for some_x, some_y in parts)
    return 100.0 * right / y.numel()


def _outputs(net: nn.Module, data: Data, x: Tensor) -> Tensor:
    found = x if data.inputs is None else data.inputs(x)
    out: Tensor = net(found.contiguous(memory_format=torch.channels_last) if found.dim() == 4 else found)
    return out
