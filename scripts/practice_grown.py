"""What `esper.grow` makes of a host of practice_hosts.py within a budget."""

from functools import partial

import esper
from practice_hosts import Data, Host
from practice_plain import Found

STEPS = 20
"""Control steps in which the network as it is would be trained by a third of the budget."""


def task_of(host: Host, data: Data, epochs: float) -> esper.Task:
    """The network, its data and the recipe of its owner, who has tried no other learning rate than the middle one."""
    batches = epochs * len(data.train[1]) / host.batch
    return esper.Task(
        name=host.name,
        model=partial(host.net, 1.0),
        slots=host.slots,
        train=data.train,
        val=data.val,
        test=data.test,
        inputs=data.inputs,
        batch=host.batch,
        batches_per_step=max(1, round(batches / STEPS)),
        episode_length=STEPS,
        lr=host.rates[1],
        schedule="cosine",
        warmup=round(host.warmup * STEPS),
    )


def grow(host: Host, data: Data, epochs: float, method: str, budget: esper.Budget, seed: int) -> Found:
    """The network that a method of `esper.grow` keeps, behind "auto, last step" that of the last step."""
    name, _, last = method.partition(", ")
    keep = "last" if last else "best"
    grown = esper.grow(task_of(host, data, epochs), name, budget=budget, keep=keep, seed=seed, progress=False)
    board = grown.leaderboard
    assert board is not None
    return Found(
        test=grown.test_points,
        val=grown.points,
        params=grown.num_params,
        flops=board.spent,
        chosen=str(board.entries[board.chosen].candidate),
    )
