"""The configuration of a run: a frozen, validated dataclass tree.

    preset  <  defaults of the task  <  file (TOML)  <  command line          later ones win, key by key

`config.toml` in a run directory holds the resolved tree and reproduces the run.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.errors import ConfigError
from esper.leyline.files import expanded
from esper.leyline.messages import EngineSpec
from esper.leyline.random import MAX_EPISODES
from esper.leyline.settings import AtLeast0, AtLeast1, Positive, check_fields
from esper.runs.assembly.values import Values, differences, flat, plain
from esper.simic.compilation import CompileChoice, is_compiled
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards import MODES, ModeTraits, RewardConfig, reward_traits
from esper.tasks.datasets import data_label
from esper.tasks.registry import TaskSpec, task_by_name
from esper.telemetry.run_directory import CHANGEABLE
from esper.telemetry.sinks import require_sinks
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import GovernorConfig

DATA_VARIABLE = "ESPER_DATA"
"""Environment variable with the default data folder."""


def data_folder(named: str) -> Path | None:
    """The named folder, else $ESPER_DATA, else None."""
    folder = named or os.environ.get(DATA_VARIABLE, "")
    return expanded(folder) if folder else None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run."""

    task: str
    preset: str
    rounds: Annotated[int, Field(ge=1, le=MAX_EPISODES)]
    """Total rounds, including those before a resume."""
    schedule_rounds: AtLeast1
    """Rounds over which coefficients are annealed; independent of `rounds`, so that extending a run later gives the
    same result as starting with more rounds."""
    num_envs: int
    """N, hosts that train in parallel."""
    episode_length: int
    """E, control steps (host epochs) per episode."""
    slots: tuple[str, ...]
    """Enabled slots, in action order."""
    batch_train: AtLeast0
    batch_val: AtLeast0
    seed: Annotated[int, Field(ge=0, le=2**62)] = 0
    """Evaluations add to it."""
    device: str = "auto"
    """"auto", "cpu", "cuda" or "cuda:N"."""
    data_dir: str = ""
    """Folder of the data files; unused by tasks with embedded data."""
    plugins: tuple[str, ...] = ()
    """Modules or .py files that register tasks, blueprints or rewards; imported before names are resolved."""
    custom_reward: str = ""
    """Name of a registered reward that replaces the built-in `reward.mode`; it receives the values in `reward`."""
    executor: Literal["auto", "native", "fused", "streamed"] = "streamed"
    """How hosts are run. All executors agree up to rounding; `config.toml` names the one that "auto" chose.

    "streamed": one host after another. The result of a host does not depend on the other hosts, bit for bit.
    "fused":    all hosts at once in stacked modules; faster on GPUs and for small images.
    "native":   C++ compiled for this CPU at the first run; several times faster, host results independent as above.
    "auto":     native on a CPU with a compiler if the network can run so, else chosen by image size."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of one operation of PyTorch; 0 is its default, of the cores that the process may use. Small networks
    are fastest with 1. Hosts that run natively use all of these cores."""
    blocks: AtLeast0 = 0
    """Groups of neighbouring hosts over which an update sums first, see `leyline/ranks.py`: so many ranks can share the
    hosts, and the result does not depend on how many do. 0: as many as there are ranks when the run begins."""
    rank_timeout: Annotated[float, Field(gt=0, le=1e7)] = 600.0
    """Seconds that a rank waits for the others at the end of a round, before the run ends with an error."""
    compile: CompileChoice = "auto"
    """Whether torch.compile is used for policy, built-in rewards and the phases of a control step. "auto" is "on" on
    CUDA in a run of at least 10,000 steps, else "off"; `config.toml` names the one chosen. It takes about a minute."""
    architecture: tuple[str, ...] = ()
    """Seeds that every host has from the first step, each as "slot blueprint ALGORITHM"; then nothing else grows, and
    no controller is trained."""
    policy: str = ""
    """File of a learned policy (or checkpoint) that training starts from, or "pretrained" for that of esper; its sizes
    replace those of `ppo`."""
    amp: Literal["off", "auto", "bf16", "fp16"] = "off"
    """Precision of host training: "off" is float32; "auto" is bf16 on a GPU that supports it, else "off"."""
    compute_budget: Positive | None = None
    """FLOPs of training that a host may spend in an episode, over those of a host without seeds. A host that cannot pay
    its next step is stopped: its episode ends with the step before. None means no limit."""
    time_limit: Literal["mode", "truncate", "terminate"] = "mode"
    """Whether the last step truncates or terminates the episode for GAE; "mode" leaves it to the reward mode."""
    checkpoint_every: AtLeast1 = 1
    """Rounds between checkpoints; the newest three are kept."""
    sinks: tuple[str, ...] = ()
    """Where metrics go besides the run directory: "tensorboard", "wandb", "trackio", or what a plugin registers."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    def __post_init__(self) -> None:
        check_fields(self)
        require_sinks(self.sinks)
        task = task_by_name(self.task)
        if (ordered := task.in_action_order(self.slots)) != self.slots:
            raise ConfigError(f"slots are {', '.join(self.slots)}; list each once, in the order {', '.join(ordered)}.")
        if task.host is not None and not (self.batch_train and self.batch_val):
            raise ConfigError(
                f"batch_train is {self.batch_train} and batch_val is {self.batch_val}; both must be at least 1."
            )
        if self.custom_reward in MODES:
            raise ConfigError(
                f"custom_reward is {self.custom_reward!r}, which is built in; set reward.mode to it and leave "
                "custom_reward out."
            )
        if self.reward_traits.fossils_as_players and not self.lifecycle.fossils_as_players:
            raise ConfigError(
                f"reward {self.reward_name!r} needs the contributions of fossilized seeds, which are not measured; "
                "set lifecycle.fossils_as_players = true, or leave it out."
            )
        if self.compute_budget is not None and self.reward_name in MODES and self.reward_name != "objective":
            raise ConfigError(
                f"compute_budget is {self.compute_budget:g}, but reward {self.reward_name!r} pays in the last step, "
                "which a stopped host does not have; use 'objective', or leave compute_budget out."
            )
        if self.num_envs % self.ppo.group_size:
            raise ConfigError(
                f"num_envs is {self.num_envs}, which ppo.group_size = {self.ppo.group_size} does not divide; every "
                "host of a round needs as many copies as the others."
            )
        if self.amp == "fp16" and self.device == "cpu":
            raise ConfigError("amp is 'fp16' on the CPU, which has no fast half precision; use 'off' or 'bf16'.")
        self.engine()
        self.optimizer.require_length(self.episode_length)

    @property
    def reward_name(self) -> str:
        """The built-in mode or registered reward."""
        return self.custom_reward or self.reward.mode

    @property
    def reward_traits(self) -> ModeTraits:
        """Requirements of the reward; raises RegistryError if it is not registered."""
        return reward_traits(self.reward_name)

    def engine(self, *, run_seed: int | None = None, num_envs: int | None = None) -> EngineConfig:
        """The engine configuration; evaluation overrides seed and number of hosts, and has no copies of hosts."""
        distinct = self.num_envs // self.ppo.group_size if num_envs is None and self.ppo.group_size > 1 else None
        limit = self.reward_traits.time_limit if self.time_limit == "mode" else self.time_limit
        return EngineConfig(
            run_seed=self.seed if run_seed is None else run_seed,
            num_envs=self.num_envs if num_envs is None else num_envs,
            distinct_hosts=distinct,
            episode_length=self.episode_length,
            slots=self.slots,
            compute_budget=self.compute_budget,
            time_limit=limit,
            executor=self.executor,
            amp=self.amp,
            lifecycle=self.lifecycle,
            governor=self.governor,
        )

    def is_compiled(self, device: torch.device) -> bool:
        """Whether `compile` means compiled functions in this run."""
        return is_compiled(self.compile, device, self.rounds * self.episode_length)

    def data_path(self) -> Path | None:
        """Data folder: `data_dir`, else $ESPER_DATA, else None."""
        return data_folder(self.data_dir)

    def task_spec(self) -> TaskSpec:
        """The task with the optimizer, length, batch sizes and slots of this run."""
        return dataclasses.replace(
            task_by_name(self.task),
            optimizer=self.optimizer,
            episode_length=self.episode_length,
            batch_train=self.batch_train,
            batch_val=self.batch_val,
            enabled=self.slots,
        )


def free_folder(config: RunConfig, kind: str) -> Path:
    """The first free name of runs/<task>-<kind>-s<seed>, ...-2, ...-3."""
    name = f"{config.task}-{kind}-s{config.seed}"
    candidates = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in count(1))
    return next(path for path in candidates if not path.exists())


def task_values(task: TaskSpec, reward: str) -> Values:
    """Default values of a task and of a registered reward."""
    values: Values = {
        "task": task.name,
        "episode_length": task.episode_length,
        "slots": list(task.enabled),
        "batch_train": task.batch_train,
        "batch_val": task.batch_val,
        "lifecycle": {
            "min_training_epochs": task.min_training_epochs,
            "fossils_as_players": reward_traits(reward).fossils_as_players,
        },
        "optimizer": plain(task.optimizer),
        "governor": {"guess": task.objective.blind_loss},
    }
    if reward == "loss" or reward not in MODES:
        values["reward"] = {
            "loss": {
                "baseline_loss": task.objective.blind_loss,
                "target_loss": task.target_loss,
                "typical_loss_delta_std": task.typical_loss_delta_std,
                "compute_rent_weight": task.rent_weight,
            }
        }
    return values


def run_shape(config: RunConfig, spec: EngineSpec, identity: Mapping[str, object]) -> dict[str, object]:
    """Properties that a checkpoint and the run that loads it must share; `identity` is that of the data set."""
    own = {name: getattr(config, name) for name in ("task", "seed", "slots", "num_envs", "episode_length")}
    policy = {name: getattr(config.ppo, name) for name in ("feature_width", "hidden_width", "num_layers")}
    others = {"data": without_paths(identity), "reward": config.reward_name, "blueprints": spec.blueprint_names}
    shape = own | others | policy
    plain: dict[str, object] = json.loads(json.dumps(shape, default=dict))  # tuples become lists, as in the header
    return plain


def data_of(shape: Mapping[str, object]) -> str:
    """The data set of a `run_shape` in words (`data_label`); "none" for scripted hosts."""
    identity = shape["data"]
    assert isinstance(identity, dict)
    return data_label(identity) if identity else "none"


def without_paths(identity: Mapping[str, object]) -> dict[str, object]:
    """The identity of a data set without paths: its folder may move."""
    return {name: value for name, value in identity.items() if not Path(str(value)).is_absolute()}


def fingerprint(config: RunConfig) -> str:
    """SHA-256 of all settings that affect the results of a run."""
    decisive = {name: value for name, value in plain(config).items() if name not in CHANGEABLE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def require_same_config(found: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ConfigError if the configuration differs from the one in a checkpoint (`found`)."""
    for name, (was, now) in differences(flat(found), flat(json.loads(json.dumps(plain(config))))).items():
        if name not in CHANGEABLE:
            raise ConfigError(
                f"{name} is {now} in config.toml, but the run was made with {was}; restore it, or start a new run for "
                "other settings."
            )
