"""The transformer host: its points, its size, its forward pass, alone and among others."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.blueprints.layers import SelfAttention
from esper.kasmina.hosts.host import HostSpec, InjectionPoint
from esper.kasmina.hosts.transformer import TransformerHost, TransformerHostSpec
from esper.kasmina.parameters.dropout import Draws, Moment, draw_for, dropout_layers, with_keyed_dropout
from esper.kasmina.parameters.initialization import build_twice, deterministic_build, fresh_rows, init_table
from esper.kasmina.parameters.layout import parameter_layout
from esper.kasmina.parameters.stacking import can_stack_layers
from esper.leyline.errors import ConfigError
from esper.leyline.random import Stream

SLOTS = ("r0c0", "r0c1")


def spec(**changes: float) -> TransformerHostSpec:
    small = {"vocabulary": 11, "width": 8, "heads": 2, "layers": 4, "segments": 2, "context": 9}
    return TransformerHostSpec(**(small | changes))


def host(slots=SLOTS, tokens: int = 7, **changes: float) -> TransformerHost:
    return deterministic_build(lambda: TransformerHost(spec(**changes), slots, tokens=tokens))


def text(rows: int = 3, tokens: int = 7, vocabulary: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def unchanged(slot_id: str, h: Tensor) -> Tensor:
    return h


def test_points_end_the_segments_and_are_met_in_the_order_of_the_forward_pass():
    assert isinstance(spec(), HostSpec)
    assert spec().points() == (
        InjectionPoint(slot_id="r0c0", channels=8, order=0, position=0.5),
        InjectionPoint(slot_id="r0c1", channels=8, order=1, position=1.0),
    )
    met = {}
    built = host()
    logits = built(text(), lambda slot_id, h: met.setdefault(slot_id, h))
    assert tuple(met) == built.execution_order() == SLOTS
    assert {h.shape for h in met.values()} == {(3, *built.features(built.enabled[0]))} == {(3, 7, 8)}
    assert logits.shape == (3, 7, 11)


def test_disabled_slots_do_not_exist_and_the_order_of_their_list_does_not_matter():
    met = []
    built = host(slots=["r0c1"])
    built(text(), lambda slot_id, h: met.append(slot_id) or h)
    assert met == ["r0c1"] == [point.slot_id for point in built.enabled]
    assert host(slots=["r0c1", "r0c0"]).enabled == spec().points()


def test_the_forward_pass_equals_the_layers_written_out():
    built, x = host(heads=1), text()
    weights = {name: tensor.detach() for name, tensor in built.named_parameters()}

    def normed(name: str, h: Tensor) -> Tensor:
        return F.layer_norm(h, (8,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def mapped(name: str, h: Tensor) -> Tensor:
        return h @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    h = weights["embedding.weight"][x] + weights["positions.weight"][:7]
    for i, change in enumerate((1.0, 2.0, 1.0, -3.0)):
        q, k, v = mapped(f"layers.{i}.attention.qkv", normed(f"layers.{i}.norm1", h)).chunk(3, dim=-1)
        scores = (q @ k.mT / math.sqrt(8)).masked_fill(torch.ones(7, 7).triu(1) > 0, -math.inf)
        h = h + mapped(f"layers.{i}.attention.out", scores.softmax(dim=-1) @ v)
        h = h + mapped(f"layers.{i}.down", F.gelu(mapped(f"layers.{i}.up", normed(f"layers.{i}.norm2", h))))
        h = h * change
    expected = normed("norm", h) @ weights["embedding.weight"].T
    found = built(x, lambda slot_id, h: h * {"r0c0": 2.0, "r0c1": -3.0}[slot_id])
    torch.testing.assert_close(found, expected)


# -- initialization ---------------------------------------------------------------------------------------------------


def drawn_weights(num_hosts: int, **changes: int) -> dict[str, Tensor]:
    builds = build_twice(lambda: TransformerHost(spec(**changes), ["r0c0"], tokens=7))
    layout = parameter_layout(builds.module)
    table = init_table(builds, layout, {})
    assert not table.rebuilt.any()  # a host is drawn, not built again
    return layout.unpack(fresh_rows(table, 5, Stream.HOST_INIT, torch.arange(num_hosts)))


def test_weights_are_normal_with_standard_deviation_0_02_and_biases_are_zero():
    for name, values in drawn_weights(8, width=32).items():
        if values.dim() == 3:
            assert abs(float(values.std()) / 0.02 - 1.0) < 0.06, name  # 2,304 numbers or more
            assert abs(float(values.mean())) < 0.0015, name
        else:
            assert torch.equal(values, torch.full_like(values, "norm" in name and name.endswith("weight"))), name


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "largest"), [({}, 7 * 32), ({"vocabulary": 100}, 7 * 100), ({"width": 8, "heads": 8}, 8 * 7 * 7)]
)
def test_the_largest_activation_is_that_of_the_mlp_the_logits_or_the_attention(changes, largest):
    built = host(**changes)
    assert built.largest_activation == largest
    sizes = [built.spec.heads * 7 * 7]

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        sizes.append(output.numel() // 3)

    for module in built.modules():
        module.register_forward_hook(note)
    built(text(), unchanged)
    assert max(sizes) == largest


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_keyed_and_leaves_evaluation_and_the_global_generator_alone():
    built, x = host(dropout=0.2), text()
    layers = dropout_layers(built)
    assert len(layers) == 1 + 3 * 4
    assert dropout_layers(host()) == ()
    torch.manual_seed(1)
    state = torch.get_rng_state()

    def passed(seed: int) -> Tensor:
        draw_for(layers, Draws(Moment(seed), torch.tensor([4]), 2))
        return built.train()(x, unchanged)

    first = passed(0)
    assert torch.equal(passed(0), first)
    assert not torch.equal(passed(1), first)
    assert torch.equal(torch.get_rng_state(), state)
    plain = host()
    plain.load_state_dict(built.state_dict())
    assert torch.equal(built.eval()(x, unchanged), plain.eval()(x, unchanged))


def test_attention_that_drops_weights_has_the_gradients_of_its_formula():
    layer = with_keyed_dropout(deterministic_build(lambda: SelfAttention(8, 2, dropout=0.4))).train()
    h = torch.randn(2, 70, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    pull = torch.randn(2, 70, 8, generator=torch.Generator().manual_seed(1))
    draw_for(dropout_layers(layer), Draws(Moment(0), torch.tensor([0]), 0))
    found = layer(h)
    grads = torch.autograd.grad((found * pull).sum(), [h, *layer.parameters()])

    draws = Draws(Moment(0), torch.tensor([0]), 0)
    q, k, v = layer.qkv(h).view(2, 70, 3, 2, 4).permute(2, 0, 3, 1, 4)
    kept = torch.zeros(2, 2, 70, 70)
    for first, end in ((0, 32), (32, 64), (64, 70)):  # masks of the queries of each part, for the keys they see
        kept[:, :, first:end, :end] = draws.kept((2, 2, end - first, end), 0.4)
    scores = (q @ k.mT / 2.0).masked_fill(torch.ones(70, 70).triu(1).bool(), -torch.inf)
    expected = layer.out((scores.softmax(-1) * kept / 0.6 @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(found, expected)
    for grad, formula in zip(
        grads, torch.autograd.grad((expected * pull).sum(), [h, *layer.parameters()]), strict=True
    ):
        torch.testing.assert_close(grad, formula, atol=1e-5, rtol=1e-4)


def test_attention_that_drops_weights_trains_in_half_precision():
    layer = with_keyed_dropout(deterministic_build(lambda: SelfAttention(8, 2, dropout=0.4))).train()
    h = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for halved in (True, False):
        draw_for(dropout_layers(layer), Draws(Moment(0), torch.tensor([0]), 0))
        with torch.autocast("cpu", torch.bfloat16, enabled=halved):
            out = layer(h)
        found.append(torch.autograd.grad(out.float().square().sum(), list(layer.parameters())))
    for half, full in zip(*found, strict=True):
        torch.testing.assert_close(half, full, atol=0.03 * float(full.abs().max()), rtol=0.05)


# -- many hosts at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_embeddings_with_options_that_their_stacked_form_lacks_are_not_stacked(option):
    assert can_stack_layers(nn.Embedding(3, 2))
    assert not can_stack_layers(nn.Embedding(3, 2, **option))


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(1, 10, dtype=torch.int64), "sequences of 10 tokens do not fit host.context, which is 9"),
        (torch.zeros(1, 0, dtype=torch.int64), "sequences of 0 tokens do not fit"),
        (torch.zeros(1, 7), r"inputs has the shape \(1, 7\) and is torch.float32; .* sequences of token numbers"),
        (torch.zeros(1, 7, dtype=torch.uint8), r"and is torch.uint8; .* int64 or int32"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), r"inputs has the shape \(1, 3, 8, 8\)"),
    ],
)
def test_inputs_that_are_no_sequences_of_the_context_are_refused(example, message):
    with pytest.raises(ConfigError, match=message):
        spec().build(SLOTS, example)
    assert spec().build(SLOTS, torch.zeros(1, 9, dtype=torch.int32)).tokens == 9
