"""One PPO update from a full rollout buffer, with one host read.

    buffer --> scaled rewards --> GAE --> normalized advantages
                                              |
    epochs 1..K:  permute the hosts, split into minibatches of whole rows, and for each minibatch
                  unroll -> losses -> gradient -> clip -> Adam step      masked on the device: no change where loss or
                                              |                          gradient is not finite, or after the KL stop
    statistics, schedules, metrics  <---------+

Shape legend: N = hosts, T = steps, M = metrics, P = parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.leyline.errors import TrainingError
from esper.leyline.messages import Hidden
from esper.leyline.random import Stream, permutation
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.agent.adam import AdamState, adam_step, clip_by_norm, flatten, initial_adam_state, subtract_
from esper.simic.agent.advantages import discounted_returns, paired_rewards
from esper.simic.agent.diagnostics import epoch_row, health_row, minibatch_row, update_row
from esper.simic.agent.losses import LossInputs, LossWeights, ppo_losses, ratio_statistics
from esper.simic.agent.normalizers import RunningMeanVar, masked_moments, scale_rewards
from esper.simic.agent.ppo_config import PPOConfig as PPOConfig
from esper.simic.agent.ppo_config import (
    entropy_coefficient,
    floor_scale,
    inverse_temperature,
    learning_rate,
    value_coefficient,
)
from esper.simic.agent.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer
from esper.simic.telemetry.aggregation import Read, aggregate_ppo_metrics
from esper.tamiyo.heads import check_logits, evaluate_heads, relevance
from esper.tamiyo.network import TamiyoNetwork

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
    observations: RunningMeanVar
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


def new_agent(
    network: TamiyoNetwork, config: PPOConfig, *, feature_dim: int, selectable: Tensor, total_updates: int
) -> PPOAgent:
    """An agent before its first update, on the device of `selectable`."""
    device = selectable.device
    return PPOAgent(
        network=network,
        optimizer=initial_adam_state(list(network.parameters())),
        observations=RunningMeanVar(config.observation_momentum, (feature_dim,), device),
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
    accumulated_NT = discounted_returns(rewards_NT, slabs.terminal, slabs.truncated, slabs.valid, config.gamma)
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
    agent.observations.update(masked_moments(slabs.raw_states, slabs.valid))
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
    stopped, rows = torch.zeros((), dtype=torch.bool, device=device), []
    for epoch, order_N in zip(epochs.unbind(0), order_KN.unbind(0), strict=True):
        results = []
        for hosts in order_N.tensor_split(groups):
            results.append(_train_minibatch(agent, buffer.sequences(hosts), config, weights, lr, stopped))
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
            x, losses, statistics, norm, ran=~stopped, finite_logits=finite_logits, finite=finite, takes=takes
        ),
        kl_sum=torch.where(takes, statistics.approx_kl * steps, 0.0),
        kl_weight=torch.where(takes, steps, 0.0),
    )
