"""Inputs of the reward kernel: values of each host's target slot, and sums over the slots of a host.

Shape legend: N = hosts, S = slots. Differences are taken in float64, which represents float32 measurements exactly.
"""

from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.messages import HostState, RewardInputs
from esper.leyline.stages import BLENDED, GROWING, HAS_MODULE, SeedStage, stages_mask
from esper.leyline.tensor_dataclass import tensor_dataclass

_STAGE_SETS = (HAS_MODULE, GROWING, frozenset({SeedStage.FOSSILIZED}), BLENDED)


@tensor_dataclass
class SlotSets:
    """Membership of slots in sets of stages, and counts per host."""

    live: Bool[Tensor, "N S"]
    growing: Bool[Tensor, "N S"]
    fossil: Bool[Tensor, "N S"]
    blended: Bool[Tensor, "N S"]
    num_growing: Int[Tensor, " N"]
    num_fossil: Int[Tensor, " N"]


@tensor_dataclass
class Parameters:
    """Parameter counts and alpha movement of each host; `occupancy` weights seeds by alpha."""

    host: Float[Tensor, " N"]
    total: Float[Tensor, " N"]
    fossilized: Float[Tensor, " N"]
    occupancy: Float[Tensor, " N"]
    alpha_delta_sq: Float[Tensor, " N"]
    alpha: Float[Tensor, "N S"]
    seeds: Float[Tensor, "N S"]


@lru_cache
def _set_table(device: torch.device) -> Tensor:
    """Membership [set, stage]."""
    return torch.tensor([stages_mask(stages) for stages in _STAGE_SETS], device=device)


def slot_sets(stage: Int[Tensor, "N S"]) -> SlotSets:
    """Membership of every slot in the sets of stages."""
    table: Tensor = _set_table(stage.device)
    members_4NS = table.index_select(1, stage.reshape(-1)).view(len(_STAGE_SETS), *stage.shape)
    live, growing, fossil, blended = members_4NS.unbind()
    num_growing, num_fossil = members_4NS[1:3].sum(-1).unbind()
    return SlotSets(
        live=live, growing=growing, fossil=fossil, blended=blended, num_growing=num_growing, num_fossil=num_fossil
    )


def measured_now(inputs: RewardInputs) -> Float[Tensor, "N S"]:
    """Contributions measured in this step, float64; NaN where the stored one is older or missing."""
    slots = inputs.slots
    return slots.contribution.to(torch.float64).masked_fill(slots.contribution_step != inputs.epoch, torch.nan)


def at_target(values: Tensor, index_N1: Int[Tensor, "N 1"]) -> Tensor:
    """[N]: `values[n, target[n]]` of values [N, S]; the index is `target[:, None]`."""
    return values.gather(1, index_N1).squeeze(1)


def parameters(
    inputs: RewardInputs,
    sets: SlotSets,
    prev_alpha_NS: Tensor,
    prev_params_NS: Tensor,
    *,
    slot_ratio: float,
    host_floor: float,
) -> Parameters:
    """Parameter counts, occupancy and alpha movement of each host.

    occupancy = sum over blended slots of slot_ratio * host + alpha * n;
    alpha movement = sum of (alpha - alpha')^2 * n' / max(host, floor), with (alpha', n') of the previous step.
    """
    zero_NS = torch.zeros_like(prev_params_NS)
    host_N = inputs.hosts.host_params.to(torch.float64)
    alpha_NS = torch.where(sets.live, inputs.slots.alpha.to(torch.float64), zero_NS)
    params_NS = torch.where(sets.live, inputs.slots.params.to(torch.float64), zero_NS)
    occupied_NS = torch.addcmul((slot_ratio * host_N)[:, None], alpha_NS, params_NS)
    moved_NS = (alpha_NS - prev_alpha_NS).square() * prev_params_NS
    sums_4N = torch.stack(
        (
            params_NS,
            torch.where(sets.fossil, params_NS, zero_NS),
            torch.where(sets.blended, occupied_NS, zero_NS),
            moved_NS,
        )
    ).sum(-1)
    seeds_N, fossilized_N, occupancy_N, moved_N = sums_4N.unbind()
    return Parameters(
        host=host_N,
        total=host_N + seeds_N,
        fossilized=fossilized_N,
        occupancy=occupancy_N,
        alpha_delta_sq=(moved_N / torch.clamp(host_N, min=host_floor)).masked_fill(host_N <= 0, 0.0),
        alpha=alpha_NS,
        seeds=params_NS,
    )


def stable_accuracy(hosts: HostState, window: int) -> Float[Tensor, " N"]:
    """Smallest of the last `window` known accuracies of a host, the current one included; NaN if that is missing."""
    known_NW = torch.where(torch.isnan(hosts.acc_hist), torch.inf, hosts.acc_hist)[:, -window:]
    return torch.minimum(known_NW.amin(-1), hosts.val_acc).to(torch.float64)


def change(now_N: Tensor, before_N: Tensor) -> Tensor:
    """Difference in float64; 0 where there is no previous value."""
    return torch.nan_to_num(now_N.to(torch.float64) - before_N, nan=0.0)
