"""Mode `objective`, the default: J of the final network, plus shaping that sums to zero.

    step t < E    gamma * Phi_t - Phi_{t-1}          Phi_0 = Phi_E = 0
    step E        J - Phi_{E-1}

J and Phi are the same function (`worth`): J of the committed network, Phi of the current one. A step with a rollback
has no reward; the first one after it continues from the last potential before it, divided by gamma for each step
between: what the rollback destroyed is missing there. So the discounted rewards of an episode sum to gamma^(E-1) * J,
with or without rollbacks, and a rollback adds no large rewards that must cancel.
"""

from collections.abc import Sequence
from typing import TypeVar, final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.lifecycle import SeedStage
from esper.leyline.messages import KeptNetwork, RewardInputs, RewardOutput
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards.reward_config import GAMMA, RewardConfig


@tensor_dataclass
class Potentials:
    """Phi after the last step and after the one before, float64, 0 at the start.

    After a rollback both are those of the last valid step, `last` divided by gamma for each step since.
    """

    last: Float[Tensor, " N"]
    before: Float[Tensor, " N"]


@final
class ObjectiveReward:
    """An `EpisodeReward`: a rollback does not end the episode, and the final reward is J of the kept network."""

    terms: Sequence[str] = ("potential", "terminal")

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._rollback_penalty = config.resolved("rollback_penalty")

    def worth(
        self,
        accuracy: Float[Tensor, " N"],
        seed_params: Int[Tensor, " N"],
        host_params: Int[Tensor, " N"],
        compute: Float[Tensor, " N"],
    ) -> Float[Tensor, " N"]:
        """J of such a network, float64; accuracy in percentage points, NaN counts as 0."""
        known = accuracy.to(torch.float64).nan_to_num(nan=0.0)
        return objective_value(
            known, seed_params, host_params.to(torch.float64), compute.to(torch.float64), self.config
        )

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Potentials:
        """Carried state at the start of an episode."""
        zeros = torch.zeros(n, dtype=torch.float64, device=device)
        return Potentials(last=zeros, before=zeros)

    def step(self, inputs: RewardInputs, state: Potentials) -> tuple[RewardOutput, Potentials]:
        """Reward one step, in the dtype of the accuracies; all flags are False."""
        hosts, slots = inputs.hosts, inputs.slots
        compute = hosts.relative_compute(inputs.epoch, inputs.max_epochs)
        if inputs.epoch == inputs.max_epochs:
            fossil_params = (slots.params * (slots.stage == SeedStage.FOSSILIZED)).sum(1)
            potential = torch.zeros_like(state.last)
            shaping, terminal = -state.last, self.worth(hosts.committed_acc, fossil_params, hosts.host_params, compute)
        else:
            potential = self.worth(hosts.val_acc, slots.params.sum(1), hosts.host_params, compute)
            shaping, terminal = GAMMA * potential - state.last, torch.zeros_like(state.last)
        breakdown = torch.stack((shaping, terminal), dim=1).to(hosts.val_acc.dtype)
        flags = torch.zeros(len(potential), 2, dtype=torch.bool, device=potential.device)
        output = RewardOutput(total=breakdown.sum(1), breakdown=breakdown, flags=flags)
        return output, Potentials(last=potential, before=state.last)

    def rollback_reward(self, state: Potentials) -> Float[Tensor, " N"]:
        """[N]: reward of the last row of a host that is rolled back now: the one it had, and the penalty."""
        return (GAMMA * state.last - state.before + self._rollback_penalty).to(torch.float32)

    def reset_hosts(self, state: Potentials, mask: Bool[Tensor, " N"]) -> Potentials:
        """Carried state where the masked hosts continue from the potential before this step, which had no reward."""
        carried = state.before / GAMMA
        return Potentials(last=torch.where(mask, carried, state.last), before=state.before)

    def final_reward(self, kept: KeptNetwork) -> Float[Tensor, " N"]:
        """J of the network at the end of the episode."""
        return self.worth(kept.accuracy, kept.fossil_params, kept.host_params, kept.compute).to(torch.float32)


A = TypeVar("A", np.ndarray, Tensor)


def objective_value(accuracy: A, fossil_params: A, host_params: A, compute: A, weights: RewardConfig) -> A:
    """J of each host [N]; `accuracy` in percentage points. Reports print 100·J, one unit per point of accuracy.

    J = accuracy weight · accuracy / 100 - growth weight · ln(1 + fossilized parameters / max(host parameters, floor))
        - FLOPs weight · log2(compute) / 100

    `compute` are the FLOPs of training over those of training the host alone.
    """
    growth = fossil_params / host_params.clip(min=weights.rent_host_params_floor)
    log_growth = torch.log1p(growth) if isinstance(growth, Tensor) else np.log1p(growth)
    doublings = torch.log2(compute) if isinstance(compute, Tensor) else np.log2(compute)
    of_network = weights.objective_acc_weight * accuracy / 100.0 - weights.objective_growth_weight * log_growth
    worth: A = of_network - weights.objective_flops_weight / 100.0 * doublings
    return worth
