"""The native optimizer step is that of `kasmina.parameters.optimizers`, row by row, clipped as the executors clip."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.kasmina.parameters.optimizers import OptimizerSpec, init_state, step_rows
from esper.leyline.tensor_dataclass import named_tensors, tree_map
from esper.tolaria.executors.native.machine import Machine, Spaces, Workload
from esper.tolaria.executors.native.networks import clipped_step
from esper.tolaria.executors.native.program import NUM_WORKING, Assembler, Place

DOUBLE = torch.float64
SGD = OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.03, grad_clip=1.5)
ADAMW = replace(SGD, kind="adamw")
ADAM = replace(SGD, kind="adam", grad_clip=float("inf"))
HOST_SIZE, SEED_SIZE, GATE_SIZE = 40, 21, 9
DECAY, FACTOR, FIRST = NUM_WORKING + 6, NUM_WORKING + 7, NUM_WORKING + 8  # behind those of a batch
"""The mask, the factor of the rates, then five spaces for each row: host, seeds and gates of both slots."""
NUM_SPACES = FIRST + 5 * 5


def space_of(row):
    return FIRST + 5 * row


def run(spec, steps, spaces, rate_factor=1.0):
    """Run steps of (rate, [(row, size)], whether the mask decides what decays)."""
    factor = torch.tensor([rate_factor], dtype=DOUBLE)
    spaces.share(FACTOR, factor)
    a = Assembler()
    for rate, rows, masked in steps:
        mask = Place(DECAY, 0, HOST_SIZE) if masked else None
        clipped_step(a, spec, rate, Place(FACTOR, 0, 1), [(space_of(row), size) for row, size in rows], mask)
    Machine(dtype=DOUBLE).run(Workload.of_each([a.program()]), spaces, batch=1)


class Row:
    """Weights, gradient and moments, beside a copy that the reference steps."""

    def __init__(self, spec, size, generator, scale):
        self.weights = torch.randn(1, size, generator=generator, dtype=DOUBLE)
        self.gradient = torch.randn(1, size, generator=generator, dtype=DOUBLE) * scale
        self.state = init_state(spec, self.weights)
        for _, moment in named_tensors(self.state):
            moment += 3 if moment.dtype == torch.int64 else torch.rand(moment.shape, generator=generator, dtype=DOUBLE)
        self.reference = self.weights.clone(), self.gradient.clone(), tree_map(torch.clone, self.state)

    def place(self, spaces, row):
        tensors = [self.weights, self.gradient, *(moment for _, moment in named_tensors(self.state))]
        for k, tensor in enumerate(tensors):
            spaces.share(space_of(row) + k, tensor)

    def step_reference(self, spec, factor, lr, decay):
        weights, gradient, state = self.reference
        step_rows(spec, weights, gradient * factor, state, lr, decay)

    def check(self):  # the reference rounds its decay to float32
        weights, _, state = self.reference
        torch.testing.assert_close(self.weights, weights, rtol=1e-7, atol=1e-7)
        for (name, ours), (_, theirs) in zip(named_tensors(self.state), named_tensors(state), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7, msg=name)


@pytest.mark.parametrize("spec", [SGD, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from([1e-9, 0.01, 1.0, 1e4]),
    st.lists(st.booleans(), min_size=2, max_size=2),
    st.booleans(),
    st.sampled_from([1.0, 0.25]),
)
def test_a_host_and_its_seeds_step_like_the_reference(spec, seed, scale, trainable, gated, rate_factor):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(HOST_SIZE) % 3 > 0
    decay = mask.to(DOUBLE)
    host = Row(spec, HOST_SIZE, generator, scale)
    spaces = Spaces(1, NUM_SPACES)
    spaces.share(DECAY, decay)
    host.place(spaces, 0)
    together = [([host], spec.host_lr, mask)]
    steps = [(spec.host_lr, [(0, HOST_SIZE)], True)]
    for s in range(2):
        if trainable[s]:
            rows = [Row(spec, SEED_SIZE, generator, scale)] + [Row(spec, GATE_SIZE, generator, scale)] * gated
            for k, row in enumerate(rows):
                row.place(spaces, 1 + 2 * s + k)
            together.append((rows, spec.seed_lr, None))
            sizes = [(1 + 2 * s, SEED_SIZE), (2 + 2 * s, GATE_SIZE)]
            steps.append((spec.seed_lr, sizes[: 1 + gated], False))
    run(spec, steps, spaces, rate_factor)
    for rows, rate, decayed in together:
        norm = torch.cat([row.reference[1] for row in rows], dim=1).norm()
        for row in rows:
            row.step_reference(spec, (spec.grad_clip / (norm + 1e-6)).clamp(max=1.0), rate * rate_factor, decayed)
            row.check()


@pytest.mark.parametrize("spec", [SGD, ADAM, ADAMW], ids=["sgd", "adam", "adamw"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_makes_the_weights_nan_as_in_the_reference(spec, bad):
    row = Row(spec, HOST_SIZE, torch.Generator().manual_seed(0), 1.0)
    row.gradient[0, 7] = bad
    spaces = Spaces(1, NUM_SPACES)
    decay = torch.ones(HOST_SIZE, dtype=DOUBLE)
    spaces.share(DECAY, decay)
    row.place(spaces, 0)
    run(spec, [(spec.host_lr, [(0, HOST_SIZE)], True)], spaces)
    assert row.weights[0, 7].isnan()
