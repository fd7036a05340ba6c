"""Rewards, or settings of the learner, side by side: the controllers that they trained, on the same new hosts.

    runs trained with objective --compare--> figures of each host --+
    runs trained with shaped ----compare--> figures of each host --+--> table of means, paired differences over hosts

The runs differ in what trains a controller alone and have the same seeds. What is said of rewards holds for settings
of the learner too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from esper.leyline.errors import ConfigError, option
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import differences, flat, plain
from esper.runs.evaluation.results import (
    LEAST_UNITS,
    REFERENCE,
    TRAINED,
    ControllerResult,
    Estimate,
    Size,
    estimate,
    units_of,
)
from esper.runs.evaluation.tables import counted, plain_table, short, text
from esper.simic.rewards.objective import objective_value
from esper.simic.rewards.reward_config import RewardConfig
from esper.telemetry.progress import RunConsole
from esper.telemetry.run_directory import CHANGEABLE

if TYPE_CHECKING:
    from esper.runs.evaluation.comparison import Comparison

_FREE = frozenset({"seed", "executor", "threads", "blocks", *CHANGEABLE} - {"rounds"})
"""Settings in which the runs of one condition may differ."""
_FOLLOWS = frozenset({"custom_reward", "lifecycle.fossils_as_players"})
"""Settings that belong to a reward, besides those of its table."""
_LEARNER = frozenset({"reward", "ppo", "policy", "rounds", "schedule_rounds", "num_envs", "preset", "time_limit"})
"""Settings and tables that decide how a controller is trained, and nothing about the hosts on which it is compared."""
_OF_OBJECTIVE = attrgetter(*(f"objective_{of}_weight" for of in ("acc", "growth", "flops")), "rent_host_params_floor")
"""The numbers that J depends on."""
OBJECTIVE = "100·J"
FIGURES: Mapping[str, str] = {
    "val": "committed",
    "test": "test",
    "growth": "growth",
    "parameters": "params",
    "FLOPs": "flops",
    "training FLOPs": "training_flops",
}
"""What is compared besides 100·J, and its name among the figures of a host."""
_FORMS = {"growth": "{:.3f}x", "parameters": "{:,.0f}"}
Runs = Sequence[tuple[RunConfig, Path]]


@dataclass(frozen=True, kw_only=True)
class RewardComparison:
    """Controllers of several rewards on the same new hosts.

    Attributes:
        rewards: of each reward, by its label, the comparison of its controller with the baselines.
    """

    rewards: Mapping[str, "Comparison"]

    @property
    def first(self) -> str:
        """The reward that differences are taken to."""
        return next(iter(self.rewards))

    @property
    def size(self) -> Size:
        """Groups and hosts."""
        return self.rewards[self.first].size

    @cached_property
    def rows(self) -> list[ControllerResult]:
        """The controller of each reward, named by it, then the baselines."""
        own = [replace(found.rows[0], name=label) for label, found in self.rewards.items()]
        return [*own, *(row for row in self.rewards[self.first].rows if row.name != TRAINED)]

    @property
    def objectives(self) -> dict[str, RewardConfig]:
        """The weights of J by the name of the figure; one of each reward where they are not the same."""
        weights = {label: found.groups[0].config.reward for label, found in self.rewards.items()}
        if len(set(map(_OF_OBJECTIVE, weights.values()))) == 1:
            return {OBJECTIVE: weights[self.first]}
        return {f"{OBJECTIVE} of {label}": one for label, one in weights.items()}

    def figures(self, row: ControllerResult) -> dict[str, np.ndarray]:
        """What is compared of each host of a controller, [G, N], float64."""
        hosts = {name: np.array(values, dtype=np.float64) for name, values in row.hosts.items()}
        own = hosts["params"] / hosts["growth"]  # parameters of the host alone
        of_objective = {
            name: 100.0 * objective_value(hosts["committed"], hosts["params"] - own, own, hosts["compute"], weights)
            for name, weights in self.objectives.items()
        }
        found = of_objective | {name: hosts[column] for name, column in FIGURES.items()}
        return {name: values.reshape(self.size.groups, self.size.hosts) for name, values in found.items()}

    @cached_property
    def differences(self) -> dict[str, dict[str, Estimate]]:
        """For each other reward the paired difference of each figure to the first reward."""
        by_run = self.size.by_run
        first, *others = (self.figures(row) for row in self.rows[: len(self.rewards)])
        return {
            label: {
                name: estimate(units_of(values, by_run=by_run) - units_of(first[name], by_run=by_run))
                for name, values in figures.items()
                if np.isfinite(values).all()
            }
            for label, figures in zip(list(self.rewards)[1:], others, strict=True)
        }

    @property
    def verdict(self) -> str:
        """What each other reward changes, in a sentence."""
        if self.units < LEAST_UNITS:
            units = self.size.units
            few = counted(self.units, units.removesuffix("s"))
            return f"{few} cannot show whether they differ; at least {LEAST_UNITS} {units} are needed."
        sentences = []
        for label, found in self.differences.items():
            words: dict[str, list[str]] = {"more": [], "less": [], "": []}
            for name, one in found.items():
                words["" if not one.excludes_zero else "more" if one.mean > 0.0 else "less"].append(name)
            parts = [f"{word} {', '.join(words[word])}" for word in ("more", "less") if words[word]]
            changed = f"{label} has {' and '.join(parts)} than {self.first}." if parts else ""
            same = f"{label} and {self.first} do not differ significantly in {', '.join(words[''])}."
            sentences += [changed] * bool(parts) + [same] * bool(words[""])
        if self.size.groups == 1:
            sentences.append("One run of each says nothing about other training seeds.")
        return " ".join(sentences)

    @property
    def units(self) -> int:
        """How many independent differences there are."""
        return len(self.rows[0].units)

    def report(self) -> dict[str, Any]:
        """The comparison as JSON values, including those of every host."""
        found = self.rewards[self.first]
        about = ("task", "data", "num_envs", "episode_length", "unit")
        return {name: value for name, value in found.report().items() if name in about} | {
            "reference": self.first,
            "rewards": [
                {
                    "name": label,
                    "reward": one.groups[0].config.reward_name,
                    "optimizes": one.groups[0].config.reward_traits.summary,
                    "runs": [str(group.run) for group in one.groups],
                    "trained": [group.trained.place for group in one.groups if group.trained],
                    "seeds": [group.seed for group in one.groups],
                    "return": _returns(one)[0],
                    f"return_of_{REFERENCE}": _returns(one)[1],
                }
                for label, one in self.rewards.items()
            ],
            "controllers": [asdict(row) for row in self.rows],
            "differences": {
                label: {name: asdict(one) for name, one in of.items()} for label, of in self.differences.items()
            },
            "verdict": self.verdict,
            "notes": list(found.notes),
        }

    def show(self, console: RunConsole) -> None:
        """Print what each reward optimizes, the tables and the verdict."""
        found, size = self.rewards[self.first], self.size
        seeds = ", ".join(str(group.seed) for group in found.groups)
        each = "of seed" if size.groups == 1 else "of each of the seeds"
        console.say(f"{found.groups[0].config.task}, {counted(size.hosts, 'host')} {each} {seeds}")
        for label, one in self.rewards.items():
            runs = ", ".join(f"{group.run} {group.trained.place}" for group in one.groups if group.trained)
            (own, alone), optimizes = _returns(one), one.groups[0].config.reward_traits.summary
            console.say(f"{label}: {optimizes}; return {own:.2f}, of {REFERENCE} {alone:.2f} ({runs})")
        means = {row.name: {n: float(v.mean()) for n, v in self.figures(row).items()} for row in self.rows}
        page = plain_table("trained with", *means[self.first])
        for name, values in means.items():
            page.add_row(name, *(_shown(figure, value) for figure, value in values.items()))
        console.print("", page, sep="\n")
        page = plain_table(f"minus {self.first}", *self.differences)
        for name in means[self.first]:
            if all(name in of for of in self.differences.values()):
                page.add_row(name, *(self._difference(name, of[name]) for of in self.differences.values()))
        console.print("", page, sep="\n")
        console.say(f"\n{_LEGEND.format(units=size.units)}\n{self.verdict}")

    def _difference(self, figure: str, found: Estimate) -> str:
        """A difference with its interval, where there are enough units for one."""
        mean, low, high = (_shown(figure, value, signed=True) for value in (found.mean, found.low, found.high))
        return f"{mean} [{low}, {high}]" if self.units >= LEAST_UNITS else mean

    def __str__(self) -> str:
        return text(self.show)


_LEGEND = """Means over hosts of the networks that are kept. 100·J: val minus the price of added parameters,
whatever the reward; FLOPs: of one example; training FLOPs: of a host. Differences are paired, with 95 %
intervals over {units}."""


def differing(first: RunConfig, other: RunConfig) -> dict[str, tuple[object, object]]:
    """The settings, by dotted name, in which runs of one condition may not differ and these do."""
    found = differences(flat(plain(first)), flat(plain(other)))
    return {name: values for name, values in found.items() if name.partition(".")[0] not in _FREE}


def differ_in_learning(configs: Sequence[RunConfig]) -> bool:
    """Whether runs have different rewards or learners, and otherwise one condition."""
    changes = [name for config in configs[1:] for name in differing(configs[0], config)]
    return bool(changes) and all(is_of_learning(name) for name in changes)


def compare_rewards(
    compare: Callable[..., "Comparison"],
    configs: Sequence[RunConfig],
    runs: Sequence[Path],
    baselines: Sequence[str],
    *,
    flops: float | None = None,
    **options: Any,  # noqa: ANN401 -- those of `compare`
) -> RewardComparison:
    """Compare the controllers of runs that differ in reward, learner and seed; beside wait_only and `baselines`.

    The arguments are those of `comparison.compare`, which compares the runs of one reward; `flops` must be None.

    Raises:
        ConfigError: the rewards were not trained with the same seeds, or a budget is given; and what `compare` raises.
    """
    if flops is not None:
        raise ConfigError(
            "several rewards or learners are compared by what they train, not at a budget; leave "
            f"{option('flops_per_host')} out, or evaluate the runs of each by themselves."
        )
    groups = _by_reward(list(zip(configs, runs, strict=True)))
    seeds = {label: ", ".join(str(config.seed) for config, _ in group) for label, group in groups.items()}
    first, *others = seeds.items()
    for label, own in others:
        if own != first[1]:
            raise ConfigError(
                f"{first[0]} was trained with seed {first[1]} and {label} with {own}; they are compared on the same "
                "hosts, so train both with the same seeds."
            )
    names = [*baselines, REFERENCE]
    return RewardComparison(
        rewards={
            label: compare(
                [config for config, _ in group],
                [run for _, run in group],
                names if label == first[0] else [REFERENCE],  # baselines are the same for all rewards
                **options,
            )
            for label, group in groups.items()
        }
    )


def _by_reward(runs: Runs) -> dict[str, Runs]:
    """The runs of each reward in the order of their seeds, by the name of the reward, and what else differs in it."""
    groups: list[list[tuple[RunConfig, Path]]] = []
    for run in runs:
        group = next((group for group in groups if not differing(group[0][0], run[0])), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    heads = [group[0][0] for group in groups]
    changed = sorted({name for head in heads for name in differing(heads[0], head)} - _FOLLOWS - {"reward.mode"})
    labels = []
    for head in heads:
        values = (f"{name.removeprefix('reward.')} {attrgetter(name)(head)}" for name in changed)
        twice = [other.reward_name for other in heads].count(head.reward_name) > 1
        labels.append(", ".join([head.reward_name, *(values if twice else ())]))
    return {label: sorted(group, key=lambda run: run[0].seed) for label, group in zip(labels, groups, strict=True)}


def is_of_learning(name: str) -> bool:
    """Whether a setting belongs to a reward or a learner."""
    return name in _FOLLOWS or name.partition(".")[0] in _LEARNER


def _returns(found: "Comparison") -> tuple[float, float]:
    """The undiscounted returns of the trained controller and of waiting, by the reward that trained it."""
    by_name = {row.name: row.shaped_return for row in found.rows}
    return by_name[TRAINED], by_name[REFERENCE]


def _shown(figure: str, value: float, *, signed: bool = False) -> str:
    """A value of a figure as it is printed."""
    if math.isnan(value):
        return "-"
    sign, size = ("+" if value >= 0.0 else "-", abs(value)) if signed else ("", value)
    return sign + (short(size) if "FLOPs" in figure else _FORMS.get(figure, "{:.2f}").format(size))
