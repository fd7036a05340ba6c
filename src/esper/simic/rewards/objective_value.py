"""J, the objective of an episode: accuracy of the kept network minus a price for its growth.

    J = accuracy weight · accuracy / 100 - growth weight · ln(1 + fossilized parameters / max(host parameters, floor))

Reports print 100·J, so that one unit is one percentage point of accuracy.
"""

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from esper.simic.rewards.config import RewardConfig

A = TypeVar("A", np.ndarray, Tensor)


def objective_value(accuracy: A, fossil_params: A, host_params: A, weights: RewardConfig) -> A:
    """J of each host [N]; `accuracy` in percentage points."""
    growth = fossil_params / host_params.clip(min=weights.rent_host_params_floor)
    log_growth = torch.log1p(growth) if isinstance(growth, Tensor) else np.log1p(growth)
    return weights.objective_acc_weight * accuracy / 100.0 - weights.objective_growth_weight * log_growth
