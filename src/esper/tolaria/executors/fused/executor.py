"""The fused executor: all hosts in one forward and one backward, whatever grows in them.

    train      rows of all hosts are one batch (host = fastest index); the gradient of the *sum* of the hosts' losses
               with respect to stacked weights is each host's own gradient
    evaluate   all coalitions of all hosts; hosts with as many distinct states travel together

It gives what the streamed executor gives, up to rounding; the streamed one stays its reference.
"""

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.messages import SlotState
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.capture import CaptureBackend, Programs
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.fused.prefixes import Bucket, buckets
from esper.tolaria.executors.fused.slots import Rows, SlotGroup, apply_groups, fixed, learning, slot_groups
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.fused.training_program import TrainingProgram, structure_key, training_program
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import TrainPass
from esper.tolaria.executors.running_seeds import begin_training, finish_training
from esper.tolaria.executors.streamed import executor as streamed
from esper.tolaria.prefixes import PrefixPlan, plan_prefixes

_CHUNK_FLOATS = 2**24
"""Most floats of one activation in a measuring pass (64 MiB); more examples go in several pieces."""


@final
class FusedExecutor(NetworkExecutor):
    """N hosts at once.

    Measuring is forward passes alone, in which all states of one host just fit into a CPU's cache and those of many
    hosts do not, so there it is done host by host; `measures_together` says otherwise.
    """

    def __init__(
        self,
        data: HostData,
        *,
        measures_together: bool | None = None,
        recorder: CaptureBackend | None = None,
    ) -> None:
        super().__init__(data)
        on_cpu = self.population.device.type == "cpu"
        self.measures_together = not on_cpu if measures_together is None else measures_together
        self.stacked_modules = StackedModules(self.population)
        if recorder is not None and any(seed.dropouts for seed in self.stacked_modules.seeds.values()):
            raise ConfigError("a recorded train pass would repeat its dropout masks; set capture to 'off'.")
        self._recorder = recorder
        self._programs: Programs[TrainingProgram] = Programs()
        self._everyone = np.arange(self.population.num_envs)
        self._num_classes = self.population.host_module.spec.classes
        self._floats_per_example = data.largest_activation

    # -- training ---------------------------------------------------------------------------------------------------

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, data = self.population, self.data
        program = self._program(slots)
        self.stacked_modules.train(True)
        told = run_epoch(
            data.train_batches(t),
            p.num_envs,
            p.device,
            train=program.train_batch,
            statistics=lambda: gradient_statistics(p, data.structure, program.rows, program.hosts.grad),
            step=program.step,
        )
        p.host.finish(program.hosts)
        finish_training(p, program.rows)
        for group in (g for of_slot in program.groups.values() for g in of_slot):
            group.keep_buffers(p)
        return told

    def _program(self, slots: SlotState) -> TrainingProgram:
        """What this pass runs; where it is recorded, on the memory of an earlier pass of the same structure."""
        p, data = self.population, self.data
        hosts = p.host.begin(torch.arange(p.num_envs, device=p.device), [p.host.params.shape[1]] * p.num_envs)
        rows = begin_training(p, data.structure)
        optimizer = StackedOptimizer(p, hosts, rows, data.scaler, data.decay_mask)
        host = learning(self.stacked_modules.host, hosts, 0, p.num_envs, p.host.buffers)
        groups = slot_groups(p, self.stacked_modules, data.structure, slots.alpha, rows, self._everyone)
        program = training_program(host, hosts, rows, groups, optimizer, data.scaler, self._recorder)
        return program if self._recorder is None else self._programs.cached(structure_key(data.structure), program)

    # -- measuring --------------------------------------------------------------------------------------------------

    def count_correct(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], num_columns: int
    ) -> tuple[Tensor, Tensor, int]:
        """See `NetworkExecutor`."""
        if not self.measures_together:
            return streamed.count_correct(self.data, self._everyone.tolist(), batches, alpha, sets, num_columns)
        p, order = self.population, self.data.execution_order
        plans = [plan_prefixes(rows, order) for rows in sets]
        correct = torch.zeros(p.num_envs, num_columns, dtype=torch.int64, device=p.device)
        loss_sum = torch.zeros(p.num_envs, device=p.device)
        self.stacked_modules.train(False)
        runs = [self._bucket_run(bucket, plans, alpha, num_columns) for bucket in buckets(plans, order)]
        count = 0
        for x, y in batches:
            for run in runs:
                for start in range(0, len(y), step := self._chunk(run.bucket, x)):
                    hits, loss = self._measure_part(run, x[start : start + step], y[start : start + step])
                    correct[run.index] += hits
                    loss_sum[run.index] += loss
            count += len(y)
        return correct, loss_sum, count

    def _bucket_run(self, bucket: Bucket, plans: list[PrefixPlan], alpha: Tensor, num_columns: int) -> "_BucketRun":
        p = self.population
        state_of = np.zeros((len(bucket.hosts), num_columns), dtype=np.int64)
        for i, n in enumerate(bucket.hosts):
            states = plans[n].state_of_coalition
            state_of[i, : len(states)] = states
        index = p.index(bucket.hosts)
        steps = {
            slot: _RunStep(p.index(step.parent), torch.from_numpy(step.on).to(p.device), step.common())
            for slot, step in bucket.steps.items()
        }
        return _BucketRun(
            bucket=bucket,
            groups=slot_groups(p, self.stacked_modules, self.data.structure, alpha, None, bucket.hosts),
            index=index,
            state_of=p.index(state_of),
            steps=steps,
            host=fixed(self.stacked_modules.host, p.host.params[index], p.host.buffers[index]),
            column=torch.arange(len(bucket.hosts), device=p.device),
        )

    def _chunk(self, bucket: Bucket, x: Tensor) -> int:
        """Examples per piece, so that an activation of all states of the bucket stays below the limit."""
        floats = self._floats_per_example * len(bucket.hosts) * bucket.num_states
        return max(1, min(len(x), _CHUNK_FLOATS // floats))

    def _measure_part(self, run: "_BucketRun", x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Hits [g, K] of the coalitions and summed loss [g] of coalition 0 on some examples."""
        with self.data.scaler.autocast():
            logits_BPg = self._logits(run, x).float()
        hits_Pg = (logits_BPg.argmax(dim=-1) == y[:, None, None]).sum(dim=0)
        main_Bg = logits_BPg[:, run.state_of[:, 0], run.column]
        labels = y.repeat_interleave(len(run.column))
        loss_Bg = F.cross_entropy(main_Bg.flatten(0, 1), labels, reduction="none").view(len(y), -1)
        return hits_Pg.t().gather(1, run.state_of), loss_Bg.sum(dim=0)

    def _logits(self, run: "_BucketRun", x: Tensor) -> Tensor:
        """Logits [B, P, g, classes] of the distinct final states of the bucket's hosts."""
        batch, num_hosts = len(x), len(run.column)

        def apply(slot_id: str, h: Tensor) -> Tensor:
            step = run.steps.get(self.data.column[slot_id])
            return h if step is None else _part_ways(h, step, run.groups.get(slot_id, []), run.column, batch)

        rows = x[:, None].expand(batch, num_hosts, *x.shape[1:]).flatten(0, 1)
        return run.host(rows, apply).view(batch, -1, num_hosts, self._num_classes)


@dataclass(frozen=True, kw_only=True)
class _BucketRun:
    """A bucket, ready to run: `state_of` [g, K] is the final state of each coalition, the rest by its name."""

    bucket: Bucket
    groups: dict[str, list[SlotGroup]]
    index: Tensor
    state_of: Tensor
    steps: dict[int, "_RunStep"]
    host: Rows
    column: Tensor


class _RunStep(NamedTuple):
    """A `BucketStep` on the device; `common` are the (off, on) parents where all hosts part alike."""

    parent: Tensor
    on: Tensor
    common: tuple[tuple[int, ...], tuple[int, ...]] | None


def _part_ways(h: Tensor, step: _RunStep, groups: list[SlotGroup], column: Tensor, batch: int) -> Tensor:
    """The states after a slot: each child is its parent, with the seed heard or not."""
    parent, on = step.parent, step.on
    h_BPg = h.view(batch, -1, len(column), *h.shape[1:])
    heard_BPg = apply_groups(groups, h, len(column)).view(h_BPg.shape)
    if step.common is not None:  # all hosts part alike: no gathering host by host
        off_p, on_p = step.common
        return torch.cat((_states(h_BPg, off_p), _states(heard_BPg, on_p)), dim=1).flatten(0, 2)
    active = on.view(*on.shape, *(1,) * (h.dim() - 1))
    return torch.where(active, heard_BPg[:, parent, column], h_BPg[:, parent, column]).flatten(0, 2)


def _states(h_BPg: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """Some of the states; a view where they are consecutive."""
    first, last = (wanted[0], wanted[-1] + 1) if wanted else (0, 0)
    if wanted == tuple(range(first, last)):
        return h_BPg[:, first:last]
    return torch.cat([h_BPg[:, p : p + 1] for p in wanted], dim=1)
