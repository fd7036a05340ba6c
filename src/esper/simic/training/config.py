"""The configuration of a run: one frozen tree, complete and checked before anything is built.

    preset  <  task's own defaults  <  file (TOML)  <  command line          the later one wins, key by key

Unknown keys and impossible combinations are refused with the nearest valid name. `config.toml` of a run directory is
the resolved tree: reading it gives the same run again.
"""

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from esper.kasmina.config import LifecycleConfig
from esper.kasmina.hosts.slots import enabled_points
from esper.kasmina.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError, nearest
from esper.simic.agent.config import PPOConfig
from esper.simic.rewards.config import MODES, RewardConfig
from esper.tasks.registry import TaskSpec, task_by_name
from esper.tolaria.config import EngineConfig
from esper.tolaria.governor import GovernorConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides a run."""

    task: str
    preset: str
    rounds: int
    """Rounds in all; a resumed run counts those it has done already."""
    schedule_rounds: int
    """Rounds over which coefficients are annealed; apart from `rounds`, so that a run which is extended later equals
    one that was that long from the start."""
    num_envs: int
    """N, hosts that train in parallel."""
    episode_length: int
    """E, control steps (host epochs) per episode."""
    slots: tuple[str, ...]
    """Enabled slots."""
    batch_train: int
    batch_val: int
    seed: int = 0
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:N"."""
    data_dir: str = ""
    """Folder of the task's files; not needed by tasks with embedded data."""
    amp: Literal["off", "auto", "bf16", "fp16"] = "off"
    time_limit: Literal["mode", "truncate", "terminate"] = "mode"
    """What the last step of an episode is to the learner; "mode" is what the reward mode asks for."""
    checkpoint_every: int = 1
    """Rounds between two checkpoints; the last three are kept."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    def __post_init__(self) -> None:
        for name in ("rounds", "schedule_rounds", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        task = task_by_name(self.task)
        self._check_slots(task)
        if self.ppo.gamma != self.reward.gamma:
            raise ConfigError(
                f"ppo.gamma is {self.ppo.gamma} but the reward's shaping uses {self.reward.gamma}; "
                "they must be equal, or shaping would pay: leave ppo.gamma out."
            )
        traits = MODES[self.reward.mode]
        if traits.fossils_as_players and not self.lifecycle.fossils_as_players:
            raise ConfigError(
                f"reward mode {self.reward.mode!r} pays by what fossilized seeds contribute, which is not measured; "
                "set lifecycle.fossils_as_players = true, or leave it out."
            )
        if self.amp == "fp16" and self.device == "cpu":
            raise ConfigError("amp is 'fp16' on the CPU, which has no fast half precision; use 'off' or 'bf16'.")
        self.engine()

    def _check_slots(self, task: TaskSpec) -> None:
        if task.host is not None:
            ordered = tuple(p.slot_id for p in enabled_points(task.host.points(), self.slots))
        else:
            for slot in self.slots:
                if slot not in task.offered:
                    raise ConfigError(f"task {task.name!r} has no slot {slot!r}; {nearest(slot, task.offered)}")
            ordered = tuple(slot for slot in task.offered if slot in self.slots)
        if ordered != self.slots:
            raise ConfigError(f"slots are {', '.join(self.slots)}; list each once, in the order {', '.join(ordered)}.")

    def engine(self, *, run_seed: int | None = None, num_envs: int | None = None) -> EngineConfig:
        """The engine's part; evaluation asks for other seeds and numbers of hosts."""
        limit = MODES[self.reward.mode].time_limit if self.time_limit == "mode" else self.time_limit
        return EngineConfig(
            run_seed=self.seed if run_seed is None else run_seed,
            num_envs=self.num_envs if num_envs is None else num_envs,
            episode_length=self.episode_length,
            slots=self.slots,
            time_limit=limit,
            amp=self.amp,
            lifecycle=self.lifecycle,
            governor=self.governor,
        )

    def data_path(self) -> Path | None:
        """Folder of the task's files: `data_dir`, else the environment's ESPER_DATA, else None."""
        told = self.data_dir or os.environ.get("ESPER_DATA", "")
        return Path(told).expanduser() if told else None

    def task_spec(self) -> TaskSpec:
        """The task with this run's optimizers and batches."""
        return dataclasses.replace(
            task_by_name(self.task),
            optimizer=self.optimizer,
            batch_train=self.batch_train,
            batch_val=self.batch_val,
            enabled=self.slots,
        )


def task_values(task: TaskSpec, reward_mode: str) -> dict[str, Any]:
    """What a task and a reward mode decide unless told otherwise."""
    values: dict[str, Any] = {
        "task": task.name,
        "episode_length": task.episode_length,
        "slots": task.enabled,
        "batch_train": task.batch_train,
        "batch_val": task.batch_val,
        "lifecycle": {
            "min_training_epochs": task.min_training_epochs,
            "fossils_as_players": reward_mode in MODES and MODES[reward_mode].fossils_as_players,
        },
        "optimizer": plain(task.optimizer),
        "governor": {"guess": math.log(task.num_classes)},
    }
    if reward_mode == "loss":
        values["reward"] = {
            "loss": {
                "baseline_loss": task.baseline_loss,
                "target_loss": task.target_loss,
                "typical_loss_delta_std": task.typical_loss_delta_std,
                "compute_rent_weight": task.rent_weight,
            }
        }
    return values


def plain(config: object) -> dict[str, Any]:
    """A configuration as nested dictionaries of plain values, without the keys whose value is None."""
    tree: dict[str, Any] = {}
    for f in fields(config):  # type: ignore[arg-type]
        value = getattr(config, f.name)
        if value is not None:
            tree[f.name] = plain(value) if is_dataclass(value) else list(value) if isinstance(value, tuple) else value
    return tree


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` in their place, table by table."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a configuration file; raises ConfigError where it is missing or no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"the configuration file {path} cannot be read ({error.strerror}); check the path."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not valid TOML: {error}. Mend that line.") from error


def validated(values: Mapping[str, Any]) -> RunConfig:
    """A complete configuration; raises ConfigError that names the first wrong key."""
    _refuse_unknown(values, RunConfig, "")
    try:
        return TypeAdapter(RunConfig).validate_python(dict(values))
    except ValidationError as error:
        raise ConfigError(_first_problem(error)) from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors()[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return str(cause)
    name = ".".join(str(part) for part in problem["loc"])
    return f"{name} is {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}. Correct {name}."


def _refuse_unknown(values: Mapping[str, Any], cls: type, path: str) -> None:
    known = {f.name: f for f in fields(cls)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"unknown key {path}{key}; {nearest(key, known)}")
        nested = _nested_type(known[key])
        if nested is not None:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{path}{key} is {value!r}, but it is a table; write its keys under [{path}{key}].")
            _refuse_unknown(value, nested, f"{path}{key}.")


def _nested_type(f: "dataclasses.Field[Any]") -> type | None:
    return f.type if isinstance(f.type, type) and is_dataclass(f.type) else None
