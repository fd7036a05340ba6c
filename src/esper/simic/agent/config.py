"""Hyper-parameters of the learner, checked at birth, and their schedules."""

from dataclasses import dataclass

from esper.leyline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Everything PPO can be told; the defaults suit 16 hosts and a network of width 128.

    Attributes:
        feature_width, hidden_width, num_layers: size of the policy network.
        gamma, gae_lambda: discount per control step, and decay of the advantage trace.
        clip: epsilon; a probability ratio outside 1 +- epsilon earns no further gradient.
        epochs: passes over the rollout in one update. minibatches: groups of whole rows in a pass, at most N.
        target_kl: a pass whose approximate divergence exceeds 1.5 times this is the last one.
        lr, adam_betas, adam_eps: Adam. grad_norm: the policy's L2 gradient norm is clipped to this.
        entropy_start, entropy_end: coefficient of the entropy bonus, linear over the run.
        value_start, value_end, value_warmup: coefficient of the value loss, linear over the first `value_warmup`
            updates, constant afterwards.
        forced_value_weight: weight of steps without a choice in the value loss.
        advantage_std_floor: advantages are never divided by less than this.
        observation_momentum, return_momentum: how slowly the statistics of features and of returns move.
    """

    feature_width: int = 128
    hidden_width: int = 128
    num_layers: int = 1
    gamma: float = 0.995
    gae_lambda: float = 0.95
    clip: float = 0.2
    epochs: int = 4
    minibatches: int = 4
    target_kl: float = 0.015
    lr: float = 5e-4
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-5
    grad_norm: float = 1.0
    entropy_start: float = 0.02
    entropy_end: float = 0.01
    value_start: float = 0.05
    value_end: float = 0.5
    value_warmup: int = 10
    forced_value_weight: float = 0.2
    advantage_std_floor: float = 0.1
    observation_momentum: float = 0.99
    return_momentum: float = 0.9

    def __post_init__(self) -> None:
        for name in ("feature_width", "hidden_width", "num_layers", "epochs", "minibatches"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("gamma", "gae_lambda", "forced_value_weight"):
            self._require(name, 0.0 <= getattr(self, name) <= 1.0, "in [0, 1]")
        for name in ("observation_momentum", "return_momentum"):
            self._require(name, 0.0 <= getattr(self, name) < 1.0, "in [0, 1)")
        self._require("adam_betas", all(0.0 <= beta < 1.0 for beta in self.adam_betas), "two values in [0, 1)")
        self._require("clip", 0.0 < self.clip < 1.0, "in (0, 1)")
        for name in ("target_kl", "lr", "adam_eps", "grad_norm", "advantage_std_floor"):
            self._require(name, 0.0 < getattr(self, name) < float("inf"), "positive and finite")
        for name in ("entropy_start", "entropy_end", "value_start", "value_end"):
            self._require(name, 0.0 <= getattr(self, name) < float("inf"), "finite and not negative")
        self._require("value_warmup", self.value_warmup >= 0, "at least 0")

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ConfigError(f"ppo.{name} is {getattr(self, name)}, expected {expected}; change ppo.{name}.")


def entropy_coefficient(config: PPOConfig, position: int, total_updates: int) -> float:
    """Linear from `entropy_start` in the first update to `entropy_end` in the last."""
    return config.entropy_start + (config.entropy_end - config.entropy_start) * progress(position, total_updates)


def value_coefficient(config: PPOConfig, position: int) -> float:
    """Linear from `value_start` in update 0 to `value_end` in update `value_warmup`."""
    share = min(position / config.value_warmup, 1.0) if config.value_warmup else 1.0
    return config.value_start + (config.value_end - config.value_start) * share


def floor_scale(position: int, total_updates: int) -> float:
    """Strength of the entropy floor: 1.5 in the first quarter of training, 1 up to three quarters, then down to 0.5."""
    done = progress(position, total_updates)
    return 1.5 if done < 0.25 else 1.0 - 2.0 * max(done - 0.75, 0.0)


def progress(position: int, total_updates: int) -> float:
    """Share of the run behind update `position` (from 0): 0 in the first update and 1 in the last."""
    return min(position / max(total_updates - 1, 1), 1.0)
