"""What the best controller of the scripted tasks `null` and `null_permuted` achieves, by formula."""

import math
from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from esper.tasks import null


def best_schedule_value(
    episode_length: int,
    min_training_epochs: int,
    num_slots: int,
    quality: float = null.BLUEPRINTS[null.BEST_BLUEPRINT].quality,
) -> float:
    """Committed accuracy (pp) of `null.best_schedule` at the end: F* = a(E) + quality sum_i (1 - e^{-(E - e_i)/10}).

    Holds for ADD without interaction and noise, under the sequential guard. With the largest quality that can be grown
    (`best_of_host`) it is optimal: strength grows with age and quality, a step can start one seed, and the guard allows
    the next one M + 1 steps later.
    """
    germinations = null.germinations(episode_length, min_training_epochs, num_slots)
    grown = sum(-math.expm1(-(episode_length - e) / null.TIME_CONSTANT) for e in germinations)
    return min(100.0, null.host_accuracy(episode_length) + quality * grown)


class BestOfHost(NamedTuple):
    """The best blueprint of each host in hindsight: its index and its quality (pp), both [N]."""

    blueprint: Int[Tensor, " N"]
    quality: Float[Tensor, " N"]


def best_of_host(
    spec: null.NullSpec, run_seed: int, hosts: Int[Tensor, " N"], episode: int | Tensor, *, min_health: float
) -> BestOfHost:
    """The blueprint of the highest quality of those whose health is at least `min_health`, which their gate asks."""
    quality_NB = null.qualities(spec, run_seed, hosts, episode)
    fails_B = null.tables(spec, hosts.device).health < min_health  # of indices without a blueprint the health is 0
    quality_N, blueprint_N = quality_NB.masked_fill(fails_B, -math.inf).max(dim=1)
    return BestOfHost(blueprint_N, quality_N)
