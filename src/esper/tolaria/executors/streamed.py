"""The streamed executor: host by host, on rows of the stacked state. The obvious way, and the reference for others.

train      for each batch: forward and backward of every host (on CUDA each on a stream of its own), then one
           stacked clip and optimizer step for all hosts and seeds
evaluate   for each host: all its coalitions in one pass that runs the network on distinct prefixes only
"""

from collections.abc import Callable, Sequence
from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from esper.kasmina.optimizers import host_decay_mask
from esper.kasmina.population import Population
from esper.kasmina.slab import Working
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.leyline.stages import SeedStage
from esper.leyline.state_tree import below, check_same_shapes, with_prefix
from esper.tasks.datasets import Dataset, SplitName
from esper.tolaria.amp import LossScaler
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.gradients import gradient_statistics
from esper.tolaria.executors.protocol import Structure, TrainPass, ValidationPass, empty_structure
from esper.tolaria.executors.running import (
    SlotsOfHost,
    TrainedRows,
    begin_training,
    finish_training,
    running_seeds,
)
from esper.tolaria.executors.stepping import StackedOptimizer
from esper.tolaria.executors.streams import HostStreams
from esper.tolaria.prefixes import PrefixPlan, plan_prefixes

TrainBatch = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""x [N, B, ...], y [N, B] --> loss and hits of the hosts that it trains."""


@final
class StreamedExecutor:
    """N hosts trained and measured one after another.

    Args:
        population: the hosts and their seeds.
        dataset: on the device already.
        batch_train, batch_val: examples per batch and host.
        scaler: precision of training.
        max_examples: most examples, each once per distinct state of the network, that one measuring pass holds; bounds
            the memory, not the result.
    """

    def __init__(
        self,
        population: Population,
        dataset: Dataset,
        *,
        batch_train: int,
        batch_val: int,
        scaler: LossScaler,
        max_examples: int = 32_768,
    ) -> None:
        self.population, self.scaler = population, scaler
        self.costs = population.costs()
        self.host_params = population.host_kind.template.parameters.num_params
        self._dataset, self._batch_val, self._max_examples = dataset, batch_val, max_examples
        self._device = population.device
        self._train = self._batches("train", batch_train)
        self._val = self._batches("val", batch_val)
        self._streams = HostStreams(population.num_envs, self._device)
        self._column = {point.slot_id: s for s, point in enumerate(population.points)}
        self.execution_order = tuple(self._column[slot_id] for slot_id in population.host_module.execution_order())
        layout = population.host_kind.template.parameters
        self.decay_mask = host_decay_mask(population.optimizer_spec, layout.matrix_mask.to(self._device))
        self._episode = 0
        self.structure = empty_structure(population.num_envs, population.num_slots)

    def _batches(self, split: SplitName, size: int, *, run_finished: bool = False) -> SharedBatchIterator:
        p = self.population
        return SharedBatchIterator(
            self._dataset, p.num_envs, size, split, p.run_seed, self._device, run_finished=run_finished
        )

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self._episode = episode
        self.population.reset(episode)
        self.structure = empty_structure(self.population.num_envs, self.population.num_slots)

    def settle(self, structure: Structure) -> None:
        """Restore, clear, draw and keep rows as the lifecycle decided in the step that ended."""
        p = self.population
        p.restore(structure.panicked, structure.stage)
        p.release(structure.released)
        p.germinate(structure.germinated, structure.blueprint, structure.has_gate, self._episode, structure.t)
        p.keep_hosts(structure.snapshot)
        p.keep_seeds(structure.keep)
        self.structure = structure

    @property
    def episode(self) -> int:
        """The episode that `reset` began."""
        return self._episode

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images."""
        height, width = self._dataset.train.x.shape[-2:]
        return height, width

    def labels(self, split: SplitName) -> tuple[int, int]:
        """The lowest and the highest label of a split."""
        y = self._dataset.split(split).y
        return int(y.min()), int(y.max())

    @property
    def largest_activation(self) -> int:
        """Floats of the largest activation of one example in a host."""
        spec, (height, width) = self.population.host_module.spec, self.image_size
        halvings = [min(i, spec.pools) for i in range(spec.blocks)]
        sizes = [c * (height >> k) * (width >> k) for c, k in zip(spec.channels(), halvings, strict=True)]
        return max(sizes)

    def begin_epoch(self, t: int) -> SharedBatchIterator:
        """The train split in each host's order of step `t`."""
        self._train.begin(t, self._episode, self.population.host_ids)
        return self._train

    def validation(self) -> SharedBatchIterator:
        """The validation split."""
        return self._val

    def test_batches(self) -> SharedBatchIterator:
        """The test split; for the end of a run."""
        return self._batches("test", self._batch_val, run_finished=True)

    def committed_sets(self) -> list[np.ndarray]:
        """The one coalition [1, S] of each host that its fossilized seeds are."""
        return [row[None] for row in self.structure.stage == SeedStage.FOSSILIZED]

    # -- training ---------------------------------------------------------------------------------------------------

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, structure = self.population, self.structure
        everyone = range(p.num_envs)
        hosts = p.host.begin(torch.arange(p.num_envs, device=self._device), [p.host.params.shape[1]] * p.num_envs)
        rows = begin_training(p, structure)
        seeds = running_seeds(p, structure, slots.alpha, rows)
        optimizer = StackedOptimizer(p, hosts, rows, self.scaler, self.decay_mask)
        self._set_mode(True)

        def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            answer = self._train_batch(everyone, hosts.leaves, seeds, x_NB, y_NB)
            optimizer.unscale()
            return answer

        told = run_epoch(
            self.begin_epoch(t),
            p.num_envs,
            self._device,
            train=train,
            statistics=lambda: gradient_statistics(p, structure, rows, hosts.grad),
            step=optimizer.step,
        )
        p.host.finish(hosts)
        finish_training(p, rows)
        return told

    def training_of(self, some: Sequence[int], hosts: Working, rows: TrainedRows, alpha: Tensor) -> TrainBatch:
        """A function that trains some of the hosts on a batch of all: gradients arrive in the working copies.

        It returns loss and hits of these hosts. For executors that run the others in another way.
        """
        seeds = running_seeds(self.population, self.structure, alpha, rows)
        self._set_mode(True)

        def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
            for n in some:
                for leaf in (hosts.leaves[n], *(x for slot in seeds[n].values() for x in slot.leaves())):
                    assert leaf.grad is not None
                    leaf.grad.zero_()
            return self._train_batch(some, hosts.leaves, seeds, x_NB, y_NB)

        return train

    def _train_batch(
        self, some: Sequence[int], leaves: tuple[Tensor, ...], seeds: list[SlotsOfHost], x_NB: Tensor, y_NB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of some hosts; gradients are added in the working copies. Returns loss and hits."""
        losses, logits = [], []
        self._streams.fork()
        for n in some:
            with self._streams.of(n):
                with self.scaler.autocast():
                    out = self._forward(leaves[n], n, seeds[n], x_NB[n])
                loss = F.cross_entropy(out.float(), y_NB[n])
                (loss * self.scaler.scale[n] if self.scaler.enabled else loss).backward()
            losses.append(loss.detach())
            logits.append(out.detach())
        self._streams.join()
        labels = y_NB if len(some) == len(leaves) else y_NB[list(some)]
        hits = (torch.stack(logits).argmax(dim=-1) == labels).sum(dim=1)
        return torch.stack(losses), hits

    def _forward(self, leaf: Tensor, n: int, slots: SlotsOfHost, x: Tensor) -> Tensor:
        template = self.population.host_kind.template
        template.bind(leaf, self.population.host.buffers[n])

        def apply(slot_id: str, h: Tensor) -> Tensor:
            seed = slots.get(slot_id)
            return h if seed is None else seed.train(h)

        return template(x, apply)

    def _set_mode(self, training: bool) -> None:
        for kind in (self.population.host_kind, *self.population.seed_kinds.values()):
            kind.template.train(training)

    # -- measuring --------------------------------------------------------------------------------------------------

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples."""
        return self.measure(slots.alpha, coalitions.sets.shape[1])

    @torch.no_grad()
    def measure(self, alpha: Float[Tensor, "N S"], num_columns: int) -> ValidationPass:
        """The coalitions of the structure, in as many columns as the engine gives them; the rest of a row is zero."""
        structure = self.structure
        sets = [rows[valid] for rows, valid in zip(structure.sets, structure.sets_valid, strict=True)]
        correct, loss_sum, count = self.measured(range(self.population.num_envs), self._val, alpha, sets, num_columns)
        return ValidationPass(accuracy=100.0 * correct / count, loss=loss_sum / count)

    @torch.no_grad()
    def test(self, slots: SlotState) -> Float[Tensor, " N"]:
        """Each host with its fossilized seeds on the test split."""
        everyone = range(self.population.num_envs)
        correct, _, count = self.measured(everyone, self.test_batches(), slots.alpha, self.committed_sets(), 1)
        return 100.0 * correct[:, 0] / count

    @torch.no_grad()
    def measured(
        self, some: Sequence[int], batches: SharedBatchIterator, alpha: Tensor, sets: list[np.ndarray], columns: int
    ) -> tuple[Int[Tensor, "H K"], Float[Tensor, " H"], int]:
        """Some hosts: correct answers of their coalitions, summed loss of the first one; and the number of examples.

        `sets` are the coalitions of all hosts; a host that has fewer than `columns` of them gets zeros for the rest.
        """
        p = self.population
        seeds = running_seeds(p, self.structure, alpha, None)
        plans = {n: plan_prefixes(sets[n], self.execution_order) for n in some}
        correct = {n: torch.zeros(len(sets[n]), dtype=torch.int64, device=self._device) for n in some}
        loss_sum = {n: torch.zeros((), device=self._device) for n in some}
        states = {n: self.population.index(np.array(plan.state_of_coalition)) for n, plan in plans.items()}
        count = 0
        self._set_mode(False)
        for x, y in batches:
            self._streams.fork()
            for n, plan in plans.items():
                chunk = max(1, self._max_examples // plan.num_states)
                with self._streams.of(n), self.scaler.autocast():
                    for some_x, some_y in zip(x.split(chunk), y.split(chunk), strict=True):
                        logits = self._coalition_logits(n, plan, seeds[n], some_x).float()
                        main = logits[plan.state_of_coalition[0]]
                        loss_sum[n] += F.cross_entropy(main, some_y, reduction="sum")
                        hits = (logits.argmax(dim=-1) == some_y).sum(dim=1)
                        correct[n] += hits[states[n]]
            self._streams.join()
            count += len(y)
        correct_HK = torch.stack([F.pad(c, (0, columns - len(c))) for c in correct.values()])
        return correct_HK, torch.stack(list(loss_sum.values())), count

    def _coalition_logits(self, n: int, plan: PrefixPlan, slots: SlotsOfHost, x: Tensor) -> Tensor:
        """Logits [states, B, classes] of the distinct final states of host `n`."""
        template, batch = self.population.host_kind.template, len(x)
        template.bind(self.population.host.params[n], self.population.host.buffers[n])
        steps = {step.slot: step for step in plan.steps}

        def apply(slot_id: str, h: Tensor) -> Tensor:
            step = steps.get(self._column[slot_id])
            if step is None:
                return h
            states = h.unflatten(0, (step.num_parents, batch))
            off = [states[i] for i in step.off]
            on = [states[i] for i in step.on]
            heard = slots[slot_id].listen(on[0] if len(on) == 1 else torch.cat(on))
            return torch.cat((*off, heard)) if off else heard

        logits: Tensor = template(x, apply).unflatten(0, (plan.num_states, batch))
        return logits

    # -- persistence ------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """The population, and the precision scales."""
        return {
            **with_prefix("population", self.population.state_dict()),
            "loss_scale": self.scaler.scale,
            "good_steps": self.scaler.good_steps,
            "episode": torch.tensor(self._episode),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        check_same_shapes(state, self.state_dict(), "executor")
        self.population.load_state_dict(below("population", state))
        self.scaler.scale.copy_(state["loss_scale"])
        self.scaler.good_steps.copy_(state["good_steps"])
        self._episode = int(state["episode"])
