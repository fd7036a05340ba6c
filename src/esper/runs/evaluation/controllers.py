"""The controllers that a comparison knows, by name, and what decides their actions.

baselines   `tamiyo.baselines`, registered policies, and best_schedule where it is known (on paper, or by a search)
policies    files, scripted (.json) or learned (.safetensors); `pretrained` is the learned one that comes with esper
races       `races`: several structures on each host, of which validation keeps one; those of portfolio and halving
            were found by a search
trained     the policy of a run; `untrained` is its network at initialization
derived     baselines that start with what another controller, their *source*, has grown:

static_final    every host has the final architecture that the source gave it, from the first step
static_common   every host has the most frequent final architecture of the source
big_host        no seeds; a wider host with about as many parameters as the source ends with
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.host import HostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.leyline.architecture import Architecture
from esper.leyline.errors import CheckpointError, ConfigError, RegistryError, nearest, option
from esper.leyline.messages import ClientProtocol, EngineSpec
from esper.leyline.tensor_dataclass import below, state_digest
from esper.runs.assembly.clients import (
    PRETRAINED,
    baseline_of,
    learned_client,
    learned_path,
    learner_of,
    policy_file_client,
    read_learned,
    reward_of,
)
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import plain
from esper.runs.evaluation.results import COMMON, RACES, REFERENCE, SEARCHED, TRAINED
from esper.runs.evaluation.tables import words
from esper.runs.report import Cost
from esper.runs.training.checkpoint import BEST, checkpoints, load, load_newest
from esper.simic.client import POLICY_PARTS, ScriptedClient
from esper.tamiyo.baselines import BASELINES, STATIC, policy_names, scheduled
from esper.tamiyo.policy_files import LEARNED_SUFFIX, is_policy_file, values_of
from esper.tamiyo.schedules import Schedule
from esper.tasks import null
from esper.tasks.registry import task_by_name
from esper.telemetry.record.writer import sha256_of
from esper.telemetry.run_directory import CHECKPOINTS, SUMMARY, continuing, require_nothing_to_lose

UNTRAINED = "untrained"
BEST_SCHEDULE = "best_schedule"
BIG_HOST = "big_host"
DERIVED = (STATIC, COMMON, BIG_HOST)
"""Baselines that need the outcome of another controller."""
Maker = Callable[[EngineSpec], ClientProtocol]


@dataclass(frozen=True, kw_only=True)
class Controller:
    """What is compared.

    Attributes:
        name: in tables. make: the client for an engine.
        identity: plain values that decide, with the configuration, what it does; for the key of a stored outcome.
        architectures: the architecture that each host has from the first step; one for all hosts, or one for each.
        host: architecture instead of that of the task, or None.
        note: a sentence about it, or "".
    """

    name: str
    make: Maker
    identity: Mapping[str, Any] = field(default_factory=dict)
    architectures: tuple[Architecture, ...] = ()
    host: HostSpec | None = None
    note: str = ""


@dataclass(frozen=True)
class Trained:
    """The controller of a run, its position in the run, a sentence for each damaged newer checkpoint, and its cost."""

    controller: Controller
    place: str
    warnings: list[str]
    cost: Cost


def names() -> tuple[str, ...]:
    """Every baseline that acts by itself: those of this package, and the policies that users registered."""
    return (*policy_names(), BEST_SCHEDULE, PRETRAINED)


def known_names() -> tuple[str, ...]:
    """Every name that a comparison knows."""
    return tuple(dict.fromkeys((*names(), *RACES, UNTRAINED, *DERIVED)))


def all_baselines(config: RunConfig, *, with_run: bool) -> tuple[str, ...]:
    """Names of the baselines that the task supports; those that belong to a trained controller only with a run."""
    own: tuple[str, ...] = BASELINES
    own += (BEST_SCHEDULE,) if has_best_schedule(config) else ()
    own += SEARCHED if has_plans(config) else ()
    if not with_run:
        return own
    widens = isinstance(task_by_name(config.task).host, CNNHostSpec | TransformerHostSpec)
    return (*own, UNTRAINED, COMMON, *((BIG_HOST,) if widens else ()))


def has_best_schedule(config: RunConfig) -> bool:
    """Whether `best_schedule` is known: worked out on paper, or searched for the slots and steps of this run."""
    return _is_solved(config) or (task_by_name(config.task).best_schedule is not None and _as_searched(config))


def has_plans(config: RunConfig) -> bool:
    """Whether `portfolio` and `halving` are known for the slots and steps of this run."""
    return task_by_name(config.task).plans is not None and _as_searched(config)


def _as_searched(config: RunConfig) -> bool:
    """Whether slots and steps are those of the task, for which its policies were searched."""
    task = task_by_name(config.task)
    return config.slots == task.enabled and config.episode_length == task.episode_length


def baseline(name: str, config: RunConfig) -> Controller:
    """A controller that needs neither a run nor another controller's outcome.

    Raises:
        ConfigError: `best_schedule` for a task that has none, or a policy file that does not fit.
        RegistryError: an unknown name.
    """
    if is_policy_file(name):
        return _of_file(Path(name), config)
    if name == PRETRAINED:
        return replace(_of_file(learned_path(name), config), name=name)
    if name == UNTRAINED:
        return Controller(
            name=name,
            make=partial(learner_of, replace(config, compile="off", policy="")),
            identity={"ppo": plain(config.ppo)},
        )
    if name == BEST_SCHEDULE:
        if not has_best_schedule(config):
            raise ConfigError(
                f"the best schedule of task {config.task!r} is not known for these slots and steps; leave "
                f"{BEST_SCHEDULE} out, or find it with esper search."
            )
        if not _is_solved(config):
            return replace(_of_file(task_by_name(config.task).best_schedule, config), name=name)
        return Controller(name=name, make=partial(_best_schedule, config))
    if name not in policy_names():
        raise RegistryError(f"unknown baseline {name!r}; {nearest(name, known_names())}")
    return Controller(name=name, make=partial(baseline_of, name, config))


def fixed(structures: Sequence[Architecture], config: RunConfig) -> Controller:
    """Waits on hosts that have a structure from the first step: one for all of them, or one for each."""
    identity = {"architectures": [structure.sha256 for structure in structures]}
    make = partial(baseline_of, REFERENCE, config)
    return Controller(name="structure", make=make, identity=identity, architectures=tuple(structures))


def _is_solved(config: RunConfig) -> bool:
    """Whether the best schedule is worked out on paper: for scripted tasks with the built-in dynamics."""
    script, known = task_by_name(config.task).script, null.NullSpec()
    constants = ("quality", "health", "algorithm_factor", "interaction")
    return script is not None and all(getattr(script, name) == getattr(known, name) for name in constants)


def _of_file(path: Path | None, config: RunConfig) -> Controller:
    """The policy in a file, under the name of the file, which is read now: others may run for hours before it."""
    assert path is not None
    read_learned(path) if path.suffix == LEARNED_SUFFIX else values_of(path)
    identity = {"policy": sha256_of(path)}
    return Controller(name=path.name, make=partial(policy_file_client, path, config), identity=identity)


def _best_schedule(config: RunConfig, spec: EngineSpec) -> ClientProtocol:
    rows = null.best_schedule(spec.episode_length, spec.min_training_epochs, spec.num_slots)
    return ScriptedClient(scheduled(Schedule.from_rows(BEST_SCHEDULE, 1, rows), spec), reward_of(config, spec))


# -- derived from another controller -----------------------------------------------------------------------------------


def source_of(controllers: Sequence[str], config: RunConfig) -> str | None:
    """The controller that the derived ones among these names start with: the trained one, else the first that grows.

    None where nothing is derived, or `static_final` has an architecture of its own. Raises ConfigError if none can
    grow.
    """
    derived = [name for name in controllers if name in DERIVED and not (name == STATIC and config.architecture)]
    if not derived:
        return None
    growing = [name for name in (TRAINED, *controllers) if name in controllers and name not in (*DERIVED, REFERENCE)]
    if not growing:
        raise ConfigError(
            f"{derived[0]} starts with what another controller has grown, and none is named; add a run directory, one "
            f"of {', '.join(name for name in BASELINES if name not in (STATIC, REFERENCE))}, or "
            f"{option('architecture')}."
        )
    return growing[0]


def derived(
    name: str, config: RunConfig, source: str | None, grown: Sequence[Architecture], params: np.ndarray
) -> Controller:
    """A derived baseline; `grown` and `params` [N] are the structures and the sizes of the networks of its source.

    Raises:
        ConfigError: `big_host` for hosts that cannot be widened.
    """
    if name == BIG_HOST:
        target = float(params.mean())
        host = _widened(config, target)
        note = f"{BIG_HOST}: {words(host)}, {host.num_params():,} parameters; {source} ends with {target:,.0f}."
        make = partial(baseline_of, REFERENCE, config)
        return Controller(name=name, make=make, identity={"host": repr(host)}, host=host, note=note)
    if name == STATIC and config.architecture:
        structures: Sequence[Architecture] = [Architecture.of_lines(config.architecture)]
        note = f"{STATIC}: each host has {', '.join(config.architecture)} from step 1."
    elif name == STATIC:
        structures, note = grown, f"{STATIC}: each host has the final architecture of {source} from step 1."
        if not any(architecture.slots for architecture in grown):
            note = f"{STATIC}: {source} ended without fossilized seeds, so this equals {REFERENCE}."
    else:
        (common, times), *_ = Counter(grown).most_common(1)  # of equally frequent ones the first
        structures = [common]
        note = f"{COMMON}: {', '.join(common.lines) or 'no seeds'} ({times} of {len(grown)} hosts of {source})."
    return replace(fixed(structures, config), name=name, note=note)


def _widened(config: RunConfig, target: float) -> HostSpec:
    """The host of the task as wide as brings its number of parameters closest to `target`."""
    host = task_by_name(config.task).host
    if isinstance(host, CNNHostSpec):
        wider: Callable[[int], HostSpec] = lambda k: replace(host, base=host.base + k)  # noqa: E731
    elif isinstance(host, TransformerHostSpec):
        wider = lambda k: replace(host, width=host.width + k * host.heads)  # noqa: E731
    else:
        raise ConfigError(f"the hosts of task {config.task!r} cannot be widened; leave {BIG_HOST} out.")
    k = 0
    while wider(k + 1).num_params() <= target:
        k += 1
    return min(wider(k), wider(k + 1), key=lambda spec: abs(spec.num_params() - target))


# -- trained -----------------------------------------------------------------------------------------------------------


def trained(run: Path, config: RunConfig, *, best: bool = False) -> Trained:
    """The controller of a run's newest intact (or best) checkpoint; raises CheckpointError if there is none.

    The task of `config` may be another one than that of the run.
    """
    if config.architecture:
        raise CheckpointError(
            f"{run} trained a fixed architecture and has no controller; its results are in {SUMMARY}."
        )
    folder = run / CHECKPOINTS
    if best and not (folder / BEST).exists():
        newest = f"the newest is {found[0].name}" if (found := checkpoints(folder)) else "it has no other either"
        raise CheckpointError(
            f"{run} has no best checkpoint ({newest}): it is chosen by a mean of ten rounds, so the first one follows "
            f"round 10; leave {option('best')} out, or train longer."
        )
    checkpoint, _, warnings = (load(folder / BEST), [], []) if best else load_newest(folder)
    if checkpoint is None:
        require_nothing_to_lose(run)
        raise CheckpointError(f"{run} has no checkpoint yet; continue it with {continuing(run)}.")
    state = below("policy", checkpoint.state)
    policy = {name: x for name, x in state.items() if name.startswith(POLICY_PARTS)}
    controller = Controller(
        name=TRAINED,
        make=partial(learned_client, policy, checkpoint.path, replace(config, compile="off")),
        identity={"policy": state_digest(policy)},
    )
    return Trained(controller, f"after {checkpoint.header.place}", warnings, checkpoint.header.total)
