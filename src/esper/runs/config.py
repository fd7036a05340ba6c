"""The configuration of a run: one frozen tree, complete and checked before anything is built.

    preset  <  task's own defaults  <  file (TOML)  <  command line          the later one wins, key by key

Unknown keys and impossible combinations are refused with the nearest valid name. `config.toml` of a run directory is
the resolved tree: reading it gives the same run again.
"""

import dataclasses
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from esper.kasmina.hosts.slots import enabled_points
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.config import LifecycleConfig
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.random import MAX_EPISODES
from esper.runs.values import Values, plain
from esper.simic.agent.config import PPOConfig
from esper.simic.compilation import CompileChoice
from esper.simic.rewards import MODES, ModeTraits, RewardConfig, reward_traits
from esper.tasks.registry import TaskSpec, task_by_name
from esper.tolaria.config import EngineConfig
from esper.tolaria.governor import GovernorConfig

DATA_VARIABLE = "ESPER_DATA"
"""Environment variable that names the data folder where nothing else does."""


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
    plugins: tuple[str, ...] = ()
    """Modules or .py files that register tasks, blueprints or rewards; imported before their names are looked up."""
    custom_reward: str = ""
    """Name of a registered reward that pays instead of the formula of `reward.mode`; it is handed the numbers in
    `reward`."""
    executor: Literal["auto", "native", "fused", "streamed"] = "streamed"
    """How hosts are run: "streamed" one after another, so that a host's numbers do not depend to the last bit on how
    many others there are; "fused" all at once, equal up to rounding and faster on small images; "native" by C++ that is
    compiled for this processor in the first run, several times faster on a CPU, also equal up to rounding, and like
    "streamed" for the last bit; "auto" native on a CPU where there is a compiler and features fit its cache, else by
    image size. The presets say "auto"; `config.toml` of a run names the one that was taken."""
    graph: Literal["dynamic", "static"] = "dynamic"
    """"dynamic" runs what grows, and the host reads once a step what that is; "static" runs everything that could grow,
    all hosts at once, under masks: nothing is read between the steps of an episode, and records arrive at its end. It
    needs `experimental`."""
    workers: int = 1
    """Processes that share the hosts of a CPU, at most, this one included. A host's numbers depend on it up to
    rounding under the fused executor, not at all under the others. `config.toml` names how many were taken."""
    threads: int = 0
    """Threads of one operation on the CPU; 0 is PyTorch's own choice, or with several workers the cores that each of
    them has. Small networks are fastest with 1."""
    compile: CompileChoice = "auto"
    """How the policy, the reward and the phases of a control step are run: "off" operator by operator; "on" compiled by
    PyTorch, half a minute for the first run of its kind on a machine; "auto" is "on" on CUDA and "off" on a CPU. A
    reward of one's own stays eager. `config.toml` of a run names what was taken."""
    capture: Literal["off", "on"] = "off"
    """"on" records policy step, reward kernel and, with executor "fused", the training of a batch as CUDA graphs and
    replays them; only on CUDA."""
    experimental: bool = False
    """Allows what has not been proven on a GPU: graph = "static" and capture = "on"."""
    amp: Literal["off", "auto", "bf16", "fp16"] = "off"
    """Precision of host training: "off" is float32; "auto" is bf16 on a GPU that supports it, else "off". `config.toml`
    names what was taken."""
    time_limit: Literal["mode", "truncate", "terminate"] = "mode"
    """What the last step of an episode is to the learner; "mode" is what the reward mode asks for."""
    checkpoint_every: int = 1
    """Rounds between two checkpoints; the last three are kept."""
    record_steps: bool = False
    """Whether every step of every host is a line of steps.jsonl: measurements, decision, reward."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    governor: GovernorConfig = field(default_factory=GovernorConfig)

    def __post_init__(self) -> None:
        if self.threads < 0:
            raise ConfigError(f"threads is {self.threads}; use 0 for PyTorch's own choice.")
        for name in ("rounds", "schedule_rounds", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.rounds > MAX_EPISODES:
            raise ConfigError(f"rounds is {self.rounds}; it can be at most {MAX_EPISODES}.")
        task = task_by_name(self.task)
        self._check_slots(task)
        self._check_batches(task)
        self._check_reward()
        self._check_experimental(task)
        if self.amp == "fp16" and self.device == "cpu":
            raise ConfigError("amp is 'fp16' on the CPU, which has no fast half precision; use 'off' or 'bf16'.")
        self.engine()

    def _check_experimental(self, task: TaskSpec) -> None:
        asked = [f"{name} is {value!r}" for name, value in (("graph", "static"), ("capture", "on"))
                 if getattr(self, name) == value]  # fmt: skip
        if asked and not self.experimental:
            raise ConfigError(
                f"{asked[0]}, which has not been proven on a GPU; set experimental = true to try it, or leave it out."
            )
        if self.capture == "on" and self.device == "cpu":
            raise ConfigError("capture is 'on' on the CPU, which has no CUDA graphs; leave capture out.")
        if self.graph == "static" and task.host is None:
            raise ConfigError(
                f"graph is 'static', but task {self.task!r} runs no networks that could be selected by masks; leave "
                "graph out."
            )

    def _check_batches(self, task: TaskSpec) -> None:
        for name in ("batch_train", "batch_val"):
            size, least = getattr(self, name), 0 if task.host is None else 1
            if size < least:
                raise ConfigError(f"{name} is {size}; it must be at least {least}.")

    def _check_reward(self) -> None:
        if self.custom_reward in MODES:
            raise ConfigError(
                f"custom_reward is {self.custom_reward!r}, which is built in; set reward.mode to it and leave "
                "custom_reward out."
            )
        if self.reward_traits.fossils_as_players and not self.lifecycle.fossils_as_players:
            raise ConfigError(
                f"reward {self.reward_name!r} pays by what fossilized seeds contribute, which is not measured; "
                "set lifecycle.fossils_as_players = true, or leave it out."
            )
        if self.ppo.gamma != self.reward.gamma:
            raise ConfigError(
                f"ppo.gamma is {self.ppo.gamma} but the reward's shaping uses {self.reward.gamma}; "
                "they must be equal, or shaping would pay: leave ppo.gamma out."
            )

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

    @property
    def reward_name(self) -> str:
        """Who pays: a built-in mode or a registered reward."""
        return self.custom_reward or self.reward.mode

    @property
    def reward_traits(self) -> ModeTraits:
        """What the reward asks of the rest; raises RegistryError where nobody registered it."""
        return reward_traits(self.reward_name)

    def engine(self, *, run_seed: int | None = None, num_envs: int | None = None) -> EngineConfig:
        """The engine's part; evaluation asks for other seeds and numbers of hosts."""
        limit = self.reward_traits.time_limit if self.time_limit == "mode" else self.time_limit
        return EngineConfig(
            run_seed=self.seed if run_seed is None else run_seed,
            num_envs=self.num_envs if num_envs is None else num_envs,
            episode_length=self.episode_length,
            slots=self.slots,
            time_limit=limit,
            executor=self.executor,
            workers=self.workers,
            graph=self.graph,
            amp=self.amp,
            capture=self.capture,
            lifecycle=self.lifecycle,
            governor=self.governor,
        )

    def data_path(self) -> Path | None:
        """Folder of the task's files: `data_dir`, else the environment's ESPER_DATA, else None."""
        told = self.data_dir or os.environ.get(DATA_VARIABLE, "")
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


def task_values(task: TaskSpec, reward: str) -> Values:
    """What a task and a reward (a registered name) decide unless told otherwise."""
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
        "governor": {"guess": math.log(task.num_classes)},
    }
    if reward == "loss" or reward not in MODES:
        values["reward"] = {
            "loss": {
                "baseline_loss": task.baseline_loss,
                "target_loss": task.target_loss,
                "typical_loss_delta_std": task.typical_loss_delta_std,
                "compute_rent_weight": task.rent_weight,
            }
        }
    return values
