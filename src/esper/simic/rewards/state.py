"""One reward step with memory: the kernel on each host's target slot, then what only the past can tell.

    inputs  slots and hosts before the op, the op and what became of it   (leyline.RewardInputs)
    state   what is remembered from step to step                          (RewardState)
    ------> what the step pays (leyline.RewardOutput) and the next state

Pure: nothing is remembered outside the state, nothing is emitted, and the host never waits for the device.
Shape legend: N = hosts, S = slots, E = steps of an episode, M = terms.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.leyline.record import record, replace, where
from esper.leyline.stages import SeedStage
from esper.simic.rewards import compiled_rewards as kernel
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
from esper.simic.rewards.terms import NEW_SEED_POTENTIAL, REWARD_INFO, REWARD_TERMS

_COLUMN = {name: index for index, name in enumerate(REWARD_TERMS)}
_POTENTIAL_INFO = REWARD_INFO.index("objective_potential")
CONTRIBUTION_MODES = ("shaped", "escrow")
"""Modes with clawback, automatic-prune penalty and hindsight credit."""
HINDSIGHT_SLOPE = 0.1

_PACKED: dict[tuple[RewardConfig, torch.device], Tensor] = {}


@record
class RewardState:
    """What a reward remembers; all zero at the start of an episode and after a rollback, float64.

    Attributes:
        escrow: credit account of each slot.
        ledger: sum of a slot's positive interactions in each step so far; width 0 in modes that never read it.
        drip_scale: open pools, 0 = none.
        prev_alpha, prev_params: alpha and parameters of each slot in the previous step.
        potential, potential_before: potential of the last step and of the one before (mode objective). The second
            is what a rollback needs, because it replaces the reward of a step that was paid already.
    """

    escrow: Float[Tensor, "N S"]
    ledger: Float[Tensor, "N S E"]
    drip_scale: Float[Tensor, "N S"]
    prev_alpha: Float[Tensor, "N S"]
    prev_params: Float[Tensor, "N S"]
    potential: Float[Tensor, " N"]
    potential_before: Float[Tensor, " N"]


def initial_state(n: int, slots: int, steps: int, device: torch.device, config: RewardConfig) -> RewardState:
    """The state at the start of an episode of `steps` steps."""

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=device)

    return RewardState(
        escrow=zeros(n, slots),
        ledger=zeros(n, slots, steps if config.mode in CONTRIBUTION_MODES else 0),
        drip_scale=zeros(n, slots),
        prev_alpha=zeros(n, slots),
        prev_params=zeros(n, slots),
        potential=zeros(n),
        potential_before=zeros(n),
    )


def reset_hosts(state: RewardState, mask: Bool[Tensor, " N"]) -> RewardState:
    """The state with the masked hosts as at the start of an episode.

    To be applied after the step in which a host was rolled back, so that nothing of that step is remembered. Zero for
    `prev_alpha` and `prev_params` moves no alpha in the next step, exactly as the restored slots themselves would
    (only fossils survive a rollback, and their alpha is 1 before and after).
    """
    zero = replace(state, **{name: torch.zeros_like(value) for name, value in vars(state).items()})
    return where(mask, zero, state)


def rollback_breakdown(state: RewardState, config: RewardConfig) -> Float[Tensor, "N M"]:
    """What replaces the reward of the last row of a host that is rolled back now, by term.

    In mode objective the previous potential is taken back, so that the shaping of the segment still sums to 0.
    """
    breakdown_NM = state.potential.new_zeros(state.potential.shape[0], len(REWARD_TERMS))
    breakdown_NM[:, _COLUMN["rollback"]] = config.resolved("rollback_penalty")
    if config.mode == "objective":
        breakdown_NM[:, _COLUMN["potential"]] = -state.potential_before
    return breakdown_NM


def rollback_reward(state: RewardState, config: RewardConfig) -> Float[Tensor, " N"]:
    """Sum of `rollback_breakdown`, float32 as rewards are stored."""
    return rollback_breakdown(state, config).sum(-1).to(torch.float32)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def packed_weights(config: RewardConfig, device: torch.device) -> Float[Tensor, " W"]:
    """The numbers of the mode on `device`, copied there once."""
    weights = _PACKED.get((config, device))
    if weights is None:
        packed = config.loss.pack() if config.mode == "loss" else config.pack()
        weights = _PACKED[config, device] = packed.to(device)
    return weights


def reward_step(inputs: RewardInputs, state: RewardState, config: RewardConfig) -> tuple[RewardOutput, RewardState]:
    """Pay one step of all hosts.

    A refused operation is a WAIT: it earns and pays nothing. Every amount is known when its own step is paid.

    Args:
        inputs: slots and hosts before the op, and the feedback of op and tick.
        state: the value returned by the previous step of the episode, or `initial_state`.
        config: mode and numbers.

    Returns:
        The pay in the dtype of `hosts.val_acc`, and the state for the next step.
    """
    op_N = inputs.ops * inputs.success
    sets = slot_sets(inputs.slots.stage)
    measured_NS = measured_now(inputs)
    params = parameters(
        inputs, sets, state.prev_alpha, state.prev_params,
        slot_ratio=config.base_slot_rent_ratio, host_floor=config.rent_host_params_floor,
    )  # fmt: skip
    paid = _kernel(inputs, state, config, op_N, sets, measured_NS, params)
    extra: dict[str, Tensor] = {}
    state = replace(
        state, prev_alpha=params.alpha, prev_params=params.seeds,
        potential=paid.info[:, _POTENTIAL_INFO].contiguous(), potential_before=state.potential,
    )  # fmt: skip
    if config.mode == "escrow":
        state = replace(state, escrow=_next_accounts(inputs, state, sets, paid.escrow_next))
    if config.mode in CONTRIBUTION_MODES:
        extra["auto_prune"] = config.auto_prune_penalty * inputs.auto_pruned.to(torch.float64)
        extra["hindsight"], ledger_NSE = _hindsight(inputs, state, config, op_N, sets.live, measured_NS)
        state = replace(state, ledger=ledger_NSE)
        if inputs.epoch == inputs.max_epochs:
            extra |= _at_the_end(inputs, state, config, op_N, sets.growing)
    if config.mode == "basic_plus":
        state = replace(state, drip_scale=_next_pools(inputs, state, paid.drip_opened))
    return _output(paid, extra, inputs.hosts.val_acc.dtype), state


def _kernel(
    inputs: RewardInputs,
    state: RewardState,
    config: RewardConfig,
    op_N: Tensor,
    sets: SlotSets,
    measured_NS: Tensor,
    params: Parameters,
) -> kernel.RewardOutput:
    """The kernel on the target slots, in float64."""
    hosts, target = inputs.hosts, target_slot(inputs, sets.live, measured_NS)
    escrow, drip, loss = config.mode == "escrow", config.mode == "basic_plus", config.mode == "loss"
    return kernel.compute_reward_batched(
        op_N, target.contribution, hosts.val_acc.to(torch.float64), change(hosts.val_acc, hosts.prev_val_acc),
        target.live, target.stage, target.total_improvement, target.epochs_in_stage, target.age,
        target.previous_stage, target.previous_epochs, inputs.epoch, inputs.max_epochs,
        packed_weights(config, op_N.device),
        mode=config.mode,
        attribution=config.attribution,
        counterfactual_improvements=hosts.cf_total,
        stage_improvements=target.stage_improvement,
        interaction_sums=target.interaction_sum,
        stable_val_accs=stable_accuracy(hosts, config.escrow_stable_window) if escrow else None,
        escrow_credits=at_target(state.escrow, inputs.target) if escrow else None,
        total_params=params.total,
        host_params=params.host,
        effective_seed_params=params.occupancy,
        alpha_delta_sq_sums=params.alpha_delta_sq,
        num_active=sets.growing.sum(-1),
        num_fossilized=sets.fossil.sum(-1),
        num_contributing=hosts.n_contributing,
        committed_accs=hosts.committed_acc,
        fossilized_params=params.fossilized,
        drip_scales=state.drip_scale if drip else None,
        drip_contributions=measured_NS if drip else None,
        val_losses=hosts.val_loss if loss else None,
        loss_deltas=change(hosts.val_loss, hosts.prev_val_loss) if loss else None,
        potentials_prev=state.potential,
    )  # fmt: skip


def _output(paid: kernel.RewardOutput, extra: dict[str, Tensor], dtype: torch.dtype) -> RewardOutput:
    """The kernel's pay with the terms that need memory."""
    breakdown_NM, total_N = paid.breakdown, paid.total
    for name, value_N in extra.items():
        breakdown_NM[:, _COLUMN[name]] = value_N  # the kernel has just made this tensor for us
        total_N = total_N + value_N
    return RewardOutput(total=total_N.to(dtype), breakdown=breakdown_NM.to(dtype), flags=paid.flags)


def _next_accounts(inputs: RewardInputs, state: RewardState, sets: SlotSets, next_N: Tensor) -> Tensor:
    """Accounts after the step; an account lives as long as its seed."""
    written_NS = state.escrow.scatter(1, inputs.target[:, None], next_N[:, None])
    return torch.where(sets.live, written_NS, 0.0)


def _next_pools(inputs: RewardInputs, state: RewardState, opened_N: Tensor) -> Tensor:
    """Pools after the step; a pool pays from the next step to the end of the episode."""
    kept_N = at_target(state.drip_scale, inputs.target)
    written_N = torch.where(opened_N > 0, opened_N, kept_N)
    return state.drip_scale.scatter(1, inputs.target[:, None], written_N[:, None])


def _hindsight(
    inputs: RewardInputs, state: RewardState, config: RewardConfig, op_N: Tensor, live_NS: Tensor, measured_NS: Tensor
) -> tuple[Tensor, Tensor]:
    """Late thanks to a seed that helped others: (term [N], next ledger [N,S,E]).

    min(cap, sum over steps tau of weight * tanh(0.1 * ledger(tau) * c) * gamma^(epoch - tau)), paid when the seed is
    fossilized with a contribution c > 0; then the seed's row is cleared.
    """
    now, index_N11 = inputs.epoch - 1, inputs.target[:, None, None]
    helped_NS = torch.clamp(torch.nan_to_num(inputs.interactions.to(torch.float64), nan=0.0), min=0.0).sum(-1)
    helped_NS = torch.where(live_NS, helped_NS, 0.0)
    row_NE = state.ledger.gather(1, index_N11.expand(-1, 1, state.ledger.shape[2])).squeeze(1)[:, : inputs.epoch]
    row_NE[:, now] = at_target(helped_NS, inputs.target)
    gain_N = torch.nan_to_num(at_target(measured_NS, inputs.target), nan=0.0)
    ages_E = torch.arange(now, -1, -1, device=op_N.device, dtype=torch.float64)
    thanks_NE = torch.tanh(HINDSIGHT_SLOPE * row_NE * gain_N[:, None]) * torch.pow(config.gamma, ages_E)
    thanks_N = torch.clamp(config.hindsight_weight * thanks_NE.sum(-1), max=config.hindsight_cap)
    fossilized_N = (op_N == int(LifecycleOp.FOSSILIZE)) & at_target(live_NS, inputs.target)
    target_NS = torch.zeros_like(live_NS).scatter(1, inputs.target[:, None], fossilized_N[:, None])
    keep_NS = live_NS & ~target_NS
    ledger_NSE = state.ledger * keep_NS[..., None]
    ledger_NSE[..., now] = torch.where(keep_NS, helped_NS, 0.0)
    return torch.where(fossilized_N & (gain_N > 0), thanks_N, 0.0), ledger_NSE


def _at_the_end(
    inputs: RewardInputs, state: RewardState, config: RewardConfig, op_N: Tensor, growing_NS: Tensor
) -> dict[str, Tensor]:
    """What the last step takes back: credit of seeds that are not permanent, potential of seeds that never blended."""
    extra: dict[str, Tensor] = {}
    if config.mode == "escrow":
        extra["escrow_forfeit"] = -torch.where(growing_NS, state.escrow, 0.0).sum(-1)
    if not config.disable_pbrs:
        stage_NS, age_NS = inputs.slots.stage, inputs.slots.age.to(torch.float64)
        young_NS = (stage_NS == int(SeedStage.GERMINATED)) | (stage_NS == int(SeedStage.TRAINING))
        pruned_N = op_N == int(LifecycleOp.PRUNE)
        gone_NS = torch.zeros_like(young_NS).scatter(1, inputs.target[:, None], pruned_N[:, None])
        lent = config.pbrs_weight * NEW_SEED_POTENTIAL
        due_NS = lent * torch.pow(config.gamma, 1.0 - age_NS)
        extra["germination_clawback"] = -torch.where(young_NS & ~gone_NS, due_NS, 0.0).sum(-1)
    return extra
