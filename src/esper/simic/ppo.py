"""One PPO update from a full rollout buffer, with one host read.

    buffer --> scaled rewards --> GAE --> normalized advantages
                                              |
    epochs 1..K:  permute the hosts, split into minibatches of whole rows, and for each minibatch
                  unroll -> losses -> gradient -> clip -> Adam step      masked on the device: no change where loss or
                                              |                          gradient is not finite, or after the KL stop
    statistics, schedules, metrics  <---------+

The losses are pure functions of one evaluated minibatch. With x = clip(new - old, +-20) and the masks

    causal    the executed op reads the head, and the step is valid
    choice    the head had two or more values for the op and slot of the step
    used      causal and not forced (another op than WAIT was legal)
    open      valid, not forced, and the head has two or more choices for some legal op

a mean over a mask without steps is 0.

Metrics are declared in one table, each with the reducer that makes one number of its rows. A row is a vector of all M
metrics, NaN where missing. Rows come from minibatches, epochs and the update as a whole:

    minibatch 0 | policy_loss  grad_norm   nan              weight of a mean: another metric of the same row
    minibatch 1 | policy_loss  grad_norm   nan
    epoch 0     | nan          nan         approx_kl        reduced    | mean      mean       last
    update      | nan          nan         nan

Rows are reduced on the device and read once. A metric that is missing in all rows is NaN, not 0.

Shape legend: N = hosts, T = steps, M = metrics, P = parameters, R = any leading axes (rows and steps), 8 = heads.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import TrainingError
from esper.leyline.lifecycle import HEAD_NAMES, HEADS, Head
from esper.leyline.messages import Hidden
from esper.leyline.random import Stream, permutation
from esper.leyline.ranks import Ranks
from esper.leyline.tensor_dataclass import blank, tensor_dataclass
from esper.simic.advantages import (
    NormalizedAdvantages,
    ObservationStatistics,
    RunningMeanVar,
    discounted_returns,
    masked_moments,
    paired_rewards,
)
from esper.simic.ppo_config import (
    PPOConfig,
    entropy_coefficient,
    floor_scale,
    inverse_temperature,
    learning_rate,
    value_coefficient,
)
from esper.simic.rewards.reward_config import GAMMA
from esper.simic.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer
from esper.tamiyo.heads import check_logits, check_stored_actions, evaluate_heads, relevance
from esper.tamiyo.network import TamiyoNetwork


class Reducer(IntEnum):
    """How the rows of one update are reduced."""

    MEAN = 0
    MAX = 1
    SUM = 2
    LAST = 3
    ANY = 4


class Metric(NamedTuple):
    """One metric; `weight` names the metric that weights the rows of a mean (equal weights if empty)."""

    name: str
    reducer: Reducer
    weight: str = ""


def _metrics(reducer: Reducer, *names: str, weight: str = "") -> tuple[Metric, ...]:
    return tuple(Metric(name, reducer, weight) for name in names)


ENTROPIES = (*HEAD_NAMES, "parameters")
"""What has an entropy: each head, and all but op together, what an operation is done with."""

METRICS: tuple[Metric, ...] = (
    *_metrics(Reducer.SUM, "evaluated_steps", "finite_minibatches", "nonfinite_minibatches", "optimizer_steps"),
    *_metrics(
        Reducer.MEAN,
        *("policy_loss", "value_loss", "entropy_loss", "floor_loss", "total_loss", "clip_fraction"),
        weight="evaluated_steps",
    ),
    *_metrics(Reducer.MEAN, "grad_norm"),
    *_metrics(Reducer.MAX, "epochs_done"),
    *_metrics(Reducer.SUM, *(f"steps_{name}" for name in ENTROPIES)),
    *(Metric(f"entropy_{name}", Reducer.MEAN, f"steps_{name}") for name in ENTROPIES),
    *_metrics(Reducer.LAST, "approx_kl", "lr", "ent_coef", "vf_coef", "floor_scale", "inverse_temperature"),
    *_metrics(Reducer.LAST, "forced_share", "explained_variance", "value_mean", "value_std"),
    *_metrics(Reducer.LAST, "return_mean", "return_std", "return_scale", "advantage_mean", "advantage_std"),
    *_metrics(Reducer.LAST, "stored_log_prob_error", "hidden_rms", "hidden_max", "cell_rms", "cell_max"),
    *_metrics(Reducer.ANY, "advantage_std_floored", "stopped_early", "actions_outside_mask", "nonfinite_logits"),
)
"""All metrics, in the order of a row."""

METRIC_NAMES = tuple(metric.name for metric in METRICS)


def metric_row(values: Mapping[str, Tensor]) -> Float[Tensor, " M"]:
    """One row from scalars by name, NaN for other metrics; KeyError for undeclared names."""
    undeclared = values.keys() - set(METRIC_NAMES)
    if undeclared:
        raise KeyError(f"{sorted(undeclared)} are not declared; add them to METRICS.")
    missing = _missing(next(iter(values.values())).device)
    return torch.stack([values.get(name, missing).detach().to(torch.float64) for name in METRIC_NAMES])


@lru_cache
def _missing(device: torch.device) -> Tensor:
    return torch.full((), torch.nan, dtype=torch.float64, device=device)


Read = Callable[[Tensor], list[float]]
"""Reads one vector to the host; the only host read of an update."""


def reduce_metrics(rows: Float[Tensor, "B M"]) -> Float[Tensor, " M"]:
    """One number per metric from the rows of an update in the order of time; no host read."""
    reducer, weight = _constants(rows.device)
    present = ~rows.isnan()
    known = present.any(dim=0)
    weights = torch.cat((rows, torch.ones_like(rows[:, :1])), dim=1).index_select(1, weight)
    weights = torch.where(present, weights, 0.0).nan_to_num()
    mean = (torch.where(weights > 0, rows, 0.0) * weights).sum(0) / weights.sum(0)
    order = torch.arange(1, rows.shape[0] + 1, device=rows.device)[:, None]
    last = rows.gather(0, (present * order).argmax(dim=0, keepdim=True))[0]
    by_reducer = torch.stack(
        (
            mean,
            torch.where(present, rows, -torch.inf).amax(0),
            rows.nansum(0),
            last,
            (present & (rows != 0)).any(0).to(rows.dtype),
        )
    )
    reduced = by_reducer.gather(0, reducer[None])[0]
    return torch.where(known, reduced, torch.nan)


def aggregate_ppo_metrics(rows: Sequence[Float[Tensor, " M"]], read: Read = Tensor.tolist) -> dict[str, float]:
    """Metrics by name from the rows of an update; calls `read` once."""
    return dict(zip(METRIC_NAMES, read(reduce_metrics(torch.stack(list(rows)))), strict=True))


@lru_cache
def _constants(device: torch.device) -> tuple[Tensor, Tensor]:
    """Reducers and weights as index tensors; an unweighted metric has the extra column of ones as its weight."""
    weights = [METRIC_NAMES.index(m.weight) if m.weight else len(METRICS) for m in METRICS]
    return torch.tensor([int(m.reducer) for m in METRICS], device=device), torch.tensor(weights, device=device)


LOG_RATIO_LIMIT = 20.0


@tensor_dataclass
class LossInputs:
    """One minibatch after the forward pass; `advantages` and `returns` of the rollout, scaled."""

    log_prob: Float[Tensor, "*R 8"]
    old_log_prob: Float[Tensor, "*R 8"]
    entropy: Float[Tensor, "*R 8"]
    entropy_avail: Float[Tensor, "*R 8"]
    causal: Bool[Tensor, "*R 8"]
    choice: Bool[Tensor, "*R 8"]
    available: Bool[Tensor, "*R 8"]
    advantages: Float[Tensor, "*R"]
    values: Float[Tensor, "*R"]
    returns: Float[Tensor, "*R"]
    valid: Bool[Tensor, "*R"]
    forced: Bool[Tensor, "*R"]


@tensor_dataclass
class LossWeights:
    """Coefficients of one update; those that change over the run are tensors, so that a compiled loss stays valid."""

    value: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    floor: Float[Tensor, ""]


@tensor_dataclass
class Losses:
    """The terms of the loss and their sum, `policy + c_v * value + c_e * entropy + floor`."""

    policy: Float[Tensor, ""]
    value: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    floor: Float[Tensor, ""]
    total: Float[Tensor, ""]


@tensor_dataclass
class LossSums:
    """Sums over the steps of some hosts, from which everything below follows; those of all hosts are their sum.

    `surrogate`, `entropy`, `available` are [8] with gradient and have their numbers of steps after them; `choices` are
    the entropies of heads with a choice, [9], see `head_entropies`. `value` has the weights of its steps.
    """

    surrogate: Float[Tensor, " 8"]
    entropy: Float[Tensor, " 8"]
    used: Float[Tensor, " 8"]
    available: Float[Tensor, " 8"]
    open: Float[Tensor, " 8"]
    value: Float[Tensor, ""]
    value_weight: Float[Tensor, ""]
    divergence: Float[Tensor, ""]
    causal: Float[Tensor, ""]
    outside: Float[Tensor, ""]
    decided: Float[Tensor, ""]
    valid: Float[Tensor, ""]
    choices: Float[Tensor, " 9"]
    choice_steps: Float[Tensor, " 9"]


def loss_sums(x: LossInputs, clip: float, forced_weight: float) -> LossSums:
    """The sums of some hosts. A forced step is not a decision: its ratio is always 1."""
    log_ratio = _log_ratio(x)
    ratio, advantages = log_ratio.exp(), x.advantages[..., None]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)
    decided = x.valid & ~x.forced
    used, available = x.causal & decided[..., None], x.available & decided[..., None]
    weight = torch.where(x.forced, forced_weight, 1.0) * x.valid
    causal, choices = x.causal & x.valid[..., None], used & x.choice
    change = log_ratio.detach() * causal
    outside = ((change.sum(-1).exp() - 1.0).abs() > clip) & decided
    entropies, steps = _sum_per_head(x.entropy.detach(), choices), _count_per_head(choices, x.entropy)
    return LossSums(
        surrogate=_sum_per_head(surrogate, used),
        entropy=_sum_per_head(x.entropy, used),
        used=_count_per_head(used, x.entropy),
        available=_sum_per_head(x.entropy_avail, available),
        open=_count_per_head(available, x.entropy),
        value=(weight * (x.values - x.returns).square()).sum(),
        value_weight=weight.sum(),
        divergence=(change.exp() - 1.0 - change).sum(),
        causal=causal.sum().to(x.entropy.dtype),
        outside=outside.sum().to(x.entropy.dtype),
        decided=decided.sum().to(x.entropy.dtype),
        valid=x.valid.sum().to(x.entropy.dtype),
        choices=torch.cat((entropies, entropies[: Head.OP].sum(0, keepdim=True))),
        choice_steps=torch.cat((steps, steps[: Head.OP].sum(0, keepdim=True))),
    )


def ppo_losses(sums: LossSums, weights: LossWeights) -> Losses:
    """All terms of the loss of one minibatch, from the sums over its hosts.

    policy    clipped surrogate (Schulman et al., "Proximal policy optimization", 2017, eq. 7), summed over the heads
    value     1/2 sum w (V - R)^2 / sum w; w is `forced_value_weight` on forced steps and 1 elsewhere
    entropy   minus the weighted sum of the normalized entropies of the heads
    floor     weighted squares of what the mean entropies of open heads lack to their floors
    """
    bonus, target, floor_weight = _entropy_columns(sums.entropy.device)
    policy = -(sums.surrogate / sums.used.clamp_min(1)).sum()
    value = 0.5 * sums.value / sums.value_weight.clamp_min(1e-6)
    entropy = -(bonus * (sums.entropy / sums.used.clamp_min(1))).sum()
    shortfall = (target - sums.available / sums.open.clamp_min(1)).clamp_min(0.0)
    floor = (floor_weight * shortfall.square() * (sums.open > 0)).sum() * weights.floor
    total = policy + weights.value * value + weights.entropy * entropy + floor
    return Losses(policy=policy, value=value, entropy=entropy, floor=floor, total=total)


@lru_cache
def _entropy_columns(device: torch.device) -> tuple[Tensor, ...]:
    """Bonus, floor and weight of the floor of each head, [8] each."""
    return torch.tensor([[getattr(head, name) for head in HEADS] for name in ("bonus", "floor", "floor_weight")],
                        device=device).unbind()  # fmt: skip


def approx_kl(sums: LossSums) -> Float[Tensor, ""]:
    """KL divergence of the policy since the rollout, a mean over heads and steps.

    The estimator is `r - 1 - log r` (Schulman, "Approximating KL divergence", 2020).
    """
    return sums.divergence / sums.causal.clamp_min(1)


def clip_fraction(sums: LossSums) -> Float[Tensor, ""]:
    """Share of the decisions whose probability, the product over the heads, changed by more than epsilon."""
    return sums.outside / sums.decided.clamp_min(1)


def largest_change(x: LossInputs) -> Float[Tensor, ""]:
    """The largest change of a log-probability of a decision since the rollout."""
    return (_log_ratio(x).detach() * (x.causal & x.valid[..., None])).abs().amax()


def head_entropies(sums: LossSums) -> tuple[Float[Tensor, " 9"], Float[Tensor, " 9"]]:
    """Mean normalized entropy of each head over the steps that used it with a choice, and their number.

    The last number is for all heads but op together: what an operation is done with. A head with one value has no
    entropy: it says nothing about exploration.
    """
    return sums.choices / sums.choice_steps.clamp_min(1), sums.choice_steps


def packed(sums: LossSums) -> Float[Tensor, " K"]:
    """All sums in one vector."""
    return torch.cat([x.reshape(-1) for x in vars(sums).values()])


def unpacked(vector: Float[Tensor, " K"]) -> LossSums:
    """The sums in a vector of `packed`."""
    parts = vector.split([shape.numel() for shape in _SHAPES.values()])
    return LossSums(**{name: part.view(shape) for (name, shape), part in zip(_SHAPES.items(), parts, strict=True)})


_SHAPES = {name: x.shape for name, x in vars(blank(LossSums, {}, torch.device("cpu"))).items()}
NUM_SUMS = sum(shape.numel() for shape in _SHAPES.values())
"""K."""


def _log_ratio(x: LossInputs) -> Tensor:
    return (x.log_prob - x.old_log_prob).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sum_per_head(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the masked steps, [8]."""
    return values.masked_fill(~mask, 0.0).reshape(-1, values.shape[-1]).sum(dim=0)


def _count_per_head(mask: Tensor, like: Tensor) -> Tensor:
    """Numbers of the masked steps, [8]."""
    return mask.reshape(-1, mask.shape[-1]).sum(dim=0).to(like.dtype)


_Width = Annotated[int, Field(ge=1, le=4096)]
"""Weights are drawn orthogonal, which takes minutes for wider layers."""


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
    ranks: Ranks,
) -> Float[Tensor, " M"]:
    """Metrics known before the first minibatch; values and returns are scaled, advantages not normalized."""
    valid = rollout.valid
    values, returns = (masked_moments(x, valid, ranks) for x in (rollout.values, rollout.returns))
    unexplained = masked_moments(rollout.returns - rollout.values, valid, ranks).var
    legal = check_stored_actions(rollout.actions, rollout.legal, rollout.has_gate, selectable)
    explained = 1.0 - unexplained / returns.var
    explainable = returns.var >= MIN_EXPLAINABLE_VARIANCE
    return metric_row(
        {
            "lr": torch.full((), lr, dtype=torch.float64, device=valid.device),
            "ent_coef": weights.entropy,
            "vf_coef": weights.value,
            "floor_scale": weights.floor,
            "inverse_temperature": inverse_temperature,
            "forced_share": ranks.sum((rollout.forced & valid).to(torch.float64), 2) / values.count,
            "explained_variance": torch.where(explainable, explained, torch.nan),
            "value_mean": values.mean,
            "value_std": values.var.sqrt(),
            "return_mean": returns.mean,
            "return_std": returns.var.sqrt(),
            "return_scale": return_scale,
            "advantage_mean": normalized.mean,
            "advantage_std": normalized.std,
            "advantage_std_floored": normalized.floored,
            "actions_outside_mask": ranks.largest((~legal).to(torch.float32)),
        }
    )


def health_row(hidden: Hidden, ranks: Ranks) -> Float[Tensor, " M"]:
    """Root mean square and largest magnitude of the recurrent state."""
    states = torch.stack((hidden.h, hidden.c), dim=-1).detach().transpose(0, 1)  # [N, L, H, 2]
    squares = ranks.sum(states.square(), 3) / (states[0, ..., 0].numel() * ranks.num_envs)
    largest = ranks.largest(states.abs().amax(dim=(0, 1, 2)))
    names = ("hidden_rms", "cell_rms", "hidden_max", "cell_max")
    return metric_row(dict(zip(names, torch.cat((squares.sqrt(), largest)), strict=True)))


def minibatch_row(
    sums: LossSums,
    numbers: Mapping[str, Tensor],
    *,
    ran: Bool[Tensor, ""],
    finite_logits: Bool[Tensor, ""],
    finite: Bool[Tensor, ""],
    takes: Bool[Tensor, ""],
    change: Float[Tensor, ""] | None,
) -> Float[Tensor, " M"]:
    """Metrics of a minibatch; NaN except for the counts if it took no optimizer step.

    `numbers` are the terms of the loss and the norm of its gradient. `change` is that of the log-probabilities in the
    first minibatch of an update: the policy is still the one that acted, so what differs are stored probabilities.
    """
    entropies, steps = head_entropies(sums)
    of_step = {
        "evaluated_steps": sums.valid,
        **numbers,
        "clip_fraction": clip_fraction(sums),
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
        | ({} if change is None else {"stored_log_prob_error": change})
    )
    return torch.where(counts.isnan(), torch.where(takes, metric_row(of_step), torch.nan), counts)


KL_STOP_FACTOR = 1.5
MAX_FAILED_UPDATES = 3


@dataclass(kw_only=True)
class PPOAgent:
    """Everything that learning changes; the client owns it, and only `run_ppo_updates` writes it.

    Attributes:
        network: the policy. optimizer: its Adam moments, in the order of `network.parameters()`.
        observations, returns: statistics of features and of discounted returns.
        selectable: blueprints a controller may choose, bool [num_blueprints].
        total_updates: length of the run, for the schedules.
        schedule_position: updates with at least one optimizer step.
        failed_updates: consecutive updates without a finite minibatch.
    """

    network: TamiyoNetwork
    optimizer: AdamState
    observations: ObservationStatistics
    returns: RunningMeanVar
    selectable: Tensor
    total_updates: int
    schedule_position: int = 0
    failed_updates: int = 0


def run_ppo_updates(
    agent: PPOAgent,
    buffer: TamiyoRolloutBuffer,
    config: PPOConfig,
    *,
    update_index: int,
    run_seed: int,
    hidden: Hidden | None = None,
    read: Read = Tensor.tolist,
    ranks: Ranks | None = None,
) -> dict[str, float]:
    """Learn from a full buffer, update the statistics, empty the buffer; metrics by name.

    `update_index` keys the order of minibatches. `hidden` is the recurrent state after the rollout, for its metrics.
    `read` is called once, after all work is queued on the device. With `ranks` the buffer has the hosts of one of them,
    and all learn from the hosts of all. Raises TrainingError after three updates in a row without a finite minibatch.
    """
    ranks = ranks or Ranks(buffer.num_envs)
    rollout = buffer.rollout
    rewards_NT = _paired(rollout, config.group_size, ranks)
    accumulated_NT = discounted_returns(rewards_NT, rollout.terminal, rollout.truncated, rollout.valid, GAMMA)
    return_moments = masked_moments(accumulated_NT, rollout.valid, ranks)
    scale = agent.returns.scale_with(return_moments)
    buffer.compute_advantages_and_returns(rewards_NT / scale)  # no shift and no clip: returns keep their order
    normalized = buffer.normalize_advantages(config.advantage_std_floor, ranks)

    weights = loss_weights(agent, config, rollout.rewards.device)
    lr = learning_rate(config, agent.schedule_position, agent.total_updates)
    beta = agent.network.inverse_temperature.clone()
    rows = [update_row(rollout, normalized, scale, weights, lr, beta, agent.selectable, ranks)]
    if hidden is not None:
        rows.append(health_row(hidden, ranks))
    rows += _run_epochs(agent, buffer, config, weights, lr, ranks, update_index=update_index, run_seed=run_seed)

    agent.returns.update(return_moments)
    agent.observations.update(rollout.raw_states, rollout.valid, ranks)
    metrics = aggregate_ppo_metrics(rows, read)
    agent.schedule_position += int(metrics["optimizer_steps"] > 0)
    agent.network.inverse_temperature.fill_(inverse_temperature(config, agent.schedule_position, agent.total_updates))
    agent.failed_updates = 0 if metrics["finite_minibatches"] > 0 else agent.failed_updates + 1
    buffer.reset()
    if agent.failed_updates >= MAX_FAILED_UPDATES:
        raise TrainingError(
            f"{agent.failed_updates} updates in a row had no minibatch with a finite loss and gradient{_why(metrics)}, "
            "so the policy cannot learn any more; resume from an earlier checkpoint with a smaller ppo.lr, and check "
            "the rewards."
        )
    return metrics


def _paired(rollout: SequenceBatch, group_size: int, ranks: Ranks) -> Float[Tensor, "N T"]:
    """`paired_rewards` of the hosts of this rank; their copies may be on others."""
    if group_size == 1:
        return rollout.rewards
    everywhere = paired_rewards(ranks.all_hosts(rollout.rewards), ranks.all_hosts(rollout.valid), group_size)
    return everywhere[ranks.hosts.start : ranks.hosts.stop]


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
    )


def evaluate_minibatch(agent: PPOAgent, batch: SequenceBatch) -> tuple[LossInputs, Bool[Tensor, ""]]:
    """Unroll whole rows and evaluate the stored actions, with gradient; and whether every logit is finite."""
    logits, values = agent.network.unroll(batch.states, batch.blueprint_index, batch.hidden0, batch.reset)
    heads = evaluate_heads(logits, batch.legal, batch.has_gate, agent.selectable, batch.actions)
    inputs = LossInputs(
        **vars(heads),
        old_log_prob=batch.log_probs,
        causal=relevance(batch.effective_op) & batch.valid[..., None],
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
    ranks: Ranks,
    *,
    update_index: int,
    run_seed: int,
) -> list[Tensor]:
    """All passes over the buffer; metric rows in the order of time."""
    device, number = buffer.rollout.valid.device, min(config.num_minibatches, ranks.num_envs)
    stopped, rows = torch.zeros((), dtype=torch.bool, device=device), list[Tensor]()
    for epoch in torch.arange(1, config.update_epochs + 1, device=device).unbind(0):
        t, found = 1 + len(rows) // (number + 1), list[tuple[Tensor, Tensor, Tensor]]()

        def order(block: int, size: int, t: int = t) -> Tensor:
            of = torch.tensor([block], device=device)
            return permutation(run_seed, Stream.MINIBATCH_ORDER, of, size, episode=update_index, t=t)[0]

        for hosts in ranks.minibatches(order, number):
            batches = [buffer.sequences(of_block) if len(of_block) else None for of_block in hosts]
            first = not rows and not found
            found.append(_train_minibatch(agent, batches, config, weights, lr, stopped, ranks, first=first))
        of_minibatches, divergences, decisions = zip(*found, strict=True)
        kl = torch.stack(divergences).sum() / torch.stack(decisions).sum()
        exceeded = kl > KL_STOP_FACTOR * config.target_kl
        rows += of_minibatches
        of_epoch = {"approx_kl": kl, "epochs_done": epoch.to(kl.dtype)}
        known = {name: torch.where(stopped, torch.nan, value) for name, value in of_epoch.items()}
        rows.append(metric_row({**known, "stopped_early": exceeded}))
        stopped = stopped | exceeded
    return rows


def _losses_and_gradient(
    agent: PPOAgent, own: Sequence[Tensor | None], weights: LossWeights, ranks: Ranks
) -> tuple[Float[Tensor, " K"], Losses, Float[Tensor, " P"]]:
    """The sums over all ranks, the losses and the gradient, from the sums of each own block (None: it has no host).

    The loss depends on the hosts by sums alone. So the sums S over all blocks give the loss L, and the gradient is the
    sum over the blocks b of dS_b/dtheta * dL/dS.
    """
    parameters, device = list(agent.network.parameters()), agent.optimizer.step.device
    nothing = torch.zeros(NUM_SUMS + 1, device=device)
    found = ranks.total([nothing if x is None else x.detach() for x in own])
    leaf = found[:-1].requires_grad_()
    losses = ppo_losses(unpacked(leaf), weights)
    (by_sums,) = torch.autograd.grad(losses.total, leaf)
    by_sums = torch.cat((by_sums, by_sums.new_zeros(1)))  # the last one counts logits that are not finite
    gradient = ranks.total(
        [
            torch.zeros_like(agent.optimizer.exp_avg)
            if x is None
            else flatten(torch.autograd.grad(x, parameters, by_sums))
            for x in own
        ]
    )
    return found.detach(), losses, gradient


def _train_minibatch(
    agent: PPOAgent,
    batches: Sequence[SequenceBatch | None],
    config: PPOConfig,
    weights: LossWeights,
    lr: float,
    stopped: Bool[Tensor, ""],
    ranks: Ranks,
    *,
    first: bool,
) -> tuple[Float[Tensor, " M"], Float[Tensor, ""], Float[Tensor, ""]]:
    """Loss, gradient and a masked optimizer step, from the rows of the hosts of each own block.

    Returns the metrics, and the KL divergence as a sum over steps with their number, which are 0 without a step.
    """
    changes, own = [torch.zeros((), device=stopped.device)], list[Tensor | None]()
    for batch in batches:
        if batch is None:
            own.append(None)
            continue
        x, finite_logits = evaluate_minibatch(agent, batch)
        of_block = packed(loss_sums(x, config.clip_coef, config.forced_value_weight))
        own.append(torch.cat((of_block, (~finite_logits).to(of_block.dtype)[None])))
        changes += [largest_change(x)] * first
    found, losses, gradient = _losses_and_gradient(agent, own, weights, ranks)
    sums = unpacked(found[:-1])
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    finite = losses.total.detach().isfinite() & norm.isfinite()
    takes = finite & ~stopped & (sums.valid > 0)
    clipped = clip_by_norm(gradient, norm, config.max_grad_norm)
    difference, agent.optimizer = adam_step(
        clipped, agent.optimizer, takes, lr=lr, betas=config.adam_betas, eps=config.adam_eps
    )
    subtract_(list(agent.network.parameters()), difference)
    metrics = minibatch_row(
        sums,
        {**{f"{name}_loss": x for name, x in vars(losses).items()}, "grad_norm": norm},
        ran=~stopped,
        finite_logits=found[-1] == 0,
        finite=finite,
        takes=takes,
        change=ranks.largest(torch.stack(changes).amax()) if first else None,
    )
    steps = torch.where(takes, sums.valid.to(torch.float64), 0.0)
    return metrics, torch.where(takes, approx_kl(sums) * steps, 0.0), steps
