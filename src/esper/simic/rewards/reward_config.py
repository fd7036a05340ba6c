"""Reward settings, packed into one vector, and the table of modes.

The kernel takes every number through `RewardConfig.pack()`, so that changing one does not compile a new graph. `mode`
and `attribution` select formulas and are static.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.settings import AtLeast0, AtLeast1, NotNegative, Positive, Share, check_fields

RewardMode = Literal["shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "simplified", "loss", "objective"]
Attribution = Literal["harmonic", "minimum"]
TimeLimit = Literal["truncate", "terminate"]

GAMMA = 0.995
"""Discount per control step, of the learner and of all potential-based shaping; two would change the optimal policy."""
MIN_PRUNE_AGE = 5
"""Age (control steps) below which a PRUNE counts as premature."""
LEGITIMATE_HOLD = 5
"""Steps in HOLDING after which a FOSSILIZE earns its full bonus."""
MIN_CONTRIBUTION = 1.0
"""Contribution (percentage points) from which a fossil counts as contributing."""


@dataclass(frozen=True, kw_only=True)
class ModeTraits:
    """Properties of a reward that the assembly of a run needs.

    Attributes:
        summary: one sentence for listings.
        time_limit: whether the last step of an episode bootstraps (truncate) or is a true end (terminate).
        fossils_as_players: whether contributions of fossils must be measured.
        rollback_penalty, deferred_fraction: the mode's values of these two configuration fields.
    """

    summary: str
    time_limit: TimeLimit = "truncate"
    fossils_as_players: bool = False
    rollback_penalty: float = -10.0
    deferred_fraction: float = 0.0


MODES: Mapping[str, ModeTraits] = {
    "shaped": ModeTraits(summary="dense; the measured contribution of the target seed in every step"),
    "escrow": ModeTraits(summary="dense; contribution is credited to an account that a lost seed gives back"),
    "basic": ModeTraits(summary="dense; stage potential, rent, and a bonus for fossilizing a contributing seed"),
    "basic_plus": ModeTraits(
        summary="basic, with most of the bonus in instalments that follow the fossil's later contribution",
        fossils_as_players=True,
        deferred_fraction=0.7,
    ),
    "sparse": ModeTraits(summary="committed accuracy minus parameter cost, in the last step only"),
    "minimal": ModeTraits(summary="sparse, with a small price for pruning too early"),
    "simplified": ModeTraits(summary="stage potential, a price per op, and accuracy in the last step"),
    "loss": ModeTraits(summary="dense; change of the validation loss, for language tasks"),
    "objective": ModeTraits(
        summary="committed accuracy minus growth, with potential-based shaping that cannot be farmed",
        time_limit="terminate",
        rollback_penalty=0.0,
    ),
}


@dataclass(frozen=True, kw_only=True)
class LossRewardConfig:
    """Numbers of mode `loss`. Losses in nats; some are those of the task (`TaskSpec`)."""

    loss_delta_weight: float = 5.0
    max_loss_delta: Positive = 5.0
    """Bound of the normalized loss change."""
    regression_penalty_scale: float = 0.5
    """Factor on the penalty of a rising loss."""
    typical_loss_delta_std: Positive = 0.1
    compute_rent_weight: float = 0.05
    max_rent_penalty: NotNegative = 5.0
    grace_epochs: AtLeast0 = 3
    """Age of the target seed below which there is no rent."""
    stage_potential_weight: float = 0.1
    baseline_loss: float = 2.3
    target_loss: float = 0.3
    terminal_loss_weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "reward.loss")

    def pack(self) -> Float[Tensor, " W"]:
        """The numbers in the order of `LOSS_FIELDS`, float64."""
        return torch.tensor([float(getattr(self, name)) for name in LOSS_FIELDS], dtype=torch.float64)


LOSS_FIELDS = tuple(f.name for f in fields(LossRewardConfig))


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The numbers of all other modes. Accuracies and contributions in percentage points, ages in control steps."""

    contribution_weight: float = 1.0
    proxy_confidence_factor: float = 0.3
    """Share of the stage improvement rewarded while no contribution is measured."""
    escrow_stable_window: Annotated[int, Field(ge=1, le=5)] = 3
    """Accuracies (of the last five) whose minimum counts as stable."""
    escrow_delta_clip: NotNegative = 2.0
    """Bound on the change of an account per step; 0 = unbounded."""
    pbrs_weight: float = 0.3
    epoch_progress_bonus: float = 0.3
    max_progress_bonus: float = 2.0
    rent_weight: float = 0.5
    max_rent: NotNegative = 1.5
    rent_host_params_floor: Annotated[float, Field(ge=1)] = 200.0
    base_slot_rent_ratio: float = 0.0039
    """Occupancy of a blended slot in shares of the host's parameters."""
    alpha_shock_coef: float = 0.1958
    alpha_shock_cap: NotNegative = 1.0
    invalid_fossilize_penalty: float = -1.0
    prune_fossilized_penalty: float = -1.0
    germinate_with_seed_penalty: float = -0.3
    germinate_cost: float = -0.15
    fossilize_cost: float = -0.01
    prune_cost: float = -0.005
    set_alpha_target_cost: float = -0.005
    fossilize_base_bonus: float = 0.5
    fossilize_contribution_scale: float = 0.1
    fossilize_noncontributing_penalty: float = -0.2
    prune_hurting_bonus: float = 0.15
    prune_acceptable_bonus: float = 0.1
    prune_good_seed_penalty: float = -0.3
    """Penalty of pruning a helpful seed, at most three times this, and per step of a premature prune."""
    prune_hurting_threshold: float = -0.5
    min_prune_bonus_age: int = 3
    improvement_safe_threshold: Positive = 0.1
    hacking_ratio_threshold: Positive = 5.0
    """Ratio of contribution to gate signal above which the difference is suspicious."""
    attribution_sigmoid_steepness: Positive = 3.0
    terminal_acc_weight: float = 0.05
    fossilize_terminal_scale: float = 3.0
    fossilize_quality_ceiling: Positive = 3.0
    basic_acc_delta_weight: float = 5.0
    basic_fossilize_base_bonus: float = 0.3
    basic_contribution_scale: float = 0.5
    basic_fossilize_invalid_penalty: float = -0.5
    basic_fossilize_noncontributing_penalty: float = -0.2
    disable_pbrs: bool = False
    disable_terminal_reward: bool = False
    disable_anti_gaming: bool = False
    param_budget: Positive = 500_000.0
    param_penalty_weight: float = 0.1
    sparse_reward_scale: float = 1.0
    early_prune_threshold: int = 5
    early_prune_penalty: float = -0.1
    advance_from_training_penalty: float = -0.1
    auto_prune_penalty: float = -0.2
    seed_occupancy_cost: float = 0.01
    free_slots: AtLeast0 = 1
    fossilized_maintenance_cost: float = 0.002
    germination_warmup_epochs: int = 10
    germination_discount_floor: Share = 0.4
    disable_timing_discount: bool = False
    deferred_fraction: Share | None = None
    """Share of a fossilization bonus given in instalments; None = the mode's own value (`MODES`)."""
    max_deferred_per_epoch: Positive = 0.1
    min_deferred_epochs: AtLeast1 = 5
    negative_deferred_ratio: Share = 0.5
    objective_acc_weight: float = 1.0
    objective_growth_weight: float = 0.03
    """0.03 means that doubling the parameters must buy 2.08 points of accuracy."""
    objective_flops_weight: NotNegative = 0.0
    """Points of accuracy that doubling the FLOPs of training must buy."""
    rollback_penalty: float | None = None
    """Reward of the row before a rollback (in `objective` added to it); None = the mode's own (`MODES`)."""
    hindsight_weight: float = 0.1
    hindsight_cap: NotNegative = 0.2

    mode: RewardMode = "objective"
    attribution: Attribution = "harmonic"
    """How progress and contribution are combined: harmonic mean or minimum."""
    loss: LossRewardConfig = field(default_factory=LossRewardConfig)

    def __post_init__(self) -> None:
        check_fields(self, "reward")
        if self.deferred_fraction and self.mode == "basic":
            raise ConfigError(
                f"reward.deferred_fraction is {self.deferred_fraction}; it must be 0 in mode 'basic': instalments need "
                "'basic_plus'."
            )

    def resolved(self, name: str) -> float:
        """The number `name`; None is replaced by the mode's own value."""
        value = getattr(self, name)
        return float(getattr(MODES[self.mode], name) if value is None else value)

    def with_mode(self, mode: RewardMode) -> "RewardConfig":
        """The same numbers for another mode."""
        return replace(self, mode=mode)

    def pack(self) -> Float[Tensor, " W"]:
        """The numbers in the order of `WEIGHT_NAMES`, float64; booleans as 0 and 1."""
        return torch.tensor([self.resolved(name) for name in WEIGHT_NAMES], dtype=torch.float64)


WEIGHT_NAMES = tuple(f.name for f in fields(RewardConfig) if f.name not in ("mode", "attribution", "loss"))
"""Names of the packed numbers, in index order."""
