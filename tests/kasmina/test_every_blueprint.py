"""What holds for every blueprint of every family, users' included: size, initial weights, gradients, shapes."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import (
    AbstractBlueprint,
    GateNetwork,
    blueprint_at,
    blueprint_by_name,
    register,
    selectable,
    unregister,
)
from esper.kasmina.blueprints.layers import LayerScale, chain
from esper.kasmina.parameters.initialization import build_twice, deterministic_build, fresh_rows, init_table
from esper.kasmina.parameters.layout import Template
from esper.kasmina.parameters.stacking import stack_layers, way_to_stack
from esper.leyline.lifecycle import STYLE_ALGORITHM, Algorithm, HostFamily
from esper.leyline.random import Stream

CNN, TRANSFORMER = HostFamily.CNN, HostFamily.TRANSFORMER
CNN_NAMES = ("conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy")
TRANSFORMER_NAMES = ("attention", "norm", "depthwise", "lora", "lora_large", "mlp_small", "mlp", "flex_attention")
BOTH_WAYS = ("attention", "depthwise", "flex_attention")
"""What lets tokens see later ones in hosts that are not causal."""


class Own(AbstractBlueprint):
    """A user's blueprint, one layer and a layer scale, for images or sequences."""

    name, init = "own", {"scale.gamma": 0.0}

    def __init__(self, family: HostFamily) -> None:
        self.family = family

    def build(self, channels: int) -> nn.Module:
        layer = nn.Conv2d(channels, channels, 3, padding=1) if self.family is CNN else nn.Linear(channels, channels)
        return chain(layer=layer, scale=LayerScale(channels))


@pytest.fixture(autouse=True)
def own() -> Iterator[None]:
    for family in (CNN, TRANSFORMER):
        register(Own(family))
    yield
    unregister("own")


class Case(NamedTuple):
    """A blueprint, the features [C, H, W] or [T, D] of one example, and whether its host is causal."""

    family: HostFamily
    name: str
    features: tuple[int, ...]
    causal: bool = True

    @property
    def channels(self) -> int:
        return self.features[0] if self.family is CNN else self.features[-1]

    @property
    def blueprint(self) -> AbstractBlueprint:
        return blueprint_by_name(self.name, self.family).within(causal=self.causal)

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.features))}{' both ways' * (not self.causal)}"


IMAGES = ((2, 1, 1), (16, 7, 5))
MORE_IMAGES = ((8, 1, 3), (4, 3, 7), (32, 1, 1), (128, 8, 8))
SEQUENCES = ((1, 6), (17, 128))
MORE_SEQUENCES = ((1, 2), (3, 16), (17, 384))


def cases(images: tuple, sequences: tuple) -> list[Case]:
    of_images = [Case(CNN, name, shape) for name in (*CNN_NAMES, "own") for shape in images]
    of_sequences = [Case(TRANSFORMER, name, shape) for name in (*TRANSFORMER_NAMES, "own") for shape in sequences]
    return (
        of_images + of_sequences + [Case(TRANSFORMER, name, s, causal=False) for name in BOTH_WAYS for s in sequences]
    )


CASES = cases(IMAGES, SEQUENCES)
ALL_CASES = [*CASES, *(pytest.param(c, marks=pytest.mark.slow) for c in cases(MORE_IMAGES, MORE_SEQUENCES))]
ALGORITHMS = sorted(set(STYLE_ALGORITHM))
every_case = pytest.mark.parametrize("case", ALL_CASES, ids=str)
NO_BUFFERS = torch.zeros(0)


class Newborn(NamedTuple):
    """A module and the row of weights that it runs on."""

    template: Template
    row: Tensor

    def __call__(self, h: Tensor) -> Tensor:
        self.template.bind(self.row, NO_BUFFERS)
        return self.template(h)


def newborn(build: Callable[[], nn.Module], init: dict[str, float], seed: int = 0) -> Newborn:
    template = Template(deterministic_build(build))
    table = init_table(build_twice(build), template.parameters, init)
    assert not table.rebuilt.any()
    row = fresh_rows(table, seed, Stream.SEED_INIT, torch.tensor([0]), t=1)[0]
    return Newborn(template, row.requires_grad_())


def new_seed(case: Case) -> Newborn:
    return newborn(lambda: case.blueprint.build(case.channels), dict(case.blueprint.init))


def new_gate(channels: int) -> Newborn:
    return newborn(lambda: GateNetwork(channels), {}, seed=1)


def features(case: Case, batch: int = 8) -> Tensor:
    return torch.randn(batch, *case.features, generator=torch.Generator().manual_seed(sum(case.features)))


def grown_up(case: Case) -> Newborn:
    """A seed whose weights are all random, so that its output is not close to zero."""
    seed = new_seed(case)
    generator = torch.Generator().manual_seed(3)
    return Newborn(seed.template, 0.5 * torch.randn(seed.row.shape, generator=generator))


# -- size -------------------------------------------------------------------------------------------------------------

FORMULAS: dict[tuple[HostFamily, str], Callable[[int], int]] = {
    (CNN, "conv_light"): lambda c: 9 * c**2 + 3 * c,
    (CNN, "attention"): lambda c: 2 * c * max(1, c // 4) + c,
    (CNN, "norm"): lambda c: 2 * c + 1,
    (CNN, "depthwise"): lambda c: c**2 + 12 * c,
    (CNN, "bottleneck"): lambda c: 2 * c * max(8, c // 4) + 9 * max(8, c // 4) ** 2 + 3 * c,
    (CNN, "conv_small"): lambda c: c**2 + 3 * c,
    (CNN, "conv_heavy"): lambda c: 18 * c**2 + 5 * c,
    (CNN, "own"): lambda c: 9 * c**2 + 2 * c,
    (TRANSFORMER, "attention"): lambda d: 4 * d**2 + 4 * d,
    (TRANSFORMER, "flex_attention"): lambda d: 4 * d**2 + 4 * d,
    (TRANSFORMER, "norm"): lambda d: 2 * d + 1,
    (TRANSFORMER, "depthwise"): lambda d: 6 * d,
    (TRANSFORMER, "lora"): lambda d: 16 * d,
    (TRANSFORMER, "lora_large"): lambda d: 64 * d,
    (TRANSFORMER, "mlp_small"): lambda d: 4 * d**2 + 3 * d,
    (TRANSFORMER, "mlp"): lambda d: 8 * d**2 + 5 * d,
    (TRANSFORMER, "own"): lambda d: d**2 + 2 * d,
}


def test_all_blueprints_of_a_family_are_examined_here():
    for family in (CNN, TRANSFORMER):
        names = {blueprint_at(index, family).name for index in selectable(family)}
        assert names == {name for of, name in FORMULAS if of is family} == {c.name for c in CASES if c.family is family}


def test_a_depthwise_seed_in_a_host_that_is_not_causal_has_a_token_more_to_weigh():
    built = blueprint_by_name("depthwise", TRANSFORMER).within(causal=False).build(8)
    assert sum(p.numel() for p in built.parameters()) == 7 * 8


@pytest.mark.parametrize(("family", "name"), FORMULAS)
def test_a_blueprint_has_as_many_parameters_as_its_formula_says(family, name):
    blueprint, formula = blueprint_by_name(name, family), FORMULAS[family, name]
    widths = (2, 6, 8, 64) if family is CNN else (2, 128)
    counts = [sum(p.numel() for p in blueprint.build(width).parameters()) for width in widths]
    assert counts == [formula(width) for width in widths]


# -- initial weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@every_case
def test_a_newborn_leaves_the_features_of_its_host_as_they_are(case, algorithm):
    h = features(case)
    delta = new_seed(case)(h)
    assert (delta.shape, delta.dtype) == (h.shape, h.dtype)
    gate = new_gate(case.channels)(h) if algorithm is Algorithm.GATE else None
    assert torch.equal(blend(h, delta, algorithm, torch.ones(()), gate), h)


@pytest.mark.parametrize("case", cases(IMAGES[-1:], SEQUENCES[-1:]), ids=str)
def test_build_already_has_the_constants_that_it_declares(case):
    built = case.blueprint.build(case.channels)
    assert case.blueprint.init
    for name, value in case.blueprint.init.items():
        assert torch.equal(built.get_parameter(name), torch.full_like(built.get_parameter(name), value))


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("active", [False, True], ids=["hidden", "half-blended"])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@every_case
def test_every_parameter_has_a_gradient_within_two_training_steps(case, algorithm, active):
    seed, gate, h = new_seed(case), new_gate(case.channels), features(case)
    alpha, x, pull = torch.tensor(0.5) if active else None, h if active else h.detach(), h.flip(0)
    reached: set[str] = set()
    for _ in range(2):
        y = blend(h, seed(x), algorithm, alpha, gate(x) if algorithm is Algorithm.GATE else None)
        grads = torch.autograd.grad((y * pull).sum(), (seed.row, gate.row), materialize_grads=True)
        for prefix, module, grad in (("seed.", seed, grads[0]), ("gate.", gate, grads[1])):
            assert grad.isfinite().all()
            per_tensor = module.template.parameters.unpack(grad)
            reached |= {prefix + name for name, value in per_tensor.items() if value.count_nonzero()}
        with torch.no_grad():
            for module, grad in zip((seed, gate), grads, strict=True):
                module.row.sub_(0.02 * grad / grad.norm().clamp(min=1.0))
    expected = {f"seed.{spec.name}" for spec in seed.template.parameters.tensors}
    if algorithm is Algorithm.GATE:
        expected |= {f"gate.{spec.name}" for spec in gate.template.parameters.tensors}
    assert reached == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_seed_that_is_not_isolated_adds_its_own_gradient_to_that_of_its_host(case, algorithm):
    seed, gate, h = grown_up(case), new_gate(case.channels), features(case).requires_grad_()
    y = blend(h, seed(h), algorithm, torch.tensor(0.5), gate(h) if algorithm is Algorithm.GATE else None)
    pull = h.detach().flip(0)
    (grad,) = torch.autograd.grad((y * pull).sum(), h)
    assert grad.isfinite().all()
    assert (grad - pull).abs().max() > 1e-4


# -- many hosts, and the future ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.features != (2, 1, 1)], ids=str)  # two values: rounding grows
def test_stacked_layers_give_every_host_the_results_of_its_own_module(case):
    for name, build in (
        (case.name, lambda: case.blueprint.build(case.channels)),
        ("gate", lambda: GateNetwork(case.channels)),
    ):
        assert way_to_stack(name, deterministic_build(build), torch.zeros(1, *case.features)) is stack_layers


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.family is TRANSFORMER and c.features[0] > 1 and c.causal], ids=str
)
def test_in_a_causal_host_a_token_sees_no_later_one(case):
    h = features(case)
    changed = h.clone()
    changed[:, 2:] += 1.0
    for module in (grown_up(case), new_gate(case.channels)):
        before, after = module(h), module(changed)
        assert torch.equal(before[:, :2], after[:, :2])
        assert not torch.equal(before[:, 2:], after[:, 2:])


@pytest.mark.parametrize("case", [c for c in CASES if not c.causal and c.features[0] > 1], ids=str)
def test_in_other_hosts_a_token_sees_as_much_before_it_as_behind_it(case):
    seed, h = grown_up(case), features(case)

    def reach(token: int) -> tuple[int, ...]:
        """Offsets of the tokens that change with this one."""
        changed = h.clone()
        changed[:, token] += 1.0
        moved = (seed(changed) != seed(h)).flatten(2).any(-1).any(0)
        return tuple(int(place) - token for place in moved.nonzero().flatten())

    assert reach(8) == tuple(range(-2, 3) if case.name == "depthwise" else range(-8, 9))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_output_depends_on_the_input_even_of_a_single_place(case):
    delta = grown_up(case)(features(case))
    assert (delta - delta[:1]).abs().max() > 1e-4
