"""Optimizers of hosts and seeds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """How hosts and seeds are trained; one optimizer kind for both.

    Attributes:
        kind: "sgd" (momentum 0.9, host weight decay 5e-4) or "adamw" (betas 0.9/0.95, eps 1e-8, host weight decay 0.1
            on matrices only). Seeds are never decayed.
        host_lr, seed_lr: learning rates.
        grad_clip: each host's and each seed's own L2 gradient norm is clipped to this.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    host_lr: float = 0.01
    seed_lr: float = 0.01
    momentum: float = 0.9
    sgd_weight_decay: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    adamw_weight_decay: float = 0.1
    grad_clip: float = 1.0
