"""Births, deaths and snapshots by masks leave the bits that the same things by numbers leave."""

import numpy as np
import pytest
import torch

from esper.kasmina.blueprints import registry
from esper.kasmina.parameters import masked_updates
from esper.leyline.stages import HostFamily, SeedStage
from tiny import adamw, population, same_tree

N, S = 5, 3
KINDS = np.array(registry.selectable(HostFamily.CNN))


def pair(optimizer):
    """Two equal populations full of noise, optimizer state and snapshots included."""
    both = [population(N, **optimizer) for _ in range(2)]
    for p in both:
        p.reset(2)
        generator = torch.Generator().manual_seed(7)
        for tensor in p.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            else:
                tensor.copy_(torch.randint(9, tensor.shape, generator=generator))
    return both


def mask(seed, *shape):
    return np.random.default_rng(seed).random(shape) < 0.5


def same(a, b):
    return same_tree(a.state_dict(), b.state_dict())


@pytest.fixture(params=[{}, {"optimizer": adamw()}], ids=["sgd", "adamw"])
def both(request):
    return pair(request.param)


@pytest.mark.parametrize("seed", range(3))
def test_a_seed_is_born_with_the_same_weights_and_its_neighbours_keep_theirs(both, seed):
    by_numbers, by_masks = both
    rng = np.random.default_rng(seed)
    born = np.zeros((N, S), dtype=np.bool_)
    born[[0, 2, 3, 4], rng.integers(S, size=4)] = True
    blueprint, gated = rng.choice(KINDS, (N, S)), mask(seed, N, S)
    before = {name: x.clone() for name, x in by_masks.state_dict().items()}
    by_numbers.germinate(born, blueprint, gated, 6, 4)
    masked_updates.germinate(by_masks, *map(torch.from_numpy, (born, blueprint, gated)), 6, 4)
    assert same(by_numbers, by_masks)
    rows = torch.from_numpy(born).flatten()
    now = by_masks.state_dict()["seeds.params"]
    assert torch.equal(now[~rows], before["seeds.params"][~rows])
    assert not bool((now[rows] == before["seeds.params"][rows]).all(dim=1).any())


def test_every_blueprint_is_born_with_the_same_weights_in_every_slot():
    for index in KINDS:
        by_numbers, by_masks = population(N), population(N)
        born, blueprint = np.zeros((N, S), dtype=np.bool_), np.full((N, S), index)
        born[range(N), np.arange(N) % S] = True
        by_numbers.germinate(born, blueprint, born, 1, 9)
        masked_updates.germinate(by_masks, *map(torch.from_numpy, (born, blueprint, born)), 1, 9)
        assert same(by_numbers, by_masks)
        assert torch.equal(by_masks.gates.params.any(dim=1), torch.from_numpy(born).flatten())


def test_the_dead_leave_nothing_not_even_nan(both):
    by_numbers, by_masks = both
    for p in both:
        p.seeds.params[::2] = torch.nan
    gone = mask(1, N, S)
    by_numbers.release(gone)
    masked_updates.release(by_masks, torch.from_numpy(gone))
    assert same(by_numbers, by_masks)
    assert not by_masks.seeds.params[torch.from_numpy(gone).flatten()].any()


def test_snapshots_are_kept_and_taken_back_alike(both):
    by_numbers, by_masks = both
    hosts, seeds, panicked = mask(2, N), mask(3, N, S), mask(4, N)
    stage = np.random.default_rng(5).choice([int(SeedStage.FOSSILIZED), int(SeedStage.TRAINING)], (N, S))
    by_numbers.snapshot_hosts(hosts)
    masked_updates.snapshot_hosts(by_masks, torch.from_numpy(hosts))
    assert same(by_numbers, by_masks)
    by_numbers.snapshot_seeds(seeds)
    masked_updates.snapshot_seeds(by_masks, torch.from_numpy(seeds))
    assert same(by_numbers, by_masks)
    for p in both:
        p.host.params.fill_(torch.nan)
        p.seeds.params.fill_(3.0)
    by_numbers.restore(panicked, stage)
    masked_updates.restore(by_masks, torch.from_numpy(panicked), torch.from_numpy(stage))
    assert same(by_numbers, by_masks)
    assert torch.equal(by_masks.host.params.isnan().any(dim=1), ~torch.from_numpy(panicked))
