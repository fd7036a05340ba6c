"""A task of the user's: network, data, loss and optimizer, checked together and made a `TaskSpec`."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from esper.api import checked
from esper.kasmina.hosts.host import Interface, as_floats, near
from esper.kasmina.hosts.module_host import ModuleHost
from esper.kasmina.hosts.places import host_of
from esper.kasmina.hosts.weights import Loaded, Model, Weights, started
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import OptimizerSpec, ScheduleName
from esper.kasmina.parameters.population import check_smallest_batch
from esper.leyline.errors import ConfigError, DataError, in_words
from esper.leyline.messages import Objective
from esper.leyline.random import seeded_generators
from esper.leyline.structure import Structure, described, flatten
from esper.tasks import registry
from esper.tasks.datasets import Augmentation, Dataset, Inputs, LastBatch, applied, augmented, inputs_of
from esper.tasks.datasets.arrays import Examples, Stored, StructuredInputs, check_finite, from_arrays, stored
from esper.tasks.losses import (
    BALANCED,
    LEAST,
    MOST,
    BalancedAccuracy,
    Classification,
    Custom,
    MeanSquaredError,
    NextToken,
    OfStructures,
    PerExample,
    WithMetric,
    per_example,
    without_mean,
)
from esper.tasks.registry import TaskSpec
from esper.tolaria.executors.choice import training_bounds
from esper.tolaria.executors.network import check_scores

AnyOptimizer: TypeAlias = str | type[torch.optim.Optimizer] | partial[torch.optim.Optimizer]
"""A name, a class of `torch.optim`, or `functools.partial` of one with some values."""
_CLASSES: Mapping[Literal["adamw", "adam", "sgd"], type[torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD
}  # fmt: skip
_OF_A_NAME: Mapping[str, Mapping[str, float]] = {"sgd": {"lr": 0.02, "momentum": 0.9}}
"""Where the defaults of a name are not those of the class."""
_NUMBERS = ("lr", "momentum", "weight_decay", "eps")
_UNUSED = {"momentum": 0.0, "eps": 1e-8, "betas": (0.0, 0.0)}


def optimizer_of(optimizer: AnyOptimizer, given: Mapping[str, Any], clip: float | None) -> OptimizerSpec:
    """The specification that trains a host as this optimizer does: all parameters are decayed.

    Values that are `given` by the names of `torch.optim` replace those of `optimizer`, unless they are None.

    Raises:
        ConfigError: an optimizer or a value that cannot be had exactly.
    """
    name = optimizer if isinstance(optimizer, str) else None
    found, own = (optimizer.func, optimizer.keywords) if isinstance(optimizer, partial) else (optimizer, {})
    kind = next((known for known, of in _CLASSES.items() if name == known or found is of), None)
    if kind is None or (isinstance(optimizer, partial) and optimizer.args):
        raise ConfigError(
            f"optimizer is {optimizer!r}; give one of {', '.join(map(repr, _CLASSES))}, the class in torch.optim, or "
            "functools.partial of the class with values by name."
        )
    parameters = inspect.signature(_CLASSES[kind]).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    changed = {**own, **{key: value for key, value in given.items() if value is not None}}
    for key, value in changed.items():
        if key not in defaults:
            raise ConfigError(f"{key} is given, but {kind} has no {key}; leave it out, or use another optimizer.")
        if key not in (*_NUMBERS, "betas") and value != defaults[key]:
            raise ConfigError(f"{kind} with {key}={value!r} is not available here; leave {key} out.")
    values = {**_UNUSED, **defaults, **_OF_A_NAME.get(name or "", {}), **changed}
    lr, momentum, decay, eps = (_number(key, values[key]) for key in _NUMBERS)
    if not lr > 0.0:
        raise ConfigError(f"lr is {lr}; it must be above 0.")
    betas = values["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigError(f"betas is {betas!r}; give two numbers, such as (0.9, 0.999).")
    return OptimizerSpec(
        kind=kind,
        host_lr=lr,
        seed_lr=lr,
        momentum=momentum,
        sgd_weight_decay=decay if kind == "sgd" else 0.0,
        betas=(_number("betas[0]", betas[0]), _number("betas[1]", betas[1])),
        eps=eps,
        adamw_weight_decay=0.0 if kind == "sgd" else decay,
        decay_vectors=True,
        grad_clip=math.inf if clip is None else _number("clip", clip),
    )


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} of the optimizer is {value!r}; it must be a number.")
    return float(value)


_FAR = 30.0
"""Mean absolute value of targets that a network reaches in some hundred steps."""
_WILD = 1e3
"""How many times the mean absolute target, or 1, the outputs of a new network are where its inputs are not scaled."""
_TRIED = 8
"""Examples whose loss and metric are computed alone and beside others."""
_EXAMPLES = 512
"""Of the training data, for the loss of a network that has learned nothing."""


@final
class Task:
    """What a controller learns to grow, or grows.

    Args:
        model: a class or function that gives a new network in every call; it is not edited. The network is called with
            x; with a, b where x is a tuple; by name where x is a dictionary. Or a network: every host starts as a copy
            of what it is now.
        slots: paths of submodules, such as "layer2.1", at whose outputs seeds may grow; "layer?.*" stands for all that
            match it part by part and can hold a seed. None: places are proposed, which `repr` names.
        train: (x [n, ...], y [n, ...]) as tensors or arrays, or a map-style `torch.utils.data.Dataset`, or a
            `DataLoader` of one, whose data set and `collate_fn` are taken. x may be a tuple or a dictionary of tensors;
            y too, with a `loss`.
        val: what the controller sees. test: what is measured once, at the end. A tenth of `train` each if not given.
        batch: examples per batch of training.
        weights: with which every network starts, and buffers: a state dict, or a file of one (torch.save, safetensors),
            of which nothing is executed. None: what `model` gives.
        name: for run directories and messages; that of the network if not given.
        outputs: what counts of the network's result, e.g. `lambda out: out.logits`. All of it if not given, which must
            be one tensor, or tensors of floats [B, ...] that a `loss` takes as the network returns them.
        loss: (outputs, targets) -> loss of each example [B]. If not given, the targets decide: classes [n] mean
            cross-entropy and accuracy, tokens [n, T] (-1 is padding) the same for each token, floats squared error, R².
            One-hot targets of the shape of the outputs mean classes or tokens, also for `metric`.
        metric: (outputs, targets) -> points of each example [B], where 100 is perfect; or bools, whether each is
            right; or "balanced accuracy", the mean over the classes. If only `loss` is given: by how many percent it is
            below `blind_loss`.
        unit: name of the points.
        blind_loss: loss of guessing. If only `loss` is given: that of a new network, without `weights`; give it where
            `model` is a trained network.
        inputs: applied to every batch on the device, e.g. to make floats of bytes.
        augmentation: a random change of training examples: a function of a batch x [B, ...] that draws from the
            global generators, as `torchvision.transforms.v2` do, or an `esper.tasks.datasets.Augmentation`. A function
            of two arguments gets and gives (x, y), e.g. to flip a mask with its picture.
        classes: their names in order, where targets are classes; for exported networks.
        episode_length: control steps in which a network grows. batches_per_step: None means all training examples.
        last_batch: where it is not full, "merge" joins one of a single example to the batch before it; "drop" leaves it
            out, as DataLoader(drop_last=True) does; "keep" trains on it as it is. smallest_batch: to which `esper.grow`
            may halve `batch` where its budget holds few; give `batch` to keep it.
        optimizer: "adamw", "adam" or "sgd", a class of these in `torch.optim`, or `functools.partial` of one with its
            values; for network and seeds. lr, weight_decay, betas, momentum: its values; None means those of
            `torch.optim`, and for the name "sgd" lr 0.02 and momentum 0.9. Seeds are not decayed.
        schedule: how the learning rate falls over the episode, by one factor per control step: "constant", "cosine" or
            "linear"; that of a seed falls from its birth on. warmup: control steps in which it rises to `lr` first.
        label_smoothing: of classes and tokens, in training, as in `torch.nn.functional.cross_entropy`.
        clip: limit of the L2 norm of the gradient of the network, and of each seed; None for no clipping.
        min_training_epochs: control steps that a seed trains before it is blended in.
        seed: of the random split, where `val` or `test` is not given.

    Attributes:
        spec: the same as a specification, which `esper.register_task` gives a name on the command line.

    Raises:
        ConfigError, DataError: network, slots, data and loss do not fit together; the message says which, and the way
            out.
    """

    @checked
    def __init__(
        self,
        model: Model | nn.Module,
        slots: Sequence[str] | None = None,
        train: Examples | None = None,
        val: Examples | None = None,
        test: Examples | None = None,
        batch: int = 128,
        *,
        weights: Weights | None = None,
        name: str | None = None,
        loss: PerExample | None = None,
        metric: PerExample | Literal["balanced accuracy"] | None = None,
        unit: str | None = None,
        blind_loss: float | None = None,
        outputs: Callable[[Any], Any] | None = None,
        inputs: Inputs | None = None,
        augmentation: Augmentation | Callable[..., Any] | None = None,
        classes: Sequence[str] | np.ndarray | None = None,
        episode_length: int = 40,
        batches_per_step: int | None = None,
        last_batch: LastBatch = "merge",
        smallest_batch: int = 8,
        optimizer: AnyOptimizer = "adamw",
        lr: float | None = None,
        weight_decay: float | None = None,
        betas: tuple[float, float] | None = None,
        momentum: float | None = None,
        schedule: ScheduleName = "constant",
        warmup: int = 0,
        label_smoothing: float = 0.0,
        clip: float | None = None,
        min_training_epochs: int = 3,
        seed: int = 0,
    ) -> None:
        if batch < 1:
            raise ConfigError(f"batch is {batch}; it must be at least 1.")
        if train is None:
            raise DataError("train is missing; give the examples as (x, y), a data set or a DataLoader.")
        values = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "momentum": momentum}
        trained_by = replace(optimizer_of(optimizer, values, clip), schedule=schedule, warmup=warmup)
        given = _stored({"train": train, "val": val, "test": test}, inputs, batch)
        first = given["train"]
        prepare, example, sample = _prepared(inputs, first)
        start, digest = started(model, weights)
        interface = Interface(inputs=example, outputs=outputs, packs=loss is not None)
        host = host_of(start, slots, sample[:8], interface=interface)
        enabled = tuple(point.slot_id for point in host.points())
        drawn = replace(host, model=start.model) if isinstance(start, Loaded) else host  # guessing is not trained
        network = cast(ModuleHost, deterministic_build(lambda: drawn.build(enabled, sample[:1])))
        with seeded_generators(seed):  # the loss of guessing must be the same in every process
            found = _outputs(network, "train", sample, batch)
            for part, of in given.items():
                if ends := _extremes(of):
                    _outputs(network, part, inputs_of(prepare, of.x[ends]), batch)
            structures = _structure_of_outputs(network, sample[:2]), first.y_structure
        if isinstance(loss, nn.Module) and any(p.requires_grad for p in loss.parameters()):
            raise ConfigError(
                f"the loss {type(loss).__name__} has parameters of its own, which are not trained; let the network "
                "have them and return them beside its outputs, or freeze them with requires_grad_(False)."
            )
        if structures != (None, None):
            if loss is None:
                raise ConfigError("targets of several tensors need a loss(outputs, targets) of your own; give one.")
            if metric == BALANCED:
                raise ConfigError("balanced accuracy is for one tensor of outputs and one of targets; give a metric of "
                                  "your own, a function (outputs, targets).")  # fmt: skip
            loss, metric = (None if of is None else OfStructures(of, *structures) for of in (loss, metric))
        given = _with_targets(given, found.shape[1:], classes=loss is None)
        if metric == BALANCED:
            metric, unit = _balanced(found, given["train"].y), unit or BALANCED

        def answers(part: str, rows: slice) -> Tensor:
            return _outputs(network, part, inputs_of(prepare, given[part].x[rows].clone()), batch)

        _check_figures(given, loss, metric, found, answers)
        objective = _objective(found, given["train"].y, loss, metric, unit, blind_loss, label_smoothing)
        self.name = _name(name, network)
        _check_outputs(self.name, network, objective, found, given["train"].y)
        dataset = from_arrays(
            self.name,
            given["train"],
            given.get("val"),
            given.get("test"),
            objective=objective,
            inputs=prepare,
            augmentation=augmentation,
            class_names=() if classes is None else tuple(map(str, classes)),
            run_seed=seed,
        )
        if digest is not None:  # a run does not go on with other weights
            dataset = replace(dataset, identity={**dataset.identity, "sha256_weights": digest})
        _check_augmentation(dataset.augmentation, dataset.train.x[:8], dataset.train.y[:8])
        rows = min(4, len(dataset.train))
        check_scores(objective, found[:rows], dataset.train.y[:rows].clone())
        if metric is not None:
            _check_unit(self.name, _each_alone("metric", metric, found, given["train"].y[: len(found)]))
        self.spec = TaskSpec(
            name=self.name,
            description=f"{len(dataset.train):,} examples of the user's.",
            family=host.family,
            host=host,
            load=partial(_given, dataset),
            enabled=enabled,
            proposed=slots is None,
            objective=objective,
            episode_length=episode_length,
            # all examples at once: growth halves batches, and scales rates, from the ones that there are
            batch_train=min(batch, len(dataset.train)) if batches_per_step is None and last_batch != "drop" else batch,
            batch_val=max(batch, min(_EXAMPLES, len(dataset.val))),
            batches_per_step=batches_per_step,
            last_batch=last_batch,
            smallest_batch=smallest_batch,
            optimizer=trained_by,
            min_training_epochs=min_training_epochs,
            target_loss=0.1 * objective.blind_loss,
            typical_loss_delta_std=0.05 * objective.blind_loss,
        )
        smallest = min(stop - start for start, stop in training_bounds(self.spec, dataset))
        check_smallest_batch(network.rebuild, sample[: min(smallest, 2)])

    def __repr__(self) -> str:
        host, objective = self.spec.host, self.spec.objective
        assert host is not None
        return (
            f"Task({self.name!r}: {host.num_params():,} parameters, slots {', '.join(self.spec.enabled)}"
            f"{' (proposed)' * self.spec.proposed}, {objective.unit})"
        )


def register_task(task: Task | TaskSpec) -> Task | TaskSpec:
    """Give a task its name for commands and `esper.train`; raises RegistryError if the name is taken."""
    registry.register_task(task.spec if isinstance(task, Task) else task)
    return task


def _given(dataset: Dataset, data_dir: Path | None, run_seed: int) -> Dataset:
    """The data that are there, whatever folder and seed; a task with a lambda could not be pickled."""
    return dataset


def _stored(examples: Mapping[str, Examples | None], inputs: Inputs | None, batch: int) -> dict[str, Stored]:
    """The splits that are given, which are all of one structure."""
    given = {part: stored(part, of, inputs) for part, of in examples.items() if of is not None}
    for part, of in given.items():
        for field in ("x", "y"):
            ours, expected = (getattr(split, f"{field}_structure") for split in (of, given["train"]))
            if ours != expected:
                words = (str(structure or "one tensor") for structure in (ours, expected))
                raise DataError("{}.{} is {}, but that of train is {}; make them equal.".format(part, field, *words))
    if loaders := [part for part, of in examples.items() if isinstance(of, DataLoader)]:
        warnings.warn(
            f"{', '.join(loaders)}: of a DataLoader its data set and collate_fn are taken; its batch_size, shuffle, "
            f"drop_last and workers are ignored: batches are of {batch} examples (batch=), in an order of each "
            "network's own.",
            stacklevel=3,
        )
    return given


def _prepared(inputs: Inputs | None, given: Stored) -> tuple[Inputs | None, Structure | None, Tensor]:
    """`inputs` for stored examples, the structure of what a network takes (None for one tensor), and some inputs."""
    prepare, structure, x = inputs, given.x_structure, given.x[:_EXAMPLES].clone()
    if inputs is not None:
        found = applied(inputs, x if structure is None else structure.unpack(x.clone()))
        try:
            structure = None if isinstance(found, Tensor) else Structure.of(found)
        except TypeError as error:
            raise ConfigError(f"inputs gives {described(found)}; it must give tensors: {error}") from error
        if (structure, given.x_structure) != (None, None):
            prepare = StructuredInputs(inputs, given.x_structure, structure)
    sample = inputs_of(prepare, x)
    if structure is None:  # one of several tensors may be a mask of -inf
        check_finite("what inputs= gives of train.x", sample)
    if not near(inputs_of(prepare, x[:1]), sample[:1]):
        raise ConfigError(
            "inputs= gives another input for an example when others are beside it, so that batches would change "
            "the data; compute it for each example alone, and give random changes as augmentation=."
        )
    return prepare, structure, sample


def _check_outputs(name: str, network: nn.Module, objective: Objective, outputs: Tensor, y: Tensor) -> None:
    """Warn of probabilities in front of cross-entropy, and of outputs of a new network that only large inputs give."""
    if isinstance(objective, Classification) and bool((outputs >= 0).all() and (outputs.sum(1) - 1).abs().max() < 1e-4):
        warnings.warn(
            f"the outputs of {name} are probabilities, but cross-entropy takes what is in front of a softmax; leave "
            "the softmax out, or the network learns slowly.",
            stacklevel=4,
        )
    if isinstance(objective, Classification) and len(y) > 1 and bool((y == y[0]).all()):
        warnings.warn(
            f"all training targets of {name} are of class {int(y[0])}, so there is nothing to learn.", stacklevel=4
        )
    size, usual = (float(of[of.isfinite()].double().abs().mean()) for of in (outputs, y))
    scales = any(isinstance(layer, _BatchNorm) for layer in network.modules())  # in training
    if size > _WILD * max(1.0, usual) and not scales:
        warnings.warn(
            f"the outputs of a new {name} are about {size:.1g}, so it learns slowly or not at all; scale train.x and "
            "the other inputs: (x - x.mean(0)) / x.std(0).",
            stacklevel=4,
        )


def _check_unit(name: str, points: Tensor) -> None:
    """Warn of a metric whose points [n] of a new network are all in 0..1."""
    if bool(((points >= 0) & (points <= 1)).all() and points.any()):
        warnings.warn(
            f"the metric of {name} gives {points.min():.2g} to {points.max():.2g} for the examples of a "
            "new network, but points are expected, of which 100 is perfect; multiply by 100, or give bools.",
            stacklevel=4,
        )


def _check_augmentation(augmentation: Augmentation | None, x: Tensor, y: Tensor) -> None:
    """Raise DataError if a second call with the same draws changes stored examples [B, ...] in another way."""
    if augmentation is not None:
        drawn = augmentation.draw(0, torch.zeros(1, dtype=torch.int64), 0, 1, len(x))
        changed, again = (augmented(augmentation, x[None], y[None], drawn) for _ in range(2))
        check_finite("what augmentation= gives of train.x", changed[0][0])
        if not all(map(torch.equal, changed, again)):
            raise DataError("augmentation= gives other examples in a second call with the same draws, so networks "
                            "would depend on each other; draw from the global generators alone.")  # fmt: skip


def _with_targets(given: Mapping[str, Stored], outputs: tuple[int, ...], *, classes: bool) -> dict[str, Stored]:
    """The splits with targets as a loss takes them; where `classes`, one-hot ones become classes or tokens.

    Raises:
        ConfigError: `classes`, and the targets are floats that may mean either.
    """
    targets = {part: of.y if of.y.is_floating_point() else of.y.long() for part, of in given.items()}
    y = targets["train"]
    is_number, column = y.is_floating_point(), y.shape[1:] == (1,)
    if is_number and y.dim() == 1 and outputs == (1,):  # the outputs have an axis more
        targets = {part: of[:, None] for part, of in targets.items()}
    elif column and (outputs == () if is_number else classes and len(outputs) == 1):  # an axis less
        targets = {part: of[:, 0] if of.shape[1:] == (1,) else of for part, of in targets.items()}
    y = targets["train"]
    if classes and y.shape[1:] == outputs:
        if _one_hot(y):
            targets = {part: of.argmax(dim=-1) if _one_hot(of) else of for part, of in targets.items()}
        else:
            _require_numbers(y)
    return {part: of._replace(y=targets[part]) for part, of in given.items()}


def _require_numbers(y: Tensor) -> None:
    """Raise ConfigError for floats of the shape of the outputs that may mean classes or numbers."""
    probabilities = y.dim() == 2 and y.shape[1] > 1 and bool((y >= 0).all() and (y.sum(dim=1) - 1).abs().max() < 1e-3)
    if y.is_floating_point() and (probabilities or bool(((y == 0) | (y == 1)).all())):
        likely = "cross_entropy" if probabilities else "binary_cross_entropy_with_logits"
        raise ConfigError(
            f"the targets are {'probabilities' if probabilities else 'all 0 or 1'}, which may mean classes or numbers; "
            f"give loss=lambda o, y: loss(o, y, reduction='none').view(len(o), -1).mean(dim=1), where loss is {likely} "
            "or mse_loss of torch.nn.functional."
        )


def _one_hot(y: Tensor) -> bool:
    """Whether rows [n, C] or [n, T, C] are 1 in one place and 0 elsewhere."""
    return y.dim() in (2, 3) and y.shape[-1] > 1 and bool(((y == 0) | (y == 1)).all() and (y.sum(dim=-1) == 1).all())


def _name(given: str | None, network: ModuleHost) -> str:
    name = type(network.network).__name__.lower() if given is None else given
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ConfigError(
            f"the name of the task is {name!r}; use letters, digits, '_', '-' and '.', as in a file name."
        )
    return name


def _extremes(of: Stored) -> list[int]:
    """The examples with the smallest and the largest integers, such as a token that an embedding has no row for."""
    tensors = flatten(of.x if of.x_structure is None else of.x_structure.unpack(of.x))[0]
    rows = [x.reshape(len(x), -1) for x in tensors if not x.is_floating_point() and x.dtype is not torch.bool]
    return [int(row) for x in rows for row in (x.amin(dim=1).argmin(), x.amax(dim=1).argmax())]


@torch.no_grad()
def _outputs(network: nn.Module, place: str, x: Tensor, batch: int) -> Tensor:
    """Outputs of a new network; raises DataError if it cannot process some of these inputs."""
    network.eval()
    try:
        return torch.cat([network(part, _no_seeds) for part in x.split(batch)])
    except Exception as error:  # any error of the user's code
        raise DataError(
            f"the network cannot process some examples of {place}: {in_words(error)}; correct them, or the network, "
            "such as the size of its embedding."
        ) from error


@torch.no_grad()
def _structure_of_outputs(network: ModuleHost, x: Tensor) -> Structure | None:
    """What a loss gets of the outputs of a network in evaluation; None for one tensor."""
    result = network.run(network.arguments(x), _no_seeds)
    counted = network.spec.interface.selected(network.network, result)
    return None if isinstance(counted, Tensor) else Structure.of(as_floats(counted))


def _no_seeds(slot_id: str, h: Tensor) -> Tensor:
    return h


def _objective(
    outputs: Tensor,
    y: Tensor,
    loss: PerExample | None,
    metric: PerExample | None,
    unit: str | None,
    blind_loss: float | None,
    label_smoothing: float,
) -> Objective:
    """The objective of outputs [n, ...] of a new network and targets [N >= n, ...]."""
    if _is_usual(loss, outputs, y) and blind_loss is None and (unit is None or metric is not None):
        loss, label_smoothing = None, label_smoothing or getattr(loss, "label_smoothing", 0.0)
    if loss is None:
        if blind_loss is not None or (unit is not None and metric is None):
            raise ConfigError("blind_loss needs a loss, and unit a loss or a metric; give it, or leave them out.")
        objective = _by_targets(outputs.shape[1:], y)
        if isinstance(objective, Classification | NextToken):
            objective = replace(objective, label_smoothing=label_smoothing)
        elif label_smoothing:
            raise ConfigError("label_smoothing is for targets that are classes or tokens, and these are numbers.")
        return objective if metric is None else WithMetric(objective=objective, metric=metric, unit=unit or "score")
    if label_smoothing:
        raise ConfigError("label_smoothing and a loss of your own are given; smooth inside the loss, or leave one out.")
    loss, targets = without_mean(loss, y), y[: len(outputs)].clone()
    losses = _each_alone("loss", loss, outputs, targets)
    default = "loss reduction" if metric is None else "score"
    blind = float(losses.mean()) if blind_loss is None else blind_loss
    return Custom(loss=loss, metric=metric, blind_loss=blind, unit=unit or default)


def _balanced(outputs: Tensor, y: Tensor) -> BalancedAccuracy:
    """The metric of that name; raises ConfigError unless outputs are [n, C] and targets classes [n]."""
    if y.is_floating_point() or y.dim() != 1 or outputs.dim() != 2:
        raise ConfigError(
            f"balanced accuracy is for outputs [B, classes] and classes [B] as integers, but the network gives "
            f"{list(outputs.shape[1:])} and the targets are {list(y.shape[1:])} of {y.dtype} for each example."
        )
    return BalancedAccuracy()


def _each_alone(name: str, function: PerExample, outputs: Tensor, targets: Tensor) -> Tensor:
    """The figures of examples [n]; raises ConfigError if that of one depends on the others beside it."""
    figures = per_example(name, function, outputs.clone(), targets.clone())
    for row in range(min(len(figures), _TRIED)):
        here = slice(row, row + 1)
        alone = per_example(name, function, outputs[here].clone(), targets[here].clone())
        if not torch.allclose(figures[here], alone, rtol=1e-3, atol=1e-5, equal_nan=True):
            shapes = list(outputs.shape[1:]), list(targets.shape[1:])
            hint = f" Outputs {shapes[0]} and targets {shapes[1]} may be broadcast." * (shapes[0] != shapes[1])
            if name == "metric":
                hint += (
                    " F1 and other figures of a whole split are no metric here: measure them with grown.module, or "
                    'take metric="balanced accuracy".'
                )
            raise ConfigError(
                f"the {name} of one example depends on the other examples of the batch; compute it for each example "
                f"alone.{hint}"
            )
    return figures


def _check_figures(
    given: Mapping[str, Stored],
    loss: PerExample | None,
    metric: PerExample | None,
    outputs: Tensor,
    answers: Callable[[str, slice], Tensor],
) -> None:
    """Raise DataError for an example whose loss, gradient of it or metric is NaN or infinite for a new network.

    `outputs` [n, ...] of some examples stand for those of all, because mostly the targets decide; where they show
    something, the examples' own do: `answers` of a split and rows of it.
    """
    y, functions = given["train"].y, {"loss": loss, "metric": metric}
    if loss is not None:  # also refuses what another split alone leaves out
        functions["loss"], *_ = [without_mean(loss, of.y) for of in given.values()]
    for (name, function), rows in zip(functions.items(), (len(outputs), 4), strict=True):
        if function is not None:
            per_example(name, function, outputs[:rows].clone(), y[:rows].clone())  # what fails without gradients
    for part, of in given.items():
        for begin in range(0, len(of.y), len(outputs)):
            here = slice(begin, begin + len(outputs))
            for name, function in functions.items():
                if function is None or _worst(name, function, outputs, of.y[here], part) is None:
                    continue
                if found := _worst(name, function, answers(part, here), of.y[here], part):
                    place, what = found
                    raise DataError(
                        f"{what} of {part}[{begin + place}] is NaN or infinite for the outputs of a new network; look "
                        "for a division by 0, or a root or logarithm of it (torch.where leaves their gradient NaN: "
                        "clamp what is divided by), or leave the example out."
                    )


def _worst(name: str, function: PerExample, outputs: Tensor, y: Tensor, part: str) -> tuple[int, str] | None:
    """The first example of a batch with a figure that is not finite, and what it is; of training with gradients."""
    outputs = outputs[: len(y)].clone().requires_grad_(name == "loss" and part == "train")
    with torch.enable_grad():
        figures = per_example(name, function, outputs, y.clone())
    finite, what = figures.isfinite(), f"the {name}"
    if bool(finite.all()) and figures.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(figures.sum(), outputs, materialize_grads=True)
        except RuntimeError as error:
            raise ConfigError(f"the gradient of the loss cannot be computed: {in_words(error)}") from error
        finite, what = gradient.reshape(len(gradient), -1).isfinite().all(dim=1), "the gradient of the loss"
    return None if bool(finite.all()) else (int((~finite).int().argmax()), what)


def _advice_of_masks(outputs: tuple[int, ...], y: Tensor) -> str:
    """What to give for a class or a number of each place, y [n, ...], of outputs [channels, ...]."""
    if outputs[0] == 1 or y.is_floating_point():
        if outputs[0] > 1:
            return "classes as integers, y.long(); or "
        numbers = "" if y.is_floating_point() else ".float() and loss=nn.BCEWithLogitsLoss()"
        return f"targets with an axis more, y[:, None]{numbers}; or "
    axes, others = tuple(range(1, len(outputs))), y[(y < 0) | (y >= outputs[0])].unique().tolist()
    loss, many = "nn.CrossEntropyLoss()", ""
    if len(others) > 1:
        return f"classes 0 to {outputs[0] - 1} for {outputs[0]} channels, not {others[0]} to {others[-1]}; or "
    if others:
        loss = f"lambda o, y: F.cross_entropy(o, y, ignore_index={others[0]}, reduction='none').mean({axes})"
        many = f" / (y != {others[0]}).float().mean({axes}).clamp(min=1e-6)"
    return f"loss={loss} and metric=lambda o, y: 100.0 * (o.argmax(1) == y).float().mean({axes}){many}; or "


def _is_usual(loss: PerExample | None, outputs: Tensor, y: Tensor) -> bool:
    """Whether a loss of `torch.nn` is the one that these targets have without it."""
    if type(loss) is nn.CrossEntropyLoss:
        plain = loss.weight is None and not (y == loss.ignore_index).any()
        return loss.reduction == "mean" and plain and not y.is_floating_point() and (y.dim(), outputs.dim()) == (1, 2)
    return type(loss) is nn.MSELoss and loss.reduction == "mean" and y.is_floating_point()


def _by_targets(outputs: tuple[int, ...], y: Tensor) -> Objective:
    """The objective for outputs of this shape per example."""
    shape = tuple(y.shape[1:])
    if y.is_floating_point():
        if shape == outputs:
            variance = float(y.double().var(dim=0, correction=0).mean())
            if not LEAST <= variance <= MOST:
                raise DataError(
                    f"the variance of the training targets is {variance}, expected {LEAST} to {MOST}; give targets "
                    "that differ, and scale them: (y - y.mean(0)) / y.std(0)."
                )
            far = float(y.double().abs().mean())
            if far > _FAR:
                warnings.warn(
                    f"training targets are about {far:.3g} in size, and a network begins near 0; scale them, "
                    "or it needs many steps to get there: (y - y.mean(0)) / y.std(0).",
                    stacklevel=5,
                )
            return MeanSquaredError(variance=variance)
    elif shape == () and len(outputs) == 1 and outputs[0] > 1:
        return Classification(outputs[0])
    elif len(shape) == 1 and len(outputs) == 2 and outputs[0] == shape[0]:
        return NextToken(outputs[1])
    out = ""
    if shape == () and outputs == (1,):
        out = "two outputs for two classes, or floats [n, 1] and loss=nn.BCEWithLogitsLoss(); or "
    elif shape == () and len(outputs) == 1 and y.is_floating_point():
        out = "classes as integers, y.long(); or "
    elif len(outputs) > 2 and shape == outputs[1:]:
        out = _advice_of_masks(outputs, y)
    raise ConfigError(
        f"targets {list(shape)} of {y.dtype} for each example do not fit the outputs {list(outputs)} of the network; "
        f"give {out}classes (one integer each) for outputs [classes], tokens [T] for [T, vocabulary], floats of the "
        "shape of the outputs, or a loss."
    )
