"""Where the formulas jump: the rows in which rounding an input to float32 may change the reward by more than rounding.

Such rows are left out of comparisons between float32 and float64, by this rule and never by hand.
"""

import struct

from esper.simic.rewards.reward_config import RewardConfig
from reference.rewards.contribution import contribution_reward, progress
from reference.rewards.row import HostRow

MARGIN = 1e-4
READ_CONTRIBUTIONS = ("shaped", "escrow", "basic", "basic_plus")
"""The other modes compare integers only."""
STEEP_PROGRESS = 0.2
"""Escrow's root of p * c turns an error of p into one that is larger by c / (2 sqrt(p * c)) under this p."""


def near_threshold(x: HostRow, w: RewardConfig) -> tuple[str, ...]:
    """Names of the thresholds that the row is close to; a number that float32 holds exactly is never close."""
    if w.mode not in READ_CONTRIBUTIONS:
        return ()
    c, g = x.seed_contribution, x.counterfactual_improvement
    limits = {
        "c": (c, (0.0, 0.1, 1.0, w.prune_hurting_threshold)),
        "g": (g, (0.0, -0.2, w.improvement_safe_threshold)),
        "stage improvement": (x.stage_improvement, (0.0,)),
        "interaction": (x.interaction_sum, (0.0,)),
    }
    found = [name for name, (value, marks) in limits.items() if any(_close(value, mark) for mark in marks)]
    if w.mode in ("shaped", "escrow"):
        found += _near_attribution(x, w)
    return tuple(found)


def _near_attribution(x: HostRow, w: RewardConfig) -> list[str]:
    c, g, p = x.seed_contribution, x.counterfactual_improvement, progress(x, w)
    found = []
    if g > 0 and abs(c / g - w.hacking_ratio_threshold) < MARGIN:
        found.append("c / g")
    if w.mode == "escrow" and -MARGIN < p < STEEP_PROGRESS:
        found.append("p")  # a difference of accuracies around 70, which float32 rounds
    if _close(p, 0.0) or (abs(p - c) < MARGIN and p != c):
        found.append("p")
    earned = contribution_reward(x, w).terms["attribution"]
    if earned != 0 and abs(earned) < MARGIN:
        found.append("attribution")
    return found


def _close(value: float, mark: float) -> bool:
    exact: float = struct.unpack("f", struct.pack("f", value))[0]
    return abs(value - mark) < MARGIN and exact != value
