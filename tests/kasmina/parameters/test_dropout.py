"""Keyed dropout: masks of a host depend on its key alone, whoever is drawn with it."""

from itertools import combinations

import pytest
import torch
from torch import nn

from esper.kasmina.parameters.dropout import Draws, Dropout, Moment, draw_for, dropout_layers, with_keyed_dropout

KEY = {"run_seed": 3, "episode": 2, "t": 7, "slot": 1, "host": 5}


def draws_of(*hosts: int, run_seed: int = 3, episode: int = 2, t: int = 7, slot: int = 1) -> Draws:
    return Draws(Moment(run_seed, episode, t), torch.tensor(hosts), slot)


def test_the_masks_of_a_host_are_the_same_alone_and_among_others():
    together = draws_of(5, 0, 11)
    for batch in (4, 4, 3):  # the host is the fastest index of the rows
        drawn = together.kept((batch * 3, 2, 5), 0.5).unflatten(0, (batch, 3))
        for i, host in enumerate((5, 0, 11)):
            alone = draws_of(host)
            alone.count = together.count - 1
            assert torch.equal(drawn[:, i], alone.kept((batch, 2, 5), 0.5))


@pytest.mark.parametrize("part", KEY)
def test_every_part_of_the_key_and_every_mask_of_a_pass_gives_other_numbers(part):
    def first(host: int, **key: int) -> Draws:
        return draws_of(host, **key)

    changed = KEY | {part: KEY[part] + 1}
    one, other = first(**KEY), first(**changed)
    masks = [draws.kept((1, 4000), 0.5) for draws in (one, other, one)]
    for a, b in combinations(masks, 2):
        assert abs(float((a == b).float().mean()) - 0.5) < 0.04  # standard error 0.008
    assert torch.equal(first(**KEY).kept((1, 4000), 0.5), masks[0])


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.9])
def test_masks_keep_what_they_should(p):
    kept = draws_of(0, 1).kept((100, 4000), p).float()
    assert abs(float(kept.mean()) - (1.0 - p)) < 0.003  # standard error below 0.0005
    assert float(kept.mean(dim=0).std()) < 0.06  # no element is favoured: at most 0.05 among 100 rows


def test_a_layer_that_drops_everything_gives_zero():
    layer = Dropout(1.0, channels=False)
    layer.draws = draws_of(0)
    assert not layer(torch.ones(70, 1000)).any()


def test_a_quarter_is_dropped_and_the_rest_is_a_third_larger():
    layer = Dropout(0.25, channels=False)
    layer.draws = draws_of(0, 1)
    y = layer(torch.full((200, 4, 3, 3), 3.0))
    assert sorted(y.unique().tolist()) == [0.0, 4.0]
    assert abs(float((y == 0.0).float().mean()) - 0.25) < 0.02  # standard error 0.005
    layer.eval()
    assert layer(y) is y


def test_layers_of_dropout_are_exchanged_wherever_they_are_and_channels_stay_whole():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    module = with_keyed_dropout(nn.Sequential(inner, nn.Dropout2d(0.4), nn.ReLU()))
    layers = dropout_layers(module)
    assert [(layer.p, layer.channels) for layer in layers] == [(0.5, False), (0.4, True)]
    assert isinstance(with_keyed_dropout(nn.Dropout(0.1)), Dropout)
    draw_for(layers, draws_of(0))
    kept = layers[1](torch.ones(50, 6, 4, 4)).flatten(2)
    assert torch.equal(kept.amin(dim=2), kept.amax(dim=2))
    assert 0 < int((kept == 0.0).all(dim=2).sum()) < 300
