"""What the kernel reads of a step: the target slot of each host, and sums over the slots of a host.

Shape legend: N = hosts, S = slots. Differences are taken in float64, in which float32 measurements are exact.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.messages import HostState, RewardInputs
from esper.leyline.record import record
from esper.leyline.stages import BLENDED, GROWING, HAS_MODULE, SeedStage, stages_mask

_STAGE_SETS = (HAS_MODULE, GROWING, frozenset({SeedStage.FOSSILIZED}), BLENDED)
_SET_TABLES: dict[torch.device, Tensor] = {}


@record
class SlotSets:
    """Which slots are in which set of stages."""

    live: Bool[Tensor, "N S"]
    growing: Bool[Tensor, "N S"]
    fossil: Bool[Tensor, "N S"]
    blended: Bool[Tensor, "N S"]


@record
class TargetSlot:
    """The slot an operation aims at, before the operation; NaN where not measured in this step."""

    live: Bool[Tensor, " N"]
    stage: Int[Tensor, " N"]
    previous_stage: Int[Tensor, " N"]
    epochs_in_stage: Int[Tensor, " N"]
    previous_epochs: Int[Tensor, " N"]
    age: Int[Tensor, " N"]
    contribution: Float[Tensor, " N"]
    total_improvement: Float[Tensor, " N"]
    stage_improvement: Float[Tensor, " N"]
    interaction_sum: Float[Tensor, " N"]


@record
class Parameters:
    """Parameter counts and alpha movement of each host; `occupancy` weights seeds by alpha."""

    host: Float[Tensor, " N"]
    total: Float[Tensor, " N"]
    fossilized: Float[Tensor, " N"]
    occupancy: Float[Tensor, " N"]
    alpha_delta_sq: Float[Tensor, " N"]
    alpha: Float[Tensor, "N S"]
    seeds: Float[Tensor, "N S"]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _set_table(device: torch.device) -> Tensor:
    table = _SET_TABLES.get(device)
    if table is None:
        rows = [stages_mask(stages) for stages in _STAGE_SETS]
        table = _SET_TABLES[device] = torch.tensor(rows, device=device).T.contiguous()
    return table


def slot_sets(stage: Int[Tensor, "N S"]) -> SlotSets:
    """Membership of every slot in the sets of stages."""
    live, growing, fossil, blended = _set_table(stage.device)[stage].unbind(-1)
    return SlotSets(live=live, growing=growing, fossil=fossil, blended=blended)


def measured_now(inputs: RewardInputs) -> Float[Tensor, "N S"]:
    """Contributions measured in this very step, float64; NaN where the stored one is older or missing."""
    slots = inputs.slots
    return torch.where(slots.contribution_step == inputs.epoch, slots.contribution, torch.nan).to(torch.float64)


def target_slot(inputs: RewardInputs, live_NS: Tensor, measured_NS: Tensor) -> TargetSlot:
    """Fields of slot `target[n]` of each host n."""
    slots, val_acc_N = inputs.slots, inputs.hosts.val_acc.to(torch.float64)
    whole_NSF = torch.stack(
        (slots.stage, slots.prev_stage, slots.epochs_in_stage, slots.prev_epochs, slots.age, live_NS.long()), dim=-1
    )
    stage, previous, epochs, previous_epochs, age, live = at_target(whole_NSF, inputs.target).unbind(-1)
    real_NSF = torch.stack((slots.acc_at_germination, slots.acc_at_stage_start, slots.interaction_sum), dim=-1)
    germination, entry, interactions = at_target(real_NSF, inputs.target).to(torch.float64).unbind(-1)
    return TargetSlot(
        live=live.bool(),
        stage=stage,
        previous_stage=previous,
        epochs_in_stage=epochs,
        previous_epochs=previous_epochs,
        age=age,
        contribution=at_target(measured_NS, inputs.target),
        total_improvement=val_acc_N - germination,
        stage_improvement=val_acc_N - entry,
        interaction_sum=interactions,
    )


def at_target(values: Tensor, target_N: Tensor) -> Tensor:
    """`values[n, target[n]]` for [N,S] or [N,S,F]."""
    if values.dim() == 2:
        return values.gather(1, target_N[:, None]).squeeze(1)
    index = target_N[:, None, None].expand(-1, 1, values.shape[2])
    return values.gather(1, index).squeeze(1)


def parameters(
    inputs: RewardInputs,
    sets: SlotSets,
    prev_alpha_NS: Tensor,
    prev_params_NS: Tensor,
    *,
    slot_ratio: float,
    host_floor: float,
) -> Parameters:
    """Parameter counts of each host, and what its slots occupy and move.

    occupancy = sum over blended slots of slot_ratio * host + alpha * n;
    alpha movement = sum of (alpha - alpha')^2 * n' / max(host, floor), with (alpha', n') of the previous step.
    """
    host_N = inputs.hosts.host_params.to(torch.float64)
    alpha_NS = torch.where(sets.live, inputs.slots.alpha.to(torch.float64), 0.0)
    params_NS = torch.where(sets.live, inputs.slots.params.to(torch.float64), 0.0)
    occupied_NS = torch.where(sets.blended, torch.addcmul((slot_ratio * host_N)[:, None], alpha_NS, params_NS), 0.0)
    moved_N = ((alpha_NS - prev_alpha_NS).square() * prev_params_NS).sum(-1)
    return Parameters(
        host=host_N,
        total=host_N + params_NS.sum(-1),
        fossilized=torch.where(sets.fossil, params_NS, 0.0).sum(-1),
        occupancy=occupied_NS.sum(-1),
        alpha_delta_sq=torch.where(host_N > 0, moved_N / torch.clamp(host_N, min=host_floor), 0.0),
        alpha=alpha_NS,
        seeds=params_NS,
    )


def stable_accuracy(hosts: HostState, window: int) -> Float[Tensor, " N"]:
    """Smallest of the last `window` known accuracies of a host, the current one included; NaN if that is missing."""
    known_NW = torch.where(torch.isnan(hosts.acc_hist), torch.inf, hosts.acc_hist)[:, -window:]
    return torch.minimum(known_NW.amin(-1), hosts.val_acc).to(torch.float64)


def change(now_N: Tensor, before_N: Tensor) -> Tensor:
    """Difference in float64; 0 where there is no previous value."""
    return torch.nan_to_num(now_N.to(torch.float64) - before_N.to(torch.float64), nan=0.0)
