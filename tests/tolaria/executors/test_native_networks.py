"""Whole hosts with their seeds, in float64: losses, hits and all gradients are those of the host in PyTorch."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from native_bench import DOUBLE, random_features

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.parameters.layout import buffer_layout, drop_batch_counters, parameter_layout
from esper.leyline.lifecycle import Algorithm, HostFamily
from esper.tolaria.coalitions import plan_prefixes
from esper.tolaria.executors.native.machine import Examples, Machine, Spaces, Workload
from esper.tolaria.executors.native.networks import (
    ActiveSeed,
    HostLayout,
    Module,
    SlotSpace,
    Space,
    measuring_program,
    num_spaces,
    slot_space,
    training_program,
)

SLOTS = ("r0c0", "r0c1", "r1c0")  # action order; the network passes r1c0 before r0c1
ORDER = (0, 2, 1)
CHANNELS = {"r0c0": 4, "r0c1": 8, "r1c0": 4}
SPEC = CNNHostSpec(in_channels=2, base=4, blocks=2, kernel=3, pools=1, classes=5)
BATCH, SIZE = 37, 6
NAMES = [registry.blueprint_at(i, HostFamily.CNN).name for i in registry.selectable(HostFamily.CNN)]
ADD, MULTIPLY, GATE = Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE
EIGHT = [[1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]]
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


def built(module, seed):
    """The module in float64 with weights that hide nothing, its layout, and a row of its values."""
    drop_batch_counters(module)
    layout = parameter_layout(module)
    generator = torch.Generator().manual_seed(seed)
    module = copy.deepcopy(module).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DOUBLE) * 0.4 + 0.1)
    return module, layout, layout.pack({name: p.detach() for name, p in module.named_parameters()})


class World:
    """One host, its seeds as `grown` says {slot: (blueprint, algorithm, alpha, trainable)}, and a batch."""

    def __init__(self, grown):
        host = CNNHost(SPEC, SLOTS, image_size=(SIZE, SIZE))
        self.buffer_layout = buffer_layout(host)
        self.skeleton_host = host
        self.host, self.layout, self.values = built(host, 1)
        self.grads = torch.zeros_like(self.values)
        self.buffers = self.buffer_layout.pack(dict(self.host.named_buffers()))
        self.x = random_features(BATCH, 2, SIZE, SIZE, seed=5)
        self.y = torch.arange(BATCH) % SPEC.classes
        self.totals = torch.zeros(16, 2, dtype=DOUBLE)
        self.seeds, self.gates, self.growth, self.rows, self.alpha = {}, {}, {}, {}, {}
        for slot, (name, algorithm, alpha, trainable) in grown.items():
            s, channels = SLOTS.index(slot), CHANNELS[slot]
            seed = registry.blueprint_by_name(name, HostFamily.CNN).build(channels)
            self.seeds[slot], layout, values = built(seed, 10 + s)
            self.gates[slot], gate_layout, gate_values = built(GateNetwork(channels), 20 + s)
            self.rows[slot] = [values, torch.zeros_like(values), gate_values, torch.zeros_like(gate_values)]
            self.alpha[slot] = torch.tensor([alpha], dtype=DOUBLE)
            self.growth[slot] = ActiveSeed(
                s=s,
                seed=Module(seed, layout),
                gate=Module(GateNetwork(channels), gate_layout),
                algorithm=algorithm,
                active=alpha > 0.0,
                trainable=trainable,
                gate_trainable=trainable and algorithm is GATE,
            )
        self.host_layout = HostLayout(self.skeleton_host, self.layout, self.buffer_layout, SIZE, SIZE)

    def run(self, program):
        spaces = Spaces(1, num_spaces(len(SLOTS)))
        for space, tensor in (
            (Space.TOTALS, self.totals), (Space.HOST, self.values), (Space.HOST_GRADS, self.grads),
            (Space.HOST_BUFFERS, self.buffers),
        ):  # fmt: skip
            spaces.share(space, tensor)
        for slot, rows in self.rows.items():
            s = SLOTS.index(slot)
            kinds = SlotSpace.SEED, SlotSpace.SEED_GRADS, SlotSpace.GATE, SlotSpace.GATE_GRADS, SlotSpace.ALPHA
            for kind, tensor in zip(kinds, (*rows, self.alpha[slot]), strict=True):
                spaces.share(slot_space(s, kind), tensor)
        batch = Examples(self.x, self.y, None, BATCH)
        Machine(dtype=DOUBLE).run_batches(Workload.of_each([program]), spaces, batch)

    def logits(self, on):
        """By PyTorch, with the seeds of the slots in `on`."""

        def apply(slot, h):
            if slot not in on:
                return h
            grown, alpha = self.growth[slot], self.alpha[slot][0]
            seed, gate = self.seeds[slot], self.gates[slot] if grown.algorithm is GATE else None
            x = h.detach()
            gate_value = None if gate is None else gate(x)
            return blend(h, seed(x), grown.algorithm, alpha if grown.active else None, gate_value)

        return self.host(self.x, apply)


def check_training(grown):
    world = World(grown)
    world.run(training_program(world.host_layout, world.growth))
    logits = world.logits(set(grown))
    loss = F.cross_entropy(logits, world.y)
    torch.testing.assert_close(world.totals[0, 0] / BATCH, loss.detach(), **CLOSE)
    assert world.totals[0, 1] == (logits.argmax(dim=1) == world.y).sum()
    learning = [(world.host, world.layout, world.grads)]
    for slot, growth in world.growth.items():
        rows = world.rows[slot]
        learning += [(world.seeds[slot], growth.seed.layout, rows[1])] * growth.trainable
        learning += [(world.gates[slot], growth.gate.layout, rows[3])] * growth.gate_trainable
        for trainable, row in ((growth.trainable, rows[1]), (growth.gate_trainable, rows[3])):
            assert trainable or not row.any()  # a frozen seed's gradients are not touched
    for module, layout, grads in learning:
        named = dict(module.named_parameters())
        want = torch.autograd.grad(loss, list(named.values()), retain_graph=True)
        found = layout.unpack(grads)
        for name, grad in zip(named, want, strict=True):
            torch.testing.assert_close(found[name], grad, **CLOSE, msg=lambda text, n=name: f"{n}: {text}")
    for name, buffer in world.host.named_buffers():  # the pass above moved both
        torch.testing.assert_close(world.buffer_layout.unpack(world.buffers)[name], buffer, **CLOSE)


def test_a_host_without_seeds():
    check_training({})


@pytest.mark.parametrize("algorithm", [ADD, MULTIPLY, GATE])
@pytest.mark.parametrize(("alpha", "trainable"), [(0.0, True), (0.4, True), (0.4, False)])
@pytest.mark.parametrize("name", NAMES)
def test_a_seed_of_every_kind(name, alpha, trainable, algorithm):
    check_training({"r0c1": (name, algorithm, alpha, trainable)})


@pytest.fixture
def in_chunks(monkeypatch):
    """The batch of 37 passes through the layers in chunks of 16, 16 and 5."""
    monkeypatch.setattr("esper.tolaria.executors.native.program._CACHED_NUMBERS", 0)


@pytest.mark.usefixtures("in_chunks")
@pytest.mark.parametrize("algorithm", [ADD, MULTIPLY, GATE])
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_a_batch_give_the_gradients_of_the_batch(name, algorithm):
    check_training({slot: (name, algorithm, 0.4, True) for slot in SLOTS})


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(SLOTS),
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from([ADD, MULTIPLY, GATE]),
            st.sampled_from([0.0, 0.3, 1.0]),
            st.booleans(),
        ).filter(lambda seed: seed[2] > 0.0 or seed[3]),
    )
)
def test_any_seeds_in_any_slots(grown):
    check_training(grown)


@pytest.mark.usefixtures("in_chunks")
def test_every_state_of_a_network_is_measured_in_chunks_too():
    check_measuring(EIGHT)


@pytest.mark.parametrize("sets", [EIGHT, [[1, 1, 0]], [[0, 0, 0]]])
def test_every_state_of_a_network_is_measured_like_a_pass_of_its_own(sets):
    check_measuring(sets)


def check_measuring(sets):
    world = World({
        "r0c0": ("conv_light", GATE, 0.7, False), "r1c0": ("norm", MULTIPLY, 0.6, False),
        "r0c1": ("conv_heavy", ADD, 1.0, False),
    })  # fmt: skip
    world.host.eval()
    plan = plan_prefixes(np.array(sets, dtype=bool), ORDER)
    steps = {SLOTS[step.slot]: (step.off, step.on) for step in plan.steps}
    before = world.buffers.clone()
    world.run(measuring_program(world.host_layout, world.growth, steps))
    assert torch.equal(world.buffers, before)
    for row, state in zip(sets, plan.state_of_coalition, strict=True):
        logits = world.logits({slot for slot, on in zip(SLOTS, row, strict=True) if on})
        torch.testing.assert_close(
            world.totals[state, 0], F.cross_entropy(logits, world.y, reduction="sum").detach(), **CLOSE
        )
        assert world.totals[state, 1] == (logits.argmax(dim=1) == world.y).sum()
    assert not world.totals[plan.num_states :].any()


def test_totals_accumulate_over_calls():
    world = World({})
    program = measuring_program(world.host_layout, {}, {})
    world.run(program)
    once = world.totals[0].clone()
    world.run(program)
    torch.testing.assert_close(world.totals[0], 2 * once)


def test_equal_logits_are_the_first_class_and_what_is_not_a_number_is_wrong():
    world = World({})
    head = world.layout.unpack(world.values)
    head["head.weight"].zero_()
    head["head.bias"].zero_()
    world.run(measuring_program(world.host_layout, {}, {}))
    assert world.totals[0, 1] == (world.y == 0).sum()
    head["head.bias"][3] = torch.nan
    world.totals.zero_()
    world.run(measuring_program(world.host_layout, {}, {}))
    assert world.totals[0, 0].isnan()
    assert world.totals[0, 1] == 0


@pytest.mark.parametrize(
    ("spec", "size"),
    [
        (replace(SPEC, kernel=1, pools=2), (5, 7)),
        (replace(SPEC, unshuffle=2), (6, 10)),
        (replace(SPEC, unshuffle=3, kernel=1), (6, 9)),
    ],
)
def test_hosts_on_images_that_are_not_square(spec, size):
    host = CNNHost(spec, ("r0c0",), image_size=size)
    plain, layout, values = built(host, 1)
    buffers_layout = buffer_layout(host)
    host_layout = HostLayout(host, layout, buffers_layout, *size)
    x, y = random_features(3, 2, *size), torch.tensor([0, 1, 2])
    grads, totals = torch.zeros_like(values), torch.zeros(1, 2, dtype=DOUBLE)
    buffers = buffers_layout.pack(dict(plain.named_buffers()))
    spaces = Spaces(1, num_spaces(1))
    kinds = Space.IMAGES, Space.LABELS, Space.TOTALS, Space.HOST, Space.HOST_GRADS, Space.HOST_BUFFERS
    for space, tensor in zip(kinds, (x, y, totals, values, grads, buffers), strict=True):
        spaces.share(space, tensor)
    Machine(dtype=DOUBLE).run(Workload.of_each([training_program(host_layout, {})]), spaces, 3)
    loss = F.cross_entropy(plain(x, lambda slot, h: h), y)
    torch.testing.assert_close(totals[0, 0] / 3, loss.detach(), **CLOSE)
    want = torch.autograd.grad(loss, list(plain.parameters()))
    for (name, _), grad in zip(plain.named_parameters(), want, strict=True):
        torch.testing.assert_close(layout.unpack(grads)[name], grad, **CLOSE)
