"""The streamed executor: one host after another, on rows of the stacked state. The reference for the others.

train      for each batch: forward and backward of each host (on CUDA on its own stream), then one stacked clip and
           optimizer step of all hosts and seeds
evaluate   for each host: all its coalitions in one pass that runs each distinct prefix once

Other executors call the functions of this module for hosts that they cannot run themselves.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.dropout import Draws
from esper.kasmina.parameters.population import TrainingCopy
from esper.leyline.messages import Scores, SlotState
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import PrefixPlan
from esper.tolaria.executors.network import HostData, NetworkExecutor, SummedScores, mean_factor, sums, train_pass
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.training import (
    SlotsOfHost,
    StackedOptimizer,
    TrainedRows,
    begin_hosts,
    begin_training,
    finish_training,
    gradient_statistics,
    running_seeds,
)

TrainBatch = Callable[[Tensor, Tensor], Scores]
"""x [N, B, ...], y [N, B, ...] --> scores [N] of the trained hosts, summed over the batch; 0 for the others."""


@final
class StreamedExecutor(NetworkExecutor):
    """N hosts trained and measured one after another."""

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        return train_epoch(self.data, t, slots)

    def sum_scores(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> SummedScores:
        """See `NetworkExecutor`."""
        return sum_scores(self.data, range(self.population.num_envs), batches, alpha, sets, num_columns)


def train_epoch(data: HostData, t: int, slots: SlotState) -> TrainPass:
    """Every host over its whole train split, in its own order."""
    p = data.population
    hosts, rows = begin_hosts(p), begin_training(p, data.structure)
    running = np.flatnonzero(~data.structure.stopped).tolist()
    return run_epoch(data, t, hosts, rows, train_function(data, running, hosts, rows, slots.alpha))


def run_epoch(data: HostData, t: int, hosts: TrainingCopy, rows: TrainedRows, train: TrainBatch) -> TrainPass:
    """Train all hosts on every batch of a step, and write the working copies back.

    Args:
        data: of the hosts.
        t: the step.
        hosts: working copies of all of them.
        rows: those of the seeds and gates that are trained.
        train: forward and backward of a batch x [N, B, ...] and y [N, B, ...]; leaves scaled gradients in place and
            returns scores [N], summed over the batch in float64.
    """
    p, batches = data.population, data.train_batches(t)
    optimizer = StackedOptimizer(p, hosts, rows, data.scaler, data.decay_mask, data.lr_factors(t))
    last, total = len(batches) - 1, None
    for i, (x_NB, y_NB) in enumerate(batches):
        scores = train(x_NB, y_NB)
        optimizer.unscale()
        if i == last:
            gradients = gradient_statistics(p, data.structure, rows, hosts.grad)
        optimizer.step()
        total = scores if total is None else Scores(*(a + b for a, b in zip(total, scores, strict=True)))
    assert total is not None, "a split has at least one batch"
    p.host.finish(hosts)
    finish_training(p, rows)
    return train_pass(data.objective, total, gradients)


def train_function(
    data: HostData, some: Sequence[int], hosts: TrainingCopy, rows: TrainedRows, alpha: Tensor
) -> TrainBatch:
    """A function that computes gradients and scores of some hosts on a batch, and sets those of the others to zero.

    `some` are their numbers; `hosts` and `rows` are the working copies of all hosts and trained seeds; `alpha` [N, S]
    is on the device.
    """
    p, scaler, template = data.population, data.scaler, data.population.host_kind.template
    draws, index = {n: p.host_draws(slice(n, n + 1)) for n in some}, p.index(np.array(some))
    seeds = running_seeds(p, data.structure, alpha, rows)
    streams, buffers = host_streams(p.num_envs, p.device), p.host.buffers.unbind()
    template.train(True)

    def train(x_NB: Tensor, y_NB: Tensor) -> Scores:
        for working in (hosts, rows.seeds, rows.gates):
            working.grad.zero_()
        scores: list[Scores] = []
        x_N, y_N = x_NB.unbind(), y_NB.unbind()
        streams.fork()
        for n in some:
            with streams.of(n):
                template.bind(hosts.leaves[n], buffers[n], draws[n])
                with scaler.autocast():
                    outputs = template(data.laid_out(x_N[n]), partial(_train_slot, seeds[n]))
                scores.append(data.objective.scores(outputs.float(), y_N[n]))
                loss, _, weight = scores[-1]
                if not loss.requires_grad:  # the whole host is frozen, and nothing grows in it
                    continue
                factor = mean_factor(weight.sum())
                loss.backward((factor * scaler.scale[n] if scaler.enabled else factor).expand_as(loss))
        streams.join()
        return sums(scores, index, p.num_envs)

    return train


def _train_slot(seeds: SlotsOfHost, slot_id: str, h: Tensor) -> Tensor:
    seed = seeds.get(slot_id)
    return h if seed is None else seed.train(h)


def sum_scores(
    data: HostData,
    some: Sequence[int],
    batches: SharedBatchIterator,
    alpha: Tensor,
    sets: list[np.ndarray],
    num_columns: int,
) -> SummedScores:
    """`NetworkExecutor.sum_scores` for some of the hosts, 0 for the others; `sets` covers all hosts."""
    p = data.population
    objective, seeds = data.objectives[batches.split], running_seeds(p, data.structure, alpha, None)
    plans = {n: data.plan(sets[n]) for n in some if len(sets[n])}
    states = {n: p.index(np.array(plan.state_of_coalition)) for n, plan in plans.items()}
    score = torch.zeros(p.num_envs, num_columns, dtype=torch.float64, device=p.device)
    loss = torch.zeros(p.num_envs, dtype=torch.float64, device=p.device)
    weight = torch.zeros_like(loss)
    streams = host_streams(p.num_envs, p.device)
    draws = {n: p.host_draws(slice(n, n + 1), trains=False) for n in plans}
    p.host_kind.template.train(False)
    for x, y in batches if plans else ():
        streams.fork()
        for n, plan in plans.items():
            size = data.examples_at_once(plan.num_states)
            x_n, y_n = (x, y) if batches.chosen is None else (x[n], y[n])
            with streams.of(n):
                for some_x, some_y in zip(x_n.split(size), y_n.split(size), strict=True):
                    outputs = _state_outputs(data, n, plan, seeds[n], some_x, draws[n])
                    targets = some_y.repeat(plan.num_states, *(1,) * (some_y.dim() - 1))
                    found = objective.score(outputs, targets).view(plan.num_states, -1)
                    score[n, : len(states[n])] += found.sum(dim=1, dtype=torch.float64)[states[n]]
                    first = outputs.unflatten(0, (plan.num_states, -1))[plan.state_of_coalition[0]]
                    main = objective.scores(first, some_y)
                    loss[n] += main.loss.sum(dtype=torch.float64)
                    weight[n] += main.weight.sum(dtype=torch.float64)
        streams.join()
    return SummedScores(score, loss, weight)


def _state_outputs(
    data: HostData, n: int, plan: PrefixPlan, seeds: SlotsOfHost, x: Tensor, draws: Draws | None
) -> Tensor:
    """Outputs [states * B, ...] of the distinct final states of host `n` for examples x [B, ...]."""
    p, template, batch = data.population, data.population.host_kind.template, len(x)
    template.bind(p.host.params[n], p.host.buffers[n], draws)
    steps, x = {step.slot: step for step in plan.steps}, data.laid_out(x)

    def apply(slot_id: str, h: Tensor) -> Tensor:
        step = steps.get(data.column[slot_id])
        if step is None:
            return h
        states = h.unflatten(0, (step.num_parents, batch))
        on = [states[i] for i in step.on]
        active = seeds[slot_id].evaluate(on[0] if len(on) == 1 else torch.cat(on))
        if not step.off:
            return active
        if plan.shared:
            return torch.cat((*(states[i] for i in step.off), active))
        place = p.index(np.array(step.on))
        replaced: Tensor = states.index_copy(0, place, active.unflatten(0, (len(on), batch))).flatten(0, 1)
        return replaced

    with data.scaler.autocast():
        outputs: Tensor = template(x if plan.shared else x.repeat(plan.num_first, *(1,) * (x.dim() - 1)), apply)
    return outputs.float()


_MAX_STREAMS = 32
"""More hosts share streams: the device does not run more kernels at once."""


@final
class HostStreams:
    """CUDA streams of the hosts, none on a CPU. They wait at a fork for the engine's stream, which waits at a join.

    Tensors that hosts read (weights, batches) are made on the engine's stream before the fork and freed after the join,
    so an event orders every use on another stream.
    """

    def __init__(self, num_envs: int, device: torch.device) -> None:
        self._device = device
        count = min(num_envs, _MAX_STREAMS) if device.type == "cuda" else 0
        self._streams = [torch.cuda.Stream(device) for _ in range(count)]

    def fork(self) -> None:
        """The hosts' streams wait for all work queued on the engine's stream."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def of(self, host: int) -> AbstractContextManager[object]:
        """The stream that host number `host` (in this process) runs on."""
        if not self._streams:
            return nullcontext()
        return torch.cuda.stream(self._streams[host % len(self._streams)])

    def join(self) -> None:
        """The engine's stream waits for all hosts."""
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)


@cache
def host_streams(num_envs: int, device: torch.device) -> HostStreams:
    """The streams of N hosts, the same in every pass."""
    return HostStreams(num_envs, device)
