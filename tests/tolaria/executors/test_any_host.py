"""Streamed and fused executors run every host and objective: sequences, a regression, hosts around their slots."""

import dataclasses

import pytest
import torch
from against_streamed import (
    EXECUTORS,
    TWELVE,
    bench_of,
    compare,
    each_of,
    grow_different_seeds,
    host_of,
    in_every_stage_and_blend,
    of_each_split,
    same_pass,
)
from torch import nn

import esper
import tiny
import tokens
from esper.kasmina.blueprints import names, selectable, unregister
from esper.kasmina.blueprints.layers import chain
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.hosts.transformer import TransformerHost, TransformerHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.population import Population
from esper.leyline.errors import ConfigError, StackingError
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from esper.leyline.messages import Scores
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.images import CropAndFlip
from esper.tasks.losses import PADDING, Classification, MeanSquaredError, NextToken, WithMetric
from esper.tasks.registry import TaskSpec
from esper.tolaria.build import build_engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.network import check_scores, mean_factor
from tiny import CLASSES, CPU, SGD, SLOTS, Bench, bit_equal, dataset
from tokens import TokenHostSpec, token_seeds
from user_networks import Sensors

S = SeedStage


each_executor = pytest.mark.parametrize("executor", list(EXECUTORS))
each_other = pytest.mark.parametrize("executor", ["fused", "native"])


@pytest.fixture(autouse=True)
def seeds():
    with token_seeds():
        yield


def token_settings(**changes) -> dict:
    return {"host": tokens.host(**changes), "data": tokens.tokens(), "objective": tokens.OBJECTIVE}


def token_bench(num_envs: int = 1, executor: str = "streamed", settings=None, **changes) -> Bench:
    return bench_of(executor, num_envs, **{**token_settings(**changes), **(settings or {})})


def regression() -> Dataset:
    """The tiny images with three numbers to predict, their class as +1 and -1."""
    images = dataclasses.replace(dataset(), num_classes=None)
    return of_each_split(images, lambda of: Split(of.x, 2.0 * torch.nn.functional.one_hot(of.y, CLASSES).float() - 1.0))


# -- fused as streamed ------------------------------------------------------------------------------------------------


@each_other
def test_sequences_in_every_stage_and_blend_are_run_as_streamed(executor):
    compare(EXECUTORS[executor], in_every_stage_and_blend("token_mlp"), num_envs=TWELVE, epochs=1, **token_settings())


@each_other
def test_convolutions_over_time_are_run_as_streamed(executor):
    def grow(bench):
        bench.grow("r0c0", "token_mlp", S.HOLDING, alpha=1.0, algorithm=Algorithm.GATE, hosts=[0, 2])
        bench.grow("r0c1", "token_scale", S.TRAINING, hosts=[1, 2])
        bench.grow("r1c0", "token_mlp", S.BLENDING, alpha=0.5, algorithm=Algorithm.MULTIPLY, hosts=[1])

    compare(EXECUTORS[executor], grow, num_envs=3, host=host_of(lambda: Sensors(1)))


@each_other
@pytest.mark.parametrize("augmentation", [None, CropAndFlip(1)], ids=["plain", "augmented"])
def test_hosts_that_unshuffle_wide_images_are_run_as_streamed(executor, augmentation):
    size, generator = (6, 10), torch.Generator().manual_seed(6)  # 3x5 after it, which is odd
    spec = CNNHostSpec(in_channels=2, base=4, blocks=2, kernel=3, pools=1, classes=CLASSES, unshuffle=2)

    def split(count: int) -> Split:
        return Split(torch.randn(count, 2, *size, generator=generator), torch.arange(count) % CLASSES)

    splits = {"train": split(40), "val": split(30), "test": split(20)}
    data = Dataset(identity={"name": "wide"}, **splits, num_classes=CLASSES, augmentation=augmentation)
    host = deterministic_build(lambda: CNNHost(spec, SLOTS, image_size=size))
    compare(EXECUTORS[executor], grow_different_seeds, num_envs=5, host=host, data=data)


def transformer_settings(dropout: float = 0.0) -> dict:
    spec = TransformerHostSpec(
        vocabulary=tokens.VOCABULARY, width=8, heads=2, layers=2, segments=2, context=tokens.TOKENS, dropout=dropout
    )
    host = deterministic_build(lambda: TransformerHost(spec, ["r0c0", "r0c1"], tokens=tokens.TOKENS))
    return {"host": host, "data": tokens.tokens(), "objective": tokens.OBJECTIVE}


@each_other
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_transformer_with_every_blueprint_is_run_as_streamed(dropout, executor):
    blueprints = [names()[index] for index in selectable(HostFamily.TRANSFORMER)]
    compare(EXECUTORS[executor], each_of(blueprints), num_envs=len(blueprints), **transformer_settings(dropout))


@pytest.mark.parametrize(("shape", "offered"), [((6,), False), ((5, 6), True)])
def test_what_only_mixes_tokens_is_not_offered_to_hosts_of_vectors(shape, offered):
    x = torch.randn(16, *shape)
    host = host_of(lambda: chain(**{slot: nn.Linear(6, 6) for slot in SLOTS}, out=nn.Linear(6, 3)), x)
    population = Population(host, SGD, num_envs=1, run_seed=0, device=CPU)
    assert bool(population.costs(x, batch=8).selectable[names().index("depthwise")]) is offered


@pytest.mark.parametrize("causal", [True, False])
def test_what_sees_later_tokens_is_not_grown_where_no_output_does(causal):
    @esper.register_blueprint(family="transformer", init={"1.weight": 0.0, "1.bias": 0.0})
    def around(channels):
        return nn.Sequential(Transposed(), nn.Conv1d(channels, channels, 3, padding=1), Transposed())

    class Transposed(nn.Module):
        def forward(self, h):
            return h.mT

    settings = token_settings()
    settings["host"].causal = causal
    try:
        population = Bench(1, **settings).population
        index = names().index("around")
        assert (index in {blueprint for _, blueprint in population.seed_kinds}) is not causal
        assert ("depends on later tokens" in population.left_out.get(index, "")) is causal
        assert {"depthwise", "attention"} <= {names()[i] for _, i in population.seed_kinds}
    finally:
        unregister("around")


def test_a_transformer_learns_and_its_hosts_are_drawn_apart():
    bench = Bench(2, **transformer_settings())
    weights = bench.population.host.params
    assert not torch.equal(weights[0], weights[1])
    first = bench.train().loss
    assert (bench.train(15).loss < 0.9 * first).all()


@pytest.mark.parametrize("causal", [True, False])
def test_gates_that_see_later_tokens_and_gates_that_do_not_are_not_mistaken(causal):
    settings = token_settings()
    settings["host"].causal = causal

    def grow(bench):
        bench.grow("r0c0", "token_mlp", S.HOLDING, alpha=1.0, algorithm=Algorithm.GATE)

    compare(EXECUTORS["native"], grow, **settings)


@each_other
def test_sequences_with_keyed_dropout_in_hosts_and_seeds_are_run_as_streamed(executor):
    def grow(bench):
        bench.grow("r0c0", "token_scale", S.HOLDING, alpha=1.0, hosts=[0, 2])
        bench.grow("r1c0", "token_mlp", S.TRAINING, algorithm=Algorithm.GATE, hosts=[1, 2])

    for settings in ({"dropout": 0.2}, {"dropout": 0.2, "activation": tokens.Tanh}):  # the second through vmap
        compare(EXECUTORS[executor], grow, **{**token_settings(), "host": tokens.host(**settings)})


@each_other
def test_a_regression_on_images_is_run_as_streamed(executor):
    settings = {"data": regression(), "objective": MeanSquaredError(variance=8.0 / 9.0)}
    compare(EXECUTORS[executor], grow_different_seeds, num_envs=5, **settings)


@each_executor
def test_r2_of_each_split_is_that_of_scikit_learn_on_its_own_targets(executor):
    from sklearn.metrics import r2_score

    data, keep = regression(), slice(0, 23)  # classes 8, 8, 7, and a last batch of seven
    own = {"val": Split(data.val.x[keep], data.val.y[keep]), "test": Split(data.test.x[:10], data.test.y[:10] * 3.0)}
    data = dataclasses.replace(data, **own)
    bench = bench_of(executor, 2, data=data, objective=MeanSquaredError(variance=8.0 / 9.0))
    bench.train()
    template, rows = bench.population.host_kind.template, bench.population.host
    found = {name: bench.executor.committed(name, bench.slots).accuracy[:, 0].tolist() for name in own}
    found["val, all seeds"] = bench.measure()[1].accuracy[:, 0].tolist()
    template.train(False)
    for name, values in found.items():
        split = own[name.split(",")[0]]
        for n, value in enumerate(values):
            template.bind(rows.params[n], rows.buffers[n])
            with torch.no_grad():
                outputs = template(split.x, lambda slot, h: h)
            expected = r2_score(split.y.numpy(), outputs.numpy(), multioutput="variance_weighted")
            assert value == pytest.approx(100.0 * expected, rel=1e-4), name


@each_executor
def test_a_metric_of_the_users_that_is_nan_gives_no_points_and_no_loss(executor):
    def broken(outputs, targets):  # NaN for one example of class 2
        return torch.where(targets == 2, 0.0 / torch.zeros(len(outputs)), 100.0)

    objective = WithMetric(objective=Classification(CLASSES), metric=broken, unit="points")
    bench = bench_of(executor, objective=objective)
    _, measured = bench.measure()
    assert measured.accuracy[0, 0] == 0.0
    assert measured.loss.isnan().all()


@each_executor
def test_a_token_host_gets_the_accuracy_and_loss_of_its_counted_tokens(executor):
    bench = token_bench(2, executor)
    bench.train(2)
    _, measured = bench.measure()
    template, rows, val = bench.population.host_kind.template, bench.population.host, bench.data.val
    for n in range(2):
        template.bind(rows.params[n], rows.buffers[n])
        with torch.no_grad():
            logits = template(val.x, lambda slot, h: h)
        counts = val.y != PADDING
        hits = (logits.argmax(dim=-1) == val.y)[counts].float().mean().item()
        loss = torch.nn.functional.cross_entropy(logits[counts], val.y[counts]).item()
        assert measured.accuracy[n, 0].item() == pytest.approx(100.0 * hits, rel=1e-6)
        assert measured.loss[n].item() == pytest.approx(loss, rel=1e-5)


@each_executor
def test_masks_of_host_dropout_differ_from_step_to_step(executor):
    losses = set()
    for t in (1, 2):
        bench = token_bench(1, executor, dropout=0.5, settings={"batches_per_step": 1})
        bench.executor.data._train.begin = lambda *key, of=bench.executor.data._train: setattr(
            of, "order", torch.arange(16)[None]
        )  # the same examples in both steps
        losses.add(bench.executor.train_epoch(t, bench.slots).loss.item())
    assert len(losses) == 2


# -- coalitions without shared prefixes -------------------------------------------------------------------------------


@each_executor
def test_a_cnn_is_measured_the_same_with_and_without_shared_prefixes(executor):
    bench = tiny.with_players(bench_of(executor, 2))
    found, want = bench.measure(shapley=True)
    bench.executor.data.host.shares_prefixes = False
    _, measured = bench.measure(shapley=True)
    assert torch.equal(measured.accuracy[found.valid], want.accuracy[found.valid])
    torch.testing.assert_close(measured.loss, want.loss)
    assert len(set(want.accuracy[found.valid].tolist())) > 3


@each_executor
def test_coalitions_of_a_host_around_its_slots_are_those_of_separate_passes(executor):
    bench = token_bench(2, executor, around=True)
    bench.grow("r0c0", "token_mlp", S.HOLDING, alpha=1.0)
    bench.grow("r1c0", "token_mlp", S.BLENDING, alpha=0.6, algorithm=Algorithm.MULTIPLY)
    bench.grow("r0c1", "token_scale", S.BLENDING, alpha=0.3, algorithm=Algorithm.GATE, hosts=[1])
    bench.train(3)
    bench.population.seeds.params.mul_(3.0)
    found, together = bench.measure(shapley=True)
    for k in range(found.sets.shape[1]):
        sets = [found.sets[n, k : k + 1].numpy() for n in range(2)]
        with torch.no_grad():
            apart = bench.executor.sum_scores(bench.executor.data.evaluation("val"), bench.slots.alpha, sets, 1)
        points = bench.executor.data.objective.points(apart.score, apart.weight)
        for n in range(2):
            if found.valid[n, k]:
                assert together.accuracy[n, k].item() == pytest.approx(points[n, 0].item(), abs=1e-4), (n, k)
    assert len(set(together.accuracy[found.valid].tolist())) > 3


# -- what does not count ----------------------------------------------------------------------------------------------


def with_targets(change) -> Dataset:
    data = tokens.tokens()
    split = Split(data.train.x.clone(), data.train.y.clone())
    change(split)
    return dataclasses.replace(data, train=Split(split.x, split.y))  # a split refuses what is edited after it is made


@each_executor
def test_what_stands_at_padded_tokens_does_not_matter(executor):
    def pad(split: Split) -> None:
        split.y[:, 3:] = PADDING

    def pad_and_overwrite(split: Split) -> None:
        pad(split)
        split.x[:, 3:] = 0

    a, b = (token_bench(2, executor, settings={"data": with_targets(change)}) for change in (pad, pad_and_overwrite))
    same_pass(a.train(), b.train())
    assert torch.equal(a.population.host.params, b.population.host.params)


@each_executor
def test_a_batch_in_which_nothing_counts_has_no_gradient(executor):
    def pad(split: Split) -> None:
        split.y.fill_(PADDING)

    settings = {"data": with_targets(pad), "optimizer": dataclasses.replace(SGD, sgd_weight_decay=0.0)}
    bench = token_bench(2, executor, settings=settings)
    born = bench.population.host.params.clone()
    bench.train()
    assert bit_equal(bench.population.host.params, born)


def test_a_masked_loss_has_gradient_zero_where_nothing_counts_and_that_of_the_mean_elsewhere():
    errors = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    for mask, want in (([0.0] * 4, [0.0] * 4), ([0.0, 1.0, 1.0, 0.0], [0.0, 0.5, 0.5, 0.0])):
        weight = torch.tensor(mask)
        (found,) = torch.autograd.grad(errors * weight, errors, mean_factor(weight.sum()).expand(4))
        assert found.tolist() == want


# -- which executor, and what is refused ------------------------------------------------------------------------------


def token_task(**changes) -> TaskSpec:
    fields = {
        "name": "tokens", "description": "Tokens.", "family": HostFamily.TRANSFORMER, "enabled": SLOTS,
        "episode_length": 6, "min_training_epochs": 1, "objective": tokens.OBJECTIVE, "host": TokenHostSpec(),
        "load": lambda folder, seed: tokens.tokens(), "batch_train": 8, "batch_val": 16, "optimizer": SGD,
    }  # fmt: skip
    return TaskSpec(**{**fields, **changes})


def token_engine(of: TaskSpec, **config):
    settings = {"num_envs": 2, "episode_length": 4, "slots": SLOTS, "run_seed": 5, **config}
    return build_engine(EngineConfig(**settings), of, tokens.tokens(), CPU)


def test_auto_runs_small_sequences_natively():
    assert token_engine(token_task(), executor="auto").config.executor == "native"


class Reading(torch.nn.Module):
    """Decides by a number of its own host, which is read in Python."""

    def forward(self, h):
        return h if h.abs().mean().item() > 0.5 else 2.0 * h


def test_a_host_that_cannot_be_stacked_is_refused_or_run_host_by_host_with_the_reason():
    of = token_task(host=TokenHostSpec(activation=Reading))
    with pytest.raises(
        StackingError, match=r"the host gives other results .* \(RuntimeError .*\.item\(\).* use executor 'streamed'"
    ):
        token_engine(of, executor="fused")
    with (
        pytest.warns(UserWarning, match="the fused executor cannot run these hosts; a slower one will: the host"),
        pytest.warns(
            UserWarning, match="the native executor cannot run these hosts; a slower one will: .*looks at values"
        ),
    ):
        assert token_engine(of, executor="auto").config.executor == "streamed"


def test_one_host_runs_alone_without_a_word():
    of = token_task(host=TokenHostSpec(activation=Reading))
    assert token_engine(of, executor="auto", num_envs=1).config.executor == "streamed"


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's objective."""

    of: object
    unit: str = "points"
    blind_loss: float = 1.0
    added: float = 0.0

    def scores(self, outputs, targets):
        error = (outputs - targets).square().mean(dim=1)
        return self.of(Scores(error, error.detach(), torch.ones(len(error))))

    def score(self, outputs, targets):
        return (outputs - targets).square().mean(dim=1) + self.added

    def points(self, score, weight):
        return -score / weight


@pytest.mark.parametrize(
    ("of", "message"),
    [
        (
            lambda s: s._replace(loss=s.loss.mean()),
            r"a loss of torch.float32 \(\) .* one number per row, float32 \(4,\)",
        ),
        (lambda s: s._replace(score=s.score[:2]), r"a score of torch.float32 \(2,\)"),
        (lambda s: s._replace(weight=4), "a weight of int "),
        (lambda s: s._replace(loss=s.loss.detach()), "the loss of objective Own has no gradient"),
    ],
)
def test_an_objective_that_is_not_per_example_is_refused(of, message):
    with pytest.raises(ConfigError, match=message):
        check_scores(Own(of), torch.randn(4, 3), torch.randn(4, 3))


def test_an_objective_whose_score_alone_is_another_is_refused():
    with pytest.raises(ConfigError, match="other numbers in score"):
        check_scores(Own(lambda s: s, added=1.0), torch.randn(4, 3), torch.randn(4, 3))


def test_an_objective_that_does_not_fit_the_host_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"objective NextToken fails on outputs \(2, 3\) and targets \(2,\)"):
        tiny.engine(of=tiny.task(objective=NextToken(3)))
    check_scores(Own(lambda s: s), torch.randn(4, 3), torch.randn(4, 3))
    check_scores(Classification(3), torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))


def test_a_measured_part_has_at_most_two_to_the_21_floats_on_a_cpu():
    data = token_bench(1).executor.data
    assert data.examples_at_once(16) == 2**21 // (16 * tokens.TOKENS * tokens.VOCABULARY)
    data.host.largest_activation = 2**25
    assert data.examples_at_once(16) == 1
