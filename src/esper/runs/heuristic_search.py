"""The heuristic, tuned for a task on training hosts with a stated budget.

random        different choices of `HeuristicRules`, each on all N hosts of the same episode
neighbours    twice: the best, and rules that differ from one of them in one choice, on new hosts
confirmation  the best on the same new hosts; the winner and its J are taken from here
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper.leyline.actions import TEMPO_NAMES
from esper.leyline.files import replacing
from esper.leyline.messages import EngineSpec
from esper.leyline.random import Stream, local_generator
from esper.runs.config import RunConfig
from esper.runs.search import passes_of
from esper.runs.search_hosts import TrainingHosts, standard_error
from esper.tamiyo.heuristic import DEFAULT_RULES, Heuristic, HeuristicRules
from esper.tamiyo.policy_files import write_policy
from esper.telemetry.run_directory import plain_json

HEURISTIC_FILE, REPORT_FILE = "best_heuristic.json", "heuristic_search.json"
_FIRST, _NEXT = 0.4, 0.2
"""Share of the passes for random choices, and for each round of neighbours; the rest confirms."""
_PARENTS, _FINALISTS = 4, 5
_MOST_BLUEPRINTS = 3
_MOST_DRAWS = 20  # for each candidate; few are left where slots and blueprints are few
_NUMBERS: Mapping[str, Sequence[float]] = {
    "tempo": range(len(TEMPO_NAMES)),
    "first_step": (1, 2, 3, 5, 8),
    "plateau_epochs": (0, 1, 3),
    "patience": (3, 5, 8),
    "drop": (2.0, 5.0, 10.0, 100.0),
    "fossilize_above": (0.0, 0.5, 1.0, 2.0, 5.0, 10.0),
    "cooldown": (0, 5),
}


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Rules with 100·J of each host on which they were tried."""

    rules: HeuristicRules
    values: np.ndarray

    @property
    def objective(self) -> float:
        """Mean 100·J."""
        return float(self.values.mean())

    def as_json(self, spec: EngineSpec) -> dict[str, Any]:
        """As JSON values."""
        error = standard_error(self.values)
        words = self.rules.words(spec)
        return {"name": words, "objective": self.objective, "standard_error": error, "hosts": self.values.size}


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result: the finalists, best first, and all stages by name."""

    config: RunConfig
    spec: EngineSpec
    budget: int
    env_steps: int
    finalists: Sequence[Tried]
    stages: Sequence[tuple[str, Sequence[Tried]]]

    def write(self, folder: Path) -> None:
        """Write the winner as a policy file, and the report with all candidates."""
        folder.mkdir(parents=True, exist_ok=True)
        best = self.finalists[0]
        found = {
            "budget": self.budget,
            "env_steps": self.env_steps,
            "episode_length": self.config.episode_length,
            "seed": self.config.seed,
            "objective": best.objective,
            "objective_hosts": best.values.size,
        }
        write_policy(folder / HEURISTIC_FILE, best.rules, self.config.task, found, self.spec)
        stages = [
            {"stage": stage, "candidates": [tried.as_json(self.spec) for tried in results]}
            for stage, results in self.stages
        ]
        with replacing(folder / REPORT_FILE) as file:
            json.dump(plain_json({"task": self.config.task, **found, "stages": stages}), file, indent=2)


def tune(
    config: RunConfig,
    *,
    budget: int,
    num_envs: int,
    on_pass: Callable[[float], None] = lambda share: None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Tuned:
    """Tune the heuristic; the arguments are those of `search.search`.

    Raises:
        ConfigError, DataError: the budget is too small, or the hosts cannot be built.
    """
    passes = passes_of(budget, num_envs, config.episode_length)
    hosts = TrainingHosts(config, num_envs, on_pass)
    generator = local_generator(config.seed, Stream.HEURISTIC_SEARCH)
    stages = list[tuple[str, list[Tried]]]()

    def run(stage: str, candidates: Sequence[HeuristicRules], episodes: int = 1) -> list[Tried]:
        on_stage(stage)
        numbers = [hosts.new_episode() for _ in range(episodes)]
        tried = [
            Tried(
                rules=rules,
                values=np.concatenate([hosts.measure(Heuristic(hosts.spec, rules), number) for number in numbers]),
            )
            for rules in candidates
        ]
        stages.append((stage, sorted(tried, key=lambda one: -one.objective)))
        return stages[-1][1]

    first, following = int(passes * _FIRST), int(passes * _NEXT)
    results = run("random", _different([DEFAULT_RULES], first, partial(random_rules, hosts.spec, generator)))
    for _ in range(2):
        parents = [tried.rules for tried in results[:_PARENTS]]
        results = run("neighbours", _different(parents, following, partial(neighbour, parents, hosts.spec, generator)))
    finalists = [tried.rules for tried in results[:_FINALISTS]]
    episodes = max((passes - hosts.passes) // len(finalists), 1)
    return Tuned(
        config=config,
        spec=hosts.spec,
        budget=budget,
        finalists=run("confirmation", finalists, episodes),
        env_steps=hosts.env_steps,
        stages=stages,
    )


def random_rules(spec: EngineSpec, generator: torch.Generator) -> HeuristicRules:
    """Each choice drawn uniformly."""
    drawn: dict[str, Any] = {name: values[_draw(len(values), generator)] for name, values in _NUMBERS.items()}
    return HeuristicRules(
        blueprints=_draw_some(spec.selectable, _MOST_BLUEPRINTS, generator),
        slots=_draw_some(range(spec.num_slots), spec.num_slots, generator),
        **drawn,
    )


def neighbour(parents: Sequence[HeuristicRules], spec: EngineSpec, generator: torch.Generator) -> HeuristicRules:
    """One of the parents with one choice drawn anew."""
    parent = parents[_draw(len(parents), generator)]
    names = ["blueprints", "slots", *_NUMBERS]
    name = names[_draw(len(names), generator)]
    return replace(parent, **{name: getattr(random_rules(spec, generator), name)})


def _different(first: Sequence[HeuristicRules], count: int, draw: Callable[[], HeuristicRules]) -> list[HeuristicRules]:
    """`first` and others, `count` in all if there are so many, none twice."""
    found = dict.fromkeys(first)
    for _ in range(_MOST_DRAWS * count):
        if len(found) >= count:
            break
        found.setdefault(draw())
    return list(found)[:count]


def _draw(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def _draw_some(values: Sequence[int], most: int, generator: torch.Generator) -> tuple[int, ...]:
    """From one to `most` of the values in random order."""
    count = 1 + _draw(min(most, len(values)), generator)
    return tuple(values[i] for i in torch.randperm(len(values), generator=generator)[:count].tolist())
