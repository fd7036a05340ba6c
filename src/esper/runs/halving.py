"""Successive halving (Jamieson and Talwalkar, 2016): many candidates on few hosts, then the best ones on more.

rung 1    128 plans,  2 hosts each
rung 2     32 plans,  8 hosts each      a quarter survives; every rung has new hosts and costs about the same
rung 3      8 plans, 32 hosts each
"""

from collections.abc import Sequence

import torch

from esper.leyline.random import Stream, local_generator
from esper.runs.search_hosts import Result, TrainingHosts, ranked
from esper.tamiyo.plans import Plan

SURVIVING = 4
"""One in how many survives a rung."""
LEAST_HOSTS = 2
"""Of a candidate in the first rung."""
_MOST_RUNGS = 3


def halve(hosts: TrainingHosts, plans: Sequence[Plan], passes: int, keep: int) -> list[list[Result]]:
    """The results of each rung, best first; the last rung has at least `keep` plans, if there are so many.

    Args:
        hosts: where the plans are measured.
        plans: more than the passes can measure are left out from the end, so those that matter most come first.
        passes: the budget.
        keep: plans whose order the last rung tells.
    """
    rungs = number_of_rungs(len(plans), passes, keep)
    side_by_side = max(hosts.num_envs // LEAST_HOSTS, 1)
    share, found = passes // rungs, list[list[Result]]()
    survivors = list(plans[: max(share - (share >= 4), 1) * side_by_side])
    for rung in range(rungs):
        last = rung == rungs - 1
        found.append(ranked(hosts, survivors, share + passes % rungs * last))
        survivors = [result.plan for result in found[-1][: max(-(-len(survivors) // SURVIVING), keep)]]
    return found


def number_of_rungs(plans: int, passes: int, keep: int) -> int:
    """Rungs that leave at least two passes to each, and end as soon as `keep` plans are left."""
    rungs = 1
    while rungs < _MOST_RUNGS and passes // (rungs + 1) >= 2 and plans > keep:
        rungs, plans = rungs + 1, -(-plans // SURVIVING)
    return rungs


def shuffled(plans: Sequence[Plan], seed: int, round_number: int) -> list[Plan]:
    """The plans in an order that is random, but equal for equal seeds."""
    own = local_generator(seed, Stream.SCHEDULE_SEARCH, episode=round_number)
    return [plans[i] for i in torch.randperm(len(plans), generator=own).tolist()]
