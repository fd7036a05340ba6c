"""PPO settings, and the schedules of its coefficients."""

from dataclasses import dataclass

from esper.leyline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of PPO; the defaults suit 16 hosts and a network of width 128.

    Attributes:
        feature_width, hidden_width, num_layers: size of the policy network.
        gamma, gae_lambda: discount per control step, decay of the advantage trace.
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

    feature_width: int = 128
    hidden_width: int = 128
    num_layers: int = 1
    gamma: float = 0.995
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    update_epochs: int = 4
    num_minibatches: int = 4
    target_kl: float = 0.015
    lr: float = 5e-4
    lr_final_fraction: float = 1.0
    final_inverse_temperature: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-5
    max_grad_norm: float = 1.0
    ent_coef: float = 0.02
    ent_coef_end: float = 0.01
    vf_coef_start: float = 0.05
    vf_coef: float = 0.5
    vf_coef_warmup: int = 10
    forced_value_weight: float = 0.2
    advantage_std_floor: float = 0.1
    observation_momentum: float = 0.99
    return_momentum: float = 0.9
    group_size: int = 1

    def __post_init__(self) -> None:
        for name in ("feature_width", "hidden_width", "num_layers", "update_epochs", "num_minibatches", "group_size"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("gamma", "gae_lambda", "forced_value_weight", "lr_final_fraction"):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "in [0, 1]")
        for name in ("observation_momentum", "return_momentum"):
            self._require(name, 0.0 <= getattr(self, name) < 1.0, "in [0, 1)")
        self._require("adam_betas", all(0.0 <= beta < 1.0 for beta in self.adam_betas), "two values in [0, 1)")
        self._require("clip_coef", 0.0 < self.clip_coef < 1.0, "in (0, 1)")
        positive = ("target_kl", "lr", "adam_eps", "max_grad_norm", "advantage_std_floor", "final_inverse_temperature")
        for name in positive:
            self._require(name, 0.0 < getattr(self, name) < float("inf"), "positive and finite")
        for name in ("ent_coef", "ent_coef_end", "vf_coef_start", "vf_coef"):
            self._require(name, 0.0 <= getattr(self, name) < float("inf"), "finite and not negative")
        self._require("vf_coef_warmup", self.vf_coef_warmup >= 0, "at least 0")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"ppo.{name} is {getattr(self, name)}, expected {expected}; change ppo.{name}.")


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
