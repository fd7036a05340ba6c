"""The optimizer of a task, in every executor, against that of torch on plain modules."""

import math
from functools import partial

import pytest
import torch
from own_tasks import own_task

import esper
from esper.api.task import optimizer_of
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import SeedStage
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from plain import PlainTraining, assert_close
from tiny import Bench

T = torch.optim
EXECUTORS = {
    "streamed": None,
    "fused": lambda data: FusedExecutor(data, measures_together=True),
    "native": NativeExecutor,
}
OF_A_USER = {
    "adamw": (("adamw", {}, None), partial(T.AdamW, lr=1e-3)),
    "adamw with values": (
        ("adamw", {"lr": 0.02, "weight_decay": 0.3, "betas": (0.8, 0.9)}, 0.5),
        partial(T.AdamW, lr=0.02, weight_decay=0.3, betas=(0.8, 0.9)),
    ),
    "adam with decay": (("adam", {"lr": 0.01, "weight_decay": 0.2}, None), partial(T.Adam, lr=0.01, weight_decay=0.2)),
    "sgd": (("sgd", {}, None), partial(T.SGD, lr=0.02, momentum=0.9)),
    "sgd without momentum": (
        ("sgd", {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.01}, 0.1),
        partial(T.SGD, lr=0.1, weight_decay=0.01),
    ),
    "a class": ((T.SGD, {}, None), T.SGD),
    "a class with values": ((T.Adam, {"lr": 0.01}, None), partial(T.Adam, lr=0.01)),
    "a partial": ((partial(T.AdamW, eps=1e-3), {"lr": 0.01}, None), partial(T.AdamW, eps=1e-3, lr=0.01)),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("named", OF_A_USER)
def test_network_and_seed_are_trained_as_by_the_optimizer_of_torch(named, executor):
    given, of_torch = OF_A_USER[named]
    bench = Bench(2, optimizer=optimizer_of(*given))
    bench.grow("r0c0", "conv_small", SeedStage.HOLDING, alpha=1.0)
    plain = PlainTraining(bench)
    (host, _), (seed, _) = plain.optimizers
    decay = {"weight_decay": 0.0}  # seeds are not decayed
    plain.optimizers = [(host, of_torch(host)), (seed, of_torch([{"params": seed, **decay}]))]
    wrap = EXECUTORS[executor]
    trained = bench.executor if wrap is None else wrap(bench.executor.data)
    for t in (1, 2):
        trained.train_epoch(t, bench.slots)
        plain.epoch(t)
    assert_close(bench.host_params(), plain.model.give())
    assert_close(bench.seed_params("r0c0"), dict(plain.seeds["r0c0"].named_parameters()))


def test_a_task_has_the_defaults_of_torch_and_no_clipping():
    spec = own_task(optimizer="adamw").spec.optimizer
    assert (spec.host_lr, spec.seed_lr, spec.adamw_weight_decay, spec.betas, spec.eps) == (
        1e-3, 1e-3, 0.01, (0.9, 0.999), 1e-8
    )  # fmt: skip
    assert spec.decay_vectors
    assert math.isinf(spec.grad_clip)
    assert own_task().spec.optimizer == spec


WRONG = [
    ({"optimizer": "adamm"}, "optimizer is 'adamm'; give one of 'adamw', 'adam', 'sgd'"),
    ({"optimizer": T.RMSprop}, "give one of 'adamw', 'adam', 'sgd', the class in torch.optim, or functools.partial"),
    ({"optimizer": partial(T.SGD, [torch.zeros(1)])}, "values by name"),
    ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "betas is given, but sgd has no betas; leave it out"),
    ({"optimizer": "adam", "momentum": 0.9}, "momentum is given, but adam has no momentum"),
    ({"optimizer": partial(T.SGD, nesterov=True)}, "sgd with nesterov=True is not available here"),
    ({"optimizer": partial(T.Adam, amsgrad=True)}, "adam with amsgrad=True is not available here"),
    ({"clip": 0.0}, "optimizer.grad_clip is 0.0; it must be above 0"),
    ({"warmup": 3, "episode_length": 3}, "warmup is 3, but an episode has 3 control steps"),
    ({"schedule": "step"}, "schedule is 'step'; it must be 'constant' or 'cosine' or 'linear'"),
    ({"label_smoothing": 1.0}, "objective.label_smoothing is 1.0; it must be below 1"),
    ({"label_smoothing": 0.1, "loss": lambda o, y: o.sum(dim=1)}, "label_smoothing and a loss of your own are given"),
    ({"weight_decay": -1.0}, "optimizer.adamw_weight_decay is -1.0; it must be at least 0"),
]


@pytest.mark.parametrize(("changes", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_an_optimizer_that_cannot_be_had_exactly_is_refused(changes, said):
    with pytest.raises(ConfigError) as caught:
        own_task(**changes)
    assert said in str(caught.value)


def test_schedule_and_smoothing_reach_the_task():
    spec = own_task(schedule="cosine", warmup=2, label_smoothing=0.1).spec
    assert (spec.optimizer.schedule, spec.optimizer.warmup, spec.objective.label_smoothing) == ("cosine", 2, 0.1)


def test_values_that_are_not_numbers_are_refused():
    with pytest.raises(ConfigError, match="lr of the optimizer is 'fast'; it must be a number"):
        optimizer_of("adamw", {"lr": "fast"}, None)
    with pytest.raises(ConfigError, match=r"betas is 0\.9; give two numbers"):
        optimizer_of("adamw", {"betas": 0.9}, None)


@pytest.mark.slow
def test_a_run_without_clipping_goes_on_with_the_same_optimizer(tmp_path):
    task = own_task(optimizer="adam", weight_decay=0.1, episode_length=3)
    small = {"feature_width": 8, "hidden_width": 8, "update_epochs": 1}
    run = esper.train(task, 1, num_envs=2, ppo=small, out=tmp_path / "run", progress=False, executor="streamed")
    assert math.isinf(run.config["optimizer"]["grad_clip"])
    assert run.config["optimizer"]["kind"] == "adam"
    assert len(run.resume(rounds=2, progress=False).rounds) == 2
