"""Tasks by name. A task is plain data: a host, a data set and default settings."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.host import HostSpec, enabled_points
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError, RegistryError, nearest
from esper.leyline.lifecycle import HostFamily
from esper.leyline.messages import Objective
from esper.leyline.random import MAX_EPISODE_LENGTH
from esper.leyline.settings import AtLeast1, check_fields
from esper.tasks.datasets import Dataset, LastBatch, Source
from esper.tasks.instances import InstanceDistribution
from esper.tasks.losses import Classification
from esper.tasks.null import NullSpec

DatasetLoader = Callable[[Path | None, int], Dataset]
"""(data folder, run seed) -> data set."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task. A trained task has `host` and `load`; a scripted one has `script` instead.

    Attributes:
        name: name on the command line. description: one sentence for `esper tasks`.
        family: family of the host; decides which blueprints fit.
        host: architecture of the host, or None. script: constants of the scripted dynamics, or None.
        load: loads the data set, or None. source: the files that `load` reads from the data folder, or None.
        enabled: slots that a run uses by default, in action order. proposed: whether esper chose them.
        objective: what the hosts are trained for and judged by.
        episode_length: E, control steps. batch_train, batch_val: examples per batch (0 without data).
        batches_per_step: batches of training in one control step, which continue through the permutation of the
            examples; None for the whole split. last_batch: of the whole split, if it is not full. smallest_batch: to
            which growth may halve `batch_train`.
        optimizer: how hosts and seeds are trained.
        instances: what makes hosts differ in their data and learning rate; None for equal ones.
        best_schedule: a policy file of `esper search`, the constant schedule to beat; None if none was searched.
        plans: a file of `esper search --portfolio`, the portfolios and halvings to beat; None if none was searched.
        min_training_epochs: M, epochs that a seed trains before its gate may open.
        target_loss, typical_loss_delta_std, rent_weight: constants of the loss reward, in the unit of the loss.
    """

    name: str
    description: str
    family: HostFamily
    enabled: tuple[str, ...]
    episode_length: Annotated[int, Field(ge=1, le=MAX_EPISODE_LENGTH)]
    min_training_epochs: AtLeast1
    objective: Objective
    proposed: bool = False
    host: HostSpec | None = None
    script: NullSpec | None = None
    load: DatasetLoader | None = None
    source: Source | None = None
    batch_train: int = 0
    batch_val: int = 0
    batches_per_step: AtLeast1 | None = None
    last_batch: LastBatch = "merge"
    smallest_batch: AtLeast1 = 8
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    instances: InstanceDistribution | None = None
    best_schedule: Path | None = None
    plans: Path | None = None
    target_loss: float = 0.3
    typical_loss_delta_std: float = 0.05
    rent_weight: float = 0.05

    def __post_init__(self) -> None:
        if (self.host is None) == (self.script is None) or (self.host is None) != (self.load is None):
            raise ConfigError(f"task {self.name!r} needs either a host and a loader, or a script.")
        check_fields(self, "task")
        self.optimizer.require_length(self.episode_length)
        if self.host is not None:
            for name in ("batch_train", "batch_val"):
                if getattr(self, name) < 1:
                    raise ConfigError(f"task.{name} is {getattr(self, name)}; it must be at least 1.")
        if self.instances is not None and self.batches_per_step is None:
            raise ConfigError(
                f"the hosts of task {self.name!r} have training splits of different sizes; set batches_per_step."
            )
        if isinstance(self.host, CNNHostSpec) and isinstance(self.objective, Classification):
            logits, classes = self.host.classes, self.objective.num_classes
            if logits != classes:  # of other pairs when the engine is built
                raise ConfigError(
                    f"the host of task {self.name!r} has {logits} logits but the task has {classes} classes; make "
                    "them equal."
                )
        if self.enabled != (ordered := self.in_action_order(self.enabled)):
            raise ConfigError(
                f"slots {', '.join(self.enabled)} are not in action order; list them as {', '.join(ordered)}."
            )

    @property
    def proposal(self) -> str | None:
        """The slots, where they were proposed, and how others are chosen."""
        return f"slots (proposed): {', '.join(self.enabled)}; name others with slots=" if self.proposed else None

    @property
    def offered(self) -> tuple[str, ...]:
        """All slots that a run can enable, in action order."""
        if self.host is not None:
            return tuple(point.slot_id for point in self.host.points())
        assert self.script is not None
        return tuple(f"r0c{i}" for i in range(self.script.max_slots))

    def in_action_order(self, slots: Sequence[str]) -> tuple[str, ...]:
        """`slots` once each, in action order; raises ConfigError if there are none or the task does not offer one."""
        if self.host is not None:
            return tuple(point.slot_id for point in enabled_points(self.host.points(), slots))
        for slot_id in slots:
            if slot_id not in self.offered:
                raise ConfigError(f"task {self.name!r} has no slot {slot_id!r}; {nearest(slot_id, self.offered)}")
        if not slots:
            raise ConfigError(f"task {self.name!r} enables no slot; choose at least one of {', '.join(self.offered)}.")
        return tuple(slot_id for slot_id in self.offered if slot_id in slots)


_TASKS: dict[str, TaskSpec] = {}


def register_task(task: TaskSpec) -> TaskSpec:
    """Add `task` under its name; raises RegistryError if the name is taken."""
    if task.name in _TASKS:
        raise RegistryError(f"a task {task.name!r} is registered already; choose another name.")
    _TASKS[task.name] = task
    return task


@contextmanager
def registered(task: TaskSpec) -> Iterator[None]:
    """`task` has its name until the end of the block; raises RegistryError if another task has it."""
    if _TASKS.get(task.name) is task:
        yield
        return
    register_task(task)
    try:
        yield
    finally:
        del _TASKS[task.name]


def task_by_name(name: str) -> TaskSpec:
    """The registered task; raises RegistryError with the nearest name if there is none."""
    if name not in _TASKS:
        in_file = "a task in a file is named FILE.py:NAME; " * (".py" in name or ":" in name)
        raise RegistryError(f"unknown task {name!r}; {in_file}{nearest(name, _TASKS)}")
    return _TASKS[name]


def task_names() -> tuple[str, ...]:
    """All names, in order of registration."""
    return tuple(_TASKS)
