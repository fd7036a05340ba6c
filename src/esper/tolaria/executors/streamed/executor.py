"""The streamed executor: one host after another, on rows of the stacked state. The reference for the others.

train      for each batch: forward and backward of each host (on CUDA on its own stream), then one stacked clip and
           optimizer step of all hosts and seeds
evaluate   for each host: all its coalitions in one pass that runs each distinct prefix once

Other executors call the functions of this module for hosts that they cannot run themselves.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from esper.kasmina.parameters.population import Population
from esper.kasmina.parameters.slab import Working
from esper.leyline.messages import SlotState
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.running_seeds import (
    SlotsOfHost,
    TrainedRows,
    begin_training,
    finish_training,
    running_seeds,
)
from esper.tolaria.executors.streamed.streams import host_streams
from esper.tolaria.prefixes import PrefixPlan, plan_prefixes

MAX_EXAMPLES = 32_768
"""Most examples, counted once per distinct state of the network, in one forward pass; bounds the memory."""

TrainBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""x [N, B, ...], y [N, B] --> loss and hits of the trained hosts."""


@final
class StreamedExecutor(NetworkExecutor):
    """N hosts trained and measured one after another."""

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        return train_epoch(self.data, t, slots)

    def count_correct(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `NetworkExecutor`."""
        return count_correct(self.data, range(self.population.num_envs), batches, alpha, sets, num_columns)


def train_epoch(data: HostData, t: int, slots: SlotState) -> TrainPass:
    """Every host over its whole train split, in its own order."""
    p = data.population
    hosts = p.host.begin(torch.arange(p.num_envs, device=p.device), [p.host.params.shape[1]] * p.num_envs)
    rows = begin_training(p, data.structure)
    optimizer = StackedOptimizer(p, hosts, rows, data.scaler, data.decay_mask)
    train_batch = train_function(data, range(p.num_envs), hosts, rows, slots.alpha)

    def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
        outputs = train_batch(x_NB, y_NB)
        optimizer.unscale()
        return outputs

    train_pass = run_epoch(
        data.train_batches(t),
        p.num_envs,
        p.device,
        train=train,
        statistics=lambda: gradient_statistics(p, data.structure, rows, hosts.grad),
        step=optimizer.step,
    )
    p.host.finish(hosts)
    finish_training(p, rows)
    return train_pass


def train_function(data: HostData, some: Sequence[int], hosts: Working, rows: TrainedRows, alpha: Tensor) -> TrainBatch:
    """A function that computes the gradients of some hosts on a batch, and sets those of the others to zero.

    `some` are their numbers; `hosts` and `rows` are the working copies of all hosts and trained seeds; `alpha` [N, S]
    is on the device.
    """
    p, scaler, template = data.population, data.scaler, data.population.host_kind.template
    seeds = running_seeds(p, data.structure, alpha, rows)
    streams = host_streams(p.num_envs, p.device)
    _set_mode(p, training=True)

    def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
        for working in (hosts, rows.seeds, rows.gates):
            working.grad.zero_()
        losses, logits = [], []
        streams.fork()
        for n in some:
            with streams.of(n):
                template.bind(hosts.leaves[n], p.host.buffers[n])
                with scaler.autocast():
                    out = template(x_NB[n], partial(_train_slot, seeds[n]))
                loss = F.cross_entropy(out.float(), y_NB[n])
                (loss * scaler.scale[n] if scaler.enabled else loss).backward()
            losses.append(loss.detach())
            logits.append(out.detach())
        streams.join()
        labels = y_NB if len(some) == p.num_envs else y_NB[list(some)]
        return torch.stack(losses), (torch.stack(logits).argmax(dim=-1) == labels).sum(dim=1)

    return train


def _train_slot(seeds: SlotsOfHost, slot_id: str, h: Tensor) -> Tensor:
    seed = seeds.get(slot_id)
    return h if seed is None else seed.train(h)


def count_correct(
    data: HostData,
    some: Sequence[int],
    batches: SharedBatchIterator,
    alpha: Tensor,
    sets: list[np.ndarray],
    num_columns: int,
) -> tuple[Int[Tensor, "H K"], Float[Tensor, " H"], int]:
    """`NetworkExecutor.count_correct` for some of the hosts; `sets` covers all hosts."""
    p = data.population
    seeds = running_seeds(p, data.structure, alpha, None)
    plans = {n: plan_prefixes(sets[n], data.execution_order) for n in some}
    correct = {n: torch.zeros(len(sets[n]), dtype=torch.int64, device=p.device) for n in some}
    loss_sum = {n: torch.zeros((), device=p.device) for n in some}
    states = {n: p.index(np.array(plan.state_of_coalition)) for n, plan in plans.items()}
    streams, count = host_streams(p.num_envs, p.device), 0
    _set_mode(p, training=False)
    for x, y in batches:
        streams.fork()
        for n, plan in plans.items():
            chunk = max(1, MAX_EXAMPLES // plan.num_states)
            with streams.of(n), data.scaler.autocast():
                for some_x, some_y in zip(x.split(chunk), y.split(chunk), strict=True):
                    logits = _coalition_logits(data, n, plan, seeds[n], some_x).float()
                    main = logits[plan.state_of_coalition[0]]
                    loss_sum[n] += F.cross_entropy(main, some_y, reduction="sum")
                    hits = (logits.argmax(dim=-1) == some_y).sum(dim=1)
                    correct[n] += hits[states[n]]
        streams.join()
        count += len(y)
    correct_HK = torch.stack([F.pad(c, (0, num_columns - len(c))) for c in correct.values()])
    return correct_HK, torch.stack(list(loss_sum.values())), count


def _coalition_logits(data: HostData, n: int, plan: PrefixPlan, seeds: SlotsOfHost, x: Tensor) -> Tensor:
    """Logits [states, B, classes] of the distinct final states of host `n`."""
    p, template, batch = data.population, data.population.host_kind.template, len(x)
    template.bind(p.host.params[n], p.host.buffers[n])
    steps = {step.slot: step for step in plan.steps}

    def apply(slot_id: str, h: Tensor) -> Tensor:
        step = steps.get(data.column[slot_id])
        if step is None:
            return h
        states = h.unflatten(0, (step.num_parents, batch))
        off = [states[i] for i in step.off]
        on = [states[i] for i in step.on]
        active = seeds[slot_id].evaluate(on[0] if len(on) == 1 else torch.cat(on))
        return torch.cat((*off, active)) if off else active

    logits: Tensor = template(x, apply).unflatten(0, (plan.num_states, batch))
    return logits


def _set_mode(population: Population, *, training: bool) -> None:
    for kind in (population.host_kind, *population.seed_kinds.values()):
        kind.template.train(training)
