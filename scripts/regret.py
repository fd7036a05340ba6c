"""Where the points go that a controller loses to the best structure in hindsight, host by host.

    regret     best of all structures on this host (none, one or two seeds, from step 1)  -  controller
    lateness   its own final structure from step 1                                        -  controller
    structure  best of all structures                                                     -  its own from step 1

"Best" is by validation, and test is read for that structure alone. The best of many favours hindsight, because what is
noise is chosen too; with test it does not. A second table has what some structures lose when they are born later.

    python scripts/regret.py mixed_digits heuristic best_schedule runs/learn-1 --hosts 128 --out runs/regret

Outcomes are kept in --out, and found there by a second call.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro

from esper.leyline.architecture import Architecture
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.presets import config_of_run, resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import Controller, baseline, fixed, trained
from esper.runs.evaluation.outcomes import SEED_OFFSET, OutcomeStore, key_of, run_controller
from esper.runs.evaluation.races import raced, small_structures
from esper.runs.evaluation.results import Outcome, estimate, host_figures
from esper.simic.client import ScriptedClient
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Plan
from esper.tasks.datasets import Dataset

BIRTHS = (1, 3, 6, 9, 12)
Values = tuple[np.ndarray, np.ndarray]
"""100·J of each host with validation, and with test."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Regret by cause."""

    task: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TASK")]
    controllers: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME|RUN ...")] = ()
    """Baselines, policy files, and the directory of one run."""
    hosts: int = 128
    """Hosts."""
    seed: int | None = None
    """Their seed. (that of the run, else 0, + 1,000,000, as in `esper evaluate`)"""
    late: int = 6
    """Structures that are born late: those that are best on most hosts, and the most frequent ones of controllers."""
    threads: int = 1
    """CPU threads."""
    out: Path = Path("runs/regret")
    """Folder of the outcomes."""


class Hosts:
    """The hosts of the comparison, and what was found on them."""

    def __init__(self, options: Options) -> None:
        runs = [Path(name) for name in options.controllers if Path(name).is_dir()]
        config = config_of_run(runs[0]) if runs else resolve({"task": options.task})
        self.config: RunConfig = replace(config, threads=options.threads)
        self.seed = self.config.seed + SEED_OFFSET if options.seed is None else options.seed
        self._device: torch.device = device_of(self.config)
        self._dataset: Dataset | None = dataset_of(self.config, self._device)
        self._store, self._num_envs = OutcomeStore(options.out), options.hosts
        one = self.config.engine(run_seed=self.seed, num_envs=1)
        self.spec: EngineSpec = engine_of(self.config, self._dataset, self._device, engine_config=one).spec

    def outcome(self, controller: Controller) -> Outcome:
        """Of one controller."""
        size, config = {"run_seed": self.seed, "num_envs": self._num_envs}, self.config
        key = key_of(config, self._dataset, controller, **size)
        found = self._store.get(key)
        if found is None:
            print(f"{controller.name} {[one.lines for one in controller.architectures[:1]]}", file=sys.stderr)
            found = run_controller(config, self._dataset, self._device, controller, **size)
            self._store.put(key, found)
        return found

    def values(self, outcome: Outcome) -> Values:
        """Its 100·J."""
        figures = host_figures([outcome], self.config.reward)
        return figures["objective"][0], figures["test_objective"][0]


def late(plan: Plan, config: RunConfig) -> Controller:
    """A schedule of the plan."""

    def make(of: EngineSpec) -> ClientProtocol:
        return ScriptedClient(scheduled(plan.schedule(of), of), reward_of(config, of))

    return Controller(name="late", make=make, identity={"plan": repr(plan)})


def difference(above: Values, below: Values) -> str:
    """Mean difference with its interval, and the same with test accuracy, as cells of a table."""
    cells = []
    for one, other in zip(above, below, strict=True):
        found = estimate(one - other)
        cells.append(f"{found.mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]")
    return " | ".join(cells)


def kinds(outcome: Outcome) -> np.ndarray:
    """Number of the kind of each host: its classes and its view, where the task has them."""
    columns = [outcome.stats.instance[name] for name in ("classes", "view") if name in outcome.stats.instance]
    if not columns:
        return np.zeros(len(outcome.test_acc), dtype=np.int64)
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1]


def by_kind(found: dict[Architecture, Outcome], hosts: Hosts) -> Values:
    """Of the best structure of each kind of host."""
    worth = np.stack([hosts.values(one)[0] for one in found.values()])
    test = np.stack([hosts.values(one)[1] for one in found.values()])
    kind = kinds(next(iter(found.values())))
    best = np.array([worth[:, kind == k].mean(axis=1).argmax() for k in range(kind.max() + 1)])[kind]
    rows = np.arange(len(kind))
    return worth[best, rows], test[best, rows]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    options = tyro.cli(Options, description=__doc__, args=arguments)
    hosts = Hosts(options)
    print(f"{options.task}, {options.hosts} hosts of seed {hosts.seed}\n")
    all_seeds = small_structures(hosts.spec)
    found = {structure: hosts.outcome(fixed([structure], hosts.config)) for structure in all_seeds}
    best = raced("hindsight", list(found.values()), hosts.config.reward)
    hindsight = hosts.values(best)
    one_for_all = max(found.values(), key=lambda one: hosts.values(one)[0].mean())
    references = {
        "the best structure of each host": hindsight,
        "of each kind of host": by_kind(found, hosts),
        f"one for all: {' + '.join(one_for_all.grown[0].lines) or 'none'}": hosts.values(one_for_all),
    }
    print("| hindsight | 100·J | with test |\n| --- | ---: | ---: |")
    for name, (worth, test) in references.items():
        print(f"| {name} | {worth.mean():.1f} | {test.mean():.1f} |")
    print("\n| controller | 100·J | with test | regret | with test | of it late | with test | structure | with test |")
    print("| --- | ---: | ---: |" + " --- |" * 6)
    ended = []
    for name in options.controllers:
        is_run, config = Path(name).is_dir(), hosts.config
        controller = trained(Path(name), config).controller if is_run else baseline(name, config)
        outcome = hosts.outcome(controller)
        ended += outcome.grown
        at_once = hosts.values(hosts.outcome(fixed(outcome.grown, hosts.config)))
        own = hosts.values(outcome)
        cells = [difference(hindsight, own), difference(at_once, own), difference(hindsight, at_once)]
        print(f"| {controller.name} | {own[0].mean():.1f} | {own[1].mean():.1f} | {' | '.join(cells)} |")
    _print_births(hosts, options, chosen(best, ended, all_seeds, options.late), found, all_seeds)


def chosen(
    best: Outcome, ended: Sequence[Architecture], known: dict[Architecture, tuple[tuple[int, int], ...]], most: int
) -> list[Architecture]:
    """The structures that are best on most hosts, and those that controllers ended with most often, in turn."""

    def often(several: Sequence[Architecture]) -> list[Architecture]:
        named = [one for one in several if one in known and one.slots]
        return sorted(dict.fromkeys(named), key=lambda one: -named.count(one))

    both = zip(often(best.grown), often(ended) or often(best.grown), strict=False)
    return list(dict.fromkeys(one for pair in both for one in pair))[:most]


def _print_births(
    hosts: Hosts,
    options: Options,
    several: Sequence[Architecture],
    found: dict[Architecture, Outcome],
    seeds: dict[Architecture, tuple[tuple[int, int], ...]],
) -> None:
    print("\n| structure | at once | " + " | ".join(f"born at {step}" for step in BIRTHS) + " |")
    print("| --- | ---: |" + " --- |" * len(BIRTHS))
    for structure in several:
        at_once = hosts.values(found[structure])
        cells = []
        for step in BIRTHS:
            outcome = hosts.outcome(late(Plan(seeds=seeds[structure], start=step), hosts.config))
            own = estimate(hosts.values(outcome)[0] - at_once[0])
            kept = np.mean([grown == structure for grown in outcome.grown])
            share = "" if kept == 1.0 else f", kept on {100 * kept:.0f} %"
            cells.append(f"{own.mean:+.1f} [{own.low:+.1f}, {own.high:+.1f}]{share}")
        print(f"| {' + '.join(structure.lines)} | {at_once[0].mean():.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
