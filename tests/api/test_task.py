"""esper.Task: objectives by targets or by functions, and what is refused."""

import copy
import functools
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_tasks import MyNet, Zero, grow, images, own_task, points, train
from torch import Tensor, nn

import esper
from esper.api.grow import grown_of
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError, DataError, EsperError
from esper.tasks.losses import MeanSquaredError
from user_networks import MLP, Encoder, Tied


def vectors(**changes: object) -> esper.Task:
    """A regression with a network whose first outputs are zero."""
    return esper.Task(**{"model": Zero, "slots": ["body"], "train": points(), "batch": 16, **changes})


def test_classes_give_cross_entropy_with_as_many_classes_as_outputs():
    objective = own_task().spec.objective
    assert (objective.num_classes, objective.unit) == (3, "accuracy")
    assert objective.blind_loss == pytest.approx(math.log(3))


def test_a_task_goes_to_another_process():
    task = own_task()
    again = pickle.loads(pickle.dumps(task))
    assert repr(again) == repr(task)
    assert torch.equal(again.spec.load(None, 0).train.x, task.spec.load(None, 0).train.x)


def test_classes_may_have_names():
    assert own_task().spec.load(None, 0).class_names == ()
    for metric in (None, lambda outputs, y: 100.0 * (outputs.argmax(dim=1) == y)):
        assert own_task(classes=("a", "b", "c"), metric=metric).spec.load(None, 0).class_names == ("a", "b", "c")


def test_a_metric_in_zero_to_one_is_noted_and_others_are_not():
    def share(outputs, y):
        return torch.full((len(y),), 0.25)

    with pytest.warns(UserWarning, match="of a new network, but points are expected, of which 100") as found:
        vectors(metric=share)
    assert "the metric of zero gives 0.25 to 0.25 for the examples" in str(found[0].message)
    for right in (lambda o, y: 100.0 * share(o, y), lambda o, y: share(o, y) > 0.0, lambda o, y: -share(o, y)):
        vectors(metric=right)


@pytest.mark.parametrize("column", [False, True])
def test_floats_give_squared_error_with_the_variance_of_the_training_targets(column):
    y = torch.tensor([0.0, 4.0] * 10)  # mean 2, every difference 2

    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    given = (x, y[:, None] if column else y)
    task = esper.Task(model=model, slots=["0"], train=given, val=given)
    assert (task.spec.objective.variance, task.spec.objective.unit) == (4.0, "R2")
    assert task.spec.load(None, 0).val.y.shape == (20, 1)


def test_a_loss_of_the_users_is_measured_against_that_of_a_new_network():
    x, _ = points()
    task = vectors(train=(x, torch.full((40, 2), 3.0)), loss=lambda out, y: (out - y).square().sum(dim=1))
    objective = task.spec.objective
    assert objective.blind_loss == pytest.approx(18.0)  # outputs are 0, twice 3²
    scores = objective.scores(torch.tensor([[3.0, 0.0], [3.0, 3.0]]), torch.full((2, 2), 3.0))
    assert scores.loss.tolist() == [9.0, 0.0]
    # 9 of 18 is half of the loss, 0 of 18 none
    assert objective.points(scores.score, scores.weight).tolist() == pytest.approx([50.0, 100.0])
    assert objective.unit == "loss reduction"


@pytest.mark.parametrize(
    ("loss", "y"),
    [
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0])), torch.eye(2).repeat(20, 1)),
        (nn.L1Loss(), torch.arange(80.0).view(40, 2)),
        (nn.HuberLoss(), torch.arange(80.0).view(40, 2)),
        (nn.MultiMarginLoss(weight=torch.tensor([1.0, 3.0])), torch.arange(40) % 2),
        (nn.SmoothL1Loss(beta=2.0), torch.arange(80.0).view(40, 2)),
        (nn.CrossEntropyLoss(), torch.full((40, 2), 0.5)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_loss_of_torch_is_what_its_mean_is_made_of(loss, y):
    x, _ = points()
    objective, outputs = vectors(train=(x, y), loss=loss).spec.objective, torch.randn(40, 2)
    losses = objective.scores(outputs, y).loss
    assert losses.shape == (40,)
    assert float(losses.mean()) == pytest.approx(float(loss(outputs, y)), rel=1e-5)
    assert loss.reduction == "mean"


def test_the_usual_losses_of_torch_are_those_that_targets_have_without_them():
    assert own_task(loss=nn.CrossEntropyLoss(label_smoothing=0.1)).spec.objective == (
        own_task(label_smoothing=0.1).spec.objective
    )
    x, y = points()
    assert vectors(train=(x, y), loss=nn.MSELoss()).spec.objective == vectors(train=(x, y)).spec.objective


def test_a_number_may_have_an_axis_more_than_the_outputs():
    x, y = points()

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(x.shape[1], 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0))

    task = esper.Task(model, ["0"], (x, y[:, :1]), batch=16)
    assert task.spec.load(None, 0).train.y.dim() == 1


def test_targets_that_are_far_from_0_are_noticed():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    given = {"model": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), "slots": ["0"], "batch": 16}
    with pytest.warns(
        UserWarning, match=r"training targets are about 1\.5e\+03 in size.*; scale them, or it needs many"
    ):
        esper.Task(train=(x, 1500.0 + x[:, :1]), **given)


def masked(divide: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The squared error where the second target is 1, by how often that is."""

    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        count = y[:, 1:].sum(1)
        return divide(((outputs - y[:, :1]).square() * y[:, 1:]).sum(1), count)

    return loss


def by_where(error: Tensor, count: Tensor) -> Tensor:
    return torch.where(count > 0, (error / count).sqrt(), 0.0)


@pytest.mark.parametrize(
    ("part", "loss", "metric", "said"),
    [
        (
            "train",
            masked(torch.div),
            None,
            r"the loss of train\[5\] is NaN or infinite for the outputs of a new network",
        ),
        ("val", masked(torch.div), None, r"the loss of val\[5\] is NaN"),
        ("train", masked(by_where), None, r"the gradient of the loss of train\[5\] is NaN .* clamp what is divided by"),
        ("val", masked(lambda error, count: error), masked(torch.div), r"the metric of val\[5\] is NaN"),
    ],
)
def test_an_example_whose_loss_gradient_or_metric_is_nan_is_named(part, loss, metric, said):
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = torch.stack((x[:, 0], torch.ones(60)), dim=1)
    given = {"train": (x[:40], y[:40].clone()), "val": (x[40:], y[40:].clone())}
    task = functools.partial(
        esper.Task, lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), ["0"], loss=loss, metric=metric, batch=16
    )
    task(**given)
    given[part][1][5, 1] = 0.0
    with pytest.raises(DataError, match=said):
        task(**given)


def test_a_loss_that_is_infinite_for_the_outputs_of_other_examples_alone_is_taken():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    legal, y = x > -1.0, (x + 100.0).argmax(1)  # the largest is legal, and not in other examples

    class Legal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).masked_fill(x <= -1.0, -torch.inf)

    assert not legal.all()
    esper.Task(Legal, ["layer"], (x, y), loss=lambda o, y: F.cross_entropy(o, y, reduction="none"), blind_loss=1.0)


@pytest.mark.parametrize(
    ("channels", "y", "said"),
    [
        (1, torch.randn(8, 5, 5), r"give targets with an axis more, y\[:, None\]; or"),
        (1, torch.zeros(8, 5, 5, dtype=torch.bool), r"y\[:, None\]\.float\(\) and loss=nn\.BCEWithLogitsLoss\(\); or"),
        (3, torch.randn(8, 5, 5), r"classes as integers, y\.long\(\); or"),
        (3, torch.full((8, 5, 5), -100), r"ignore_index=-100, .* / \(y != -100\)\.float\(\)\.mean\(\(1, 2\)\)\.clamp"),
        (3, torch.arange(200).view(8, 5, 5), "classes 0 to 2 for 3 channels, not 3 to 199; or"),
    ],
)
def test_for_a_target_of_each_pixel_the_advice_fits_its_type(channels, y, said):
    x = torch.randn(8, 2, 5, 5, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ConfigError, match=said):
        esper.Task(lambda: nn.Sequential(nn.Conv2d(2, channels, 1)), ["0"], (x, y), val=(x, y))


def test_targets_of_one_class_alone_are_noticed():
    x = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    with pytest.warns(UserWarning, match="all training targets of sequential are of class 1, so there is nothing"):
        esper.Task(lambda: nn.Sequential(nn.Linear(4, 2)), ["0"], (x, torch.ones(20, dtype=torch.int64)), classes=None)


def test_inputs_that_are_not_scaled_are_noticed_by_the_outputs_of_a_new_network():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    given = {"slots": ["0"], "batch": 16}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    with pytest.warns(
        UserWarning, match=r"outputs of a new sequential are about .e\+06, .* scale train\.x and the other"
    ):
        esper.Task(model, train=(1e7 * x, x[:, :1]), **given)
    esper.Task(lambda: nn.Sequential(nn.BatchNorm1d(4), model()), ["0"], train=(1e7 * x, x[:, :1]), batch=16)
    with pytest.warns(UserWarning, match="training targets are"):  # outputs of this size are meant
        esper.Task(model, train=(1e7 * x, 1e6 * x[:, :1].abs()), **given)


def test_a_softmax_in_front_of_cross_entropy_is_noticed():
    with pytest.warns(UserWarning, match="are probabilities, but cross-entropy takes what is in front of a softmax"):
        own_task(
            model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.Linear(4, 3), nn.Softmax(1)), slots=["1"]
        )


def test_a_metric_gives_points_beside_its_own_loss_or_that_of_the_targets():
    def twice(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 200.0 * (out.argmax(dim=1) == y)

    logits, y = torch.tensor([[5.0, 0.0, 0.0], [5.0, 0.0, 0.0]]), torch.tensor([0, 1])
    for loss in (None, torch.nn.CrossEntropyLoss(reduction="none")):
        objective = own_task(metric=twice, loss=loss, unit="double accuracy").spec.objective
        scores = objective.scores(logits, y)
        assert scores.loss.tolist() == pytest.approx(F.cross_entropy(logits, y, reduction="none").tolist())
        assert objective.points(scores.score.sum(), scores.weight.sum()) == 100.0
        assert objective.unit == "double accuracy"


def test_bytes_become_numbers_by_inputs():
    x, y = images()
    stored = (x.abs() * 50).to(torch.uint8)
    task = own_task(train=(stored, y), val=None, test=None, inputs=lambda x: x.float() / 255)
    data = task.spec.load(None, 0)
    assert data.train.x.dtype == torch.uint8
    assert [len(data.split(part)) for part in ("train", "val", "test")] == [33, 3, 4]


def test_sequences_get_the_blueprints_of_sequences_and_a_name_of_their_own():
    tokens = torch.arange(140).reshape(20, 7) % 11
    task = esper.Task(model=Encoder, slots=["encoder.layers.0"], train=(tokens, torch.arange(20) % 3))
    assert (task.name, task.spec.family.name) == ("encoder", "TRANSFORMER")
    assert repr(task).endswith("slots encoder.layers.0, accuracy)")
    assert vectors(name="lines").name == "lines"


def test_functions_that_edit_what_they_get_leave_the_users_data_as_they_were():
    (x, y), (xv, yv) = points(), points(30)
    before = [values.clone() for values in (x, y, xv, yv)]
    edits, plain = (
        vectors(train=(x, y), val=(xv, yv), test=(xv, yv), inputs=inputs, episode_length=3)
        for inputs in (lambda x: x.mul_(1.5), lambda x: x * 1.5)
    )
    edited, expected = grow(edits, "wait_only"), grow(plain, "wait_only")
    assert edited.points == expected.points
    assert edited.test_points == expected.test_points
    assert all(map(torch.equal, before, (x, y, xv, yv)))


def test_a_loss_or_metric_that_edits_what_it_gets_is_refused_without_a_change_of_the_data():
    def squares(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y.sub_(out.detach()).square().mean(dim=1) + 0.0 * out.sum(dim=1)

    x, y = points()
    before = y.clone()
    for changes in ({"loss": squares}, {"metric": squares}):
        with pytest.raises(EsperError, match=f"the {next(iter(changes))} edits its targets in place"):
            vectors(train=(x, y), **changes)
        assert torch.equal(y, before)
    with pytest.raises(EsperError, match="the loss edits its outputs in place"):
        vectors(train=(x, y), loss=lambda out, y: out.sub_(y).square().mean(dim=1))


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray])
def test_data_that_change_after_the_task_was_made_are_noticed(kind):
    x, y = map(kind, points())
    task = vectors(train=(x, y), val=points(30), test=points(20))
    y *= 2.0
    with pytest.raises(EsperError, match=r"changed in place .* after the task was made; give the task a copy"):
        grow(task, "wait_only")


def trained() -> MyNet:
    """A network that is right about some images."""
    network = deterministic_build(MyNet, seed=4)
    optimizer = torch.optim.Adam(network.parameters(), 1e-2)
    x, y = images()
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.eval()


def test_networks_start_with_the_weights_that_are_given_or_as_a_copy_of_the_network(tmp_path):
    network = trained()
    before = copy.deepcopy(network.state_dict())
    torch.save({"state_dict": network.state_dict(), "epoch": 20}, tmp_path / "mine.pt")
    still = {"lr": 1e-12, "weight_decay": 0.0, "slots": ["stem"], "val": images(20)}
    tasks = [own_task(model=network, **still), own_task(weights=tmp_path / "mine.pt", **still)]
    found = grow(tasks[0], "wait_only", steps=2)
    assert torch.allclose(found.module.network.stem[0].weight, before["stem.0.weight"], atol=1e-6)
    assert found.points > 60.0  # not the same, because statistics move
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    digests = {task.spec.load(None, 0).identity["sha256_weights"] for task in tasks}
    assert len(digests) == 1
    assert [task.name for task in tasks] == ["mynet", "mynet"]


def test_the_loss_of_guessing_is_not_that_of_the_weights():
    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y, reduction="none")

    tasks = [own_task(loss=loss, slots=["stem"], weights=of) for of in (None, trained().state_dict())]
    assert tasks[0].spec.objective.blind_loss == tasks[1].spec.objective.blind_loss


def test_a_run_does_not_go_on_with_other_weights(tmp_path):
    task, other = (own_task(slots=["stem"], weights=deterministic_build(MyNet, seed).state_dict()) for seed in (1, 2))
    train(task, tmp_path)
    with pytest.raises(EsperError, match=r"was made with data.sha256_weights = "):
        esper.load(tmp_path / "run", task=other).resume(rounds=2, progress=False)


def test_the_best_host_of_a_run_is_not_given_with_figures_of_other_data(tmp_path):
    x, y = images()
    task, other = (own_task(slots=["stem"], val=(x, of)) for of in (y, y.roll(1)))
    train(task, tmp_path)
    assert grown_of(esper.load(tmp_path / "run", task=task)).points > 0.0
    with pytest.raises(
        EsperError, match=r"has accuracy .* on val, and had .* in the run: the network, the data or the"
    ):
        grown_of(esper.load(tmp_path / "run", task=other))


def test_a_batch_larger_than_the_data_is_all_of_them():
    examples = len(images()[0])
    own = {given: own_task(batch=batch, **given_) for given, batch, given_ in (
        ("all", 10**9, {}), ("as large", examples, {}), ("a stream", 10**3, {"batches_per_step": 2}))}  # fmt: skip
    assert own["all"].spec.batch_train == own["as large"].spec.batch_train == len(own["all"].spec.load(None, 0).train)
    assert own["a stream"].spec.batch_train == 10**3


def test_slots_that_are_left_out_are_proposed_and_named(capsys):
    task = own_task(slots=None)
    assert repr(task) == "Task('mynet': 379 parameters, slots stem, layer2 (proposed), accuracy)"
    esper.grow(task, "wait_only", steps=1, executor="streamed")
    assert "\nslots (proposed): stem, layer2; name others with slots=\n" in capsys.readouterr().out
    matched = own_task(slots=["layer2.*", "s*"])
    assert (matched.spec.enabled, matched.spec.proposal) == (("layer2.0", "layer2.1", "stem"), None)


@pytest.mark.parametrize("kind", [torch.float32, torch.int64, torch.bool])
def test_one_hot_targets_mean_classes(kind):
    x, y = images()
    one_hot = own_task(train=(x, F.one_hot(y).to(kind)), val=None, test=None)
    classes = own_task(train=(x, y), val=None, test=None)
    assert one_hot.spec.objective == classes.spec.objective
    assert one_hot.spec.load(None, 0).identity == classes.spec.load(None, 0).identity
    given = {"train": (x, F.one_hot(y).to(kind)), "val": None, "test": None}
    assert own_task(**given, loss=lambda out, y: out.square().mean(dim=1)).spec.load(None, 0).train.y.shape == (33, 3)


@pytest.mark.parametrize("given", [lambda y: y, lambda y: F.one_hot(y).float()])
def test_tokens_and_one_hot_targets_of_sequences_give_the_loss_of_the_next_token(given):
    tokens = torch.arange(120).reshape(20, 6) % 5
    task = esper.Task(model=Tied, slots=["mix"], train=(tokens, given(tokens.roll(-1, dims=1))), batch=4)
    assert (task.spec.objective.vocabulary, task.spec.objective.unit) == (5, "token accuracy")


X, Y = images()


class NotANumber(MyNet):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias.data.fill_(math.nan)


class Normed(MyNet):
    """Normalizes one value of each example and channel over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))


class Squeezed(MyNet):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).squeeze()


class Table:
    """Examples that say that there are fifty, of which the eighth cannot be read if `broken`."""

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.broken and index == 7:
            raise OSError("no such picture")
        return X[index], Y[index]


def fails(*_: object) -> torch.Tensor:
    return torch.tensor(1 / 0)


class OwnWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs * self.scale, y, reduction="none")


SMOOTH = 0.9 * F.one_hot(Y).float() + 0.1 / 3
WRONG = [
    ({"model": NotANumber}, "'head.bias' of NotANumber is NaN or infinite in a new network; correct its initial"),
    ({"model": lambda: fails()}, "the model cannot be built: ZeroDivisionError: division by zero"),
    ({"augmentation": fails}, "augmentation= fails on a tensor [8, 1, 6, 6] of torch.float32: ZeroDivisionError"),
    ({"augmentation": lambda x: x.double()}, "it gives a tensor [8, 1, 6, 6] of torch.float64; keep shapes and dtypes"),
    ({"augmentation": lambda x: x[1:]}, "it gives a tensor [7, 1, 6, 6] of torch.float32; keep shapes and dtypes, and"),
    ({"augmentation": lambda x: x.numpy()}, "TypeError: a tree of tensors cannot contain ndarray"),
    (
        {"augmentation": lambda x: x + np.random.default_rng().random()},
        "augmentation= gives other examples in a second call with the same draws, so networks would depend on each",
    ),
    ({"loss": fails}, "the loss fails on outputs (40, 3) and targets (40,) of torch.int64: ZeroDivisionError"),
    ({"metric": fails}, "the metric fails on outputs (4, 3) and targets (4,) of torch.int64: ZeroDivisionError"),
    (
        {"inputs": fails},
        "inputs= fails on a tensor [40, 1, 6, 6] of torch.float32: ZeroDivisionError: division by zero",
    ),
    (
        {"inputs": lambda x: x.numpy()},
        "inputs gives a ndarray; it must give tensors",
    ),
    ({"inputs": lambda x: x[:1]}, "inputs= gives a tensor [1, 1, 6, 6] for examples [40, 1, 6, 6]"),
    (
        {"train": Table()},
        "train[40] fails: IndexError: index 40 is out of bounds for dimension 0 with size 40. Its length",
    ),
    ({"train": Table(broken=True)}, "train[7] fails: OSError: no such picture. Its length is given as 50"),
    ({"train": {"x": X, "y": Y}}, "train is a dictionary of 'x', 'y', expected inputs by name and 'labels'"),
    (
        {"train": (X.to_sparse(), Y)},
        "train.x is a tensor of torch.float32, torch.sparse_coo on cpu, expected a dense one",
    ),
    ({"train": (X.to("meta"), Y)}, "train.x is a tensor of torch.float32, torch.strided on meta, expected a dense one"),
    ({"train": (X, SMOOTH)}, "the targets are probabilities, which may mean classes or numbers; give loss=lambda o, y"),
    (
        {"train": (X, (Y[:, None] > torch.arange(3)).float())},
        "where loss is binary_cross_entropy_with_logits or mse_loss of torch.nn.functional.",
    ),
    (
        {"train": (X, F.one_hot(Y)), "val": (X, SMOOTH)},
        "mynet.val.y holds torch.float32 [40, 3], expected classes [n] as integers",
    ),
    ({"slots": 3}, "slots is 3; it must be list[str]"),
    ({"slots": ["stem*"], "train": None}, "train is missing; give the examples as (x, y), a data set or a DataLoader"),
    ({"weights": MLP()}, "weights is a MLP; it must be Path or text or Mapping[str, Any] or None."),
    ({"train": (X[:, :, 0], Y)}, "MyNet cannot process inputs [4, 1, 6] of torch.float32"),
    ({"loss": F.cross_entropy}, "one number per example, (40,): average over the axes of an example, and not over"),
    ({"loss": lambda out, y: float(out.sum())}, "the loss gives a result of type float"),
    ({"loss": lambda out, y: out.sum(dim=1) - out.sum()}, "the loss of one example depends on the other examples"),
    (
        {"loss": lambda out, y: torch.logcumsumexp(out[:, 0], 0) - out[:, 0]},  # right for the first one
        "the loss of one example depends on the other examples",
    ),
    (
        {"metric": lambda out, y: 100.0 * (out.argmax(1) == y).float().mean().expand(len(y))},
        "figures of a whole split are no metric here: measure them with grown.module",
    ),
    ({"loss": lambda out, y: out.detach().exp().sum(dim=1)}, "the loss of objective Custom has no gradient"),
    ({"loss": lambda out, y: -out.exp().sum(dim=1)}, "it must be finite and above 0: give blind_loss"),
    ({"metric": lambda out, y: out}, "the metric gives a result of shape (4, 3)"),
    ({"loss": lambda out, y: out[:, 9]}, "the loss fails on outputs (40, 3) and targets (40,) of torch.int64"),
    (
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))},
        "CrossEntropyLoss with weight= divides by what a whole batch counts, so that the loss of one example depends",
    ),
    (
        {"train": (X, Y.clamp(min=1)), "val": (X, Y), "loss": nn.CrossEntropyLoss(ignore_index=0)},
        "CrossEntropyLoss with ignore_index= divides by what a whole batch",
    ),
    ({"loss": OwnWeights()}, "the loss OwnWeights has parameters of its own, which are not trained; let the network"),
    ({"train": (X, Y.float()), "val": None, "test": None}, "give classes as integers, y.long()"),
    ({"train": (X, [str(int(y)) for y in Y])}, "convert it with np.unique(labels, return_inverse=True)[1]"),
    ({"loss": nn.BCEWithLogitsLoss()}, "; integers stay integers: give y.float() if it takes floats"),
    ({"unit": "hits"}, "unit a loss or a metric; give it, or leave them out"),
    (
        {"model": Normed, "batch": 1},
        "the network cannot be trained on a batch [1, 1, 6, 6]: ValueError: Expected more",
    ),
    (
        {"model": Normed, "batch": 39, "last_batch": "keep"},
        "for an incomplete last batch last_batch='merge' or 'drop'.",
    ),
    (
        {"model": Normed, "train": (X[:1], Y[:1]), "val": (X, Y), "test": (X, Y)},
        "Training has a batch of one example, and normalization over a batch needs two: give a larger batch, more",
    ),
    ({"batch": 41, "last_batch": "drop"}, "last_batch is 'drop', and 40 training examples do not fill a batch of 41"),
    ({"model": Squeezed}, "Squeezed gives [3] of torch.float32 for 1 example; outputs are floats [1, ...]"),
    ({"last_batch": "pad"}, "last_batch is 'pad'; it must be 'merge' or 'drop' or 'keep'"),
    ({"batch": 0}, "batch is 0; it must be at least 1"),
    ({"lr": 0.0}, "lr is 0.0; it must be above 0"),
    ({"classes": ["a", "b"]}, "mynet: the class names are ['a', 'b'], expected 3 different texts, in order"),
    ({"classes": ["a", "b", "b"]}, "expected 3 different texts"),
    ({"classes": ["a", "b"], "loss": lambda out, y: out.exp().sum(dim=1)}, "its targets are not classes; leave them"),
    ({"name": "my net"}, "the name of the task is 'my net'; use letters"),
]


@pytest.mark.parametrize("changes", [{"batch": 39}, {"batch": 39, "last_batch": "drop"}, {"last_batch": "keep"}])
def test_batch_normalization_of_single_values_is_trained_where_no_batch_is_of_one(changes):
    task = own_task(model=Normed, **changes)
    assert math.isfinite(grow(task).points)


@pytest.mark.slow
def test_a_network_that_grew_with_a_function_as_augmentation_is_saved(tmp_path):
    files = grow(own_task(augmentation=lambda x: x + 0.1 * torch.randn_like(x))).save(tmp_path / "net")
    assert (tmp_path / "net" / "model.py").exists(), files


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_what_does_not_fit_is_refused_with_the_way_out(changes, said):
    with pytest.raises(EsperError) as caught:
        own_task(**changes)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_two_outputs_for_one_number_are_not_broadcast():
    x, y = points()
    with pytest.raises(ValueError, match=r"targets \[\] of torch.float32 .* do not fit the outputs \[2\]"):
        esper.Task(model=MLP, slots=["body"], train=(x, y[:, 0]))
    with pytest.raises(ValueError, match="outputs and targets differ in shape"):
        MeanSquaredError(1.0).scores(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize("loss", [F.cross_entropy, F.mse_loss])
def test_the_losses_that_are_proposed_for_probabilities_work(loss):
    task = own_task(
        train=(X, SMOOTH), val=None, test=None, loss=lambda o, y: loss(o, y, reduction="none").view(len(o), -1).mean(1)
    )
    assert task.spec.objective.unit == "loss reduction"
