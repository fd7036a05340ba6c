"""PPO settings, and the schedules of its coefficients."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from esper.leyline.settings import AtLeast0, AtLeast1, Decay, NotNegative, Positive, Share, check_fields

_Width = Annotated[int, Field(ge=1, le=4096)]
"""Weights are drawn orthogonal, which takes minutes for wider layers."""


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; the defaults suit 16 hosts.

    Attributes:
        feature_width, hidden_width, num_layers: size of the policy network, for each slot.
        gae_lambda: decay of the advantage trace; the discount is `rewards.reward_config.GAMMA`.
        clip_coef: epsilon; probability ratios are clipped to 1 +- epsilon.
        update_epochs: passes over the rollout per update. num_minibatches: per pass, at most N; each has whole rows.
        target_kl: no further pass once the approximate KL divergence exceeds 1.5 times this.
        lr, adam_betas, adam_eps: Adam. max_grad_norm: limit of the L2 norm of the policy gradient.
        lr_final_fraction: share of `lr` in the last update; linear over the run, 1 for a constant rate.
        final_inverse_temperature: factor of the logits of all heads after the last update, from which it is kept. It is
            1 for nine tenths of the run, so that the policy explores, and rises linearly then.
        ent_coef, ent_coef_end: entropy coefficient, linear over the run.
        vf_coef_start, vf_coef, vf_coef_warmup: value coefficient, linear from `vf_coef_start` to `vf_coef` over the
            first `vf_coef_warmup` updates, then constant.
        forced_value_weight: weight in the value loss of steps where WAIT was the only legal op.
        advantage_std_floor: lower bound of the divisor that normalizes advantages.
        observation_momentum, return_momentum: momentum of the running statistics.
        group_size: how many hosts of a round are copies of each other, with equal data and weights. A reward then
            counts by its difference from the mean reward of the other copies in the same step (`paired_rewards`), as in
            RLOO and GRPO. 1: no copies.
    """

    feature_width: _Width = 64
    hidden_width: _Width = 64
    num_layers: Annotated[int, Field(ge=1, le=16)] = 1
    gae_lambda: Share = 0.95
    clip_coef: Annotated[float, Field(gt=0, lt=1)] = 0.2
    update_epochs: Annotated[int, Field(ge=1, le=1000)] = 4
    num_minibatches: AtLeast1 = 4
    target_kl: Positive = 0.015
    lr: Positive = 5e-4
    lr_final_fraction: Share = 1.0
    final_inverse_temperature: Positive = 1.0
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)
    adam_eps: Positive = 1e-5
    max_grad_norm: Positive = 1.0
    ent_coef: NotNegative = 0.02
    ent_coef_end: NotNegative = 0.01
    vf_coef_start: NotNegative = 0.05
    vf_coef: NotNegative = 0.5
    vf_coef_warmup: AtLeast0 = 10
    forced_value_weight: Share = 0.2
    advantage_std_floor: Positive = 0.1
    observation_momentum: Decay = 0.99
    return_momentum: Decay = 0.9
    group_size: AtLeast1 = 1

    def __post_init__(self) -> None:
        check_fields(self, "ppo")


def learning_rate(config: PPOConfig, position: int, total_updates: int) -> float:
    """Linear from `lr` in the first update to `lr_final_fraction * lr` in the last."""
    return config.lr * (1.0 + (config.lr_final_fraction - 1.0) * progress(position, total_updates))


def inverse_temperature(config: PPOConfig, position: int, total_updates: int) -> float:
    """1 for nine tenths of the run, then linear to `final_inverse_temperature` after the last update."""
    late = max(10.0 * position / total_updates - 9.0, 0.0)
    return 1.0 + (config.final_inverse_temperature - 1.0) * min(late, 1.0)


def entropy_coefficient(config: PPOConfig, position: int, total_updates: int) -> float:
    """Linear from `ent_coef` in the first update to `ent_coef_end` in the last."""
    return config.ent_coef + (config.ent_coef_end - config.ent_coef) * progress(position, total_updates)


def value_coefficient(config: PPOConfig, position: int) -> float:
    """Linear from `vf_coef_start` in update 0 to `vf_coef` in update `vf_coef_warmup`."""
    share = min(position / config.vf_coef_warmup, 1.0) if config.vf_coef_warmup else 1.0
    return config.vf_coef_start + (config.vf_coef - config.vf_coef_start) * share


def floor_scale(position: int, total_updates: int) -> float:
    """Scale of the entropy floor: 1.5 in the first quarter of training, 1 up to three quarters, then down to 0.5."""
    done = progress(position, total_updates)
    return 1.5 if done < 0.25 else 1.0 - 2.0 * max(done - 0.75, 0.0)


def progress(position: int, total_updates: int) -> float:
    """Share of the run before update `position` (from 0): 0 in the first update, 1 in the last."""
    return min(position / max(total_updates - 1, 1), 1.0)
