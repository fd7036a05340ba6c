"""Settings of the lifecycle."""

import math
from dataclasses import dataclass
from typing import Literal

from esper.leyline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Limits and thresholds of the lifecycle. Epochs are control steps, accuracies percentage points."""

    max_seeds: int | None = None
    """Most live seeds of a host; None means one per slot, 0 means no limit."""
    sequential: bool = True
    """Whether a seed may germinate only while no other slot is GERMINATED, TRAINING or in cooldown."""
    min_prune_age: int = 5
    """Age from which PRUNE is legal, so that a seed has time to show its value."""
    embargo_epochs: int = 5
    """Epochs for which a pruned slot stays EMBARGOED."""
    interaction_limit: int = 4
    """Most players for which single and pair coalitions are evaluated."""
    shapley_limit: int = 6
    """Most live seeds for which Shapley values are reported at the end of an episode."""
    fossils_as_players: bool = False
    """Whether contributions of fossilized seeds are measured too; set by the reward mode."""
    gate_mode: Literal["permissive", "strict"] = "permissive"
    """Strict gates also require improvement, a gradient ratio, blending time and a contribution of 1 pp."""
    auto_g1: bool = True
    auto_g2: bool = True
    auto_g3: bool = True
    """Whether the tick asks the gate; otherwise ADVANCE does."""
    min_training_epochs: int = 10
    min_blending_epochs: int = 10
    g2_health: float = 0.7
    g2_improvement: float = 0.5
    g2_ratio: float = 0.10
    g5_contribution: float = 1.0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("min_prune_age", "embargo_epochs", "interaction_limit", "shapley_limit"), 0)
        for name, bound in {**least, "min_training_epochs": 1, "min_blending_epochs": 1}.items():
            value = getattr(self, name)
            if value < bound:
                raise ConfigError(f"lifecycle.{name} is {value}; it must be {bound} or more.")
        for name in ("g2_health", "g2_improvement", "g2_ratio", "g5_contribution"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ConfigError(f"lifecycle.{name} is {value}; it must be a finite number.")
        if self.max_seeds is not None and self.max_seeds < 0:
            raise ConfigError(f"lifecycle.max_seeds is {self.max_seeds}; use 0 for no limit.")
        if self.gate_mode not in ("permissive", "strict"):
            raise ConfigError(f"lifecycle.gate_mode is {self.gate_mode!r}; it must be 'permissive' or 'strict'.")
        if self.shapley_limit > 6 or self.interaction_limit > 4:
            raise ConfigError(
                f"lifecycle.shapley_limit is {self.shapley_limit} and lifecycle.interaction_limit is "
                f"{self.interaction_limit}; the most are 6 and 4, because the coalitions grow exponentially."
            )
