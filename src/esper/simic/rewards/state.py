"""A step of the modes but `objective`: the kernel on each host's target slot, then what only the past can tell.

    inputs  slots and hosts before the op, the op and what became of it   (leyline.RewardInputs)
    state   what is remembered from step to step                          (RewardState)
    ------> what the step pays (leyline.RewardOutput) and the next state

Pure: nothing is remembered outside the state, nothing is emitted, and the host never waits for the device.
Shape legend: N = hosts, S = slots, E = steps of an episode, M = terms.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import ConfigError
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import lift, replace, tensor_dataclass, tree_map
from esper.simic.rewards import compiled_rewards as kernel
from esper.simic.rewards.compiled_rewards import Kernel, compute_reward_batched
from esper.simic.rewards.config import RewardConfig
from esper.simic.rewards.gather import (
    Parameters,
    SlotSets,
    at_target,
    change,
    measured_now,
    parameters,
    slot_sets,
    stable_accuracy,
    target_slot,
)
from esper.simic.rewards.row import NEW_SEED_POTENTIAL
from esper.simic.rewards.terms import REWARD_TERMS

_COLUMN = {name: index for index, name in enumerate(REWARD_TERMS)}
CONTRIBUTION_MODES = ("shaped", "escrow")
"""Modes with clawback, automatic-prune penalty and hindsight credit."""
HINDSIGHT_SLOPE = 0.1

_PACKED: dict[tuple[RewardConfig, torch.device], Tensor] = {}


@tensor_dataclass
class RewardState:
    """What a reward remembers; all zero at the start of an episode and after a rollback, float64.

    Attributes:
        escrow: credit account of each slot.
        ledger: sum of a slot's positive interactions in each step so far; width 0 in modes that never read it.
        drip_scale: open pools, 0 = none.
        prev_alpha, prev_params: alpha and parameters of each slot in the previous step.
    """

    escrow: Float[Tensor, "N S"]
    ledger: Float[Tensor, "N S E"]
    drip_scale: Float[Tensor, "N S"]
    prev_alpha: Float[Tensor, "N S"]
    prev_params: Float[Tensor, "N S"]


def initial_state(n: int, slots: int, steps: int, device: torch.device, config: RewardConfig) -> RewardState:
    """The state at the start of an episode of `steps` steps; raises ConfigError for mode `objective`."""
    if config.mode == "objective":
        raise ConfigError("mode 'objective' is paid by ObjectiveReward; make_reward('objective') builds it.")

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    return RewardState(
        escrow=zeros(n, slots),
        ledger=zeros(n, slots, steps if config.mode in CONTRIBUTION_MODES else 0),
        drip_scale=zeros(n, slots),
        prev_alpha=zeros(n, slots),
        prev_params=zeros(n, slots),
    )


def reset_hosts(state: RewardState, mask: Bool[Tensor, " N"]) -> RewardState:
    """The state with the masked hosts as at the start of an episode.

    To be applied after the step in which a host was rolled back, so that nothing of that step is remembered. Zero for
    `prev_alpha` and `prev_params` moves no alpha in the next step, exactly as the restored slots themselves would
    (only fossils survive a rollback, and their alpha is 1 before and after).
    """
    zero = state.escrow.new_zeros(())
    return tree_map(lambda x: torch.where(lift(mask, x), zero, x), state)


def rollback_reward(state: RewardState, config: RewardConfig) -> Float[Tensor, " N"]:
    """What the last row of each host is paid instead when the host is rolled back now."""
    penalty, hosts = config.resolved("rollback_penalty"), len(state.escrow)
    return torch.full((hosts,), penalty, dtype=torch.float32, device=state.escrow.device)


def packed_weights(config: RewardConfig, device: torch.device) -> Float[Tensor, " W"]:
    """The numbers of the mode on `device`, copied there once."""
    weights = _PACKED.get((config, device))
    if weights is None:
        packed = config.loss.pack() if config.mode == "loss" else config.pack()
        weights = _PACKED[config, device] = packed.to(device)
    return weights


def reward_step(
    inputs: RewardInputs,
    state: RewardState,
    config: RewardConfig,
    pay: Kernel = compute_reward_batched,
) -> tuple[RewardOutput, RewardState]:
    """Pay one step of all hosts.

    A refused operation is a WAIT: it earns and pays nothing. Every amount is known when its own step is paid.

    Args:
        inputs: slots and hosts before the op, and the feedback of op and tick.
        state: the value returned by the previous step of the episode, or `initial_state`.
        config: mode and numbers.
        pay: the kernel, eager or compiled; both give the same answer.

    Returns:
        The pay in the dtype of `hosts.val_acc`, and the state for the next step.
    """
    op_N = inputs.ops * inputs.success
    index_N1 = inputs.target[:, None]
    sets = slot_sets(inputs.slots.stage)
    measured_NS = measured_now(inputs)
    params = parameters(
        inputs, sets, state.prev_alpha, state.prev_params,
        slot_ratio=config.base_slot_rent_ratio, host_floor=config.rent_host_params_floor,
    )  # fmt: skip
    paid = pay(**_arguments(inputs, state, config, op_N, index_N1, sets, measured_NS, params))
    extra: dict[str, Tensor] = {}
    after: dict[str, Tensor] = {"prev_alpha": params.alpha, "prev_params": params.seeds}
    if config.mode == "escrow":
        after["escrow"] = _next_accounts(inputs, state, sets, paid.escrow_next)
    if config.mode in CONTRIBUTION_MODES:
        extra["auto_prune"] = config.auto_prune_penalty * inputs.auto_pruned.to(torch.float64)
        extra["hindsight"], after["ledger"] = _hindsight(inputs, state, config, op_N, index_N1, sets.live, measured_NS)
        if inputs.epoch == inputs.max_epochs:
            extra |= _at_the_end(inputs, after.get("escrow"), config, op_N, sets.growing)
    if config.mode == "basic_plus":
        after["drip_scale"] = _next_pools(inputs, state, index_N1, paid.drip_opened)
    return _output(paid, extra, inputs.hosts.val_acc.dtype), replace(state, **after)


def _arguments(
    inputs: RewardInputs,
    state: RewardState,
    config: RewardConfig,
    op_N: Tensor,
    index_N1: Tensor,
    sets: SlotSets,
    measured_NS: Tensor,
    params: Parameters,
) -> dict[str, Any]:
    """What the kernel is told of the target slots.

    All numbers are float64 and contiguous and what changes from step to step is a tensor, so that one graph serves all.
    """
    hosts, val_acc_N = inputs.hosts, inputs.hosts.val_acc.to(torch.float64)
    target = target_slot(inputs, index_N1, val_acc_N, sets.live, measured_NS)
    escrow, drip, loss = config.mode == "escrow", config.mode == "basic_plus", config.mode == "loss"
    return {
        "actions": op_N,
        "seed_contributions": target.contribution,
        "val_accs": val_acc_N,
        "acc_deltas": change(val_acc_N, hosts.prev_val_acc),
        "has_seed_mask": target.live,
        "stages": target.stage,
        "total_improvements": target.total_improvement,
        "epochs_in_stage": target.epochs_in_stage,
        "seed_ages": target.age,
        "previous_stages": target.previous_stage,
        "previous_epochs": target.previous_epochs,
        "epoch": _as_tensor(inputs.epoch, op_N),
        "max_epochs": _as_tensor(inputs.max_epochs, op_N),
        "config_weights": packed_weights(config, op_N.device),
        "mode": config.mode,
        "attribution": config.attribution,
        "counterfactual_improvements": hosts.cf_total.to(torch.float64),
        "stage_improvements": target.stage_improvement,
        "interaction_sums": target.interaction_sum,
        "stable_val_accs": stable_accuracy(hosts, config.escrow_stable_window) if escrow else None,
        "escrow_credits": at_target(state.escrow, index_N1) if escrow else None,
        "total_params": params.total,
        "host_params": params.host,
        "effective_seed_params": params.occupancy,
        "alpha_delta_sq_sums": params.alpha_delta_sq,
        "num_active": sets.num_growing,
        "num_fossilized": sets.num_fossil,
        "num_contributing": hosts.n_contributing.contiguous(),
        "committed_accs": hosts.committed_acc.to(torch.float64),
        "fossilized_params": params.fossilized,
        "drip_scales": state.drip_scale if drip else None,
        "drip_contributions": measured_NS if drip else None,
        "val_losses": hosts.val_loss.to(torch.float64) if loss else None,
        "loss_deltas": change(hosts.val_loss, hosts.prev_val_loss) if loss else None,
    }


def _as_tensor(clock: int | Tensor, like: Tensor) -> Tensor:
    return clock if isinstance(clock, Tensor) else like.new_full((), clock)


def _output(paid: kernel.RewardOutput, extra: dict[str, Tensor], dtype: torch.dtype) -> RewardOutput:
    """The kernel's pay with the terms that need memory."""
    breakdown_NM, total_N = paid.breakdown, paid.total
    for name, value_N in extra.items():
        breakdown_NM[:, _COLUMN[name]] = value_N  # the kernel has just made this tensor for us
        total_N = total_N + value_N
    return RewardOutput(total=total_N.to(dtype), breakdown=breakdown_NM.to(dtype), flags=paid.flags)


def _is_target(inputs: RewardInputs) -> Bool[Tensor, "N S"]:
    """The slot that each host's operation aims at.

    What is written there is chosen with this mask and not scattered: where the whole step is compiled for a CPU,
    PyTorch 2.13 moves a read of the scattered tensor before the scatter.
    """
    slots = torch.arange(inputs.slots.stage.shape[1], device=inputs.target.device)
    return inputs.target[:, None] == slots


def _next_accounts(inputs: RewardInputs, state: RewardState, sets: SlotSets, next_N: Tensor) -> Tensor:
    """Accounts after the step; an account lives as long as its seed."""
    written_NS = torch.where(_is_target(inputs), next_N[:, None], state.escrow)
    return torch.where(sets.live, written_NS, 0.0)


def _next_pools(inputs: RewardInputs, state: RewardState, index_N1: Tensor, opened_N: Tensor) -> Tensor:
    """Pools after the step; a pool pays from the next step to the end of the episode."""
    written_N = torch.where(opened_N > 0, opened_N, at_target(state.drip_scale, index_N1))
    return torch.where(_is_target(inputs), written_N[:, None], state.drip_scale)


def _hindsight(
    inputs: RewardInputs,
    state: RewardState,
    config: RewardConfig,
    op_N: Tensor,
    index_N1: Tensor,
    live_NS: Tensor,
    measured_NS: Tensor,
) -> tuple[Tensor, Tensor]:
    """Late thanks to a seed that helped others: (term [N], next ledger [N,S,E]).

    min(cap, sum over steps tau of weight * tanh(0.1 * ledger(tau) * c) * gamma^(epoch - tau)), paid when the seed is
    fossilized with a contribution c > 0; then the seed's row is cleared.
    """
    assert isinstance(inputs.epoch, int), "the ledger has a column for each step"
    now = inputs.epoch - 1
    helped_NS = torch.clamp(torch.nan_to_num(inputs.interactions, nan=0.0), min=0.0).sum(-1, dtype=torch.float64)
    helped_NS = helped_NS * live_NS
    known_NSE = state.ledger[..., : inputs.epoch]
    row_NE = known_NSE.gather(1, index_N1[..., None].expand(-1, -1, inputs.epoch)).squeeze(1)
    row_NE[:, now] = at_target(helped_NS, index_N1)
    gain_N = torch.nan_to_num(at_target(measured_NS, index_N1), nan=0.0)
    ages_E = torch.arange(now, -1, -1, device=op_N.device, dtype=torch.float64)
    thanks_NE = torch.tanh(row_NE * (HINDSIGHT_SLOPE * gain_N)[:, None]) * torch.pow(config.gamma, ages_E)
    thanks_N = torch.clamp(config.hindsight_weight * thanks_NE.sum(-1), max=config.hindsight_cap)
    fossilized_N = (op_N == int(LifecycleOp.FOSSILIZE)) & at_target(live_NS, index_N1)
    keep_NS = live_NS & ~(_is_target(inputs) & fossilized_N[:, None])
    ledger_NSE = state.ledger * keep_NS[..., None]
    ledger_NSE[..., now] = helped_NS * keep_NS
    return thanks_N * (fossilized_N & (gain_N > 0)), ledger_NSE


def _at_the_end(
    inputs: RewardInputs, escrow_NS: Tensor | None, config: RewardConfig, op_N: Tensor, growing_NS: Tensor
) -> dict[str, Tensor]:
    """What the last step takes back: credit of seeds that are not permanent, potential of seeds that never blended."""
    extra: dict[str, Tensor] = {}
    if escrow_NS is not None:
        extra["escrow_forfeit"] = -torch.where(growing_NS, escrow_NS, 0.0).sum(-1)
    if not config.disable_pbrs:
        stage_NS, age_NS = inputs.slots.stage, inputs.slots.age.to(torch.float64)
        young_NS = (stage_NS == int(SeedStage.GERMINATED)) | (stage_NS == int(SeedStage.TRAINING))
        pruned_N = op_N == int(LifecycleOp.PRUNE)
        gone_NS = _is_target(inputs) & pruned_N[:, None]
        lent = config.pbrs_weight * NEW_SEED_POTENTIAL
        due_NS = lent * torch.pow(config.gamma, 1.0 - age_NS)
        extra["germination_clawback"] = -torch.where(young_NS & ~gone_NS, due_NS, 0.0).sum(-1)
    return extra
