"""The policy network: its size, its start, its cell by hand, and that steps and sequences are the same function."""

import math

import pytest
import torch
from states import generator, random_legal
from torch import nn

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Head, LifecycleOp, head_sizes
from esper.leyline.messages import Hidden
from esper.leyline.tensor_dataclass import tree_map
from esper.tamiyo.features import feature_dim
from esper.tamiyo.heads import evaluate_heads, sample_heads
from esper.tamiyo.network import RecurrentLayer, TamiyoNetwork, initialize, lstm_cell

CPU = torch.device("cpu")
SELECTABLE = torch.arange(13) > 0
NUM_SLOTS = 3


def new_network(
    run_seed: int = 0, num_slots: int = NUM_SLOTS, *, feature: int = 32, hidden: int = 32, layers: int = 1
) -> TamiyoNetwork:
    network = TamiyoNetwork(
        num_slots=num_slots,
        head_sizes=head_sizes(num_slots),
        feature_width=feature,
        hidden_width=hidden,
        num_layers=layers,
    )
    initialize(network, run_seed)
    return network


class Rollout:
    """Random inputs [N, T] with resets, and what a network decides on them step by step."""

    def __init__(self, network: TamiyoNetwork, seed: int = 0, n: int = 6, steps: int = 8) -> None:
        g = generator(seed)
        self.features = torch.randn(n, steps, feature_dim(NUM_SLOTS), generator=g)
        self.blueprints = torch.randint(-1, 13, (n, steps, NUM_SLOTS), generator=g)
        self.reset = torch.rand(n, steps, generator=g) < 0.2
        self.reset[0, :2] = self.reset[-1, -1] = True
        self.legal = random_legal(g, n * steps, NUM_SLOTS).unflatten(0, (n, steps))
        self.has_gate = torch.rand(n, steps, NUM_SLOTS, generator=g) < 0.5
        self.uniforms = torch.rand(n, steps, 8, generator=g)
        shape = (network.num_layers, n, network.hidden_width)
        self.hidden0 = Hidden(h=torch.randn(shape, generator=g), c=torch.randn(shape, generator=g))

    def rows(self, hosts: torch.Tensor) -> "Rollout":
        """The same for some hosts, in any order."""
        other = object.__new__(Rollout)
        for name, value in vars(self).items():
            taken = tree_map(lambda x: x[:, hosts], value) if name == "hidden0" else value[hosts]
            setattr(other, name, taken)
        return other

    @torch.no_grad()
    def act(self, network: TamiyoNetwork) -> dict[str, torch.Tensor]:
        """Decide step by step; [N, T, 8] actions and log-probabilities, [N, T] values, and the last state."""
        hidden, actions, log_prob, values = self.hidden0, [], [], []
        for t in range(self.features.shape[1]):
            fresh = self.reset[:, t, None]
            hidden = tree_map(lambda x, fresh=fresh: x.masked_fill(fresh, 0.0), hidden)
            out = network.step(self.features[:, t], self.blueprints[:, t], hidden)
            heads = sample_heads(out.logits, self.legal[:, t], self.has_gate[:, t], SELECTABLE, self.uniforms[:, t])
            hidden = out.hidden
            actions.append(heads.actions)
            log_prob.append(heads.log_prob)
            values.append(out.value)
        stacked = {"actions": actions, "log_prob": log_prob, "value": values}
        return {name: torch.stack(x, dim=1) for name, x in stacked.items()} | {"h": hidden.h, "c": hidden.c}

    def evaluate(self, network: TamiyoNetwork, actions: torch.Tensor):
        logits, values = network.unroll(self.features, self.blueprints, self.hidden0, self.reset)
        return evaluate_heads(logits, self.legal, self.has_gate, SELECTABLE, actions), values


# Size and start. -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "num_slots", "total"),
    [
        (512, 1, 3_629_152), (512, 3, 3_665_506), (512, 4, 3_683_683), (512, 6, 3_720_037), (512, 10, 3_792_745),
        (128, 1, 236_128), (128, 3, 245_218), (128, 4, 249_763), (128, 6, 258_853), (128, 10, 277_033),
    ],
)  # fmt: skip
def test_the_number_of_parameters(width, num_slots, total):
    network = TamiyoNetwork(
        num_slots=num_slots, head_sizes=head_sizes(num_slots), feature_width=width, hidden_width=width
    )
    assert sum(p.numel() for p in network.parameters()) == total


def test_a_projection_exists_only_between_different_widths():
    # F = 16, H = 32, S = 1: the projection has 16 * 32 + 32 = 544 parameters
    sizes = {"feature_width": 16, "hidden_width": 32}
    with_projection = TamiyoNetwork(num_slots=1, head_sizes=head_sizes(1), **sizes)
    assert sum(p.numel() for p in with_projection.projection.parameters()) == 544
    assert not list(new_network().projection.parameters())


def test_neither_building_nor_initializing_touches_the_global_generator():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    network = TamiyoNetwork(num_slots=1, head_sizes=head_sizes(1), feature_width=16, hidden_width=32)
    assert not any(p.any() for name, p in network.named_parameters() if "norm" not in name and "net" not in name)
    initialize(network, 3)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_run_seed_fixes_every_weight_and_another_seed_changes_them():
    a, b, c = new_network(4), new_network(4), new_network(5)
    initialize(b, 9)
    initialize(b, 4)
    same, other = ([torch.equal(x, y) for x, y in zip(a.parameters(), z.parameters(), strict=True)] for z in (b, c))
    assert all(same)
    drawn = [name for (name, p), equal in zip(a.named_parameters(), other, strict=True) if not equal and p.dim() > 1]
    assert drawn == [name for name, p in a.named_parameters() if p.dim() > 1]


OP_BIASES = [2.0, 0.0, -1.0, -1.0, 2.0, 0.0]
"""WAIT, GERMINATE, SET_ALPHA_TARGET, PRUNE, FOSSILIZE, ADVANCE."""


def assert_orthogonal(weight: torch.Tensor, gain: float) -> None:
    rows = weight if weight.shape[0] <= weight.shape[1] else weight.t()
    torch.testing.assert_close(rows @ rows.t(), gain**2 * torch.eye(len(rows)), atol=1e-5, rtol=1e-5)


def test_every_weight_starts_as_the_table_says():
    network, root2 = new_network(1, feature=16, hidden=32, layers=2), math.sqrt(2)
    value_linears = [layer for layer in network.value_net if isinstance(layer, nn.Linear)]
    for rows in network.trunk_slices():
        assert_orthogonal(network.trunk.weight[rows], root2)
    for layer in (network.feature_net[0], network.projection, network.head_blueprint, *value_linears[:-1]):
        assert_orthogonal(layer.weight, root2)
    for output in network.head_outputs:
        assert_orthogonal(output.weight, 0.01)
    assert_orthogonal(value_linears[-1].weight, 0.1)
    for layer in network.core:
        for gate in (*layer.input_weight.chunk(4), *layer.recurrent_weight.chunk(4)):
            assert_orthogonal(gate, 1.0)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            expected = OP_BIASES if module is network.head_outputs[Head.OP] else 0.0
            assert torch.equal(module.bias, torch.tensor(expected).expand_as(module.bias))
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5
            assert (module.weight == 1).all()
            assert not module.bias.any()
    assert network.embedding.shape == (14, 4)
    assert network.embedding.std().item() == pytest.approx(0.02, rel=0.4)


def test_the_forget_bias_adds_exactly_one_to_the_pre_activation():
    layer = new_network(2).core[0]
    gates = layer.input_gates(torch.zeros(3, 32))
    i, f, g, o = gates.chunk(4, dim=-1)
    assert (f == 1).all()
    assert not torch.stack((i, g, o)).any()


def test_a_new_cell_that_sees_nothing_keeps_the_sigmoid_of_one_of_its_memory():
    # c' = sigmoid(1) c + sigmoid(0) tanh(0), h' = sigmoid(0) tanh(c'): the forget bias counts once, and nothing else
    layer = new_network(2).core[0]
    x = torch.zeros(1, 32)
    h, c = lstm_cell(layer.input_gates(x), x, torch.full((1, 32), 0.5), layer.recurrent_weight)
    kept = 0.5 / (1 + math.exp(-1.0))
    torch.testing.assert_close(c, torch.full((1, 32), kept))
    torch.testing.assert_close(h, torch.full((1, 32), 0.5 * math.tanh(kept)))


def test_the_trunk_gives_every_output_its_own_rows():
    network = new_network()
    slices = network.trunk_slices()
    assert [rows.stop - rows.start for rows in slices] == [16, 32, 16, 16, 16, 16, 16, 16, 16]
    assert [rows.start for rows in slices[1:]] == [rows.stop for rows in slices[:-1]]
    assert slices[-1].stop == network.trunk.out_features == 5 * 32


# The cell and the core. ----------------------------------------------------------------------------------------------


def test_one_step_of_the_cell_by_hand():
    # H = 1; gates (i, f, g, o) = (1, -1, 0.5, 2) + h * (0.1, 0.2, 0.3, 0.4) with h = 2, c = 0.25
    h, c = lstm_cell(
        torch.tensor([[1.0, -1.0, 0.5, 2.0]]), torch.tensor([[2.0]]), torch.tensor([[0.25]]),
        torch.tensor([[0.1], [0.2], [0.3], [0.4]]),
    )  # fmt: skip

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    want_c = sigmoid(-0.6) * 0.25 + sigmoid(1.2) * math.tanh(1.1)
    assert c.item() == pytest.approx(want_c, abs=1e-6)
    assert h.item() == pytest.approx(sigmoid(2.8) * math.tanh(want_c), abs=1e-6)


def test_the_cell_agrees_with_the_framework_and_does_not_clamp_its_memory():
    g = generator(1)
    layer, cell = RecurrentLayer(8), nn.LSTMCell(8, 8)
    with torch.no_grad():
        for parameter in (layer.input_weight, layer.recurrent_weight, layer.bias):
            parameter.copy_(torch.randn(parameter.shape, generator=g))
        cell.weight_ih.copy_(layer.input_weight)
        cell.weight_hh.copy_(layer.recurrent_weight)
        cell.bias_ih.copy_(layer.bias)
        cell.bias_hh.zero_()
        x, h, c = torch.randn(3, 5, 8, generator=g).unbind(0)
        c = c * 100
        got, want = lstm_cell(layer.input_gates(x), h, c, layer.recurrent_weight), cell(x, (h, c))
    torch.testing.assert_close(got, want)


def plain_forward(network: TamiyoNetwork, x, index, h, c):
    """One step of a single-layer network, written out layer by layer."""
    rows = network.embedding[torch.where(index < 0, 13, index)].flatten(1)
    x = network.feature_net(torch.cat((x, rows), dim=1))
    x = network.projection(x)
    h, c = lstm_cell(network.core[0].input_gates(x), h, c, network.core[0].recurrent_weight)
    x = x + network.core[0].norm(h)
    first = [x @ network.trunk.weight[r].t() + network.trunk.bias[r] for r in network.trunk_slices()]
    logits = []
    for head in Head:
        z = first[head].relu()
        if head is Head.BLUEPRINT:
            z = network.head_blueprint(z).relu()
        logits.append(network.head_outputs[head](z))
    return logits, network.value_net(first[-1]).squeeze(1), h, c


def test_a_step_is_the_network_written_out():
    network = new_network(3, feature=16)
    rollout = Rollout(network)
    x, index, hidden = rollout.features[:, 0], rollout.blueprints[:, 0], rollout.hidden0
    out = network.step(x, index, hidden)
    logits, value, h, c = plain_forward(network, x, index, hidden.h[0], hidden.c[0])
    torch.testing.assert_close(list(out.logits), logits)
    torch.testing.assert_close((out.value, out.hidden.h[0], out.hidden.c[0]), (value, h, c))
    assert [head.shape[1] for head in out.logits] == list(head_sizes(NUM_SLOTS))


def test_the_inverse_temperature_multiplies_every_logit_and_is_kept_with_the_weights():
    network = new_network(3)
    rollout = Rollout(network)
    inputs = rollout.features[:, 0], rollout.blueprints[:, 0], rollout.hidden0
    whole = rollout.features, rollout.blueprints, rollout.hidden0, rollout.reset
    before, of_sequences = network.step(*inputs), network.unroll(*whole)[0]
    network.inverse_temperature.fill_(3.0)
    after = network.step(*inputs)
    torch.testing.assert_close(list(network.unroll(*whole)[0]), [3.0 * logits for logits in of_sequences])
    torch.testing.assert_close(list(after.logits), [3.0 * logits for logits in before.logits])
    torch.testing.assert_close((after.value, after.hidden.h), (before.value, before.hidden.h))
    assert network.state_dict()["inverse_temperature"] == 3.0


@pytest.mark.parametrize(("feature", "layers"), [(32, 1), (16, 1), (32, 2)])
def test_a_sequence_is_evaluated_to_what_its_steps_decided_through_resets(feature, layers):
    network = new_network(4, feature=feature, layers=layers)
    with torch.no_grad():
        for output in network.head_outputs:
            output.weight.mul_(100.0)  # policies far from uniform
    rollout = Rollout(network)
    acted = rollout.act(network)
    heads, values = rollout.evaluate(network, acted["actions"])
    torch.testing.assert_close(heads.log_prob, acted["log_prob"], atol=1e-5, rtol=0)
    torch.testing.assert_close(values, acted["value"], atol=1e-5, rtol=0)
    assert acted["log_prob"].std() > 0.3


def test_a_reset_forgets_all_that_came_before():
    network = new_network(5)
    rollout = Rollout(network)
    rollout.reset[:] = False
    rollout.reset[:, 4] = True
    _, values = rollout.evaluate(network, rollout.act(network)["actions"])
    rollout.features[:, :4] += 1.0
    rollout.hidden0 = tree_map(torch.neg, rollout.hidden0)
    _, changed = rollout.evaluate(network, rollout.act(network)["actions"])
    assert torch.equal(values[:, 4:], changed[:, 4:])
    assert (values[:, :4] != changed[:, :4]).any(dim=0).all()


def test_a_state_that_is_not_finite_does_not_survive_a_reset():
    network = new_network(5)
    rollout = Rollout(network)
    rollout.reset[:, 0] = True
    rollout.hidden0 = tree_map(lambda x: torch.full_like(x, math.nan), rollout.hidden0)
    logits, values = network.unroll(rollout.features, rollout.blueprints, rollout.hidden0, rollout.reset)
    assert values.isfinite().all()
    assert all(head.isfinite().all() for head in logits)


def test_a_host_decides_the_same_among_others_in_any_order():
    network = new_network(6)
    rollout = Rollout(network)
    together = rollout.act(network)
    for hosts in (torch.tensor([5, 0, 3, 1, 4, 2]), torch.tensor([2])):
        other = rollout.rows(hosts).act(network)
        assert torch.equal(other["actions"], together["actions"][hosts])
        torch.testing.assert_close(other["log_prob"], together["log_prob"][hosts], atol=1e-6, rtol=0)
        torch.testing.assert_close(other["value"], together["value"][hosts], atol=1e-6, rtol=0)
        torch.testing.assert_close(other["h"], together["h"][:, hosts], atol=1e-6, rtol=0)


def test_the_first_policy_mostly_waits_and_is_uniform_otherwise_and_the_first_value_is_small():
    network = new_network(7)
    rollout = Rollout(network)
    heads, values = rollout.evaluate(network, rollout.act(network)["actions"])
    available = heads.available.clone()
    available[..., Head.OP] = False
    assert (heads.entropy_avail[available] > 0.999).all()
    # an op with bias b has probability e^b, divided by the sum of that over the legal ops
    op, log_p = heads.actions[..., Head.OP], heads.log_prob[..., Head.OP]
    biases = torch.tensor(OP_BIASES)
    total = (biases.exp() * rollout.legal.any(-1)).sum(-1)
    want = biases[op] - total.log()
    torch.testing.assert_close(log_p, want, atol=0.05, rtol=0)
    assert values.abs().max() < 0.5
    assert values.std() > 0


# Gradients and what depends on what. ---------------------------------------------------------------------------------


def test_every_parameter_gets_a_finite_gradient_that_is_not_zero():
    network = new_network(8, feature=16, layers=2)
    rollout = Rollout(network, n=32, steps=10)
    acted = rollout.act(network)
    assert acted["actions"][..., Head.OP].unique().tolist() == list(LifecycleOp)
    assert rollout.blueprints.unique().tolist() == list(range(-1, 13))
    heads, values = rollout.evaluate(network, acted["actions"])
    weights = torch.randn(heads.log_prob.shape, generator=generator(1))
    loss = (weights * heads.log_prob).mean() + heads.entropy.mean() + (values - 1).square().mean()
    loss.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    for rows in network.trunk_slices():
        assert network.trunk.weight.grad[rows].any()
        assert network.trunk.bias.grad[rows].any()
    # and so does every single embedding, gate unit, and value of a head, but noop, which cannot be chosen
    rows = [network.embedding, *(x for layer in network.core for x in (layer.input_weight, layer.recurrent_weight))]
    assert all(x.grad.any(dim=1).all() for x in rows)
    for head, output in zip(Head, network.head_outputs, strict=True):
        assert output.weight.grad[1 if head is Head.BLUEPRINT else 0 :].any(dim=1).all()
    assert not network.head_outputs[Head.BLUEPRINT].weight.grad[0].any()


def test_the_value_does_not_depend_on_any_decision():
    network = new_network(9)
    rollout = Rollout(network)
    acted = rollout.act(network)
    rollout.uniforms = 1 - 2.0**-24 - rollout.uniforms
    other = rollout.act(network)
    assert not torch.equal(acted["actions"], other["actions"])
    assert torch.equal(acted["value"], other["value"])
    assert torch.equal(rollout.evaluate(network, acted["actions"])[1], rollout.evaluate(network, other["actions"])[1])


def test_the_index_of_an_empty_slot_has_an_embedding_of_its_own():
    network = new_network(10)
    with torch.no_grad():
        network.embedding.copy_(torch.arange(14.0)[:, None].expand(-1, 4))
    rollout = Rollout(network, n=14)
    index = torch.arange(-1, 13)[:, None].expand(-1, NUM_SLOTS)
    hidden = network.initial_hidden(14, CPU)
    got = network.step(rollout.features[:1, 0].expand(14, -1), index, hidden).value
    assert got.unique().numel() == 14
    want = plain_forward(network, rollout.features[:1, 0].expand(14, -1), index, hidden.h[0], hidden.c[0])[1]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("index", [-2, 13, 99])
def test_a_blueprint_index_outside_the_table_is_an_error(index):
    network = new_network()
    rollout = Rollout(network, n=1)
    with pytest.raises(IndexError):
        network.step(rollout.features[:, 0], torch.full((1, NUM_SLOTS), index), rollout.hidden0)


def test_a_step_asks_the_device_nothing(monkeypatch):
    network, reads = new_network(), []
    rollout = Rollout(network)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *a, m=name, **k: reads.append(m))
    network.step(rollout.features[:, 0], rollout.blueprints[:, 0], rollout.hidden0)
    network.unroll(rollout.features, rollout.blueprints, rollout.hidden0, rollout.reset)
    monkeypatch.undo()
    assert reads == []


# Configuration. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["feature_width", "hidden_width", "num_layers"])
def test_a_size_below_one_is_refused(field):
    with pytest.raises(ConfigError, match=rf"{field} of the policy network is 0, expected at least 1"):
        TamiyoNetwork(num_slots=1, head_sizes=head_sizes(1), **{field: 0})


@pytest.mark.parametrize(("width", "nearest"), [(100, 96), (1, 8), (15, 16)])
def test_a_recurrent_width_that_cannot_be_narrowed_is_refused_with_the_nearest_that_can(width, nearest):
    with pytest.raises(
        ConfigError, match=f"is {width}, expected a multiple of 8.*hidden_width to {nearest}, the nearest"
    ):
        TamiyoNetwork(num_slots=1, head_sizes=head_sizes(1), hidden_width=width)
