"""Keyed dropout: masks of a host depend on its key alone, whoever is drawn with it."""

import copy
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.dropout import (
    Draws,
    Dropout,
    KeyedAttention,
    Moment,
    draw_for,
    dropout_layers,
    with_keyed_dropout,
)
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import StackedTemplate, buffer_layout, parameter_layout
from esper.kasmina.parameters.stacking import HOST_EXAMPLES, StackedAttention, stack_layers, stacked_host
from user_networks import Encoder

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


ROWS, T, D, HEADS = 3, 5, 8, 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def attention(**settings: object) -> nn.MultiheadAttention:
    layer = deterministic_build(lambda: nn.MultiheadAttention(D, HEADS, **{"batch_first": True, **settings}))
    for i, parameter in enumerate(layer.parameters()):
        parameter.data = 0.5 * normal(*parameter.shape, seed=i)
    return layer


def own(layer: nn.MultiheadAttention) -> KeyedAttention:
    found = copy.deepcopy(layer)
    found.__class__ = KeyedAttention
    return found


LATER = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDED = torch.arange(T) >= torch.tensor([5, 3, 4])[:, None]
MASKS = {
    "none": {},
    "later": {"attn_mask": LATER},
    "numbers": {"attn_mask": normal(T, T, seed=5)},
    "of each head": {"attn_mask": normal(ROWS * HEADS, T, T, seed=6)},
    "padding": {"key_padding_mask": PADDED},
    "both": {"attn_mask": LATER, "key_padding_mask": PADDED},
    "hint": {"attn_mask": LATER, "is_causal": True},
    "hint and padding": {"attn_mask": LATER, "key_padding_mask": PADDED, "is_causal": True},
}


@pytest.mark.parametrize("options", [{"need_weights": False}, {}, {"average_attn_weights": False}])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks_and_weights_are_those_of_pytorch(masks, options):
    layer, x = attention(), normal(ROWS, T, D, seed=9)
    want, found = (of(x, x, x, **masks, **options) for of in (layer, own(layer)))
    torch.testing.assert_close(found[0], want[0])
    assert (found[1] is None) is (want[1] is None)
    if want[1] is not None:
        torch.testing.assert_close(found[1], want[1])


@pytest.mark.parametrize("settings", [{"batch_first": False}, {"bias": False}, {"kdim": 3, "vdim": 6}])
def test_layouts_and_inputs_are_those_of_pytorch(settings):
    layer = attention(**settings)
    shape = (T, ROWS) if not layer.batch_first else (ROWS, T)
    q, k, v = normal(*shape, D, seed=1), normal(*shape, layer.kdim, seed=2), normal(*shape, layer.vdim, seed=3)
    torch.testing.assert_close(own(layer)(q, k, v), layer(q, k, v))


def test_inputs_without_an_axis_of_examples_and_hints_without_a_mask_are_refused():
    x = normal(ROWS, T, D)
    with pytest.raises(ValueError, match="is_causal describes attn_mask, which is None"):
        own(attention())(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match=r"inputs \[5, 8\]; expected an axis of examples"):
        own(attention())(*(normal(T, D),) * 3)


def test_dropped_weights_are_keyed_and_the_others_are_enlarged():
    layer = attention(dropout=0.25)
    keyed = with_keyed_dropout(copy.deepcopy(layer)).train()
    assert type(keyed) is KeyedAttention
    x, found, before = normal(ROWS, T, D), [], torch.get_rng_state()
    for step in (1, 1, 2):
        draw_for(dropout_layers(keyed), Draws(Moment(0, t=step), torch.zeros(1, dtype=torch.int64), 1))
        found.append(keyed(x, x, x, average_attn_weights=False))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    kept = layer.eval()(x, x, x, average_attn_weights=False)[1]
    factor = found[0][1] / kept
    dropped = factor == 0.0
    assert 0.1 < dropped.float().mean() < 0.4
    torch.testing.assert_close(factor[~dropped], torch.full_like(factor[~dropped], 4.0 / 3.0))
    values = (x @ layer.in_proj_weight[2 * D :].mT + layer.in_proj_bias[2 * D :]).unflatten(-1, (HEADS, -1))
    mixed = torch.einsum("rhts,rshd->rthd", found[0][1], values).flatten(2)
    torch.testing.assert_close(found[0][0], layer.out_proj(mixed))
    torch.testing.assert_close(keyed.eval()(x, x, x)[0], layer(x, x, x)[0])


def test_many_encoders_in_evaluation_are_each_its_own():
    """Without gradients PyTorch would run its fused kernel on the weights of all hosts."""
    hosts = 3
    builds = [deterministic_build(lambda: Encoder(dropout=0.1), seed) for seed in range(hosts)]
    layout = parameter_layout(builds[0])
    rows = torch.stack([layout.pack(dict(net.named_parameters())) for net in builds])
    stacked = StackedTemplate(stack_layers(builds[0]), layout, buffer_layout(builds[0]))
    assert type(stacked.module.encoder.layers[0].self_attn) is StackedAttention
    stacked.train(False)
    stacked.assign(stacked.views(rows), ())
    tokens = torch.randint(11, (4, hosts, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together = stacked(tokens.flatten(0, 1)).unflatten(0, (4, hosts))
        for g, net in enumerate(builds):
            torch.testing.assert_close(together[:, g], net.eval()(tokens[:, g]))


class Wide(nn.Module):
    """Tokens [B, T] -> logits [B, T, 64]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(64, 64), nn.Linear(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.embed(x)))


def test_a_wide_encoder_is_not_refused_for_a_relu_that_rounding_switches():
    """Gradients of one of its hosts differ by 2 % in float32, because a hidden value is zero up to rounding."""
    tokens = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))[:, :-1]
    slots = ["encoder.layers.0", "encoder.layers.1"]
    host = ModuleHostSpec.of(Wide, slots, tokens).build(slots, tokens[:1])
    stacked_host(host.rebuild, tokens[torch.arange(HOST_EXAMPLES) % 8])


def test_attention_with_rare_options_is_left_as_it_is():
    for settings in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        layer = with_keyed_dropout(attention(dropout=0.1, **settings))
        assert type(layer) is nn.MultiheadAttention
