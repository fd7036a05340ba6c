"""The static executor: every blueprint runs in every slot, and masks on the device select each host's own.

    train             every blueprint in every slot of every host, in one forward and one backward; frozen and empty
                      rows keep every bit
    evaluate          all coalitions of all hosts, by a plan that does not depend on the structures
    apply_changes     births, releases, snapshots and rollbacks under masks

The host never needs the structure, so a whole episode runs without a read, at the cost of computing every blueprint.
Its results equal those of the other executors up to rounding.
"""

from typing import final

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.parameters import masked_updates
from esper.kasmina.parameters.slab import Working
from esper.kasmina.parameters.stacking_trial import HOST_EXAMPLES
from esper.leyline.errors import ConfigError
from esper.leyline.messages import SlotState
from esper.leyline.objective import Scores
from esper.leyline.stages import SeedStage
from esper.tasks.objectives import Classification
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.fused.measuring import measure_states
from esper.tolaria.executors.fused.slots import frozen_rows, trainable_rows
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.fused.training_program import train_batch
from esper.tolaria.executors.host_data import HostData, examples
from esper.tolaria.executors.network import HostOwner
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import Changes, EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.executors.running_seeds import TrainedRows
from esper.tolaria.executors.scoring import SummedScores, measured
from esper.tolaria.executors.static.coalitions import static_states
from esper.tolaria.executors.static.gradients import static_gradient_statistics
from esper.tolaria.executors.static.slots import SeedMasks, seed_masks, static_slots


@final
class StaticExecutor(HostOwner):
    """N hosts at once, of any structure."""

    def __init__(self, data: HostData) -> None:
        super().__init__(data)
        population = data.population
        found = f"{type(data.host).__name__} and {type(data.objective).__name__}"
        if not isinstance(data.host, CNNHost) or not isinstance(data.objective, Classification):
            raise ConfigError(
                f"graph is 'static', which runs CNNHost and Classification only, not {found}; set graph to 'dynamic'."
            )
        self.stacked_modules = StackedModules(population, examples(data.dataset, HOST_EXAMPLES)[0])
        for kind in population.seed_kinds.values():
            if kind.start.rebuilt:
                raise ConfigError(
                    f"graph is 'static', but blueprint {kind.name!r} rebuilds its module for each new seed, "
                    "which needs the structure; draw its parameters by `uniform_`, or use 'dynamic'."
                )
        self._rank = {population.points[s].slot_id: i for i, s in enumerate(data.execution_order)}

    def apply_structure(self, structure: Structure) -> None:
        """The same as `apply_changes`, from arrays."""
        names = ("germinated", "released", "panicked", "snapshot", "keep", "stage", "blueprint", "has_gate")
        on_device = {
            name: torch.from_numpy(getattr(structure, name)).to(self.population.device, non_blocking=True)
            for name in names
        }
        slots = [on_device.pop(name) for name in names[-3:]]
        self._apply(Changes(t=structure.t, **on_device), *slots)

    def apply_changes(self, changes: Changes, slots: SlotState) -> None:
        """Restore, clear, draw and snapshot rows as the lifecycle decided, without a read."""
        self._apply(changes, slots.stage, slots.blueprint, slots.has_gate)

    def _apply(self, changes: Changes, stage: Tensor, blueprint: Tensor, has_gate: Tensor) -> None:
        p = self.population
        masked_updates.restore(p, changes.panicked, stage)
        masked_updates.release(p, changes.released)
        masked_updates.germinate(p, changes.germinated, blueprint, has_gate, self.data.episode, changes.t)
        masked_updates.snapshot_hosts(p, changes.snapshot)
        masked_updates.snapshot_seeds(p, changes.keep)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, masks = self.population, seed_masks(slots)
        hosts, seeds, gates = p.host.whole(), p.seeds.whole(), p.gates.whole()
        optimizer = self._optimizer(masks, hosts, seeds, gates)
        host = trainable_rows(self.stacked_modules.host, hosts, 0, p.num_envs, p.host.buffers)
        slots_of_pass = static_slots(p, self.stacked_modules, masks, (seeds.grad, gates.grad))
        candidates = [candidate for slot in slots_of_pass.values() for candidate in slot.candidates()]
        trained = [host, *(candidate.rows for candidate in candidates)]
        updates = [candidate.update for candidate in candidates if candidate.update is not None]
        self.stacked_modules.train(True)

        def apply(slot_id: str, h: Tensor) -> Tensor:
            return slots_of_pass[slot_id](h, p.num_envs)

        def train(x_NB: Tensor, y_NB: Tensor) -> Scores:
            scores = train_batch(trained, apply, self.data.scaler, self.data.objective, x_NB, y_NB)
            for update in updates:
                update.write_grad()
            optimizer.unscale()
            return scores

        outputs = run_epoch(
            self.data.train_batches(t),
            self.data.objective,
            train=train,
            statistics=lambda: static_gradient_statistics(p, slots_of_pass, masks, slots, hosts.grad),
            step=optimizer.step,
        )
        for update in updates:
            update.write_buffers()
        return outputs

    def _optimizer(self, masks: SeedMasks, hosts: Working, seeds: Working, gates: Working) -> StackedOptimizer:
        p = self.population
        every = np.arange(p.num_envs * p.num_slots)
        host, slot = every // p.num_slots, every % p.num_slots
        rows = TrainedRows(seed_host=host, seed_slot=slot, gate_of=every, seeds=seeds, gates=gates)
        trainable = (masks.trainable.flatten(), masks.gate_trainable.flatten())
        data = self.data
        return StackedOptimizer(p, hosts, rows, data.scaler, data.decay_mask, data.lr_factor, trainable)

    @torch.no_grad()
    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples."""
        return self._measured("val", slots, coalitions.sets)

    @torch.no_grad()
    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """Each host with its fossilized seeds alone."""
        return self._measured(split, slots, (slots.stage == SeedStage.FOSSILIZED)[:, None])

    def _measured(self, split: EvaluationSplit, slots: SlotState, sets: Bool[Tensor, "N K S"]) -> ValidationPass:
        """Figure of merit of the coalitions `sets` of each host, and loss of its first one."""
        p, data = self.population, self.data
        slots_of_pass = static_slots(p, self.stacked_modules, seed_masks(slots), None)
        states = static_states(sets, data.execution_order)
        host = frozen_rows(self.stacked_modules.host, p.host.params, p.host.buffers)
        score = torch.zeros(sets.shape[:2], dtype=torch.float64, device=p.device)
        loss, weight = torch.zeros_like(score[:, 0]), torch.zeros_like(score[:, 0])
        self.stacked_modules.train(False)

        def apply(batch: int, slot_id: str, h: Tensor) -> Tensor:
            shape = (batch, -1, p.num_envs, *h.shape[1:])
            active = slots_of_pass[slot_id](h, p.num_envs)
            return states.branch(self._rank[slot_id], h.view(shape), active.view(shape)).flatten(0, 2)

        batches = data.evaluation(split)
        own = batches.chosen is not None
        for x, y in batches:
            for part in measure_states(
                data, data.objective, host, apply, states.final, states.num_states, x, y, own=own
            ):
                score += part.score
                loss += part.loss
                weight += part.weight
        return measured(data.objective, SummedScores(score, loss, weight))
