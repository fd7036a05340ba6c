"""The exported network computes what the committed coalition computes, is trainable, and counts right."""

import math
from dataclasses import asdict, replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import tiny
from esper.export.grown import Grown, GrownSeed, plain
from esper.export.network import GrownNetwork, load
from esper.export.source import Code, UnwritableError
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.hosts.weights import started
from esper.kasmina.parameters.flops import flops
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ExportError
from esper.leyline.lifecycle import SeedStage
from esper.tasks.registry import task_by_name
from hosts_to_export import ARCHITECTURES, grown, outputs
from tiny import SLOTS
from user_networks import Backbone, Encoder

HOST_PARAMS = (9 * 4 + 2 * 4) + (9 * 4 * 8 + 2 * 8) + (8 * 3 + 3)
HOST_FLOPS = 2 * (36 * 9 * 4 + 9 * 9 * 4 * 8 + 8 * 3)  # 6x6 pixels in block 0, 3x3 in block 1


@pytest.mark.parametrize("host", range(3))
def test_the_outputs_are_those_of_the_committed_coalition(trained, network_of, host):
    x = tiny.dataset().val.x
    with torch.no_grad():
        found = network_of(host).module(x)
    torch.testing.assert_close(found, outputs(trained, host, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("host", range(3))
def test_the_description_names_what_grew_and_how_well_it_does(trained, network_of, host):
    network = network_of(host, test=12.5)
    data, found = tiny.dataset().val, network.description
    hits = network.module(data.x).argmax(dim=1) == data.y
    assert (found.task, found.slots, found.unit, found.test) == ("tiny", tiny.SLOTS, "accuracy", 12.5)
    assert found.val == pytest.approx(100.0 * float(hits.float().mean()))
    assert found.architecture == ARCHITECTURES[host]
    assert (found.host_params, found.grown_params) == (HOST_PARAMS, int(trained.stats.fossil_params[host]))
    assert found.host == {"class": "esper.kasmina.hosts.cnn.CNNHostSpec", **asdict(tiny.HOST)}
    assert (found.input_shape, found.input_dtype, found.normalization) == ((1, 6, 6), "float32", None)


def test_parameters_and_operations_are_counted_by_hand():
    host = tiny.HOST.build(tiny.SLOTS, torch.zeros(1, 1, 6, 6))
    seed = GrownSeed("r0c0", "conv_light", "ADD")  # 9 weights per pair of the 4 channels, and 3 vectors of 4
    module = plain(host, (seed,)).module
    counts = [sum(p.numel() for p in part.parameters()) for part in (module.network, module.grown)]
    assert counts == [HOST_PARAMS, 9 * 16 + 3 * 4]
    assert flops(lambda: module(torch.zeros(1, 1, 6, 6))) == HOST_FLOPS + 2 * 36 * 9 * 16


def test_seeds_that_are_still_blended_in_belong_to_the_live_network_alone(trained, network_of):
    stage, alpha = trained.stats.stage.copy(), trained.stats.alpha.copy()
    stage[0, 1], alpha[0, 1] = SeedStage.BLENDING, 0.25
    stage[0, 2] = SeedStage.TRAINING
    stats = replace(trained.stats, stage=stage, alpha=alpha)
    committed, live = network_of(0, stats=stats), network_of(0, stats=stats, live=True)
    assert [seed.slot for seed in committed.description.seeds] == ["r0c0"]
    assert [(seed.slot, seed.alpha) for seed in live.description.seeds] == [("r0c0", 1.0), ("r0c1", 0.25)]
    assert (committed.description.val, live.description.val) == (trained.stats.committed_acc[0], None)
    x = tiny.dataset().val.x
    expected = outputs(trained, 0, x, alpha={"r0c0": 1.0, "r0c1": 0.25})
    with torch.no_grad():
        torch.testing.assert_close(live.module(x), expected, rtol=1e-6, atol=1e-6)
    assert "grown.r0c1.alpha" not in dict(live.module.named_parameters())


def test_a_host_that_is_not_there_and_a_task_without_networks_are_refused(trained, network_of):
    with pytest.raises(ExportError, match="there is no host 3; choose one of 0 to 2"):
        network_of(3)
    with pytest.raises(ExportError, match="'null' is scripted and has no networks"):
        GrownNetwork.of(trained.engine, task_by_name("null"), tiny.dataset(), trained.stats, host=0)


class Double(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return 2.0 * h


@pytest.mark.parametrize(
    ("algorithm", "gate", "alpha", "slope"),
    [
        ("ADD", None, 1.0, 3.0),  # h + 2h
        ("ADD", None, 0.5, 2.0),  # h + 0.5 · 2h
        ("MULTIPLY", None, 1.0, 1.0 + math.tanh(2.0) + 2.0 * (1.0 - math.tanh(2.0) ** 2)),  # h (1 + tanh 2h)
        ("GATE", Double(), 1.0, 9.0),  # h + 2h · 2h
    ],
)
def test_a_seed_passes_the_gradient_of_its_input_on(algorithm, gate, alpha, slope):
    h = torch.ones(1, requires_grad=True)
    Grown(Double(), algorithm, gate, alpha)(h).backward()
    assert float(h.grad) == pytest.approx(slope)


@pytest.mark.parametrize("loads", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_grown_host_with_a_frozen_backbone_is_the_same_as_files(loads, tmp_path):
    x = tiny.dataset().val.x
    of = tiny.task(host=ModuleHostSpec.of(partial(Backbone, loads=loads), SLOTS, x[:8]))
    hosts = grown(ARCHITECTURES[0], ARCHITECTURES[1], of=of)
    network = GrownNetwork.of(hosts.engine, of, tiny.dataset(), hosts.stats, host=1)
    with torch.no_grad():
        want = network.module(x)
        torch.testing.assert_close(want, outputs(hosts, 1, x), rtol=1e-6, atol=1e-6)
    own = dict(Backbone().named_parameters())
    frozen = {f"network.{name}" for name, p in own.items() if not p.requires_grad}
    assert network.description.host_params == sum(p.numel() for p in own.values())

    (note,) = network.save(tmp_path / "grown").notes
    assert note.startswith("model.py imports user_networks, which must be importable where it is loaded;")
    text = (tmp_path / "grown" / "model.py").read_text()
    names: dict[str, object] = {"__name__": "model", "__file__": str(tmp_path / "grown" / "model.py")}
    exec(text, names)
    again = load(tmp_path / "grown", host=of.host.build(SLOTS, x[:1])).module
    for module in (network.module, names["load_model"](), again):
        assert {name for name, p in module.named_parameters() if not p.requires_grad} == frozen
        with torch.no_grad():
            torch.testing.assert_close(module(x), want, rtol=1e-6, atol=1e-6)


def test_given_weights_are_those_of_the_files_and_the_source_is_that_of_the_model():
    x, weights = tiny.dataset().val.x, deterministic_build(Backbone, seed=3).state_dict()
    for model in (started(Backbone, weights)[0], started(deterministic_build(Backbone, seed=3), None)[0]):
        found = plain(ModuleHostSpec.of(model, SLOTS, x[:8]).build(SLOTS, x[:1]), ())
        own = found.module.network.state_dict()
        assert all(torch.equal(own[name], value) for name, value in weights.items())
        code = Code(imports=True)
        if found.model is Backbone:
            assert code.call(found.model) == "Backbone()"
        else:
            with pytest.raises(
                UnwritableError, match=r"the task was given a network, .* and weights=network.state_dict"
            ):
                code.call(found.model)


def test_attention_with_dropout_leaves_as_pytorchs_own():
    tokens = torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(0))
    spec = ModuleHostSpec.of(partial(Encoder, dropout=0.1), ["encoder.layers.0"], tokens)
    host = spec.build(["encoder.layers.0"], tokens[:1])
    module = plain(host, []).module
    layer = module.network.encoder.layers[1].self_attn
    assert type(layer) is torch.nn.MultiheadAttention
    assert (layer.dropout, list(layer.named_children())) == (0.1, [("out_proj", layer.out_proj)])
    assert module.train()(tokens).shape == (8, 3)


def test_flops_of_an_lstm_are_those_of_its_products():
    layers = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    of_products = 2 * 5 * (16 * 3 + 16 * 4) + 2 * 5 * (16 * 4 + 16 * 4)
    assert flops(lambda: layers(torch.zeros(1, 5, 3))) == of_products
