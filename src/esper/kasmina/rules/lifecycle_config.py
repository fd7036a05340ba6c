"""Settings of the lifecycle."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from esper.leyline.settings import AtLeast0, AtLeast1, check_fields


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Limits and thresholds of the lifecycle. Epochs are control steps, accuracies percentage points."""

    max_seeds: AtLeast0 | None = None
    """Most live seeds of a host; None means one per slot, 0 means no limit."""
    sequential: bool = True
    """Whether a seed may germinate only while no other slot is GERMINATED, TRAINING or in cooldown."""
    min_prune_age: AtLeast0 = 5
    """Age from which PRUNE is legal, so that a seed has time to show its value."""
    embargo_epochs: AtLeast0 = 5
    """Epochs for which a pruned slot stays EMBARGOED."""
    interaction_limit: Annotated[int, Field(ge=0, le=4)] = 4
    """Most players for which single and pair coalitions are evaluated."""
    shapley_limit: Annotated[int, Field(ge=0, le=6)] = 6
    """Most live seeds for which Shapley values are reported at the end of an episode."""
    fossils_as_players: bool = False
    """Whether contributions of fossilized seeds are measured too; set by the reward mode."""
    gate_mode: Literal["permissive", "strict"] = "permissive"
    """Strict gates also require improvement, a gradient ratio, blending time and a contribution of 1 pp."""
    auto_g1: bool = True
    auto_g2: bool = True
    auto_g3: bool = True
    """Whether the tick asks the gate; otherwise ADVANCE does."""
    min_training_epochs: AtLeast1 = 10
    min_blending_epochs: AtLeast1 = 10
    g2_health: float = 0.7
    g2_improvement: float = 0.5
    g2_ratio: float = 0.10
    g5_contribution: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "lifecycle")
