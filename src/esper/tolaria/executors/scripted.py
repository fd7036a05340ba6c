"""The scripted executor: hosts without networks, which follow the formulas of the `null` task on the device."""

from functools import partial
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.blueprints.registry import KINDS, blueprint_at, kinds_of
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS, HostFamily, SeedStage
from esper.leyline.messages import SeedCosts, SlotState
from esper.leyline.tensor_dataclass import StateTree, copy_into
from esper.tasks import null
from esper.tasks.null import NullSpec
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import EvaluationSplit, Structure, TrainPass, ValidationPass

_CHANNELS = 16
"""Of the features that the networks of blueprints are described with, which scripted hosts do not have."""


@final
class ScriptedExecutor:
    """N scripted hosts. Their state is the number of train passes of each host and seed.

    Args:
        script: constants of the dynamics.
        num_envs, num_slots: N and S.
        run_seed: key of the scripted noise.
        host_ids: numbers [N] of the hosts.
    """

    def __init__(
        self,
        script: NullSpec,
        *,
        num_envs: int,
        num_slots: int,
        run_seed: int,
        device: torch.device,
        host_ids: Int[Tensor, " N"] | None = None,
    ) -> None:
        self.script, self.run_seed, self.device = script, run_seed, device
        self.host_params = script.host_params
        self.host_ids = torch.arange(num_envs, device=device) if host_ids is None else host_ids
        # hosts are the innermost axis in memory, as in SlotState
        self.passes = torch.zeros(num_slots, num_envs, dtype=torch.int64, device=device).t()
        self.steps = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._runs = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._nan = torch.full((num_slots, num_envs), torch.nan, device=device).t()
        self._never = torch.zeros(num_slots, num_envs, dtype=torch.bool, device=device).t()
        self._episode, self._t = 0, 0
        self._quality: Tensor | None = None
        everything = torch.arange(NUM_BUILTIN_BLUEPRINTS)
        params = null.params(script, everything, torch.zeros_like(everything, dtype=torch.bool))
        self.costs = SeedCosts(
            seed_params=params.expand(num_slots, -1).contiguous().to(device),
            gate_params=torch.full((num_slots,), null.GATE_PARAMS, device=device),
            # a script computes nothing: a multiply-add for each parameter
            seed_flops=2 * params.expand(num_slots, -1).contiguous().to(device),
            gate_flops=torch.full((num_slots,), 2 * null.GATE_PARAMS, device=device),
            host_flops=torch.tensor(2 * script.host_params, device=device),
            selectable=(params > 0).to(device),
            kinds=_kinds(params > 0).expand(num_slots, -1, -1).contiguous().to(device),
        )

    @property
    def quality(self) -> Float[Tensor, "N B"]:
        """What each blueprint adds to each host in this episode (pp), which no observation shows."""
        return null.qualities(self.script, self.run_seed, self.host_ids, self._episode)

    def reset(self, episode: int) -> None:
        """Fresh hosts: nothing has been trained."""
        self._begin(episode, t=0)
        self.passes.zero_()
        self.steps.zero_()
        self._runs.fill_(True)

    def _begin(self, episode: int, t: int) -> None:
        self._episode, self._t = episode, t
        self._quality = self.quality if self.script.permuted else None

    def apply_structure(self, structure: Structure) -> None:
        """Remember who is stopped; `train_epoch` reads the lifecycle on the device."""
        self._runs = torch.from_numpy(~structure.stopped).to(self.device, non_blocking=True)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """One more pass for every trained seed; those of seeds that left are set to zero."""
        self._t = t
        self.steps = self.steps + self._runs
        live = null.trained(self.script, slots.stage, slots.alpha_mode)
        frozen = (slots.stage == SeedStage.BLENDING) & ~live
        now = torch.where(live, self.passes + 1, torch.where(frozen, self.passes, 0))
        self.passes = torch.where(self._runs[:, None], now, self.passes)
        health = null.gradient_health(self.script, slots.stage, slots.alpha_mode, slots.blueprint)
        one = torch.where(torch.isnan(health), self._nan, 1.0)
        acc = null.host_accuracies(self.steps)
        return TrainPass(
            acc=acc,
            loss=null.validation_loss(acc),
            grad_norm=one,
            grad_health=health,
            grad_vanishing=self._never,
            grad_exploding=self._never,
            grad_ratio=one,
        )

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """Accuracy of each coalition by formula; injected faults replace the loss."""
        strength = self._strength(slots)
        accuracy = null.coalition_accuracy(self.script, self.steps, strength, coalitions.sets, self._noise())
        loss = null.inject_faults(self.script, null.validation_loss(accuracy[:, 0]), self.host_ids, t)
        return ValidationPass(accuracy=accuracy, loss=loss)

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """The host with its fossilized seeds; on the test split without noise."""
        strength = self._strength(slots)
        committed = (slots.stage == SeedStage.FOSSILIZED)[:, None]
        noise = self._noise() if split == "val" else None
        accuracy = null.coalition_accuracy(self.script, self.steps, strength, committed, noise)
        return ValidationPass(accuracy=accuracy, loss=null.validation_loss(accuracy[:, 0]))

    def _strength(self, slots: SlotState) -> Float[Tensor, "N S"]:
        return null.strengths(self.script, slots.alpha, self.passes, slots.blueprint, slots.algorithm, self._quality)

    def _noise(self) -> Tensor | None:
        """Noise of the accuracy of each host in this step, None without noise."""
        if self.script.sigma == 0.0:
            return None
        return null.scripted_noise(self.script, self.run_seed, self.host_ids, self._episode, self._t)

    def state_dict(self) -> StateTree:
        """Passes of each host and seed, episode and step."""
        return {"passes": self.passes, "steps": self.steps, "place": torch.tensor([self._episode, self._t])}

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`."""
        copy_into(self.state_dict(), state, "scripted hosts")
        episode, t = (int(v) for v in state["place"])
        self._begin(episode, t)


def _kinds(selectable: Bool[Tensor, " B"]) -> Float[Tensor, "B K"]:
    """What the blueprints that have these names are made of, with as many channels as a small host has."""
    kinds = torch.zeros(len(selectable), len(KINDS))
    for index in selectable.nonzero().flatten().tolist():
        seed = deterministic_build(partial(blueprint_at(index, HostFamily.CNN).build, _CHANNELS))
        kinds[index] = torch.tensor(kinds_of(seed, _CHANNELS))
    return kinds
