"""Compares the methods of growth at equal FLOPs on two built-in kinds of hosts (docs/experiments.md).

python scripts/growth_methods.py digits --runs 3 --seeds 0 1 2 3
python scripts/growth_methods.py clothes --runs 3 --seeds 0 1 2        needs ESPER_DATA
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

import numpy as np
import torch
import tyro

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.runs.assembly.assemble import dataset_of
from esper.runs.assembly.presets import resolve
from esper.runs.growth import RATES, Budget, Growth, Method, Stage
from esper.runs.leaderboard import Candidate
from esper.tasks.datasets import Dataset, Split
from esper.tasks.registry import TaskSpec, register_task, task_by_name

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Options:
    """Compare the methods of growth."""

    host: Annotated[Literal["digits", "clothes"], tyro.conf.Positional]
    runs: float = 3.0
    """Budget in trainings of the network alone."""
    seeds: tuple[int, ...] = (0, 1, 2)


def sound_network() -> TaskSpec:
    """A small network that needs no growth, for pictures of clothes."""
    optimizer = OptimizerSpec(
        kind="adamw", host_lr=0.01, seed_lr=0.01, betas=(0.9, 0.999), adamw_weight_decay=0.01
    )  # as torch.optim.AdamW
    host = CNNHostSpec(in_channels=1, base=8, blocks=3, kernel=3, pools=2, classes=10)
    task = task_by_name("fashion_mnist")
    return replace(task, name="clothes", host=host, episode_length=12, batch_train=128, optimizer=optimizer)


def few(dataset: Dataset) -> Dataset:
    """3,000 of its training pictures, 2,000 others to validate on, 5,000 to test on."""
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(5))

    def part(split: Split, rows: torch.Tensor) -> Split:
        return Split(x=split.x[rows].clone(), y=split.y[rows].clone())

    train, val = part(dataset.train, order[:3_000]), part(dataset.train, order[3_000:5_000])
    return replace(dataset, train=train, val=val, test=part(dataset.test, torch.arange(5_000)))


def growths(options: Options, seed: int) -> Iterator[tuple[str, Growth]]:
    """Each method before its first step, with the best of three rates and one long run before them."""
    config = resolve({"task": options.host, "executor": "auto", "threads": 1})
    steps = config.episode_length
    dataset = dataset_of(config, _CPU)
    assert dataset is not None
    dataset = dataset if options.host == "digits" else few(dataset)

    def growth(method: Method, flops: float, fixed: int | None = None) -> Growth:
        return Growth(config, dataset, _CPU, method=method, budget=Budget(flops=flops), seed=seed, steps=fixed)

    alone = growth("plain", flops=1e18, fixed=1)
    alone.step()
    flops = options.runs * steps * alone.entries[0].spent
    for name, rates, length in (("three", RATES, steps), ("long", (1.0,), int(options.runs * steps))):
        usual = growth("plain", 1e18, length)
        usual.stages = (Stage(1.0, len(rates)),)  # no rate is left out early
        usual.begin([Candidate(rate=rate) for rate in rates])
        yield name, usual
    for method in get_args(Method):
        yield method, growth(method, flops)


def main(options: Options) -> None:
    """Print each network that is kept, then the means."""
    register_task(sound_network())
    found: dict[str, list[float]] = {}
    for seed in options.seeds:
        for name, growth in growths(options, seed):
            while not growth.is_over:
                growth.step()
            network, entry, steps = growth.result()
            test = network.description.test
            assert test is not None
            found.setdefault(name, []).append(test)
            print(f"{seed} {name}: {growth.entries[entry].candidate}, {steps} steps, test {test:.2f}", flush=True)
    for name, tests in found.items():
        print(f"{name}: {np.mean(tests):.2f} ({', '.join(f'{test:.1f}' for test in tests)})")


if __name__ == "__main__":
    main(tyro.cli(Options))
