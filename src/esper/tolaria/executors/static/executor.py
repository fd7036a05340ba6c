"""The static executor: whatever could grow runs, and masks on the device say what is real.

    train      every blueprint in every slot of every host, in one forward and one backward; each host hears and trains
               its own, frozen and empty rows keep every bit
    evaluate   all coalitions of all hosts, by a plan that does not depend on what grows
    settle     births, deaths, snapshots and rollbacks under masks

So the host need not know what grows where, and a whole episode runs without a read. The price is the work of all that
is not real. It gives what the other executors give, up to rounding.
"""

from typing import final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from esper.kasmina.parameters import masked_updates
from esper.kasmina.parameters.slab import Working
from esper.leyline.errors import ConfigError
from esper.leyline.messages import SlotState
from esper.leyline.protocols import StateTree
from esper.leyline.stages import HostFamily, SeedStage
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.epoch import run_epoch
from esper.tolaria.executors.fused.slots import Rows, fixed, learning
from esper.tolaria.executors.fused.stacked_modules import StackedModules
from esper.tolaria.executors.fused.training_program import train_batch
from esper.tolaria.executors.host_data import HostData
from esper.tolaria.executors.optimizer_step import StackedOptimizer
from esper.tolaria.executors.protocol import Changes, EvaluationSplit, Structure, TrainPass, ValidationPass
from esper.tolaria.executors.running_seeds import TrainedRows
from esper.tolaria.executors.static.coalitions import StaticStates, static_states
from esper.tolaria.executors.static.gradients import static_gradient_statistics
from esper.tolaria.executors.static.slots import Candidate, SeedMasks, Slopes, StaticSlot, seed_masks, static_slots

_CHUNK_FLOATS = 2**24
"""Most floats of one activation in a measuring pass (64 MiB); more examples go in several pieces."""


@final
class StaticExecutor:
    """N hosts at once, of any structure."""

    def __init__(self, data: HostData) -> None:
        population = data.population
        assert population.family is HostFamily.CNN, "seeds that send gradients to their host are not masked here"
        self.data, self.population = data, population
        self.costs = population.costs()
        self.host_params = population.host_kind.template.parameters.num_params
        self.stacked_modules = StackedModules(population)
        for kind in population.seed_kinds.values():
            if kind.start.rebuilt:
                raise ConfigError(
                    f"graph is 'static', but blueprint {kind.name!r} is built anew for each newborn, "
                    "which the host would have to know of; draw its parameters by `uniform_`, or use 'dynamic'."
                )
        self._rank = {population.points[s].slot_id: i for i, s in enumerate(data.execution_order)}
        self._num_classes = population.host_module.spec.classes
        self._all_rows = _all_rows(population.num_envs, population.num_slots)

    def reset(self, episode: int) -> None:
        """N fresh hosts with empty slots."""
        self.data.reset(episode)

    def state_dict(self) -> StateTree:
        """The population."""
        return self.data.state_dict()

    def load_state_dict(self, state: StateTree) -> None:
        """Restore what `state_dict` gave."""
        self.data.load_state_dict(state)

    # -- births and deaths ------------------------------------------------------------------------------------------

    def apply_structure(self, structure: Structure) -> None:
        """What the host knows, as masks; for whoever has read the structure all the same."""
        device = self.population.device

        def mask(marked: np.ndarray) -> Tensor:
            return torch.from_numpy(marked).to(device, non_blocking=True)

        changes = Changes(
            t=structure.t,
            germinated=mask(structure.germinated),
            released=mask(structure.released),
            panicked=mask(structure.panicked),
            snapshot=mask(structure.snapshot),
            keep=mask(structure.keep),
        )
        self._operate(changes, mask(structure.stage), mask(structure.blueprint), mask(structure.has_gate))

    def apply_changes(self, changes: Changes, slots: SlotState) -> None:
        """Restore, clear, draw and keep rows as the lifecycle decided, without a read."""
        self._operate(changes, slots.stage, slots.blueprint, slots.has_gate)

    def _operate(self, changes: Changes, stage: Tensor, blueprint: Tensor, has_gate: Tensor) -> None:
        p = self.population
        masked_updates.restore(p, changes.panicked, stage)
        masked_updates.release(p, changes.released)
        masked_updates.germinate(p, changes.germinated, blueprint, has_gate, self.data.episode, changes.t)
        masked_updates.snapshot_hosts(p, changes.snapshot)
        masked_updates.snapshot_seeds(p, changes.keep)

    # -- training ---------------------------------------------------------------------------------------------------

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """Every host over its whole train split, in its own order."""
        p, masks = self.population, seed_masks(slots)
        hosts, seeds, gates = p.host.whole(), p.seeds.whole(), p.gates.whole()
        optimizer = self._optimizer(masks, hosts, seeds, gates)
        host = learning(self.stacked_modules.host, hosts, 0, p.num_envs, p.host.buffers)
        passing = static_slots(p, self.stacked_modules, masks, Slopes(seeds.grad, gates.grad))
        parts = [part for slot in passing.values() for part in slot.candidates()]
        self.stacked_modules.train(True)

        def train(x_NB: Tensor, y_NB: Tensor) -> tuple[Tensor, Tensor]:
            answer = self._train_batch(host, parts, passing, x_NB, y_NB)
            optimizer.unscale()
            return answer

        told = run_epoch(
            self.data.train_batches(t),
            p.num_envs,
            p.device,
            train=train,
            statistics=lambda: static_gradient_statistics(p, passing, masks, slots, hosts.grad),
            step=optimizer.step,
        )
        for part in parts:
            assert part.learning is not None
            part.learning.keep_buffers()
        return told

    def _optimizer(self, masks: SeedMasks, hosts: Working, seeds: Working, gates: Working) -> StackedOptimizer:
        host, slot, gate_of = self._all_rows
        rows = TrainedRows(seed_host=host, seed_slot=slot, gate_of=gate_of, seeds=seeds, gates=gates)
        learn = (masks.trainable.flatten(), masks.gate_trainable.flatten())
        return StackedOptimizer(self.population, hosts, rows, self.data.scaler, self.data.decay_mask, learn)

    def _train_batch(
        self, host: Rows, parts: list[Candidate], passing: dict[str, StaticSlot], x_NB: Tensor, y_NB: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One forward and one backward of everything; gradients arrive in the slabs'. Returns loss and hits [N]."""
        num_hosts = y_NB.shape[0]

        def apply(slot_id: str, h: Tensor) -> Tensor:
            return passing[slot_id](h, num_hosts)

        answer = train_batch([host, *(part.rows for part in parts)], apply, self.data.scaler, x_NB, y_NB)
        for part in parts:
            assert part.learning is not None
            part.learning.take_gradient()
        return answer

    # -- measuring --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of every host on the same validation examples; 0 where there is none."""
        correct, loss_sum, count = self._measure(self.data.evaluation("val"), slots, coalitions.sets)
        return ValidationPass(accuracy=100.0 * correct * coalitions.valid / count, loss=loss_sum / count)

    @torch.no_grad()
    def committed_accuracy(self, split: EvaluationSplit, slots: SlotState) -> Float[Tensor, " N"]:
        """Each host with its fossilized seeds alone."""
        committed = (slots.stage == SeedStage.FOSSILIZED)[:, None]
        correct, _, count = self._measure(self.data.evaluation(split), slots, committed)
        return 100.0 * correct[:, 0] / count

    def _measure(
        self, batches: SharedBatchIterator, slots: SlotState, sets: Bool[Tensor, "N K S"]
    ) -> tuple[Tensor, Tensor, int]:
        """Correct answers [N, K] of each host's coalitions, summed loss [N] of its first one, number of examples."""
        p = self.population
        passing = static_slots(p, self.stacked_modules, seed_masks(slots), None)
        states = static_states(sets, self.data.execution_order)
        host = fixed(self.stacked_modules.host, p.host.params, p.host.buffers)
        correct = torch.zeros(sets.shape[:2], dtype=torch.int64, device=p.device)
        loss_sum = torch.zeros(p.num_envs, device=p.device)
        self.stacked_modules.train(False)
        floats = self.data.largest_activation * p.num_envs * states.num_states
        step, count = max(1, _CHUNK_FLOATS // floats), 0
        for x, y in batches:
            for start in range(0, len(y), step):
                some_y = y[start : start + step]
                with self.data.scaler.autocast():
                    logits_BPN = self._logits(host, passing, states, x[start : start + step]).float()
                hits_PN = (logits_BPN.argmax(dim=-1) == some_y[:, None, None]).sum(dim=0)
                correct += hits_PN.t().gather(1, states.final)
                main_BN = logits_BPN[:, states.final[:, 0], states.column]
                labels_BN = some_y[:, None].expand(-1, p.num_envs)
                loss = F.cross_entropy(main_BN.flatten(0, 1), labels_BN.reshape(-1), reduction="none")
                loss_sum += loss.view(labels_BN.shape).sum(dim=0)
            count += len(y)
        return correct, loss_sum, count

    def _logits(self, host: Rows, passing: dict[str, StaticSlot], states: StaticStates, x: Tensor) -> Tensor:
        """Logits [B, P, N, classes] of the final states of all hosts."""
        batch, num_hosts = len(x), self.population.num_envs

        def apply(slot_id: str, h: Tensor) -> Tensor:
            shape = (batch, -1, num_hosts, *h.shape[1:])
            active = passing[slot_id](h, num_hosts)
            return states.part(self._rank[slot_id], h.view(shape), active.view(shape)).flatten(0, 2)

        rows = x[:, None].expand(batch, num_hosts, *x.shape[1:]).flatten(0, 1)
        return host(rows, apply).view(batch, -1, num_hosts, self._num_classes)


def _all_rows(num_envs: int, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Host and slot of every row of the slabs of seeds, and the seed of every gate."""
    rows = np.arange(num_envs * num_slots)
    return rows // num_slots, rows % num_slots, rows
