"""The policy network: its start, its cell by hand, that steps and sequences are one function, and any slots."""

import math

import pytest
import torch
from states import generator, random_legal
from torch import nn

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HEADS, Head, LifecycleOp
from esper.leyline.messages import Hidden, Menu
from esper.leyline.tensor_dataclass import tree_map
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, feature_dim
from esper.tamiyo.heads import evaluate_heads, sample_heads
from esper.tamiyo.network import OF_SLOT, RecurrentLayer, TamiyoNetwork, initialize, lstm_cell
from toys import menu

CPU = torch.device("cpu")
SELECTABLE = torch.arange(13) > 0
NUM_SLOTS = 3


def new_network(
    run_seed: int = 0, num_slots: int = NUM_SLOTS, *, feature: int = 32, hidden: int = 32, layers: int = 1
) -> TamiyoNetwork:
    network = TamiyoNetwork(menu(num_slots), feature_width=feature, hidden_width=hidden, num_layers=layers)
    initialize(network, run_seed)
    return network


def of_menu(network: TamiyoNetwork, seen: Menu) -> TamiyoNetwork:
    """A network with the same weights for the hosts of another menu."""
    sizes = {"feature_width": network.feature_width, "hidden_width": network.hidden_width}
    other = TamiyoNetwork(seen, **sizes, num_layers=network.num_layers)
    other.load_state_dict(network.state_dict())
    return other


def certain(network: TamiyoNetwork) -> TamiyoNetwork:
    """The network with large output weights, so that its policy is far from uniform."""
    with torch.no_grad():
        for output in (network.head_op, network.head_slot, network.head_values, network.head_blueprint):
            output.weight.mul_(100.0)
    return network


class Rollout:
    """Random inputs [N, T] with resets, and what a network decides on them step by step."""

    def __init__(self, network: TamiyoNetwork, seed: int = 0, n: int = 6, steps: int = 8) -> None:
        g, slots = generator(seed), network.num_slots
        self.features = torch.randn(n, steps, feature_dim(slots), generator=g)
        self.blueprints = torch.randint(-1, 13, (n, steps, slots), generator=g)
        self.reset = torch.rand(n, steps, generator=g) < 0.2
        self.reset[0, :2] = self.reset[-1, -1] = True
        self.legal = random_legal(g, n * steps, slots).unflatten(0, (n, steps))
        self.has_gate = torch.rand(n, steps, slots, generator=g) < 0.5
        self.uniforms = torch.rand(n, steps, 8, generator=g)
        shape = (network.num_layers, n, network.state_width)
        self.hidden0 = Hidden(h=torch.randn(shape, generator=g), c=torch.randn(shape, generator=g))

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


@pytest.mark.parametrize(("width", "total"), [(128, 308_955), (16, 6_555)])
def test_the_number_of_parameters_is_the_same_for_any_slots_and_blueprints(width, total):
    sizes = {
        sum(p.numel() for p in TamiyoNetwork(of, feature_width=width, hidden_width=width).parameters())
        for of in (menu(1), menu(3), menu(64), menu(3, num_blueprints=40))
    }
    assert sizes == {total}


def test_a_projection_exists_only_between_different_widths():
    # F = 16, H = 32: the projection has 16 * 32 + 32 = 544 parameters
    with_projection = new_network(feature=16)
    assert sum(p.numel() for p in with_projection.projection.parameters()) == 544
    assert not list(new_network().projection.parameters())


def test_neither_building_nor_initializing_touches_the_global_generator():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    network = TamiyoNetwork(menu(1), feature_width=16, hidden_width=32)
    assert not any(p.any() for name, p in network.named_parameters() if "norm" not in name and "value" not in name)
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
    linears = {module for module in network.modules() if isinstance(module, nn.Linear)}
    outputs = {network.head_op, network.head_slot, network.head_values, network.head_blueprint}
    for layer in linears - outputs - {value_linears[-1]}:
        assert_orthogonal(layer.weight, root2)
    for output in outputs:
        assert_orthogonal(output.weight, 0.01)
    assert_orthogonal(value_linears[-1].weight, 0.1)
    for layer in network.core:
        for weight in (layer.input_weight, layer.others_weight, layer.recurrent_weight):
            for gate in weight.chunk(4):
                assert_orthogonal(gate, 1.0)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            expected = OP_BIASES if module is network.head_op else 0.0
            assert torch.equal(module.bias, torch.tensor(expected).expand_as(module.bias))
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5
            assert (module.weight == 1).all()
            assert not module.bias.any()


def test_a_new_cell_that_sees_nothing_keeps_the_sigmoid_of_one_of_its_memory():
    # c' = sigmoid(1) c + sigmoid(0) tanh(0), h' = sigmoid(0) tanh(c'): the forget bias counts once, and nothing else
    layer = new_network(2).core[0]
    x = torch.zeros(1, 32)
    h, c = lstm_cell(layer.input_gates(x[None])[0], x, torch.full((1, 32), 0.5), layer.recurrent_weight)
    kept = 0.5 / (1 + math.exp(-1.0))
    torch.testing.assert_close(c, torch.full((1, 32), kept))
    torch.testing.assert_close(h, torch.full((1, 32), 0.5 * math.tanh(kept)))


# The cell and the core. ----------------------------------------------------------------------------------------------


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
        gates = layer.input_gates(x[:, None])[:, 0]  # the weights of the mean are zero
        got, want = lstm_cell(gates, h, c, layer.recurrent_weight), cell(x, (h, c))
    torch.testing.assert_close(got, want)


def plain_forward(network: TamiyoNetwork, seen: Menu, x, index, h, c):
    """One step of one host, written out slot by slot."""
    slots, width = range(len(index)), network.hidden_width
    host, rest = x[: len(HOST_FEATURES)], x[len(HOST_FEATURES) :]
    out, states = [], []
    for s in slots:
        holds = index[s] >= 0
        block = rest[s * len(SLOT_FEATURES) : (s + 1) * len(SLOT_FEATURES)]
        seed = seen.seeds[s, index[s]]
        known = torch.cat((block if holds else 0 * block, seed if holds else 0 * seed, seen.places[s]))
        e = network.norm(network.slot_net(known) + network.host_net(host)).relu()
        out.append(network.projection(e))
    for number, layer in enumerate(network.core):
        mean, cells = sum(out) / len(slots), []
        for s in slots:
            gates = layer.input_weight @ out[s] + layer.others_weight @ mean + layer.bias
            state = (of[number, None, s * width : (s + 1) * width] for of in (h, c))
            cells.append(lstm_cell(gates[None], *state, layer.recurrent_weight))
        out = [out[s] + layer.norm(cells[s][0][0]) for s in slots]
        states.append([torch.cat([of[k][0] for of in cells]) for k in (0, 1)])
    everything = torch.cat((sum(out) / len(slots), torch.stack(out).max(dim=0).values))
    op = network.head_op(network.trunk_op(everything).relu())
    slot, of_slots = [], []
    for s in slots:
        y = (network.trunk_slot(out[s]) + network.trunk_others(everything)).relu()
        slot.append(network.head_slot(y))
        pointer = network.head_blueprint(y)
        found = [(pointer @ network.seed_net(seed)) / math.sqrt(len(pointer)) for seed in seen.seeds[s]]
        sizes = [HEADS[head].size for head in OF_SLOT]
        of_slots.append((torch.stack(found), *network.head_values(y).split(sizes)))
    logits = (torch.cat(slot), *map(torch.stack, zip(*of_slots, strict=True)), op)
    return logits, network.value_net(everything)[0], *map(torch.stack, zip(*states, strict=True))


@pytest.mark.parametrize(("num_slots", "blueprints"), [(3, 13), (1, 13), (64, 13), (3, 17)])
def test_a_step_is_the_network_written_out_slot_by_slot_for_any_slots_and_blueprints(num_slots, blueprints):
    # so slots and blueprints share all weights and differ by their descriptions, and hosts do not meet
    seen = menu(num_slots, blueprints)
    network = of_menu(certain(new_network(3, feature=16, layers=2)), seen)
    rollout = Rollout(network, n=4)
    x, index, hidden = rollout.features[:, 0], rollout.blueprints[:, 0], rollout.hidden0
    index[0, 0], index[-1], index[1] = 5, blueprints - 1, -1
    out = network.step(x, index, hidden)
    for n in range(len(x)):
        logits, value, h, c = plain_forward(network, seen, x[n], index[n], hidden.h[:, n], hidden.c[:, n])
        torch.testing.assert_close([head[n] for head in out.logits], list(logits), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close((out.value[n], out.hidden.h[:, n], out.hidden.c[:, n]), (value, h, c))
    assert out.logits[Head.BLUEPRINT].std() > 0.1


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


@pytest.mark.parametrize(("feature", "layers", "num_slots"), [(32, 1, 3), (16, 1, 1), (32, 2, 64)])
def test_a_sequence_is_evaluated_to_what_its_steps_decided_through_resets(feature, layers, num_slots):
    network = certain(new_network(4, num_slots, feature=feature, layers=layers))
    rollout = Rollout(network)
    acted = rollout.act(network)
    heads, values = rollout.evaluate(network, acted["actions"])
    torch.testing.assert_close(heads.log_prob, acted["log_prob"], atol=1e-5, rtol=0)
    torch.testing.assert_close(values, acted["value"], atol=1e-5, rtol=0)
    assert acted["log_prob"].std() > 0.3


def test_a_state_that_is_not_finite_does_not_survive_a_reset():
    network = new_network(5)
    rollout = Rollout(network)
    rollout.reset[:, 0] = True
    rollout.hidden0 = tree_map(lambda x: torch.full_like(x, math.nan), rollout.hidden0)
    logits, values = network.unroll(rollout.features, rollout.blueprints, rollout.hidden0, rollout.reset)
    assert values.isfinite().all()
    assert all(head.isfinite().all() for head in logits)


def test_the_first_policy_mostly_waits_and_is_uniform_otherwise_and_the_first_value_is_small():
    network = new_network(7)
    rollout = Rollout(network)
    actions = rollout.act(network)["actions"]
    heads, values = rollout.evaluate(network, actions)
    available = heads.available.clone()
    available[..., Head.OP] = False
    assert (heads.entropy_avail[available] > 0.999).all()
    # an op with bias b has probability e^b, divided by the sum of that over the legal ops
    op, log_p = actions[..., Head.OP], heads.log_prob[..., Head.OP]
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
    # and so does every single gate unit, and value of a head
    rows = [x for layer in network.core for x in (layer.input_weight, layer.others_weight, layer.recurrent_weight)]
    outputs = (network.head_op, network.head_slot, network.head_values, network.head_blueprint)
    assert all(x.grad.any(dim=1).all() for x in (*rows, *(output.weight for output in outputs)))


@pytest.mark.parametrize("index", [13, 99])
def test_a_blueprint_index_outside_the_table_is_an_error(index):
    network = new_network()
    rollout = Rollout(network, n=1)
    with pytest.raises(IndexError):
        network.step(rollout.features[:, 0], torch.full((1, NUM_SLOTS), index), rollout.hidden0)


# Configuration. ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "nearest"), [(100, 96), (1, 8), (15, 16)])
def test_a_recurrent_width_that_cannot_be_narrowed_is_refused_with_the_nearest_that_can(width, nearest):
    with pytest.raises(
        ConfigError, match=f"is {width}, expected a multiple of 8.*hidden_width to {nearest}, the nearest"
    ):
        TamiyoNetwork(menu(1), hidden_width=width)
