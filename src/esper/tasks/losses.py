"""Objectives: a loss with its figure of merit (see `esper.leyline.messages`).

Outputs that are not finite are wrong in every metric: an example or token whose largest output is NaN or infinite is
not correct, whatever its index, and its error, loss and points are NaN. One output of -infinity beside finite ones is
allowed: it is the logit of a class that is ruled out.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.leyline.errors import ConfigError, in_words
from esper.leyline.messages import Objective, Scores
from esper.leyline.settings import AtLeast2, Decay, Positive, check_fields
from esper.leyline.structure import Structure

PADDING = -1
"""Target of an example or token that does not count."""
_LARGEST_EXPONENT = 700.0
LEAST, MOST = 1e-25, 1e25
"""Of the loss of guessing, so that float32 holds what is computed from it."""
PerExample = Callable[[Tensor, Tensor], Tensor]
"""(outputs [B, ...], targets [B, ...]) -> one number per example [B]."""


@final
@dataclass(frozen=True)
class Classification:
    """Cross-entropy of one class per example; the figure of merit is accuracy in percent.

    Examples of the class `PADDING` do not count. `label_smoothing` is that of `torch.nn.functional.cross_entropy`
    (Szegedy et al. 2016), in training alone.
    """

    num_classes: AtLeast2
    label_smoothing: Decay = 0.0
    unit: ClassVar[str] = "accuracy"

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    @property
    def blind_loss(self) -> float:
        """ln(number of classes): all classes equally likely."""
        return math.log(self.num_classes)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Logits [R, classes] and classes [R]."""
        losses = _cross_entropy(outputs.float(), targets, self.label_smoothing)
        return Scores(losses, self.score(outputs, targets), (targets != PADDING).float())

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """1 where the largest logit is that of the class and finite, else 0."""
        largest = outputs.max(dim=-1)
        return ((largest.indices == targets) & largest.values.isfinite()).float()

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """Percent of the examples."""
        return 100.0 * score / weight  # in this order, all correct gives exactly 100


@final
@dataclass(frozen=True)
class NextToken:
    """Cross-entropy of the next token; the figure of merit is token accuracy in percent. exp(loss) is the perplexity.

    Targets of `PADDING` count neither in the loss nor in the accuracy. `label_smoothing` as in `Classification`.
    """

    vocabulary: AtLeast2
    label_smoothing: Decay = 0.0
    unit: ClassVar[str] = "token accuracy"

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    @property
    def blind_loss(self) -> float:
        """ln(vocabulary): all tokens equally likely."""
        return math.log(self.vocabulary)

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Logits [R, T, vocabulary] and tokens [R, T], integers of any size."""
        targets = targets.long()
        logits, weight = outputs.float(), (targets != PADDING).sum(dim=1).float()
        losses = _cross_entropy(logits.flatten(0, 1), targets.flatten(), self.label_smoothing)
        return Scores(losses.view(targets.shape).sum(dim=1), self.score(outputs, targets), weight)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """How many tokens of a row have the largest logit, if it is finite."""
        largest = outputs.max(dim=-1)
        hits = (largest.indices == targets) & largest.values.isfinite() & (targets != PADDING)
        return hits.sum(dim=1).float()

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """Percent of the tokens."""
        return 100.0 * score / weight


@final
@dataclass(frozen=True)
class MeanSquaredError:
    """Squared error, averaged over the outputs of an example; the figure of merit is R² in percent.

    R² is that of `sklearn.metrics.r2_score(..., multioutput="variance_weighted")` on the split that `of_split` was
    given: 1 - squared error / variance of the targets in the split, both averaged over the outputs. So the network with
    the lowest loss has the highest R², whatever the variances; errors of outputs whose targets are all equal count too,
    which scikit-learn leaves out. If all targets are equal, an example counts 1 if it is met exactly, and else 0.

    Attributes:
        variance: of the training targets, averaged over the outputs: the loss of guessing their mean.
        factors: of the squared error, and of whether it is above 0; None before `of_split`, where the error is divided
            by `variance`.
    """

    variance: Positive
    factors: tuple[Tensor, Tensor] | None = field(default=None, compare=False, repr=False)
    unit: ClassVar[str] = "R2"

    def __post_init__(self) -> None:
        check_fields(self, "objective")

    @property
    def blind_loss(self) -> float:
        """The variance."""
        return self.variance

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Outputs and targets [R, ...]; raises ValueError unless their shapes are equal."""
        if outputs.shape != targets.shape:  # subtraction would broadcast them
            raise ValueError("outputs and targets differ in shape")
        losses = (outputs.float() - targets.float()).square().reshape(len(outputs), -1).mean(dim=1)
        if self.factors is None:
            relative = losses.detach() / self.variance
        else:
            of_error, of_miss = self.factors
            relative = losses.detach() * of_error + (losses.detach() > 0.0) * of_miss
        return Scores(losses, relative, torch.ones_like(relative))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """As in `scores`."""
        return self.scores(outputs, targets).score

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """100 (1 - error / variance): 100 is perfect, 0 is the mean of the targets, worse is negative."""
        return 100.0 * (1.0 - score / weight)

    def of_split(self, targets: Tensor) -> "MeanSquaredError":
        """The same with R² of a split with the targets [n, ...]; no device read."""
        y = targets.reshape(len(targets), -1).double()
        constant = (y == y[0]).all()
        of_error = y.var(dim=0, correction=0).mean().reciprocal().masked_fill(constant, 0.0)
        return replace(self, factors=(of_error.float(), constant.float()))


@final
@dataclass(frozen=True, kw_only=True)
class Custom:
    """A loss of the user's, and a figure of merit in points.

    Attributes:
        loss: of each example. blind_loss: its mean for guessing, above 0.
        metric: points of each example; None for 100 (1 - loss / blind_loss).
        unit: name of the figure of merit.
    """

    loss: PerExample
    blind_loss: float
    metric: PerExample | None = None
    unit: str = "loss reduction"

    def __post_init__(self) -> None:
        if not LEAST <= self.blind_loss <= MOST:
            raise ConfigError(
                f"the blind loss is {self.blind_loss}; it must be finite and above 0: give blind_loss, or add a "
                f"constant to the loss; below {LEAST} or above {MOST}, multiply the loss by a constant."
            )

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Outputs and targets [R, ...] as the functions take them; raises ConfigError unless they give [R]."""
        losses = per_example("loss", self.loss, outputs, targets)
        if self.metric is None:
            points = 100.0 * (1.0 - losses.detach() / self.blind_loss)
        else:
            points = per_example("metric", self.metric, outputs.detach(), targets)
        return Scores(losses, points, torch.ones_like(points))

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """As in `scores`."""
        return self.scores(outputs, targets).score

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """Mean of the examples."""
        return score / weight


@final
@dataclass(frozen=True, kw_only=True)
class WithMetric:
    """The loss of another objective, with points of each example by a function of the user's."""

    objective: Objective
    metric: PerExample
    unit: str

    @property
    def blind_loss(self) -> float:
        """That of the other objective."""
        return self.objective.blind_loss

    def scores(self, outputs: Tensor, targets: Tensor) -> Scores:
        """Outputs and targets [R, ...]; raises ConfigError unless the metric gives [R]."""
        scores = self.objective.scores(outputs, targets)
        points = per_example("metric", self.metric, outputs.detach(), targets)
        return scores._replace(score=points * scores.weight)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """As in `scores`."""
        return self.scores(outputs, targets).score

    def points(self, score: Tensor, weight: Tensor) -> Tensor:
        """Mean of the examples, or of the tokens."""
        return score / weight


BALANCED: Literal["balanced accuracy"] = "balanced accuracy"


@final
@dataclass(frozen=True, eq=False)
class BalancedAccuracy:
    """Points of each example, whose mean over a split is the mean of the accuracies of its classes.

    As `sklearn.metrics.balanced_accuracy_score`. `weights`: of each class of the split; None before `of_split`.
    """

    weights: Tensor | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Logits [B, C] and classes [B] -> points [B]."""
        points = 100.0 * (outputs.argmax(dim=1) == targets).float()
        return points if self.weights is None else points * self.weights[targets]

    def of_split(self, targets: Tensor) -> "BalancedAccuracy":
        """The same for a split with the classes [n]."""
        counts = targets.bincount()
        share = len(targets) / ((counts > 0).sum() * counts.clamp(min=1))
        return BalancedAccuracy(share.float())


@final
@dataclass(frozen=True)
class OfStructures:
    """A loss or metric of the user's that takes several tensors as outputs or targets, which come packed.

    `outputs`, `targets`: their structures, None for one tensor.
    """

    function: Callable[[Any, Any], Tensor]
    outputs: Structure | None
    targets: Structure | None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example [B]."""
        pairs = ((self.outputs, outputs), (self.targets, targets))
        return self.function(*(x if structure is None else structure.unpack(x) for structure, x in pairs))


@final
@dataclass(frozen=True)
class OfEachExample:
    """A loss of `torch.nn` without its mean over the batch."""

    loss: nn.Module

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One number per example [B]."""
        losses: Tensor = self.loss(outputs, targets)
        return losses.reshape(len(outputs), -1).mean(dim=1)


def without_mean(loss: PerExample, targets: Tensor) -> PerExample:
    """A loss of `torch.nn` that gives the mean of a batch as one of each example; any other as it is.

    Raises:
        ConfigError: its mean counts some examples more than others.
    """
    if type(loss).__module__ != nn.MSELoss.__module__ or getattr(loss, "reduction", None) != "mean":
        return loss
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        name = type(loss).__name__
        found = "weight" if loss.weight is not None else "ignore_index" if (targets == loss.ignore_index).any() else ""
        if found:
            raise ConfigError(
                f"{name} with {found}= divides by what a whole batch counts, so that the loss of one example depends "
                "on the others; divide by the number of examples: loss=lambda o, y: "
                f"each(o, y).reshape(len(o), -1).mean(dim=1), where each = nn.{name}(..., reduction='none')."
            )
    alone = copy.copy(loss)
    alone.reduction = "none"  # type: ignore[attr-defined]
    assert isinstance(alone, nn.Module)
    return OfEachExample(alone)


def per_example(name: str, function: PerExample, outputs: Tensor, targets: Tensor) -> Tensor:
    """What a loss or metric gives, float32 [R], NaN where the outputs are not finite.

    Raises:
        ConfigError: it is not one number per example, or the function edits what it gets.
    """
    versions = outputs._version, targets._version
    try:
        found = function(outputs, targets)
    except Exception as error:  # any error of the user's code
        where = _words(function, outputs, targets)
        out = "" if targets.is_floating_point() else "; integers stay integers: give y.float() if it takes floats"
        raise ConfigError(f"the {name} fails on {where}: {in_words(error)}{out}") from error
    if (outputs._version, targets._version) != versions:
        raise ConfigError(
            f"the {name} edits its {'targets' if outputs._version == versions[0] else 'outputs'} in place, which are "
            "needed after it; let it work on a copy, e.g. outputs - targets instead of outputs.sub_(targets)."
        )
    if not isinstance(found, Tensor) or found.shape != outputs.shape[:1]:
        kind = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"type {type(found).__name__}"
        way = "average over the axes of an example, and not over the batch (reduction='none')"
        if not isinstance(found, Tensor):
            way = f"give a tensor, and {way}"
        elif found.shape == (len(outputs), 1):
            way = "drop the last axis, [:, 0]"
        raise ConfigError(
            f"the {name} gives a result of {kind} for {_words(function, outputs, targets)}; expected one number per "
            f"example, {tuple(outputs.shape[:1])}: {way}."
        )
    if found.dtype is torch.bool:
        if name == "loss":
            raise ConfigError("the loss gives bool; expected a loss that is a number with a gradient.")
        found = 100.0 * found  # right or wrong
    return found.float().masked_fill(~outputs.reshape(len(outputs), -1).amax(dim=1).isfinite(), torch.nan)


def _cross_entropy(logits: Tensor, classes: Tensor, label_smoothing: float) -> Tensor:
    """The loss [R] of logits [R, C]."""
    return F.cross_entropy(logits, classes, ignore_index=PADDING, reduction="none", label_smoothing=label_smoothing)


def of_split(objective: Objective, targets: Tensor) -> Objective:
    """The objective with the figure of merit of a split that has the targets [n, ...], on which some depend."""
    if isinstance(objective, WithMetric | Custom) and isinstance(objective.metric, BalancedAccuracy):
        return replace(objective, metric=objective.metric.of_split(targets))
    return objective.of_split(targets) if isinstance(objective, MeanSquaredError) else objective


def needs_whole_split(objective: Objective) -> bool:
    """Whether a part of a split, in which classes have other shares, says little of the figure of merit."""
    return isinstance(objective, WithMetric | Custom) and isinstance(objective.metric, BalancedAccuracy)


def of_measuring(objective: Objective) -> Objective:
    """The objective by which networks are measured, without label smoothing: exp(loss) stays the perplexity."""
    if isinstance(objective, WithMetric):
        return replace(objective, objective=of_measuring(objective.objective))
    if isinstance(objective, Classification | NextToken):
        return replace(objective, label_smoothing=0.0)
    return objective


def _words(function: PerExample, outputs: Tensor, targets: Tensor) -> str:
    """What a loss or metric is called with."""
    of = (function.outputs, function.targets) if isinstance(function, OfStructures) else (None, None)
    return (
        f"outputs {of[0] or tuple(outputs.shape)} and targets {of[1] or f'{tuple(targets.shape)} of {targets.dtype}'}"
    )


def points_of_guessing(objective: Objective, targets: Tensor) -> float | None:
    """Figure of merit of the best constant answer on targets [n, ...]; None where that is not known."""
    if isinstance(objective, Classification | NextToken):
        counts = targets[targets != PADDING].flatten().long().bincount()
        return 100.0 * float(counts.max() / counts.sum()) if counts.numel() else None
    if needs_whole_split(objective):
        return 100.0 / len(targets.unique())
    by_loss = isinstance(objective, Custom) and objective.metric is None
    return 0.0 if by_loss or isinstance(objective, MeanSquaredError) else None


def perplexity(objective: Objective, loss: float) -> float | None:
    """exp(loss) where the loss is the mean cross-entropy of a token in nats, padding left out; None elsewhere."""
    losses = objective.objective if isinstance(objective, WithMetric) else objective
    if not isinstance(losses, NextToken):
        return None
    return math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)
