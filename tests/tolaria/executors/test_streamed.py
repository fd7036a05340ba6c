"""The streamed executor against plain PyTorch: what it trains, and what it leaves alone."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from esper.leyline.lifecycle import Algorithm, SeedStage
from plain import PlainTraining, assert_close
from tiny import SGD, SLOTS, Bench

S = SeedStage
ADD, MULTIPLY, GATE = Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE

CONDITIONS = {
    "host alone": None,
    "straight-through": ("r1c0", "conv_light", S.TRAINING, 0.0, ADD),
    "straight-through product": ("r0c0", "conv_small", S.TRAINING, 0.0, MULTIPLY),
    "straight-through gate in the first blending pass": ("r0c1", "depthwise", S.BLENDING, 0.0, GATE),
    "half-blended gate": ("r0c0", "bottleneck", S.BLENDING, 0.3, GATE),
    "held": ("r1c0", "norm", S.HOLDING, 1.0, ADD),
    "held product": ("r0c1", "conv_light", S.HOLDING, 1.0, MULTIPLY),
    "permanent": ("r0c0", "attention", S.FOSSILIZED, 1.0, ADD),
}


def check_epochs(name: str, hosts: int, epochs: int, loudness: float = 1.0, **settings: object) -> None:
    bench, condition = Bench(hosts, **settings), CONDITIONS[name]
    if condition is not None:
        slot, blueprint, stage, alpha, algorithm = condition
        bench.grow(slot, blueprint, stage, alpha=alpha, algorithm=algorithm)
        bench.population.seeds.params.mul_(loudness)
    plain = [PlainTraining(bench, host) for host in range(hosts)]
    for t in range(1, epochs + 1):
        outputs = bench.train()
        for reference in plain:
            reference.epoch(t)
    for host, reference in enumerate(plain):
        assert_close(bench.host_params(host), reference.model.give())
        if condition is not None:
            assert_close(bench.seed_params(slot, host), dict(reference.seeds[slot].named_parameters()))
        assert outputs.loss[host].item() == pytest.approx(reference.loss / reference.examples, abs=1e-5)
        assert outputs.acc[host].item() == pytest.approx(100.0 * reference.correct / 40)  # 16 + 16 + 8 examples


@pytest.mark.parametrize("name", CONDITIONS)
def test_two_epochs_equal_plain_training(name):
    check_epochs(name, hosts=2, epochs=2)


@pytest.mark.parametrize("name", ["half-blended gate", "straight-through"])
def test_host_and_seed_are_clipped_each_by_its_own_norm_gate_included(name):
    check_epochs(name, hosts=2, epochs=2, loudness=100.0, optimizer=replace(SGD, grad_clip=0.005))


def test_seeds_in_all_slots_train_side_by_side_like_plain_modules():
    bench = Bench(1)
    bench.grow("r0c0", "conv_light", S.FOSSILIZED, alpha=1.0)
    bench.grow("r1c0", "conv_light", S.BLENDING, alpha=0.5, algorithm=MULTIPLY)  # the skeleton of r0c0 once more
    bench.grow("r0c1", "conv_small", S.TRAINING, algorithm=GATE)
    plain = PlainTraining(bench)
    for t in (1, 2):
        bench.train()
        plain.epoch(t)
    assert_close(bench.host_params(), plain.model.give())
    for slot in SLOTS:
        assert_close(bench.seed_params(slot), dict(plain.seeds[slot].named_parameters()))
    gate = plain.model.grown["r0c1"][1]
    assert gate is not None
    assert_close(bench.gate_params("r0c1"), dict(gate.named_parameters()))


# -- who gets a gradient --------------------------------------------------------------------------------------------


def test_momentum_lives_through_fossilization_and_ends_with_the_release():
    bench = Bench(1)
    bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=GATE)
    bench.train()
    momentum = bench.population.seeds.optimizer.momentum
    before = momentum[0].clone()
    assert bool(before.any())
    bench.set("r0c0", stage=int(S.FOSSILIZED))
    assert torch.equal(momentum[0], before)
    bench.set("r0c0", apply_structure=False, stage=int(S.PRUNED), alpha=0.0, has_gate=False)
    bench.executor.apply_structure(bench.structure(released=bench.marked("r0c0")))
    for flat in (bench.population.seeds, bench.population.gates):
        for name, tensor in flat.tensors().items():
            assert not tensor[0].any(), name


# -- gradient statistics --------------------------------------------------------------------------------------------


CLIP = 0.001
"""So low that every gradient is clipped, and that some tensors count as exploding."""


def scalar_statistics(tensors: list[Tensor], host: list[Tensor]) -> tuple[float, float, float, list[bool]]:
    """Norm, health, ratio and [vanishing, exploding] of the last batch, by the definition, in float64."""
    norms = [g.double().norm().item() for g in tensors]
    norm = sum(x * x for x in norms) ** 0.5
    bad = sum(x < 1e-7 for x in norms), sum(x > 10.0 * CLIP for x in norms)
    health = min(1.0, max(0.0, 1.0 - 0.5 * bad[0] / len(norms) - 0.8 * bad[1] / len(norms)))
    host_norm = sum(g.double().square().sum().item() for g in host) ** 0.5
    n_seed, n_host = sum(g.numel() for g in tensors), sum(g.numel() for g in host)
    found = [count > 0 for count in bad]
    if norm < 1e-8 or host_norm < 1e-8:
        return norm, health, 0.0, found
    return norm, health, (norm / n_seed**0.5) / (host_norm / n_host**0.5 + 1e-8), found


def test_gradient_statistics_are_those_of_the_last_batch_before_clipping():
    bench = Bench(3, optimizer=replace(SGD, grad_clip=CLIP))
    bench.grow("r0c0", "conv_heavy", S.TRAINING, hosts=[0, 2])
    bench.grow("r0c0", "bottleneck", S.TRAINING, hosts=1)  # equally wide, other layers
    bench.grow("r1c0", "conv_light", S.BLENDING, alpha=0.5, algorithm=GATE)
    bench.grow("r0c1", "attention", S.HOLDING, alpha=1.0)
    want = {}
    outputs = bench.train()
    again = Bench(3, optimizer=replace(SGD, grad_clip=CLIP))  # the same hosts before the pass
    again.slots = bench.slots
    again.executor.apply_structure(again.structure(germinated=again.slots.stage.numpy() > 1))
    for n in range(3):
        plain = PlainTraining(again, n)

        def look(plain: PlainTraining = plain, n: int = n) -> None:
            host = [p.grad for p in plain.optimizers[0][0]]
            for slot in ("r0c0", "r1c0"):
                seed, gate, _, _ = plain.model.grown[slot]
                tensors = [p.grad for p in (*seed.parameters(), *(gate.parameters() if gate else ()))]
                want[n, SLOTS.index(slot)] = scalar_statistics(tensors, host)

        plain.epoch(1, look)
    for place, (norm, health, ratio, found) in want.items():
        assert outputs.grad_norm[place].item() == pytest.approx(norm, rel=1e-4)
        assert outputs.grad_health[place].item() == pytest.approx(health)
        assert [bool(of[place]) for of in (outputs.grad_vanishing, outputs.grad_exploding)] == found
        assert outputs.grad_ratio[place].item() == pytest.approx(ratio, rel=1e-4)
    assert any(0.0 < health < 0.999 for _, health, _, _ in want.values())
    assert {tuple(found) for *_, found in want.values()} >= {(True, False), (False, True)}
    holding = SLOTS.index("r0c1")
    for name in ("grad_norm", "grad_health", "grad_ratio"):
        assert bool(getattr(outputs, name)[:, holding].isnan().all()), name
    assert not outputs.grad_vanishing[:, holding].any()
    assert not outputs.grad_exploding[:, holding].any()


def test_without_seeds_no_statistic_is_measured():
    outputs = Bench(2).train()
    assert bool(outputs.grad_norm.isnan().all() & outputs.grad_health.isnan().all() & outputs.grad_ratio.isnan().all())
