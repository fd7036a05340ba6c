"""Users' networks as files: what is frozen stays frozen, and attention is PyTorch's own again."""

from functools import partial

import pytest
import torch

import tiny
from esper.export.grown import plain
from esper.export.network import GrownNetwork, load
from esper.kasmina.hosts.module_host import ModuleHostSpec
from hosts_to_export import TOPOLOGIES, grown, outputs
from tiny import SLOTS
from user_networks import Backbone, Encoder


@pytest.mark.parametrize("loads", [True, False])
def test_a_grown_host_with_a_frozen_backbone_is_the_same_as_files(loads, tmp_path):
    x = tiny.dataset().val.x
    of = tiny.task(host=ModuleHostSpec.of(partial(Backbone, loads=loads), SLOTS, x[:8]))
    hosts = grown(TOPOLOGIES[0], TOPOLOGIES[1], of=of)
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


def test_attention_with_dropout_leaves_as_pytorchs_own():
    tokens = torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(0))
    spec = ModuleHostSpec.of(partial(Encoder, dropout=0.1), ["encoder.layers.0"], tokens)
    host = spec.build(["encoder.layers.0"], tokens[:1])
    module = plain(host, []).module
    layer = module.network.encoder.layers[1].self_attn
    assert type(layer) is torch.nn.MultiheadAttention
    assert (layer.dropout, list(layer.named_children())) == (0.1, [("out_proj", layer.out_proj)])
    assert module.train()(tokens).shape == (8, 3)
