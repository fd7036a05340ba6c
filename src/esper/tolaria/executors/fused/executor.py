"""The fused executor: all hosts in one forward and one backward, whatever grows in them.

    train      rows of all hosts are one batch (host = fastest index); the gradient of the *sum* of the hosts' losses
               with respect to stacked weights is each host's own gradient
    evaluate   all coalitions of all hosts; hosts with the same number of distinct states share a forward pass

Its results equal those of the streamed executor, its reference, up to rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from esper.kasmina.parameters.population import TrainingCopy
from esper.kasmina.parameters.stacking import HOST_EXAMPLES
from esper.leyline.messages import SlotState
from esper.leyline.objective import Objective, Scores
from esper.tolaria.amp import LossScaler
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.fused.prefixes import Bucket, buckets
from esper.tolaria.executors.fused.slots import Rows, SlotGroup, apply_groups, frozen_rows, slot_groups, trainable_rows
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData, examples
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.running_seeds import TrainedRows, begin_training, finish_training
from esper.tolaria.executors.scoring import SummedScores, mean_factor
from esper.tolaria.executors.streamed import executor as streamed

Groups = dict[str, list[SlotGroup]]


@final
@dataclass(frozen=True, kw_only=True)
class TrainingProgram:
    """Functions and memory of the train passes of one structure.

    Attributes:
        hosts: the working copies of all hosts. rows: those of seeds and gates. groups: what runs in each slot.
        train_batch: x, y --> scores [N]; writes the gradients of all hosts and seeds into the working copies.
        step: gradients --> weights, in the working copies. Gradient statistics are computed before it.
    """

    hosts: TrainingCopy
    rows: TrainedRows
    groups: Groups
    train_batch: Callable[[Tensor, Tensor], Scores]
    step: Callable[[], None]


def training_program(
    host: Rows,
    hosts: TrainingCopy,
    rows: TrainedRows,
    groups: Groups,
    optimizer: StackedOptimizer,
    scaler: LossScaler,
    objective: Objective,
) -> TrainingProgram:
    """The program on this memory."""
    trained = [host, *(rows for of_slot in groups.values() for group in of_slot for rows in group.trained_rows())]

    def run_batch(x_NB: Tensor, y_NB: Tensor) -> Scores:
        def apply(slot_id: str, h: Tensor) -> Tensor:
            of_slot = groups.get(slot_id)
            return h if of_slot is None else apply_groups(of_slot, h, y_NB.shape[0])

        scores = train_batch(trained, apply, scaler, objective, x_NB, y_NB)
        optimizer.unscale()
        return scores

    return TrainingProgram(hosts=hosts, rows=rows, groups=groups, train_batch=run_batch, step=optimizer.step)


def train_batch(
    trained: list[Rows],
    apply: Callable[[str, Tensor], Tensor],
    scaler: LossScaler,
    objective: Objective,
    x_NB: Tensor,
    y_NB: Tensor,
) -> Scores:
    """One forward and one backward of all hosts; `trained[0]` are the hosts. Returns scores [N], float64.

    `apply` is what a slot does to the features that pass it.
    """
    batch, num_hosts = y_NB.shape[1], y_NB.shape[0]
    x, y = (of_NB.transpose(0, 1).flatten(0, 1) for of_NB in (x_NB, y_NB))
    with scaler.autocast():
        outputs = trained[0](x, apply)
    rows = objective.scores(outputs.float(), y)
    loss_BN, score_BN, weight_BN = (of_rows.view(batch, num_hosts) for of_rows in rows)
    factor_N = mean_factor(weight_BN.sum(dim=0)) * scaler.scale
    leaves = [leaf for of_kind in trained for leaf in of_kind.parameters]
    if leaves:  # none where the whole host is frozen and nothing grows in it
        # a blueprint may have parameters that it does not use
        grads = torch.autograd.grad(loss_BN, leaves, factor_N.expand_as(loss_BN), materialize_grads=True)
        torch._foreach_copy_([grad for of_kind in trained for grad in of_kind.grads], grads)
    return Scores(*(of_BN.sum(dim=0, dtype=torch.float64) for of_BN in (loss_BN.detach(), score_BN, weight_BN)))


@final
class FusedExecutor(NetworkExecutor):
    """N hosts at once.

    `measures_together` says whether it also measures all hosts at once. By default it does on a GPU; on a CPU it
    measures host by host, because the states of one host just fit into the cache and those of many hosts do not.
    """

    def __init__(self, data: HostData, *, measures_together: bool | None = None) -> None:
        super().__init__(data)
        on_cpu = self.population.device.type == "cpu"
        self.measures_together = not on_cpu if measures_together is None else measures_together
        self.stacked_modules = StackedModules(self.population, examples(data.dataset, HOST_EXAMPLES)[0])
        self._all_hosts = np.arange(self.population.num_envs)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        program = self._program(slots)
        self.stacked_modules.train(True)
        outputs = run_epoch(
            data.train_batches(t),
            data.objective,
            train=program.train_batch,
            statistics=lambda: gradient_statistics(p, data.structure, program.rows, program.hosts.grad),
            step=program.step,
        )
        p.host.finish(program.hosts)
        finish_training(p, program.rows)
        for group in (g for of_slot in program.groups.values() for g in of_slot):
            group.write_buffers(p)
        return outputs

    def _program(self, slots: SlotState) -> TrainingProgram:
        """What this pass runs."""
        p, data = self.population, self.data
        hosts = p.host.begin(torch.arange(p.num_envs, device=p.device), [p.host.params.shape[1]] * p.num_envs)
        rows = begin_training(p, data.structure)
        optimizer = StackedOptimizer(p, hosts, rows, data.scaler, data.decay_mask, data.lr_factor)
        host = trainable_rows(self.stacked_modules.host, hosts, 0, p.num_envs, p.host.buffers)
        host = host._replace(draws=p.host_draws(slice(None)))
        groups = slot_groups(p, self.stacked_modules, data.structure, slots.alpha, rows, self._all_hosts)
        return training_program(host, hosts, rows, groups, optimizer, data.scaler, data.objective)

    def sum_scores(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> SummedScores:
        """See `NetworkExecutor`."""
        if not self.measures_together:
            return streamed.sum_scores(self.data, self._all_hosts.tolist(), batches, alpha, sets, num_columns)
        p, data = self.population, self.data
        score = torch.zeros(p.num_envs, num_columns, dtype=torch.float64, device=p.device)
        loss = torch.zeros(p.num_envs, dtype=torch.float64, device=p.device)
        weight = torch.zeros_like(loss)
        self.stacked_modules.train(False)
        runs = []
        for bucket in buckets([data.plan(rows) for rows in sets], data.execution_order, num_columns, p.device):
            groups = slot_groups(p, self.stacked_modules, data.structure, alpha, None, bucket.hosts)
            host = frozen_rows(self.stacked_modules.host, p.host.params[bucket.index], p.host.buffers[bucket.index])
            runs.append((bucket, host, self._apply(bucket, groups)))
        for x, y in batches:
            for bucket, host, apply in runs:
                some_x, some_y = (of if batches.chosen is None else of[bucket.index] for of in (x, y))
                for part in measure_states(
                    data, data.objectives[batches.split], host, apply, bucket.state_of, bucket.num_states,
                    some_x, some_y, num_first=bucket.num_first, own=batches.chosen is not None,
                ):  # fmt: skip
                    score[bucket.index] += part.score
                    loss[bucket.index] += part.loss
                    weight[bucket.index] += part.weight
        return SummedScores(score, loss, weight)

    def _apply(self, bucket: Bucket, groups: dict[str, list[SlotGroup]]) -> Callable[[int, str, Tensor], Tensor]:
        """`apply` of `measure_states` for a bucket."""
        num_hosts = len(bucket.hosts)

        def apply(batch: int, slot_id: str, h: Tensor) -> Tensor:
            step = bucket.steps.get(self.data.column[slot_id])
            if step is None:
                return h

            def run(h_BPg: Tensor) -> Tensor:
                active = apply_groups(groups.get(slot_id, []), h_BPg.flatten(0, 2), num_hosts)
                return active.view(h_BPg.shape)

            return step.branch(h.view(batch, -1, num_hosts, *h.shape[1:]), run).flatten(0, 2)

        return apply


def measure_states(
    data: HostData,
    objective: Objective,
    host: Rows,
    apply: Callable[[int, str, Tensor], Tensor],
    state_of: Int[Tensor, "g K"],
    num_states: int,
    x: Tensor,
    y: Tensor,
    *,
    num_first: int = 1,
    own: bool = False,
) -> Iterator[SummedScores]:
    """Scores of each coalition, for one part of the examples after another; many states of the network in one pass.

    B = examples, P = states, g = hosts, K = coalitions.

    Args:
        data: precision.
        objective: that of the split.
        host: the hosts.
        apply: B, slot id and features [B * P * g, ...] before a slot --> the features [B * P' * g, ...] after it.
        state_of: the final state of each coalition.
        num_states: P after the last slot.
        num_first: P before the first slot.
        x: the examples [B, ...], the same for all hosts, or [g, B, ...] of each with `own`.
        y: their targets, likewise.
        own: whether each host has its own examples.
    """
    num_hosts = len(state_of)
    size = data.examples_at_once(num_hosts * num_states)
    column = torch.arange(num_hosts, device=state_of.device)
    x_B1g, y_B1g = (of.transpose(0, 1)[:, None] if own else of[:, None, None] for of in (x, y))
    for part_x, part_y in zip(x_B1g.split(size), y_B1g.split(size), strict=True):
        batch = len(part_y)
        rows = part_x.expand(batch, num_first, num_hosts, *x_B1g.shape[3:]).flatten(0, 2)
        with data.scaler.autocast():
            outputs = host(rows, partial(apply, batch))
        targets = part_y.expand(batch, num_states, num_hosts, *y_B1g.shape[3:]).flatten(0, 2)
        of_rows = objective.scores(outputs.float(), targets)
        loss_Pg, score_Pg, weight_Pg = (
            of.view(batch, num_states, num_hosts).sum(dim=0, dtype=torch.float64) for of in of_rows
        )
        yield SummedScores(score_Pg.t().gather(1, state_of), loss_Pg[state_of[:, 0], column], weight_Pg[0])
