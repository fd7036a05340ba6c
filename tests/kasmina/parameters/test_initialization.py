"""Initialization as data: bounds, constants, and independence of who else is drawn."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.kasmina.parameters import initialization
from esper.kasmina.parameters.initialization import (
    InitTable,
    build_twice,
    deterministic_build,
    fresh,
    fresh_rows,
    init_table,
)
from esper.kasmina.parameters.layout import parameter_layout
from esper.kasmina.parameters.population import seed_kind
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from esper.leyline.random import Stream


class Mixed(nn.Module):
    """Everything that a parameter can start from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)
        self.depthwise = nn.Conv2d(6, 6, 3, groups=6, bias=False)
        self.linear = nn.Linear(9, 5)
        self.out = nn.Linear(5, 5)
        self.norm = nn.GroupNorm(1, 5)
        self.attention = nn.MultiheadAttention(6, 2)
        self.wide = nn.Linear(3, 2, bias=False)
        nn.init.uniform_(self.wide.weight, 1.0, 4.0)
        self.silent = nn.Linear(3, 3)
        nn.init.zeros_(self.silent.weight)
        nn.init.constant_(self.silent.bias, 0.5)
        self.other = nn.Parameter(torch.full((3,), 0.01))
        self.halved = nn.Linear(3, 4, bias=False)
        with torch.no_grad():
            self.halved.weight.mul_(0.5)
        self.table = nn.Embedding(3, 2, padding_idx=0)
        self.words = nn.Embedding(30, 20)
        self.small = nn.Linear(4, 3)
        nn.init.normal_(self.small.weight, 0.5, 0.02)


def host_like_kind(build):
    """The kind of seeds whose blueprint builds this."""
    blueprint = FunctionBlueprint(HostFamily.TRANSFORMER, lambda width: build(), {})
    return seed_kind(blueprint, 2, (3, 2), torch.device("cpu"))


GIVEN = {"out.weight": 0.0, "other": 0.25}
INTERVALS = {  # centre and half the width
    "conv.weight": (0, 1 / 6), "conv.bias": (0, 1 / 6), "depthwise.weight": (0, 1 / 3), "linear.weight": (0, 1 / 3),
    "linear.bias": (0, 1 / 3), "out.bias": (0, 1 / math.sqrt(5)), "attention.in_proj_weight": (0, 0.5),
    "attention.out_proj.weight": (0, 1 / math.sqrt(6)), "wide.weight": (2.5, 1.5),
    "small.bias": (0, 0.5),
}  # fmt: skip
NORMALS = {"words.weight": (0, 1), "small.weight": (0.5, 0.02)}  # mean and standard deviation
CONSTANTS = {
    "out.weight": 0.0, "other": 0.25, "norm.weight": 1.0, "norm.bias": 0.0, "attention.in_proj_bias": 0.0,
    "attention.out_proj.bias": 0.0, "silent.weight": 0.0, "silent.bias": 0.5,
}  # fmt: skip
REBUILT = {"halved.weight", "table.weight"}


def mixed_table() -> tuple[nn.Module, InitTable]:
    module = deterministic_build(Mixed)
    return module, init_table(build_twice(Mixed), parameter_layout(module), GIVEN)


def test_a_parameter_is_drawn_as_its_author_draws_it_and_keeps_what_its_author_set():
    module, table = mixed_table()
    layout = parameter_layout(module)
    constants = {name: (value, 0) for name, value in CONSTANTS.items()}
    starts = INTERVALS | NORMALS | constants | dict.fromkeys(REBUILT, (0, 0))
    assert starts.keys() == {spec.name for spec in layout.tensors}
    found = zip(layout.unpack(table.centre).items(), layout.unpack(table.spread).values(), strict=True)
    for (name, centre), spread in found:
        torch.testing.assert_close(centre, torch.full_like(centre, starts[name][0]), msg=name)
        torch.testing.assert_close(spread, torch.full_like(spread, starts[name][1]), msg=name)
    for marked, names in ((table.rebuilt, REBUILT), (table.normal, NORMALS.keys())):
        masks = layout.unpack(marked.float())
        assert {name for name, mask in masks.items() if mask.all()} == names
        assert not any(mask.any() for name, mask in masks.items() if name not in names)


def test_a_word_becomes_a_weight_by_centre_plus_spread_times_two_u_minus_one():
    never = torch.zeros(3, dtype=torch.bool)
    table = InitTable(spread=torch.tensor([2.0, 0.0, 1.0]), centre=torch.tensor([0.0, 7.0, 10.0]), rebuilt=never)
    words = torch.tensor([[0, 0, 2**31], [2**32 - 1, 5, 3 * 2**30]])
    # u = 0, -, 1/2 and 1 - 2^-24, -, 3/4
    expected = torch.tensor([[-2.0, 7.0, 10.0], [2.0 * (1 - 2.0**-23), 7.0, 10.5]])
    assert torch.equal(fresh(table, words), expected)


def test_a_word_becomes_a_normal_weight_by_the_quantile_of_its_uniform_number():
    always = torch.ones(4, dtype=torch.bool)
    table = InitTable(
        spread=torch.tensor([1.0, 0.02, 1.0, 1.0]), centre=torch.tensor([0.0, 3.0, 0.0, 0.0]), rebuilt=~always,
        normal=always,
    )  # fmt: skip
    words = torch.tensor([[2**31, 3 * 2**30, 0, 2**32 - 1]])
    # u = 1/2, 3/4, 2^-25 and 1 - 2^-25; the upper quartile is at 0.6744898
    expected = torch.tensor([[0.0, 3.0 + 0.02 * 0.6744898, -5.4199, 5.4199]])
    torch.testing.assert_close(fresh(table, words), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("at_once", [4, 100, 2400])
def test_weights_drawn_in_pieces_are_those_drawn_at_once(monkeypatch, at_once):
    _, table = mixed_table()
    key = {"run_seed": 3, "stream": Stream.SEED_INIT, "host": torch.arange(3), "t": 4, "first_block": 2**31}
    whole = fresh_rows(table, **key)
    assert whole.shape[1] % 2400
    monkeypatch.setattr(initialization, "_WORDS_AT_ONCE", at_once)
    assert torch.equal(fresh_rows(table, **key), whole)


def test_a_birth_name_that_does_not_exist_is_refused():
    builds = build_twice(lambda: nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"init names '0.wieght'.*did you mean '0.weight'"):
        init_table(builds, parameter_layout(builds.module), {"0.wieght": 0.0})


# -- draws that are not the weights of a layer ------------------------------------------------------------------------


class Rare(nn.Module):
    """[B, 2] -> [B, 2]; starts at zero in four of ten networks, by a number of this generator."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        if draw() < 0.4:
            nn.init.zeros_(self.layer.weight)

    def forward(self, h):
        return self.layer(h)


DRAWS = {
    "torch": lambda: torch.rand(()),
    "torch in place": lambda: torch.empty(()).uniform_(),
    "python": lambda: random.random(),
    "numpy": np.random.random,
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_rare_branch_of_a_constructor_is_taken_by_the_hosts_that_draw_it(draw):
    kind = host_like_kind(lambda: Rare(draw))
    assert kind.start.rebuilt
    assert kind.start.table.rebuilt[:4].all()
    params, _ = kind.rebuild(list(range(100)))
    silent = int((params[:, :4] == 0.0).all(dim=1).sum())
    assert 25 <= silent <= 55  # 40 are expected, with a standard deviation of 4.9


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_build_leaves_the_generators_of_the_user_where_they_were(draw):
    deterministic_build(lambda: Rare(draw))
    states = random.getstate(), np.random.random(), torch.get_rng_state()
    random.setstate(states[0])
    before = np.random.get_state()[2], random.getstate(), torch.get_rng_state()
    build_twice(lambda: Rare(draw))
    assert (np.random.get_state()[2], random.getstate()) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_layers_that_are_initialized_twice_or_tied_need_no_rebuilding():
    def build() -> nn.Module:
        net = nn.ModuleList([nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)])
        nn.init.normal_(net[0].weight, std=0.02)
        net[1].weight = net[0].weight
        return net

    assert not build_twice(build).hidden


def test_an_architecture_that_is_drawn_at_random_is_refused():
    kind = host_like_kind(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU() if torch.rand(()) < 0.4 else nn.Tanh()))
    with pytest.raises(ConfigError, match="Sequential draws its architecture at random"):
        kind.rebuild(list(range(100)))
