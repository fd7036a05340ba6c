"""The fused executor: all hosts in one forward and one backward, whatever grows in them.

    train      rows of all hosts are one batch (host = fastest index); the gradient of the *sum* of the hosts' losses
               with respect to stacked weights is each host's own gradient
    evaluate   all coalitions of all hosts; hosts with the same number of distinct states share a forward pass

Its results equal those of the streamed executor, its reference, up to rounding.
"""

from collections.abc import Callable
from typing import final

import numpy as np
import torch
from torch import Tensor

from esper.kasmina.parameters.stacking_trial import HOST_EXAMPLES
from esper.leyline.messages import SlotState
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.fused.measuring import measure_states
from esper.tolaria.executors.fused.prefixes import Bucket, buckets
from esper.tolaria.executors.fused.slots import SlotGroup, apply_groups, frozen_rows, slot_groups, trainable_rows
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.fused.training_program import TrainingProgram, training_program
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData, examples
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.running_seeds import begin_training, finish_training
from esper.tolaria.executors.scoring import SummedScores
from esper.tolaria.executors.streamed import executor as streamed


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
