"""One PPO update from a full rollout buffer, with one host read.

    buffer --> scaled rewards --> GAE --> normalized advantages
                                              |
    epochs 1..K:  permute the hosts, split into minibatches of whole rows, and for each minibatch
                  unroll -> losses -> gradient -> clip -> Adam step      masked on the device: no change where loss or
                                              |                          gradient is not finite, or after the KL stop
    statistics, schedules, metrics  <---------+

Shape legend: N = hosts, T = steps, M = metrics, P = parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import TrainingError
from esper.leyline.messages import Hidden
from esper.leyline.random import Stream, permutation
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.agent.advantages import (
    NormalizedAdvantages,
    ObservationStatistics,
    RunningMeanVar,
    discounted_returns,
    masked_moments,
    paired_rewards,
    scale_rewards,
)
from esper.simic.agent.losses import (
    Losses,
    LossInputs,
    LossWeights,
    RatioStatistics,
    head_entropies,
    ppo_losses,
    ratio_statistics,
)
from esper.simic.agent.ppo_config import PPOConfig as PPOConfig
from esper.simic.agent.ppo_config import (
    entropy_coefficient,
    floor_scale,
    inverse_temperature,
    learning_rate,
    value_coefficient,
)
from esper.simic.agent.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer
from esper.simic.metrics import ENTROPIES, Read, aggregate_ppo_metrics, metric_row
from esper.simic.rewards.reward_config import GAMMA
from esper.tamiyo.heads import check_logits, check_stored_actions, evaluate_heads, relevance
from esper.tamiyo.network import TamiyoNetwork

CLIP_EPS = 1e-6


@tensor_dataclass
class AdamState:
    """Moments of all parameters in their order, and the number of steps taken."""

    exp_avg: Float[Tensor, " P"]
    exp_avg_sq: Float[Tensor, " P"]
    step: Float[Tensor, ""]


def initial_adam_state(parameters: Sequence[Tensor]) -> AdamState:
    """Zero moments on the device of the parameters."""
    flat = flatten(parameters)
    step = torch.zeros((), dtype=torch.float64, device=flat.device)
    return AdamState(exp_avg=torch.zeros_like(flat), exp_avg_sq=torch.zeros_like(flat), step=step)


def adam_step(
    gradient: Float[Tensor, " P"],
    state: AdamState,
    take: Bool[Tensor, ""],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float,
) -> tuple[Float[Tensor, " P"], AdamState]:
    """The difference to subtract from the parameters, and the next state (Kingma and Ba, 2015, algorithm 1).

    Without `take` the difference is exactly zero and the state unchanged, even for a gradient that is not finite.
    """
    beta1, beta2 = betas
    step = state.step + 1.0
    step_size = (lr / (1.0 - beta1**step)).to(gradient.dtype)
    correction = (1.0 - beta2**step).sqrt().to(gradient.dtype)
    exp_avg = torch.lerp(state.exp_avg, gradient, 1.0 - beta1)
    exp_avg_sq = (state.exp_avg_sq * beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
    # in place: allocating vectors of this length costs more than the arithmetic
    difference = exp_avg_sq.sqrt().div_(correction).add_(eps)
    torch.div(exp_avg, difference, out=difference).mul_(step_size).masked_fill_(~take, 0.0)
    return difference, AdamState(
        exp_avg=torch.where(take, exp_avg, state.exp_avg, out=exp_avg),
        exp_avg_sq=torch.where(take, exp_avg_sq, state.exp_avg_sq, out=exp_avg_sq),
        step=torch.where(take, step, state.step),
    )


def flatten(tensors: Sequence[Tensor]) -> Float[Tensor, " P"]:
    """All tensors in one vector, in their order; a copy."""
    return torch.cat([x.detach().reshape(-1) for x in tensors])


def clip_by_norm(gradient: Float[Tensor, " P"], norm: Float[Tensor, ""], limit: float) -> Float[Tensor, " P"]:
    """`gradient` scaled down to the length `limit` where its length `norm` is above it."""
    return gradient * (limit / (norm + CLIP_EPS)).clamp_max(1.0).to(gradient.dtype)


def subtract_(parameters: Sequence[Tensor], difference: Float[Tensor, " P"]) -> None:
    """Subtract a flat vector from the parameters in place."""
    chunks = torch.split(difference, [p.numel() for p in parameters])
    with torch.no_grad():
        torch._foreach_sub_(list(parameters), [c.view_as(p) for c, p in zip(chunks, parameters, strict=True)])


MIN_EXPLAINABLE_VARIANCE = 1e-8


def update_row(
    rollout: SequenceBatch,
    normalized: NormalizedAdvantages,
    return_scale: Float[Tensor, ""],
    weights: LossWeights,
    lr: float,
    inverse_temperature: Float[Tensor, ""],
    selectable: Bool[Tensor, " B"],
) -> Float[Tensor, " M"]:
    """Metrics known before the first minibatch; values and returns are scaled, advantages not normalized."""
    valid = rollout.valid
    values, returns = masked_moments(rollout.values, valid), masked_moments(rollout.returns, valid)
    unexplained = masked_moments(rollout.returns - rollout.values, valid).var
    explained = 1.0 - unexplained / returns.var
    explainable = returns.var >= MIN_EXPLAINABLE_VARIANCE
    return metric_row(
        {
            "lr": torch.full((), lr, dtype=torch.float64, device=valid.device),
            "ent_coef": weights.entropy,
            "vf_coef": weights.value,
            "floor_scale": weights.floor,
            "inverse_temperature": inverse_temperature,
            "forced_share": (rollout.forced & valid).sum() / valid.sum(),
            "explained_variance": torch.where(explainable, explained, torch.nan),
            "value_mean": values.mean,
            "value_std": values.var.sqrt(),
            "return_mean": returns.mean,
            "return_std": returns.var.sqrt(),
            "return_scale": return_scale,
            "advantage_mean": normalized.mean,
            "advantage_std": normalized.std,
            "advantage_std_floored": normalized.floored,
            "actions_outside_mask": ~check_stored_actions(rollout.actions, rollout.legal, rollout.has_gate, selectable),
        }
    )


def health_row(hidden: Hidden) -> Float[Tensor, " M"]:
    """Root mean square and largest magnitude of the recurrent state."""
    h, c = hidden.h.detach(), hidden.c.detach()
    return metric_row(
        {
            "hidden_rms": h.square().mean().sqrt(),
            "hidden_max": h.abs().amax(),
            "cell_rms": c.square().mean().sqrt(),
            "cell_max": c.abs().amax(),
        }
    )


def epoch_row(
    approx_kl: Float[Tensor, ""], epoch: Int[Tensor, ""], *, ran: Bool[Tensor, ""], exceeded: Bool[Tensor, ""]
) -> Float[Tensor, " M"]:
    """KL divergence of one epoch; NaN for an epoch after the early stop."""
    return metric_row(
        {
            "approx_kl": torch.where(ran, approx_kl, torch.nan),
            "epochs_done": torch.where(ran, epoch.to(approx_kl.dtype), torch.nan),
            "stopped_early": exceeded,
        }
    )


def minibatch_row(
    x: LossInputs,
    losses: Losses,
    ratios: RatioStatistics,
    grad_norm: Float[Tensor, ""],
    *,
    first: bool,
    ran: Bool[Tensor, ""],
    finite_logits: Bool[Tensor, ""],
    finite: Bool[Tensor, ""],
    takes: Bool[Tensor, ""],
) -> Float[Tensor, " M"]:
    """Metrics of a minibatch; NaN except for the counts if it took no optimizer step.

    In the `first` one of an update the policy is still the one that acted, so what differs are stored probabilities.
    """
    entropies, steps = head_entropies(x)
    numbers = {
        "evaluated_steps": x.valid.sum(),
        "policy_loss": losses.policy,
        "value_loss": losses.value,
        "entropy_loss": losses.entropy,
        "floor_loss": losses.floor,
        "total_loss": losses.total,
        "grad_norm": grad_norm,
        "clip_fraction": ratios.clip_fraction,
        **{f"steps_{name}": count for name, count in zip(ENTROPIES, steps.unbind(0), strict=True)},
        **{f"entropy_{name}": mean for name, mean in zip(ENTROPIES, entropies.unbind(0), strict=True)},
    }
    counts = metric_row(
        {
            "finite_minibatches": ran & finite,
            "nonfinite_minibatches": ran & ~finite,
            "nonfinite_logits": ran & ~finite_logits,
            "optimizer_steps": takes,
        }
        | ({"stored_log_prob_error": ratios.largest_change} if first else {})
    )
    return torch.where(counts.isnan(), torch.where(takes, metric_row(numbers), torch.nan), counts)


KL_STOP_FACTOR = 1.5
MAX_BARREN_UPDATES = 3


@dataclass(kw_only=True)
class PPOAgent:
    """Everything that learning changes; the client owns it, and only `run_ppo_updates` writes it.

    Attributes:
        network: the policy. optimizer: its Adam moments, in the order of `network.parameters()`.
        observations, returns: statistics of features and of discounted returns.
        selectable: blueprints a controller may choose, bool [num_blueprints].
        total_updates: length of the run, for the schedules.
        schedule_position: updates with at least one optimizer step.
        barren_updates: consecutive updates without a finite minibatch.
    """

    network: TamiyoNetwork
    optimizer: AdamState
    observations: ObservationStatistics
    returns: RunningMeanVar
    selectable: Tensor
    total_updates: int
    schedule_position: int = 0
    barren_updates: int = 0


@tensor_dataclass
class MinibatchResult:
    """The next optimizer state and the metrics of a minibatch."""

    optimizer: AdamState
    metrics: Float[Tensor, " M"]
    kl_sum: Float[Tensor, ""]
    kl_weight: Float[Tensor, ""]


def new_agent(network: TamiyoNetwork, config: PPOConfig, *, selectable: Tensor, total_updates: int) -> PPOAgent:
    """An agent before its first update, on the device of `selectable`."""
    device = selectable.device
    return PPOAgent(
        network=network,
        optimizer=initial_adam_state(list(network.parameters())),
        observations=ObservationStatistics(config.observation_momentum, device),
        returns=RunningMeanVar(config.return_momentum, (), device),
        selectable=selectable,
        total_updates=total_updates,
    )


def run_ppo_updates(
    agent: PPOAgent,
    buffer: TamiyoRolloutBuffer,
    config: PPOConfig,
    *,
    update_index: int,
    run_seed: int,
    hidden: Hidden | None = None,
    read: Read = Tensor.tolist,
) -> dict[str, float]:
    """Learn from a full buffer, update the statistics, empty the buffer; metrics by name.

    `update_index` keys the order of minibatches. `hidden` is the recurrent state after the rollout, for its metrics.
    `read` is called once, after all work is queued on the device. Raises TrainingError after three updates in a row
    without a finite minibatch.
    """
    slabs = buffer.slabs
    rewards_NT = paired_rewards(slabs.rewards, slabs.valid, config.group_size)
    accumulated_NT = discounted_returns(rewards_NT, slabs.terminal, slabs.truncated, slabs.valid, GAMMA)
    return_moments = masked_moments(accumulated_NT, slabs.valid)
    scale = agent.returns.scale_with(return_moments)
    buffer.compute_advantages_and_returns(scale_rewards(rewards_NT, scale))
    normalized = buffer.normalize_advantages(config.advantage_std_floor)

    weights = loss_weights(agent, config, slabs.rewards.device)
    lr = learning_rate(config, agent.schedule_position, agent.total_updates)
    beta = agent.network.inverse_temperature.clone()
    rows = [update_row(slabs, normalized, scale, weights, lr, beta, agent.selectable)]
    if hidden is not None:
        rows.append(health_row(hidden))
    rows += _run_epochs(agent, buffer, config, weights, lr, update_index=update_index, run_seed=run_seed)

    agent.returns.update(return_moments)
    agent.observations.update(slabs.raw_states, slabs.valid)
    metrics = aggregate_ppo_metrics(rows, read)
    agent.schedule_position += int(metrics["optimizer_steps"] > 0)
    agent.network.inverse_temperature.fill_(inverse_temperature(config, agent.schedule_position, agent.total_updates))
    agent.barren_updates = 0 if metrics["finite_minibatches"] > 0 else agent.barren_updates + 1
    buffer.reset()
    if agent.barren_updates >= MAX_BARREN_UPDATES:
        raise TrainingError(
            f"{agent.barren_updates} updates in a row had no minibatch with a finite loss and gradient{_why(metrics)}, "
            "so the policy cannot learn any more; resume from an earlier checkpoint with a smaller ppo.lr, and check "
            "the rewards."
        )
    return metrics


def _why(metrics: Mapping[str, float]) -> str:
    """Known reasons for non-finite minibatches."""
    reasons = {
        "actions_outside_mask": "a stored action is outside its mask",
        "nonfinite_logits": "the network has logits that are not finite",
    }
    found = [text for name, text in reasons.items() if metrics[name] > 0]
    return f" ({' and '.join(found)})" if found else ""


def loss_weights(agent: PPOAgent, config: PPOConfig, device: torch.device) -> LossWeights:
    """Coefficients of the next update by their schedules."""

    def scalar(value: float) -> Tensor:
        return torch.full((), value, device=device)

    position, total = agent.schedule_position, agent.total_updates
    return LossWeights(
        value=scalar(value_coefficient(config, position)),
        entropy=scalar(entropy_coefficient(config, position, total)),
        floor=scalar(floor_scale(position, total)),
        clip=config.clip_coef,
        forced_value=config.forced_value_weight,
    )


def evaluate_minibatch(agent: PPOAgent, batch: SequenceBatch) -> tuple[LossInputs, Bool[Tensor, ""]]:
    """Unroll whole rows and evaluate the stored actions, with gradient; and whether every logit is finite."""
    logits, values = agent.network.unroll(batch.states, batch.blueprint_index, batch.hidden0, batch.reset)
    heads = evaluate_heads(logits, batch.legal, batch.has_gate, agent.selectable, batch.actions)
    inputs = LossInputs(
        log_prob=heads.log_prob,
        old_log_prob=batch.log_probs,
        entropy=heads.entropy,
        entropy_avail=heads.entropy_avail,
        causal=relevance(batch.effective_op) & batch.valid[..., None],
        choice=heads.choice,
        available=heads.available,
        advantages=batch.advantages,
        values=values,
        returns=batch.returns,
        valid=batch.valid,
        forced=batch.forced,
    )
    return inputs, check_logits(logits)


def _run_epochs(
    agent: PPOAgent,
    buffer: TamiyoRolloutBuffer,
    config: PPOConfig,
    weights: LossWeights,
    lr: float,
    *,
    update_index: int,
    run_seed: int,
) -> list[Tensor]:
    """All passes over the buffer; metric rows in the order of time."""
    device = buffer.slabs.valid.device
    groups = min(config.num_minibatches, buffer.num_envs)
    epochs = torch.arange(1, config.update_epochs + 1, device=device)
    order_KN = permutation(
        run_seed, Stream.MINIBATCH_ORDER, torch.zeros_like(epochs), buffer.num_envs, episode=update_index, t=epochs
    )
    stopped, rows = torch.zeros((), dtype=torch.bool, device=device), list[Tensor]()
    for epoch, order_N in zip(epochs.unbind(0), order_KN.unbind(0), strict=True):
        results = list[MinibatchResult]()
        for hosts in order_N.tensor_split(groups):
            batch, first = buffer.sequences(hosts), not rows and not results
            results.append(_train_minibatch(agent, batch, config, weights, lr, stopped, first=first))
            agent.optimizer = results[-1].optimizer
        weight = torch.stack([result.kl_weight for result in results]).sum()
        kl = torch.stack([result.kl_sum for result in results]).sum() / weight
        exceeded = kl > KL_STOP_FACTOR * config.target_kl
        rows += [result.metrics for result in results]
        rows.append(epoch_row(kl, epoch, ran=~stopped, exceeded=exceeded))
        stopped = stopped | exceeded
    return rows


def _train_minibatch(
    agent: PPOAgent,
    batch: SequenceBatch,
    config: PPOConfig,
    weights: LossWeights,
    lr: float,
    stopped: Bool[Tensor, ""],
    *,
    first: bool,
) -> MinibatchResult:
    """Loss, gradient and a masked optimizer step."""
    parameters = list(agent.network.parameters())
    x, finite_logits = evaluate_minibatch(agent, batch)
    losses = ppo_losses(x, weights)
    gradient = flatten(torch.autograd.grad(losses.total, parameters))
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    finite = losses.total.detach().isfinite() & norm.isfinite()
    takes = finite & ~stopped & batch.valid.any()
    difference, optimizer = adam_step(
        clip_by_norm(gradient, norm, config.max_grad_norm),
        agent.optimizer,
        takes,
        lr=lr,
        betas=config.adam_betas,
        eps=config.adam_eps,
    )
    subtract_(parameters, difference)
    statistics = ratio_statistics(x, config.clip_coef)
    steps = batch.valid.sum(dtype=torch.float64)
    return MinibatchResult(
        optimizer=optimizer,
        metrics=minibatch_row(
            x,
            losses,
            statistics,
            norm,
            first=first,
            ran=~stopped,
            finite_logits=finite_logits,
            finite=finite,
            takes=takes,
        ),
        kl_sum=torch.where(takes, statistics.approx_kl * steps, 0.0),
        kl_weight=torch.where(takes, steps, 0.0),
    )
