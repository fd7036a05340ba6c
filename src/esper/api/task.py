"""A task of the user's: a network, its slots, and data."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, final

import torch
from torch import Tensor, nn

from esper.kasmina.hosts.module_host import ModuleHost, ModuleHostSpec
from esper.kasmina.hosts.module_probe import Model
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError
from esper.leyline.objective import Objective
from esper.tasks import registry
from esper.tasks.datasets import Augmentation, Dataset, Inputs
from esper.tasks.datasets.arrays import Examples, from_arrays, stored_pair
from esper.tasks.objectives import (
    Classification,
    Custom,
    MeanSquaredError,
    NextToken,
    PerExample,
    WithMetric,
    per_example,
)
from esper.tasks.registry import TaskSpec
from esper.tolaria.executors.scoring import check_scores

_LEARNING_RATES = {"adamw": 1e-3, "sgd": 0.02}
_EXAMPLES = 512
"""Of the training data, for the loss of a network that has learned nothing."""


@final
class Task:
    """What a controller learns to grow, or grows.

    Args:
        model: a class or function that gives a new network x -> outputs in every call; it is not edited.
        slots: paths of submodules, such as "layer2.1", at whose outputs seeds may grow.
        train: (x [n, ...], y [n, ...]) as tensors or arrays, or a map-style `torch.utils.data.Dataset`.
        val: what the controller sees. test: what is measured once, at the end. A tenth of `train` each if not given.
        batch: examples per batch of training; a last batch of a single example joins the one before it.
        name: for run directories and messages; that of the network if not given.
        loss: (outputs, targets) -> loss of each example [B]. If not given, the targets decide: classes [n] mean
            cross-entropy and accuracy, tokens [n, T] (-1 is padding) the same for each token, floats squared error, R².
        metric: (outputs, targets) -> points of each example [B], where 100 is perfect. If only `loss` is given: by how
            many percent it is below `blind_loss`.
        unit: name of the points.
        blind_loss: loss of guessing. If only `loss` is given: that of a new network.
        inputs: applied to every batch on the device, e.g. to make floats of bytes.
        augmentation: a random change of training examples (`esper.tasks.datasets.Augmentation`).
        classes: their names in order, where targets are classes; for exported networks.
        episode_length: control steps in which a network grows. batches_per_step: None means all training examples.
        optimizer: "adamw" or "sgd" with momentum, for network and seeds. lr: its learning rate; None means 1e-3, 0.02.
        min_training_epochs: control steps that a seed trains before it is blended in.
        seed: of the random split, where `val` or `test` is not given.

    Attributes:
        spec: the same as a specification, which `esper.register_task` gives a name on the command line.

    Raises:
        ConfigError, DataError: network, slots, data and loss do not fit together; the message says which, and the way
            out.
    """

    def __init__(
        self,
        model: Model,
        slots: Sequence[str],
        train: Examples,
        val: Examples | None = None,
        test: Examples | None = None,
        batch: int = 128,
        *,
        name: str | None = None,
        loss: PerExample | None = None,
        metric: PerExample | None = None,
        unit: str | None = None,
        blind_loss: float | None = None,
        inputs: Inputs | None = None,
        augmentation: Augmentation | None = None,
        classes: Sequence[str] = (),
        episode_length: int = 40,
        batches_per_step: int | None = None,
        optimizer: Literal["adamw", "sgd"] = "adamw",
        lr: float | None = None,
        min_training_epochs: int = 3,
        seed: int = 0,
    ) -> None:
        given = {
            part: _with_whole_numbers(*stored_pair(part, examples, inputs))
            for part, examples in (("train", train), ("val", val), ("test", test))
            if examples is not None
        }
        x, y = given["train"]
        sample = x[: min(len(x), _EXAMPLES)]
        sample = sample if inputs is None else inputs(sample)
        host = ModuleHostSpec.of(model, slots, sample[:8])
        network = deterministic_build(lambda: host.build(slots, sample[:1]))
        outputs = _outputs(network, sample, batch)
        if y.is_floating_point() and y.dim() == 1 and outputs.shape[1:] == (1,):  # one number, with and without an axis
            given = {part: (of_x, of_y[:, None]) for part, (of_x, of_y) in given.items()}
            y = given["train"][1]
        objective = _objective(outputs, y, loss, metric, unit, blind_loss)
        self.name = _name(name, network)
        dataset = from_arrays(
            self.name,
            given["train"],
            given.get("val"),
            given.get("test"),
            objective=objective,
            inputs=inputs,
            augmentation=augmentation,
            class_names=classes,
            run_seed=seed,
        )
        check_scores(objective, outputs[:4], dataset.train.y[:4])
        rate = _LEARNING_RATES[optimizer] if lr is None and optimizer in _LEARNING_RATES else lr or 0.0
        self.spec = TaskSpec(
            name=self.name,
            description=f"{len(dataset.train):,} examples of the user's.",
            family=host.family,
            host=host,
            load=_Given(dataset),
            enabled=tuple(slots),
            objective=objective,
            episode_length=episode_length,
            batch_train=batch,
            batch_val=max(batch, min(_EXAMPLES, len(dataset.val))),
            batches_per_step=batches_per_step,
            optimizer=OptimizerSpec(kind=optimizer, host_lr=rate, seed_lr=rate),
            min_training_epochs=min_training_epochs,
            target_loss=0.1 * objective.blind_loss,
            typical_loss_delta_std=0.05 * objective.blind_loss,
        )

    def __repr__(self) -> str:
        host, objective = self.spec.host, self.spec.objective
        assert host is not None
        return (
            f"Task({self.name!r}: {host.num_params():,} parameters, slots {', '.join(self.spec.enabled)}, "
            f"{objective.unit})"
        )


def register_task(task: Task | TaskSpec) -> Task | TaskSpec:
    """Give a task its name for commands and `esper.train`; raises RegistryError if the name is taken."""
    registry.register_task(task.spec if isinstance(task, Task) else task)
    return task


@final
@dataclass(frozen=True, eq=False)
class _Given:
    """A loader for data that are there."""

    dataset: Dataset

    def __call__(self, data_dir: Path | None, run_seed: int) -> Dataset:
        """The data, whatever folder and seed."""
        return self.dataset


def _with_whole_numbers(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Targets as a data set has them, float32 or int64."""
    return x, y if y.is_floating_point() else y.long()


def _name(given: str | None, network: nn.Module) -> str:
    name = type(cast(ModuleHost, network).network).__name__.lower() if given is None else given
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"the name of the task is {name!r}; use letters, digits, '_', '-' and '.', as in a file name."
        )
    return name


@torch.no_grad()
def _outputs(network: nn.Module, x: Tensor, batch: int) -> Tensor:
    """Outputs of a new network."""
    network.eval()
    return torch.cat([network(part, lambda slot_id, h: h) for part in x.split(max(batch, 1))])


def _objective(
    outputs: Tensor,
    y: Tensor,
    loss: PerExample | None,
    metric: PerExample | None,
    unit: str | None,
    blind_loss: float | None,
) -> Objective:
    """The objective of outputs [n, ...] of a new network and targets [N >= n, ...]."""
    if loss is None:
        if blind_loss is not None or (unit is not None and metric is None):
            raise ConfigError("blind_loss needs a loss, and unit a loss or a metric; give it, or leave them out.")
        objective = _by_targets(outputs.shape[1:], y)
        return objective if metric is None else WithMetric(objective=objective, metric=metric, unit=unit or "score")
    targets = y[: len(outputs)]
    losses, first = (per_example("loss", loss, outputs[:n], targets[:n]) for n in (len(outputs), 1))
    if not torch.allclose(losses[:1], first, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ConfigError(
            "the loss of one example depends on the other examples of the batch; compute it for each example alone."
        )
    default = "loss reduction" if metric is None else "score"
    blind = float(losses.mean()) if blind_loss is None else blind_loss
    return Custom(loss=loss, metric=metric, blind_loss=blind, unit=unit or default)


def _by_targets(outputs: tuple[int, ...], y: Tensor) -> Objective:
    """The objective for outputs of this shape per example."""
    shape = tuple(y.shape[1:])
    if y.is_floating_point():
        if shape == outputs:
            return MeanSquaredError(variance=float(y.double().var(dim=0, correction=0).mean()))
    elif shape == () and len(outputs) == 1 and outputs[0] > 1:
        return Classification(outputs[0])
    elif len(shape) == 1 and len(outputs) == 2 and outputs[0] == shape[0]:
        return NextToken(outputs[1])
    raise ConfigError(
        f"targets {list(shape)} of {y.dtype} for each example do not fit the outputs {list(outputs)} of the network; "
        "give classes (one integer each) for outputs [classes], tokens [T] for [T, vocabulary], floats of the shape of "
        "the outputs, or a loss."
    )
