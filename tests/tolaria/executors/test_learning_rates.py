"""Scheduled learning rates, rates of each host, and label smoothing, in every executor, against loops of torch."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_streamed import EXECUTORS, bench_of

import tiny
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Algorithm, LifecycleOp, SeedStage
from esper.tasks.losses import Classification
from esper.tasks.registry import task_by_name
from plain import PlainTraining, assert_close
from tiny import CLASSES, SGD
from toys import ToyClient, action, script

LENGTH, WARMUP = 4, 1
COSINE = {"schedule": "cosine", "warmup": WARMUP}
OPTIMIZERS = {"sgd": replace(SGD, **COSINE), "adamw": replace(tiny.adamw(), host_lr=0.01, seed_lr=0.02, **COSINE)}
of = torch.optim.lr_scheduler


def of_torch(optimizer):
    """What a practitioner writes for a cosine with a warm-up of one epoch."""
    rising = of.LinearLR(optimizer, 0.5, total_iters=WARMUP)
    return of.SequentialLR(optimizer, [rising, of.CosineAnnealingLR(optimizer, LENGTH - WARMUP)], milestones=[WARMUP])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_rate_of_a_late_seed_falls_from_its_birth_to_the_end_of_the_episode(executor):
    bench = bench_of(executor, optimizer=OPTIMIZERS["sgd"], episode_length=LENGTH)
    bench.train(2)
    bench.grow("r1c0", "conv_light", SeedStage.HOLDING, alpha=1.0, algorithm=Algorithm.GATE)
    plain = PlainTraining(bench)
    momentum, flat = bench.population.host.optimizer.momentum[0], bench.population.host_kind.template.parameters
    names = {value.data_ptr(): name for name, value in plain.model.give().items()}
    (host, sgd), (_, of_seed) = plain.optimizers
    for parameter in host:
        sgd.state[parameter]["momentum_buffer"] = flat.unpack(momentum)[names[parameter.data_ptr()]].clone()
    scheduler = of.CosineAnnealingLR(of_seed, LENGTH - 2)
    for t, share in ((3, 1 / 3), (4, 2 / 3)):
        sgd.param_groups[0]["lr"] = SGD.host_lr * 0.5 * (1 + np.cos(np.pi * share))
        bench.train()
        plain.epoch(t)
        scheduler.step()
    assert_close(bench.host_params(), plain.model.give())
    assert_close(bench.seed_params("r1c0"), dict(plain.seeds["r1c0"].named_parameters()))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hosts_and_seeds_follow_the_schedulers_of_torch_with_a_rate_of_their_own(kind, executor):
    factors, spec = torch.tensor([1.0, 0.25]), OPTIMIZERS[kind]
    bench = bench_of(executor, 2, optimizer=spec, episode_length=LENGTH, lr_factors=factors)
    bench.grow("r0c0", "conv_small", SeedStage.HOLDING, alpha=1.0)
    bench.grow("r0c1", "conv_light", SeedStage.HOLDING, alpha=1.0, algorithm=Algorithm.GATE)
    plain = [PlainTraining(bench, host) for host in (0, 1)]
    for network, factor in zip(plain, factors.tolist(), strict=True):
        if kind == "adamw":
            matrices = [p for p in network.optimizers[0][0] if p.dim() > 1]
            rest = [p for p in network.optimizers[0][0] if p.dim() == 1]
            groups = [[{"params": matrices, "weight_decay": 0.1}, {"params": rest}]]
            groups += [[{"params": seed}] for seed, _ in network.optimizers[1:]]
            network.optimizers = [
                (own, torch.optim.AdamW(group, lr=rate, betas=spec.betas, weight_decay=0.0))
                for (own, _), group, rate in zip(network.optimizers, groups, (0.01, 0.02, 0.02), strict=True)
            ]
        for _, optimizer in network.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor
    schedulers = [of_torch(optimizer) for network in plain for _, optimizer in network.optimizers]
    for t in range(1, LENGTH + 1):
        bench.train()
        for network in plain:
            network.epoch(t)
        for scheduler in schedulers:
            scheduler.step()
    for host, network in enumerate(plain):
        assert_close(bench.host_params(host), network.model.give())
        for slot, seed in network.seeds.items():
            # the first gradients of a newborn seed are 0, and Adam divides later ones by their small root mean square
            assert_close(bench.seed_params(slot, host), dict(seed.named_parameters()), rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_labels_are_smoothed_as_by_torch_in_training_and_not_in_measuring(executor):
    bench = bench_of(executor, objective=Classification(CLASSES, label_smoothing=0.3))
    bench.grow("r0c0", "conv_small", SeedStage.HOLDING, alpha=1.0)
    plain = PlainTraining(bench)
    plain.label_smoothing = 0.3
    for t in (1, 2):
        told = bench.train()
        plain.epoch(t)
    assert_close(bench.host_params(), plain.model.give())
    assert told.loss.item() == pytest.approx(plain.loss / plain.examples, rel=1e-5)
    with torch.no_grad():
        want = F.cross_entropy(plain.model.eval()(bench.data.val.x), bench.data.val.y)
    assert bench.measure()[1].loss.item() == pytest.approx(want.item(), rel=1e-5)


PLAN = {2: action(LifecycleOp.GERMINATE, slot=0, blueprint=1), 4: action(LifecycleOp.ADVANCE, slot=0)}


def engine():
    chosen = tiny.task(optimizer=OPTIMIZERS["sgd"], episode_length=6)
    built = tiny.engine(3, 6, of=chosen, lr_factors=(1.0, 0.5, 0.25))
    return built, ToyClient(built.spec, script(3, 6, PLAN))


def test_an_episode_goes_on_with_the_rates_of_its_steps():
    (whole, client), (first, own), (second, heir) = engine(), engine(), engine()
    whole.reset(client, 1)
    want = whole.rollout(client)
    first.reset(own, 1)
    for _ in range(3):
        first.step(own)
    second.load_state_dict(first.state_dict(), heir)
    found = second.rollout(heir)
    assert tiny.same_tree(second.state_dict(), whole.state_dict())
    assert np.array_equal(found.val_acc, want.val_acc)


def test_rates_that_are_not_one_positive_number_for_each_host_are_refused():
    for wrong in ((1.0, 1.0), (1.0, 0.0, 1.0), (1.0, float("nan"), 1.0)):
        with pytest.raises(ConfigError, match="expected 3 finite numbers above 0, one for each host"):
            tiny.engine(3, lr_factors=wrong)
    with pytest.raises(ConfigError, match="task 'null' is scripted and has no learning rate"):
        tiny.engine(1, of=task_by_name("null"), lr_factors=[1.0])


def test_a_schedule_that_does_not_fit_the_episode_is_refused_wherever_the_two_meet():
    spec = replace(SGD, warmup=12)
    for build in (
        lambda: tiny.task(optimizer=spec),
        lambda: tiny.engine(1, 12, of=tiny.task(optimizer=spec, episode_length=20)),
    ):
        with pytest.raises(ConfigError, match="so the learning rate would never be reached"):
            build()
