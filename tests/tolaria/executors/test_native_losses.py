"""Losses in native programs: as streamed, to the same bits alone, and PyTorch's where they must be."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_streamed import compare, grow_different_seeds, of_each_split
from native_agreement import agree
from test_faults_of_one_host import gradient_of
from torch import Tensor, nn

import tiny
import tokens
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import SeedStage
from esper.tasks.datasets import Dataset, RandomFunction, Split
from esper.tasks.datasets.images import CropAndFlip, Pixels
from esper.tasks.losses import (
    PADDING,
    Classification,
    Custom,
    MeanSquaredError,
    NextToken,
    WithMetric,
    of_split,
    without_mean,
)
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.native.losses import loss_of
from esper.tolaria.executors.native.trace import NoRuleError
from esper.tolaria.executors.streamed import StreamedExecutor
from tiny import CLASSES, Bench, bit_equal, dataset


def with_numbers(given: Dataset | None = None, dtype: torch.dtype = torch.float32) -> Dataset:
    """The tiny images with three numbers as targets, which differ between the examples of a class."""
    images = dataset() if given is None else given

    def split(of: Split) -> Split:
        mean = of.x.float().flatten(1).mean(dim=1, keepdim=True) / of.x.max()
        numbers = 2.0 * F.one_hot(of.y.clamp(min=0), CLASSES).float() - 1.0 + mean * torch.tensor([1.0, -2.0, 0.0])
        return Split(of.x, numbers.to(dtype))

    return of_each_split(dataclasses.replace(images, num_classes=None), split)


def mean_of(function: Callable[..., Tensor], **options: object) -> Callable[[Tensor, Tensor], Tensor]:
    """A loss of torch.nn.functional as one number for each example."""
    return lambda outputs, y: function(outputs, y, reduction="none", **options).flatten(1).mean(dim=1)


def yes_or_no(outputs: Tensor, y: Tensor) -> Tensor:
    return mean_of(F.binary_cross_entropy_with_logits)(outputs, (y > 0.0).float())


def all_right(outputs: Tensor, y: Tensor) -> Tensor:
    return ((outputs > 0.0) == (y > 0.0)).all(dim=1)


def any_wrong(outputs: Tensor, y: Tensor) -> Tensor:
    return -100.0 * ((outputs > 0.0) != (y > 0.0)).any(dim=1)


def hits(outputs: Tensor, y: Tensor) -> Tensor:
    return outputs.argmax(dim=1) == y


def pinball(outputs: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(0.9 * (y - outputs), 0.1 * (outputs - y)).mean(dim=1)


def likelihood(outputs: Tensor, y: Tensor) -> Tensor:
    return 5.0 + outputs[:, 1] + (y[:, 0] - outputs[:, 0]).square() * torch.exp(-outputs[:, 1])


def own(loss: Callable[[Tensor, Tensor], Tensor], **options: object) -> Custom:
    return Custom(loss=loss, blind_loss=1.0, **options)


ERROR = MeanSquaredError(variance=8.0 / 9.0)
OF_NUMBERS = {
    "squared error": ERROR,
    "with a metric": WithMetric(objective=ERROR, metric=lambda o, y: -(o - y).abs().amax(dim=1), unit="largest"),
    "Huber": own(mean_of(F.huber_loss, delta=0.3)),
    "smooth L1": own(mean_of(F.smooth_l1_loss)),
    "L1 of torch.nn": own(without_mean(nn.L1Loss(), torch.zeros(1, 3))),
    "logits": own(yes_or_no, metric=all_right),
    "weighted logits": own(mean_of(F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([1.0, 2.0, 3.0]))),
    "Poisson": own(mean_of(F.poisson_nll_loss), metric=any_wrong),
    "a quantile": own(pinball),
    "a likelihood": own(likelihood),
    "shares": own(lambda o, y: F.cross_entropy(o, y.softmax(dim=1), reduction="none")),
}
OF_CLASSES = {
    "cross-entropy": own(lambda o, y: F.cross_entropy(o, y, reduction="none"), metric=hits),
    "weighted": own(lambda o, y: F.cross_entropy(o, y, torch.tensor([1.0, 2.0, 0.5]), reduction="none")),
    "smoothed": own(lambda o, y: F.cross_entropy(o, y, reduction="none", label_smoothing=0.1)),
    "focal": own(lambda o, y: (1 - (p := o.softmax(dim=1).gather(1, y[:, None])[:, 0])).square() * -p.log()),
    "Brier": own(lambda o, y: (o.softmax(dim=1) - F.one_hot(y, CLASSES)).square().sum(dim=1)),
    "with a metric": WithMetric(objective=Classification(CLASSES, 0.1), metric=hits, unit="u"),
}  # fmt: skip


class ByPyTorchError(AssertionError):
    """PyTorch computes a loss."""


@pytest.fixture
def by_program(monkeypatch):
    """PyTorch computes no loss of a host in training, and no scores."""

    def refuse(*arguments: object) -> None:
        raise ByPyTorchError

    monkeypatch.setattr(NativeExecutor, "_train_by_pytorch_loss", refuse)
    wrapped = NativeExecutor.sum_scores

    def sum_scores(self, batches, *arguments):
        if self._loss(batches.split) is None:
            raise ByPyTorchError
        return wrapped(self, batches, *arguments)

    monkeypatch.setattr(NativeExecutor, "sum_scores", sum_scores)


# -- as streamed ------------------------------------------------------------------------------------------------------


def grow_two(bench):
    bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[1])
    bench.grow("r0c1", "norm", SeedStage.BLENDING, alpha=0.5)


@pytest.mark.parametrize("objective", [*OF_NUMBERS.values(), *OF_CLASSES.values()], ids=[*OF_NUMBERS, *OF_CLASSES])
def test_a_loss_on_numbers_or_classes_is_part_of_the_program(objective, by_program):
    data = with_numbers() if objective in OF_NUMBERS.values() else dataset()
    compare(NativeExecutor, grow_two, num_envs=2, data=data, objective=objective)


def test_a_batch_in_chunks_has_the_loss_of_the_whole_batch(by_program, monkeypatch):
    monkeypatch.setattr("esper.tolaria.executors.native.program._CACHED_NUMBERS", 16)
    monkeypatch.setattr(tiny, "BATCH", 36)
    compare(NativeExecutor, grow_different_seeds, num_envs=5, data=with_numbers(), objective=ERROR)


def pixels(augmentation: object = None) -> Dataset:
    """Images as bytes."""
    images = of_each_split(dataset(), lambda of: Split((of.x * 40.0 + 128.0).clamp(0.0, 255.0).byte(), of.y))
    return dataclasses.replace(with_numbers(images), inputs=Pixels((0.5,), (0.2,)), augmentation=augmentation)


SETTINGS = {
    "bytes": {"data": pixels()},
    "windows": {"data": pixels(CropAndFlip(padding=1))},
    "batches made by PyTorch": {"data": dataclasses.replace(with_numbers(), augmentation=RandomFunction(lambda x: x))},
    "some batches": {"data": with_numbers(), "batches_per_step": 2},
    "a part of the validation split": {"data": with_numbers(), "measured_share": 0.4},
    "no last batch": {"data": with_numbers(), "last_batch": "drop"},
    "two moments": {"data": with_numbers(), "optimizer": tiny.adamw()},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_targets_come_with_their_examples(settings, by_program):
    compare(NativeExecutor, grow_two, num_envs=2, objective=ERROR, **settings)


def test_padded_tokens_count_neither_in_a_loss_nor_in_its_mean(by_program):
    def split(of: Split) -> Split:
        y = of.y.clone()
        y[::3, 2:] = PADDING
        y[:16] = PADDING
        return Split(of.x, y)

    data = of_each_split(tokens.tokens(), split)
    metric = WithMetric(objective=NextToken(tokens.VOCABULARY), metric=lambda o, y: o.amax(dim=(1, 2)), unit="u")

    def grow(bench):
        bench.grow("r0c0", "token_mlp", SeedStage.HOLDING, alpha=1.0, hosts=[0, 2])

    with tokens.token_seeds():
        compare(NativeExecutor, grow, data=data, objective=metric, host=tokens.host())


# -- what is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("objective", [ERROR, own(lambda o, y: (o.clamp(-2.0, 2.0) - y).abs().mean(dim=1))])
def test_outputs_that_are_not_finite_show_as_streamed_and_in_their_host_alone(objective, value, by_program):
    found = []
    for wrap, broken in ((StreamedExecutor, True), (NativeExecutor, True), (NativeExecutor, False)):
        bench = Bench(3, data=with_numbers(), objective=objective)
        bench.executor = wrap(bench.executor.data)
        if broken:
            bench.population.host_kind.template.parameters.unpack(bench.population.host.params[1])["head.bias"][0] = (
                value
            )
        first = bench.measure()[1]
        found.append((first.loss, first.accuracy[:, 0], bench.train().loss, bench.population.host.params))
    streamed, native, sound = found
    for a, b in zip(streamed[:3], native[:3], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-4, atol=1e-4)
    assert native[0][1].isfinite() == (value == 1e30 and objective is not ERROR)
    for a, b in zip(native, sound, strict=True):
        assert bit_equal(a[[0, 2]], b[[0, 2]])


# -- what stays with PyTorch ------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """A loss whose gradient is not its own."""

    @staticmethod
    def forward(ctx, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2.0 * grad


def errors(outputs: Tensor, y: Tensor) -> Tensor:
    return (outputs - y).square().mean(dim=1)


WITHOUT_RULE = {
    "no rule for quantile": lambda o, y: torch.quantile((o - y).abs(), 0.5, dim=1),
    "draws from global random generators": lambda o, y: errors(o, y) + 0.1 * torch.rand(()),
    "looks at values": lambda o, y: errors(o, y) * (2.0 if float(o.detach().max()) > 0.0 else 1.0),
    "a backward pass of its own": lambda o, y: Doubled.apply(errors(o, y)),
    "differ from PyTorch's in": lambda o, y: errors(o, y) * (2.0 if o.requires_grad else 1.0),
}


@pytest.mark.parametrize(("reason", "loss"), WITHOUT_RULE.items(), ids=WITHOUT_RULE.keys())
def test_a_loss_without_a_rule_says_why(reason, loss):
    with pytest.raises(NoRuleError, match=reason):
        loss_of(own(loss), (3,), with_numbers().train.y)


@pytest.mark.parametrize("reason", [reason for reason in WITHOUT_RULE if "random" not in reason])
def test_a_loss_without_a_rule_goes_through_pytorch_and_gives_the_same(reason):
    objective = own(WITHOUT_RULE[reason])
    compare(NativeExecutor, grow_two, num_envs=2, data=with_numbers(), objective=objective)


def test_a_gradient_that_differs_on_rare_outputs_alone_is_left_to_pytorch():
    with pytest.raises(NoRuleError, match="a backward pass of its own"):
        loss_of(own(gradient_of(1.0)), (3,), dataset().train.y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.uint8])
def test_targets_of_other_types_are_left_to_pytorch(dtype):
    objective = own(lambda o, y: (o - y).abs().mean(dim=1))
    with pytest.raises(NoRuleError, match=str(dtype)):
        loss_of(objective, (3,), with_numbers(dtype=dtype).train.y)
    compare(NativeExecutor, grow_two, num_envs=2, data=with_numbers(dtype=dtype), objective=objective)


def test_integers_that_float32_rounds_are_left_to_pytorch():
    with pytest.raises(NoRuleError, match="targets from 0 to 16777217"):
        loss_of(own(lambda o, y: (o[:, 0] - y).abs()), (3,), torch.tensor([0, 2**24 + 1]))


def test_a_loss_that_changes_during_a_run_is_followed():
    found = []
    for wrap in (StreamedExecutor, NativeExecutor):
        share = torch.tensor(0.0)
        bench = Bench(
            2, data=with_numbers(), objective=own(lambda o, y, s=share: errors(o, y) + s * o.abs().mean(dim=1))
        )
        bench.executor = wrap(bench.executor.data)
        losses = [bench.train().loss]
        share.fill_(3.0)
        found.append([*losses, bench.train().loss, bench.measure()[1].loss, bench.train().loss])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("executor", [StreamedExecutor, NativeExecutor])
def test_a_class_that_the_outputs_lack_is_refused_in_pytorchs_words(executor):
    given = dataset()
    data = dataclasses.replace(
        given, train=Split(given.train.x, given.train.y.index_fill(0, torch.tensor([7]), CLASSES))
    )
    bench = Bench(1, data=data, objective=OF_CLASSES["cross-entropy"])
    bench.executor = executor(bench.executor.data)
    with pytest.raises(ConfigError, match="Target 3 is out of bounds"):
        bench.train()


# -- how often --------------------------------------------------------------------------------------------------------


def test_the_squared_error_before_it_knows_a_split_is_traced_too():
    y = with_numbers().train.y
    for objective in (ERROR, of_split(ERROR, y)):
        assert loss_of(objective, (3,), y).numbers == 3


# -- rules that losses brought ----------------------------------------------------------------------------------------


def picked(x: Tensor) -> Tensor:
    return x.gather(1, x.detach().argmax(dim=1, keepdim=True)) * x


OPERATIONS = {
    "the place of the largest": lambda x: x * x.argmax(dim=2, keepdim=True),
    "one number of each row": picked,
    "where all are above": lambda x: torch.where((x > -1.0).all(dim=1, keepdim=True), x, 0.0),
    "where any is above": lambda x: torch.where((x > 1.0).any(dim=2, keepdim=True), x, 0.0),
    "where it is finite": lambda x: torch.where((1.0 / (x * (x > 0.0))).isfinite(), x, 7.0),
    "likelihoods of places": lambda x: F.nll_loss(
        x.log_softmax(dim=1), torch.ops.esper.whole(x.detach().argmax(dim=1)), reduction="none"
    ),
    "a type that it has": lambda x: x.float() * torch.tensor([[1.0], [2.0], [3.0]]),
}


@pytest.mark.parametrize("function", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_an_operation_of_losses_is_that_of_pytorch_in_any_module(function):
    agree(function, 3, 4)


@pytest.mark.parametrize("function", [lambda x: x.gather(0, x.argmax(dim=0, keepdim=True)), lambda x: x * x.argmax()])
def test_a_place_among_the_examples_is_refused(function):
    with pytest.raises(NoRuleError, match="a place among several examples"):
        agree(function, 3, 4)
