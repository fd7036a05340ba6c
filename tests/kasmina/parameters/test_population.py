"""The population: who is born with which weights, what remains of a seed, and what a snapshot brings back."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import FlatParameters, channels_last, host_kind, runs_channels_last
from esper.leyline.lifecycle import HostFamily, SeedStage
from esper.leyline.random import Stream, to_uniform, words
from esper.leyline.tensor_dataclass import named_tensors
from tiny import CHANNELS, CPU, SGD, SLOTS, adamw, population
from user_networks import ResNet8

CONV_LIGHT, ATTENTION, NORM = 1, 2, 3
EPISODE, T = 2, 4
S = len(SLOTS)
EXAMPLE = torch.zeros(1, 1, 6, 6)


def mask(n, *places):
    """[N, S] with the places (host, slot) set."""
    found = np.zeros((n, S), dtype=np.bool_)
    for host, slot in places:
        found[host, slot] = True
    return found


def born(of, places, blueprint=CONV_LIGHT, *, gated=False, t=T):
    """Germinate one blueprint in the places (host, slot)."""
    here = mask(of.num_envs, *places)
    of.germinate(here, np.full(here.shape, blueprint), here & gated, EPISODE, t)


def copies(of):
    return {name: x.clone() for name, x in of.state_dict().items()}


@pytest.fixture
def hosts():
    of = population(3)
    of.reset(EPISODE)
    return of


def test_the_weights_of_a_host_are_the_draws_of_its_own_number_and_episode(hosts):
    kind = hosts.host_kind
    length = kind.template.parameters.total
    drawn = words(5, Stream.HOST_INIT, torch.tensor([[2]]), episode=EPISODE, block=torch.arange(-(-length // 4))[None])
    u = to_uniform(drawn.reshape(-1)[:length])
    assert torch.equal(hosts.host.params[2], kind.start.table.centre + kind.start.table.spread * (2.0 * u - 1.0))
    assert not torch.equal(hosts.host.params[0], hosts.host.params[1])
    before = hosts.host.params.clone()
    hosts.reset(EPISODE + 1)
    assert not torch.equal(hosts.host.params, before)
    hosts.reset(EPISODE)
    assert torch.equal(hosts.host.params, before)


def test_new_hosts_start_with_fresh_statistics_and_empty_slots(hosts):
    born(hosts, [(0, 0), (2, 1)], gated=True)
    hosts.snapshot_hosts(np.array([True, True, True]))
    for name, tensor in hosts.state_dict().items():
        if name.endswith("buffers") or "momentum" in name:
            tensor.add_(3.0)
    hosts.reset(EPISODE)
    for name, tensor in hosts.state_dict().items():
        if name.startswith(("seeds", "gates", "kept_seeds", "kept_gates")) or "momentum" in name:
            assert not tensor.any(), name
    statistics = hosts.host_kind.template.buffers.unpack(hosts.host.buffers)
    assert all(bool((x == (1.0 if name.endswith("var") else 0.0)).all()) for name, x in statistics.items())


@pytest.mark.parametrize("blueprint", [CONV_LIGHT, ATTENTION])
def test_a_seed_depends_on_its_host_slot_and_step_alone(hosts, blueprint):
    born(hosts, [(1, 1)], blueprint, gated=True)
    alone = (hosts.seeds.params[1 * S + 1].clone(), hosts.gates.params[1 * S + 1].clone())
    hosts.reset(EPISODE)
    # the same seed among others: other hosts, other slots, other blueprints, another order
    born(hosts, [(2, 0), (0, 2)], NORM, gated=True)
    born(hosts, [(0, 1), (1, 1), (2, 1), (1, 0)], blueprint, gated=True)
    assert torch.equal(hosts.seeds.params[1 * S + 1], alone[0])
    assert torch.equal(hosts.gates.params[1 * S + 1], alone[1])


@pytest.mark.parametrize("other", [{"place": (0, 1)}, {"place": (1, 2)}, {"t": T + 1}])
def test_another_host_slot_or_step_draws_another_seed(hosts, other):
    place, t = other.get("place", (1, 0)), other.get("t", T)
    born(hosts, [(1, 0)])
    first = hosts.seeds.params[1 * S].clone()
    born(hosts, [place], t=t)
    row = hosts.seeds.params[place[0] * S + place[1]]
    weights = slice(0, 36)  # the first drawn values of any convolution; r0c0 and r1c0 have equal channels
    assert not torch.equal(row[weights], first[weights])


def test_a_gate_shares_no_numbers_with_its_seed(hosts):
    born(hosts, [(0, 0)], gated=True)
    kinds = (hosts.seed_kinds[CHANNELS["r0c0"], CONV_LIGHT], hosts.gate_kinds[CHANNELS["r0c0"]])
    uniforms = []
    for kind, flat in zip(kinds, (hosts.seeds, hosts.gates), strict=True):
        row, bound = flat.params[0, : kind.template.parameters.total], kind.start.table.spread
        uniforms.append(((row / bound + 1.0) / 2.0)[bound > 0])
    of_seed, of_gate = uniforms
    assert len(of_gate) > 40
    assert bool(((of_seed[:, None] - of_gate).abs() > 1e-6).all())


def test_many_hosts_are_populations_of_one_host_each():
    together = population(4)
    together.reset(EPISODE)
    places = [(0, 0), (1, 2), (3, 1), (3, 0)]
    born(together, places, gated=True)
    for n in range(4):
        alone = population(1, host_offset=n)
        alone.reset(EPISODE)
        born(alone, [(0, slot) for host, slot in places if host == n], gated=True)
        for name, tensor in alone.state_dict().items():
            size = 1 if "host" in name else S
            assert torch.equal(tensor, together.state_dict()[name][n * size : (n + 1) * size]), name


@pytest.mark.parametrize("optimizer", [None, adamw()])
def test_a_release_leaves_no_weights_and_no_optimizer_state(optimizer):
    hosts = population(2) if optimizer is None else population(2, optimizer=optimizer)
    hosts.reset(EPISODE)
    born(hosts, [(0, 0), (1, 1)], gated=True)
    for name, tensor in hosts.state_dict().items():
        if not name.startswith("kept") and not name.endswith(("params", "buffers")):
            tensor.fill_(7)
    before = copies(hosts)
    hosts.release(mask(2, (0, 0)))
    gone = 0
    for name, tensor in hosts.state_dict().items():
        if name.startswith(("seeds", "gates")):
            assert not tensor[gone].any(), name
            assert torch.equal(tensor[1:], before[name][1:]), name
        else:
            assert torch.equal(tensor, before[name]), name


def test_a_birth_in_a_used_slot_starts_without_momentum_and_without_old_weights(hosts):
    born(hosts, [(0, 1)], 7)  # conv_heavy, the widest
    hosts.seeds.optimizer.momentum[1] = 4.0
    born(hosts, [(0, 1)], NORM)
    used = hosts.seed_kinds[CHANNELS["r0c1"], NORM].template.parameters.total
    assert not hosts.seeds.optimizer.momentum[1].any()
    assert not hosts.seeds.params[1, used:].any()


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_snapshot_brings_hosts_and_fossils_back_to_the_bit_and_forgets_their_optimizers(kind):
    hosts = population(3, optimizer=SGD if kind == "sgd" else adamw())
    hosts.reset(EPISODE)
    born(hosts, [(0, 0), (1, 0), (1, 2)], gated=True)
    hosts.host.buffers.add_(0.5)
    kept = copies(hosts)
    hosts.snapshot_hosts(np.array([False, True, False]))
    for flat in (hosts.host, hosts.seeds, hosts.gates):
        flat.params.add_(1.0)
        flat.buffers.add_(2.0)
        for _, tensor in named_tensors(flat.optimizer):
            tensor.fill_(3)
    moved = copies(hosts)
    stage = np.full((3, S), int(SeedStage.DORMANT))
    stage[0, 0] = stage[1, 0] = SeedStage.FOSSILIZED
    stage[1, 2] = SeedStage.PRUNED  # a growing seed of the host in panic; its release comes next
    hosts.restore(np.array([False, True, False]), stage)
    now, row = hosts.state_dict(), 1 * S + 0
    for part, back in (("host", 1), ("seeds", row), ("gates", row)):
        for name in ("params", "buffers"):
            assert torch.equal(now[f"{part}.{name}"][back], kept[f"{part}.{name}"][back]), (part, name)
        others = [i for i in range(len(now[f"{part}.params"])) if i != back]
        state = [name.removeprefix(f"{part}.") for name in now if name.startswith(f"{part}.")]
        assert {*state} == {"params", "buffers"} | (
            {"momentum"} if kind == "sgd" else {"exp_avg", "exp_avg_sq", "steps"}
        )
        for name in state:
            if name not in ("params", "buffers"):
                assert not now[f"{part}.{name}"][back].any(), (part, name)
            assert torch.equal(now[f"{part}.{name}"][others], moved[f"{part}.{name}"][others]), (part, name)


def test_the_first_snapshot_is_the_newborn_host(hosts):
    start = hosts.host.params.clone()
    hosts.host.params.add_(1.0)
    hosts.restore(np.array([True, False, True]), np.full((3, S), int(SeedStage.DORMANT)))
    assert torch.equal(hosts.host.params[[0, 2]], start[[0, 2]])
    assert torch.equal(hosts.host.params[1], start[1] + 1.0)


def test_a_single_seed_joins_an_older_snapshot_without_its_host(hosts):
    born(hosts, [(0, 0), (0, 1)])
    hosts.snapshot_seeds(mask(3, (0, 1)))
    start, seed = hosts.host.params[0].clone(), hosts.seeds.params[1].clone()
    hosts.host.params.add_(1.0)
    hosts.seeds.params.add_(1.0)
    stage = np.full((3, S), int(SeedStage.DORMANT))
    stage[0, 1] = SeedStage.FOSSILIZED
    hosts.restore(np.array([True, False, False]), stage)
    assert torch.equal(hosts.seeds.params[1], seed)
    assert torch.equal(hosts.host.params[0], start)


def test_the_costs_are_those_of_the_networks_that_are_built(hosts):
    costs = hosts.costs(EXAMPLE, 2)
    for s, slot in enumerate(SLOTS):
        for index in registry.selectable(HostFamily.CNN):
            module = registry.blueprint_at(index, HostFamily.CNN).build(CHANNELS[slot])
            assert costs.seed_params[s, index] == sum(p.numel() for p in module.parameters())
    assert costs.selectable.nonzero().flatten().tolist() == list(registry.selectable(HostFamily.CNN))
    assert costs.gate_params.device == CPU
    assert costs.gate_params.tolist() == [4 * 8 + 16 + 1, 8 * 8 + 16 + 1, 4 * 8 + 16 + 1]
    # two for each multiply-add: 3x3 convolutions of 1 to 4 and 4 to 8 channels and a linear layer; in r0c0 and r0c1 a
    # seed sees 6x6 and 3x3 pixels, behind the pooling of the first block 3x3
    assert int(costs.host_flops) == 2 * (36 * 9 * 4 + 9 * 9 * 4 * 8 + 8 * 3)
    assert costs.seed_flops[:, CONV_LIGHT].tolist() == [2 * 9 * 36 * 16, 2 * 9 * 9 * 64, 2 * 9 * 9 * 16]
    assert costs.seed_flops[:, NORM].tolist() == [0, 0, 0]
    assert costs.gate_flops.tolist() == [2 * (4 * 8 + 8), 2 * (8 * 8 + 8), 2 * (4 * 8 + 8)]


ADAMW = OptimizerSpec(kind="adamw")
ROWS, PARAMS, BUFFERS = 4, 6, 3


def filled(spec=SGD):
    """Every element holds its own number, optimizer state too."""
    flat = FlatParameters((ROWS, PARAMS, BUFFERS), spec, CPU)
    for k, tensor in enumerate(flat.tensors().values(), start=1):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 100 * k)
    return flat


def tensors_of(flat):
    return {name: tensor.clone() for name, tensor in flat.tensors().items()}


def rows(*numbers):
    return torch.tensor(numbers, dtype=torch.int64)


def test_the_gradient_of_a_leaf_arrives_in_the_rows_of_gradients():
    working = filled().begin(rows(3, 1), [6, 4])
    (working.leaves[0] * 2.0).sum().backward()
    (working.leaves[1] * 5.0).sum().backward()
    assert working.grad.tolist() == [[2.0] * 6, [5.0] * 4 + [0.0] * 2]


def test_training_a_copy_changes_the_rows_when_it_is_finished_and_not_before():
    flat = filled(ADAMW)
    before = tensors_of(flat)
    working = flat.begin(rows(3, 1), [3, 5])
    assert working.params.shape == (2, 5)
    working.params.add_(0.5)
    working.optimizer.exp_avg.add_(0.25)
    working.optimizer.steps.add_(1)
    assert all(torch.equal(flat.tensors()[name], value) for name, value in before.items())
    flat.finish(working)
    assert torch.equal(flat.params[[3, 1], :5], before["params"][[3, 1], :5] + 0.5)
    assert torch.equal(flat.params[[3, 1], 5], before["params"][[3, 1], 5])
    assert torch.equal(flat.optimizer.exp_avg[[3, 1], :5], before["exp_avg"][[3, 1], :5] + 0.25)
    assert torch.equal(flat.optimizer.steps, before["steps"] + torch.tensor([0, 1, 0, 1]))
    assert torch.equal(flat.params[[0, 2]], before["params"][[0, 2]])


def test_no_rows_are_trained_without_complaint():
    flat = filled()
    before = tensors_of(flat)
    working = flat.begin(rows(), [])
    assert working.params.shape == (0, 0)
    flat.finish(working)
    assert all(torch.equal(flat.tensors()[name], value) for name, value in before.items())


class Viewing(nn.Module):
    """A convolution whose output is flattened by `view`, which refuses features that lie channels-last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x)).view(len(x), -1))


class Shortcut(nn.Module):
    """A block whose shortcut halves the images by a strided 1x1 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, channels, 3, padding=1), nn.Conv2d(channels, 8, 3, 2, padding=1)
        self.shortcut, self.head = nn.Conv2d(channels, 8, 1, 2, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = torch.relu(self.conv(h) + functional.conv2d(h, self.shortcut.weight, stride=2))
        return self.head(h.mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "slot", "channels", "runs"),
    [
        (Viewing, "conv", 1, False),
        (ResNet8, "layer1", 3, True),
        # the gradient of a narrow strided shortcut corrupts memory
        *((partial(Shortcut, width), "stem", 3, runs) for width, runs in ((4, False), (7, False), (8, True))),
    ],
)
def test_a_network_gets_channels_last_images_where_it_takes_them(model, slot, channels, runs):
    x = torch.randn(2, channels, 6, 6)
    host = ModuleHostSpec.of(model, [slot], x[:1]).build([slot], x[:1])
    assert runs_channels_last(host_kind(host, torch.device("cpu")), x) is runs


def test_channels_last_images_have_the_same_values_in_another_order_also_with_one_channel():
    x = torch.randn(2, 1, 3, 4)
    assert torch.equal(channels_last(x), x)
    assert channels_last(x).stride() == (12, 1, 4, 1)
    assert channels_last(x.long()).stride() == x.stride()
