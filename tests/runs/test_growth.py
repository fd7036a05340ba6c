"""esper.runs.growth: budgets, stages, and what a candidate is among others."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import esper
from esper.api.run import in_process
from esper.kasmina.blueprints import registry
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.random import MAX_EPISODE_LENGTH
from esper.runs.assembly.presets import resolve
from esper.runs.growth import (
    RATES,
    Budget,
    Growth,
    Stage,
    climbing_stages,
    halving_stages,
    longest,
    racing_stages,
    side_by_side,
    stage_ends,
)
from esper.runs.leaderboard import Candidate, Entry, Leaderboard, compared
from esper.runs.state_file import read_state, write_state

CPU = torch.device("cpu")


class Net(nn.Module):
    """[B, 6] -> logits [B, 3], with two slots of two tokens, or of vectors."""

    def __init__(self, tokens: int = 2) -> None:
        super().__init__()
        self.tokens = tokens
        self.one, self.two, self.out = nn.Linear(6 // tokens, 8), nn.Linear(8, 8), nn.Linear(8 * tokens, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens == 1 else x.unflatten(1, (self.tokens, -1))
        return self.out(torch.tanh(self.two(torch.tanh(self.one(x)))).flatten(1))


def vectors(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(n))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def task_of(name: str, tokens: int = 2) -> esper.Task:
    return esper.Task(
        partial(Net, tokens), ["one", "two"], train=vectors(64), val=vectors(40), test=vectors(50), batch=16,
        episode_length=12, lr=1e-2, name=name,
    )  # fmt: skip


TASK = task_of("net")
STEP = 3 * 64 + 40
"""Forward passes of examples that a step of training and measuring counts as."""
STEP_MEASURED = 3 * 64 + 4
"""The same with the few examples that a step measures."""


@pytest.fixture(scope="module")
def grow() -> Iterator[Callable[..., Growth]]:
    """`grow("halving", flops=...)`: a growth of the task, before its first step."""
    with ExitStack() as stack:
        stack.enter_context(in_process(TASK.spec))
        config = resolve({"task": TASK.spec.name, "executor": "streamed", "threads": 1})
        dataset = TASK.spec.load(None, 0)

        def begun(
            method: Any = "halving", steps: int | None = None, warmup: int = 0, seed: int = 3, keep: Any = "best",
            **budget: Any,
        ) -> Growth:  # fmt: skip
            own = replace(config, optimizer=replace(config.optimizer, warmup=warmup))
            return Growth(own, dataset, CPU, method=method, budget=Budget(**budget), seed=seed, steps=steps, keep=keep)

        yield begun


@pytest.fixture(scope="module")
def step_flops(grow: Callable[..., Growth]) -> float:
    """What a step of the network alone costs, with a measurement of all examples."""
    return STEP * grow("plain", steps=1).entries[0].flops


@pytest.fixture(scope="module")
def begun(grow: Callable[..., Growth], tmp_path_factory: pytest.TempPathFactory) -> tuple[Growth, Path]:
    """A growth of one step and its file, neither to be changed."""
    growth, file = grow("halving"), tmp_path_factory.mktemp("growth") / "unfinished"
    growth.step()
    growth.write(file)
    return growth, file


def finished(growth: Growth) -> Growth:
    while not growth.is_over:
        growth.step()
    return growth


def curves(growth: Growth) -> list[tuple[str, list[float], list[float]]]:
    return [(str(entry.candidate), entry.val, entry.loss) for entry in growth.entries]


# -- stages and budgets ------------------------------------------------------------------------------------------------


def test_a_quarter_is_left_after_a_tenth_of_the_steps_and_one_after_a_quarter():
    assert halving_stages(9) == (Stage(0.1, 9), Stage(0.25, 2), Stage(1.0, 1))
    assert [stage.kept for stage in halving_stages(16)] == [16, 4, 1]
    assert halving_stages(2) == (Stage(0.25, 2), Stage(1.0, 1))
    assert halving_stages(1) == (Stage(1.0, 1),)


def test_a_climb_keeps_the_best_beside_its_copies_and_ends_with_one_network():
    stages = climbing_stages(climbs=2, new=4)
    assert [(stage.kept, stage.new) for stage in stages] == [(3, 0), (1, 4), (1, 4), (1, 0)]
    assert [stage.until for stage in stages] == pytest.approx([0.1, 0.35, 0.6, 1.0])


def test_a_race_tries_what_is_free_then_architectures_then_the_best_two():
    stages = racing_stages(3, new=4)
    assert [(stage.kept, stage.new) for stage in stages] == [(3, 0), (1, 4), (2, 0), (1, 0)]
    assert [stage.until for stage in stages] == [0.06, 0.1, 0.15, 1.0]
    assert racing_stages(3, new=0) == (Stage(0.06, 3), Stage(1.0, 1))


def test_a_budget_too_small_to_tell_candidates_apart_goes_to_the_network_alone(grow, step_flops):
    flops = step_flops
    growth = grow("auto", flops=30 * flops)  # a stage of 6 % has 14 batches of half the size
    assert [entry.candidate for entry in growth.entries] == [Candidate()]
    assert growth.end == growth.steps > 30
    assert growth.plan.startswith(f"plan: {growth.steps} steps, candidates 1, ")
    assert growth.plan.endswith("; the budget is too small to compare candidates, so the network alone has all of it")
    assert grow("auto", flops=200 * flops).stages == racing_stages(3, new=0)  # 1,600 batches: no race
    rich = grow("auto", flops=260 * flops)
    assert len(rich.entries) == len(RATES)
    assert rich.stages[1].new > 0
    assert rich.end * 8 >= 20  # batches of the first stage, of half the size
    assert rich.steps >= 3 * 12  # three trainings of the network alone are left to the one that is kept


FREE = Architecture((PlacedSeed("one", "norm", "ADD"), PlacedSeed("two", "norm", "ADD")))
ALONE, GROWN, FASTER = Candidate(), Candidate(FREE), Candidate(FREE, 3.0)


@pytest.fixture
def small(grow: Callable[..., Growth], step_flops: float) -> Growth:
    """A growth of "auto" by a budget of fewer than six trainings, before its first step."""
    return grow("auto", flops=60 * step_flops)


def test_a_small_budget_compares_the_network_alone_with_what_is_free(small, grow, step_flops):
    assert [entry.candidate for entry in small.entries] == [ALONE, GROWN, FASTER]
    assert small.stages == racing_stages(3, new=0)
    assert small.plan.startswith(f"plan: about {small.steps} steps, candidates 3 -> 1, ")
    assert small._prices.flops(FREE) <= 1.02 * small._prices.flops(Architecture())
    assert small.births(1) == [(seed, 0) for seed in FREE.slots]
    limited = grow("auto", flops=60 * step_flops, params=small.entries[1].params - 1)  # norms do not fit
    assert [entry.candidate for entry in limited.entries] == [ALONE, Candidate(rate=3.0)]
    assert limited.stages == racing_stages(2, new=0)


@pytest.mark.parametrize(
    ("losses", "continued", "until"),
    [
        pytest.param(
            (1.0, 1.01, 1.02), [FASTER], 1.0, id="free seeds at three times the rate that harm by less than 2 %"
        ),
        pytest.param((1.0, 1.01, 1.04), [GROWN], 1.0, id="the rate of the task where it is better by more"),
        pytest.param((1.0, 1.03, 1.06), [ALONE], 1.0, id="the network alone where it is better by more"),
        pytest.param((1.0, 1.03, 1.02), [Candidate(rate=3.0)], 1.0, id="at the better rate of the others"),
        pytest.param((1.0, 1.01, 1.0), [FASTER], 1.0, id="the better rate"),
        pytest.param((1.0, 1.0, 1.24), [GROWN], 1.0, id="no third where three times is worse by less"),
        pytest.param((1.0, 1.0, 1.26), [GROWN, Candidate(FREE, 1 / 3)], 0.1, id="a third where three times is worse"),
        pytest.param((1.0, 1.0, math.nan), [GROWN, Candidate(FREE, 1 / 3)], 0.1, id="or is not a number"),
    ],
)
def test_the_first_stage_of_a_small_budget_ends_with(small, losses, continued, until):
    end_of_stage(small, losses)
    assert [small.entries[row].candidate for row in small.rows] == continued
    assert small.stages[1].until == until


def test_after_its_first_stage_a_small_budget_is_spent_to_its_end(small):
    end_of_stage(small, (1.0, 1.0, 1.11))
    assert finished(small).result()[1] in range(len(small.entries))
    assert small.t == small.steps


@pytest.fixture
def of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growth, "_is_of_tokens", True)


@pytest.mark.usefixtures("of_tokens")
def test_what_auto_chooses_of_tokens_is_trained_as_if_it_had_been_known_from_the_start(small):
    """The same weights, order of examples and rates as those of an engine that begins with it after as many steps."""
    end_of_stage(small, (1.0, 1.0, 1.01))
    begun = small.t
    (row,), alone = small.rows, small.entries[0]
    assert (small.entries[row].late, small.entries[row].parent, len(alone.val)) == (begun, None, begun)
    weights = small._engine.executor.state_dict()
    small.begin([FASTER])
    fresh = small._engine.executor.state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in weights.items() if "weight" in name)


@pytest.mark.usefixtures("of_tokens")
def test_the_steps_of_what_begins_anew_are_its_own(small, tmp_path: Path):
    end_of_stage(small, (1.0, 1.0, 1.01))
    begun = small.t
    assert small.place == f"step {begun}/{small.steps}, 1 candidate, {FASTER} begins anew"
    finished(small)
    small.write(tmp_path / "unfinished")
    _, row, steps = small.result()
    entry = small.entries[row]
    assert (entry.candidate, entry.late) == (FASTER, begun)
    assert steps <= len(entry.val) == small.t - begun
    assert small.births(row) == [(seed, 0) for seed in FREE.slots]
    board = small.leaderboard(row, steps, None)
    assert board.val == entry.val[steps - 1]
    ((_, spent, points, kept),) = [course for course in board.courses if course[-1]]
    assert len(points) == len(entry.val)
    assert (spent[0], kept) == (pytest.approx(entry.of_step), (pytest.approx(entry.of_step * steps), board.val))


def end_of_stage(growth: Growth, losses: tuple[float, ...]) -> None:
    """Train to the end of the stage, where the rows have these losses."""
    while growth.t < growth.end - 1:
        growth.step()
    for row, loss in zip(growth.rows, losses, strict=True):
        growth.entries[row].val.append(50.0)
        growth.entries[row].loss.append(loss)
    growth.t = growth.measured = growth.end
    growth._next_stage()


@pytest.mark.parametrize(("nearly", "is_better"), [(1.01, False), (0.99, True)])
def test_in_a_race_architectures_grow_from_the_network_alone_and_must_be_clearly_better_than_what_is_free(
    grow, step_flops, nearly, is_better
):
    growth = grow("auto", flops=400 * step_flops)
    many = growth.stages[1].new
    assert many >= 2
    end_of_stage(growth, (1.0, 1.0, 0.9))
    best, *others = (growth.entries[row] for row in growth.rows)
    assert best.candidate == FASTER
    assert len(others) == many
    assert {(entry.parent, entry.candidate.rate) for entry in others} == {(0, 3.0)}  # entry 0 is the network alone
    assert FREE not in {entry.candidate.architecture for entry in others}
    one = others[0].candidate
    end_of_stage(growth, (0.5, 0.4, *(0.6 for _ in others[1:])))
    assert {growth.entries[row].candidate for row in growth.rows} == {FASTER, one}
    doublings = math.log2(others[0].flops / growth.entries[0].flops)
    least = 1.0 / (1.02 + 0.1 * doublings)  # 2 % lower, and 10 % for each doubling of the price
    losses = {FASTER: 0.4, one: 0.4 * least * nearly}
    end_of_stage(growth, tuple(losses[growth.entries[row].candidate] for row in growth.rows))
    assert [growth.entries[row].candidate for row in growth.rows] == [one if is_better else FASTER]


def test_a_budget_of_more_steps_than_there_can_be_has_candidates_all_the_same(grow, step_flops):
    for runs in (1, 100):
        growth = grow("auto", flops=runs * MAX_EPISODE_LENGTH * step_flops)
        assert len(growth.entries) == 3
    assert growth.steps == MAX_EPISODE_LENGTH
    assert "; the budget holds more, but no growth has more steps" in growth.plan


def test_behind_vectors_the_rate_alone_is_chosen(step_flops):
    spec = task_of("of_vectors", tokens=1).spec
    with in_process(spec):
        config = resolve({"task": spec.name, "executor": "streamed", "threads": 1})
        growth = Growth(config, spec.load(None, 0), CPU, method="auto", budget=Budget(flops=60 * step_flops))
    assert [entry.candidate for entry in growth.entries] == [ALONE, Candidate(rate=3.0)]


@pytest.mark.parametrize("tokens", [1, 2])
def test_blueprints_of_the_user_are_tried_first(step_flops, tokens):
    @esper.register_blueprint(family="transformer", init={"weight": 0.0, "bias": 0.0})
    def thin(channels: int) -> nn.Module:
        return nn.LayerNorm(channels)

    try:
        spec = task_of("with_own_blueprint", tokens).spec
        with in_process(spec):
            config = resolve({"task": spec.name, "executor": "streamed", "threads": 1})
            growth = Growth(config, spec.load(None, 0), CPU, method="auto", budget=Budget(flops=60 * step_flops))
    finally:
        registry.unregister("thin")
    assert [seed.blueprint for seed in growth.entries[1].candidate.architecture.slots] == ["thin", "thin"]


class Texts(nn.Module):
    """Tokens [B, T] -> logits [B, T, 5], so wide that a convolution over tokens costs hardly any FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.two = nn.Embedding(5, 512), nn.Linear(512, 512), nn.Linear(512, 512)
        self.out = nn.Linear(512, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.two(torch.tanh(self.one(self.table(x))))))


@pytest.mark.parametrize(
    ("of_tokens", "examples", "each", "free"),
    [(True, 1024, 0.2, True), (True, 1024, 0.3, False), (False, 1024, 0.3, True), (True, 128, 0.3, True)],
    ids=["a short training of tokens", "a long one", "a long one of texts", "a long one of few tokens"],
)
def test_in_a_long_training_of_tokens_nothing_is_free(monkeypatch, of_tokens, examples, each, free):
    """Long is what sees so many targets for each parameter; 16 passes count."""
    monkeypatch.setattr("esper.runs.growth._LONG", 0.25)

    def texts(n: int) -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 5, (n, 16), generator=torch.Generator().manual_seed(n))
        return x, x if of_tokens else x[:, 0]

    class Net(Texts):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if of_tokens else super().forward(x).mean(1)

    spec = esper.Task(
        Net, ["one", "two"], train=texts(examples), val=texts(40), test=texts(50), batch=16, batches_per_step=8,
        name="texts",
    ).spec  # fmt: skip
    with in_process(spec):
        config = resolve({"task": spec.name, "executor": "streamed", "threads": 1})
        one_batch = Growth(config, spec.load(None, 0), CPU, method="plain", budget=Budget(), steps=1)
        params, of_step = one_batch.entries[0].params, one_batch._of_step(Candidate())
        steps = each * params / (128 * (16 if of_tokens else 1))
        growth = Growth(config, spec.load(None, 0), CPU, method="auto", budget=Budget(flops=steps * of_step))
    filled = Architecture(tuple(PlacedSeed(slot, "depthwise", "ADD") for slot in ("one", "two")))
    assert (filled in growth._pool) == free
    found = [entry.candidate for entry in growth.entries]
    assert found == [ALONE, Candidate(filled), Candidate(filled, 3.0)] if free else [ALONE, Candidate(rate=3.0)]


def test_a_budget_of_few_batches_is_spent_on_smaller_ones_by_lower_rates(grow):
    of_step = STEP_MEASURED * grow("plain", steps=1).entries[0].flops
    growth, rich = grow("auto", flops=60 * of_step), grow("auto", flops=501 * of_step)
    assert (growth.batch, rich.batch) == (8, 16)  # 240 and 2,004 batches of 16; there are none below 8
    assert growth.plan.endswith("batches of 8 instead of 16 examples, because the budget holds few (lr 0.0071)")
    assert "batches" not in rich.plan
    data, optimizer = growth._engine.executor.data, growth._engine.executor.data.population.optimizer_spec
    assert data.batch_train == 8
    assert (optimizer.host_lr, optimizer.seed_lr) == pytest.approx((1e-2 / math.sqrt(2), 1e-2 / math.sqrt(2)))
    assert growth._prices.of_step(1.0) == rich._prices.of_step(1.0)  # as many examples
    assert grow("halving", flops=60 * of_step).batch == grow("plain", flops=60 * of_step).batch == 8  # what is compared
    assert grow("auto", flops=60 * of_step, steps=3).batch == 16


def test_batches_are_not_halved_below_the_smallest_of_the_task(step_flops):
    spec = replace(TASK.spec, name="whole_batches", smallest_batch=16)
    with in_process(spec):
        config = resolve({"task": spec.name, "executor": "streamed", "threads": 1})
        growth = Growth(config, spec.load(None, 0), CPU, method="auto", budget=Budget(flops=60 * step_flops))
    assert growth.batch == 16


@pytest.mark.parametrize(("seconds", "batch"), [((1.0, 1.2), 8), ((1.0, 1.3, 1.2), 16), ((1.0, 1.3, 1.3), 32)])
def test_under_minutes_batches_are_as_small_as_do_not_take_much_longer(grow, monkeypatch, seconds, batch):
    growth = grow("plain", minutes=5.0, flops=1e5 * STEP)
    growth.batch = 32
    paces = iter(seconds)  # of an example in the batches of the task, and in those of 8 and 16
    monkeypatch.setattr(Growth, "_pace", lambda self, *given: next(paces))
    growth._halve_batches(1e-3)
    assert growth.batch == batch
    assert next(paces, None) is None


def test_stages_end_at_their_share_of_the_steps_and_have_a_step_each():
    assert stage_ends([1 / 9, 1 / 3, 1.0], 27) == (3, 9, 27)
    assert stage_ends([1 / 9, 1 / 3, 1.0], 3) == (1, 2, 3)
    assert stage_ends([1 / 3, 1.0], 27, done=12) == (13, 27)


def test_the_longest_growth_spends_what_the_stages_cost():
    # 9, 3 and 1 candidates at 10 FLOPs a step: 27 steps cost 3 * 90 + 6 * 30 + 18 * 10 = 630
    assert longest([90, 30, 10], [1 / 9, 1 / 3, 1.0], budget=630) == 27
    assert longest([90, 30, 10], [1 / 9, 1 / 3, 1.0], budget=629) == 26
    assert longest([90, 30, 10], [1 / 9, 1 / 3, 1.0], budget=1) == 3


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    budget=st.integers(1, 5_000),
    done=st.integers(0, 5),
)
def test_one_step_more_than_the_longest_growth_would_cost_too_much(sizes, budget, done):
    until = [(i + 1) / len(sizes) for i in range(len(sizes))]

    def cost(steps: int) -> int:
        ends = stage_ends(until, steps, done)
        return sum(of * (end - begin) for of, begin, end in zip(sizes, (done, *ends), ends, strict=False))

    steps = longest(sizes, until, budget, done)
    assert cost(steps) <= budget or steps == done + len(sizes)
    assert cost(steps + 1) > budget or steps == MAX_EPISODE_LENGTH


@pytest.mark.parametrize("method", ["plain", "portfolio", "halving", "hill_climbing", "auto"])
@pytest.mark.parametrize("runs", [0.7, 4.3])
def test_no_method_spends_more_flops_or_parameters_than_allowed(grow, step_flops, method, runs):
    params = 400
    flops = runs * 12 * step_flops
    growth = grow(method, flops=flops, params=params)
    assert Candidate() in [made.candidate for made in growth.entries]  # the network alone is always among them
    finished(growth)
    assert growth.spent <= flops
    assert growth.spent == pytest.approx(sum(made.spent for made in growth.entries))
    if (method, runs) == ("halving", 4.3):
        assert growth.spent > 0.8 * flops
        assert [growth.entries[row].spent > 0.5 * growth.spent for row in growth.rows] == [True]
    network, entry, _ = growth.result()
    assert network.description.host_params + network.description.grown_params <= params
    assert max(made.params for made in growth.entries) <= params
    assert growth.entries[entry].params == network.description.host_params + network.description.grown_params


def test_all_validation_examples_are_measured_behind_a_stage_and_few_in_each_step(grow):
    growth = grow("plain", steps=2, keep="last", flops=1e12)
    growth.stages = (Stage(1.0, 1),)
    growth.begin([Candidate()])
    growth.step()
    x, y = vectors(40)
    assert growth.entries[0].val[0] in (0.0, 25.0, 50.0, 75.0, 100.0)  # 2 % of 3 * 64 passes are 4 examples
    growth.step()
    network, _, _ = growth.result()
    right = (network.module(x).argmax(dim=1) == y).float().mean()
    assert growth.entries[0].val[1] == pytest.approx(100.0 * float(right)) == network.description.val
    assert growth.spent == growth.entries[0].flops * (2 * (3 * 64 + 4) + 40)


def test_minutes_end_a_growth_before_the_step_that_would_be_too_late(grow):
    growth = grow("plain", minutes=5.0)
    for _ in range(3):
        growth.step()
    assert not growth.is_over
    growth.seconds = 300.0 - 1e-9
    assert growth.is_over
    growth.seconds = 300.0 - 2.0 * growth.training_seconds
    assert not growth.is_over


def test_candidates_at_the_same_time_cost_minutes_once_and_flops_each(grow):
    growth = grow("plain", steps=4, flops=1e12)
    alone = [Candidate()] * 4
    step = STEP_MEASURED * growth.entries[0].flops
    stages = (Stage(0.1, 4), Stage(0.5, 3), Stage(1.0, 1))
    assert growth._costs(alone, stages) == [4 * step, 3 * step, step]
    assert growth._costs(alone, stages, 2.0) == [2 * step, 1.5 * step, step]
    assert growth._costs(alone, stages, 8.0) == [step, step, step]
    dear = Candidate(Architecture((PlacedSeed("one", "mlp", "ADD"),)))
    assert growth._costs([*alone, dear], stages[:1], 8.0) == [growth._of_step(dear)]  # the slowest one decides
    growth._at_once, growth.stages = 2.0, (Stage(1.0, 4),)
    growth.begin(alone)
    growth.step()
    assert (growth.spent, growth.lasted) == (4 * step, 2 * step)


def test_under_minutes_as_many_go_on_as_run_in_the_time_of_one(grow, monkeypatch):
    stages = (Stage(0.1, 9), Stage(0.2, 1, 3), Stage(0.3, 2), Stage(1.0, 1))
    assert side_by_side(stages, 1) == stages
    assert [stage.kept for stage in side_by_side(stages, 3)] == [9, 1, 3, 3]
    assert [stage.kept for stage in side_by_side(stages, 9)] == [9, 1, 4, 4]
    growth = grow("halving", minutes=5.0)
    assert growth._at_once == 1.0  # one host after the other here
    assert growth.stages[-1].kept == 1

    def try_time(self: Growth, *given: object) -> None:
        self._at_once = 3.0

    monkeypatch.setattr(Growth, "_try_time", try_time)
    assert grow("halving", minutes=5.0).stages[-1].kept == 3
    assert grow("halving", minutes=5.0, flops=1e7).stages[-1].kept == 1


@pytest.mark.parametrize(("seconds", "steps"), [(190.0, 75), (70.0, 203)])
def test_a_stage_that_is_late_or_early_is_planned_anew_halfway_and_ends_with_its_schedule(grow, seconds, steps):
    growth = grow("auto", minutes=5.0)
    growth.stages, growth._at_once = (Stage(1.0, 1),), 1.0
    growth.begin([Candidate()])
    flops = growth._of_step(Candidate())
    growth._trial_seconds = 60.0 * 5.0 * 0.95 / (100 * flops + growth._measuring([flops]))
    growth._replan()
    assert growth.steps == growth.end == 100
    while growth.t < 49:
        growth.step()
    kept = growth.entries[0].loss[:]
    growth.seconds = growth.training_seconds = seconds  # 49 steps should have taken about 140
    growth.step()
    assert growth.t == 50
    assert growth.steps == growth.end == pytest.approx(steps, abs=2)  # 285 seconds, of which 50 steps took `seconds`
    assert growth.entries[0].loss[:49] == kept
    low = growth._engine.executor.data.lr_factors(growth.end)[0, 0]
    assert 0.0 <= float(low) < 0.01
    growth.step()
    assert growth.entries[0].loss[50] < 2.0 * growth.entries[0].loss[49]


def test_a_stage_that_is_late_is_planned_anew_again_where_a_quarter_is_left_but_is_not_made_longer_there(grow):
    growth = grow("auto", minutes=5.0, steps=100)
    growth.stages, growth._at_once, growth._fixed = (Stage(1.0, 1),), 1.0, None
    growth.begun, growth.end, growth.steps = 0, 100, 100
    growth.t, growth.lasted = 75, 75 * growth._of_step(Candidate())
    growth.rows = growth.rows[:1]
    growth.seconds = growth.training_seconds = 75.0
    growth._replan_if_wrong()
    assert growth.end == 100  # 210 seconds are left for 25 steps of one
    growth.seconds = growth.training_seconds = 260.0
    growth._replan_if_wrong()
    assert 76 <= growth.end < 90  # 25 seconds are left


def test_the_time_of_candidates_is_tried_before_they_are_planned(grow, monkeypatch):
    paces = iter((8.0, 2.0, 3.0))
    monkeypatch.setattr(Growth, "_pace", lambda self, some, **given: next(paces))
    growth = grow("plain", steps=1)
    growth._try_time(1e-3, 5.0, copies=8)
    assert growth._at_once == 4.0  # a FLOP of eight copies takes a quarter of the time
    assert growth._trial_seconds == 12.0  # that of candidates with seeds, times four


def test_a_trial_of_the_time_measures_as_few_examples_as_its_price_says(grow, monkeypatch):
    growth, built, shares = grow("plain", steps=1), Growth._built, []

    def noted(self: Growth, *given: object) -> object:
        engine = built(self, *given)
        shares.append(engine.executor.data._measured_share)
        return engine

    monkeypatch.setattr(Growth, "_built", noted)
    growth._pace([Candidate()], seconds=1e-3, batch_seconds=1.0)
    assert shares == [pytest.approx(0.02 * 3 * 16 / 40)]  # of one batch, not of the four of a step


# -- candidates --------------------------------------------------------------------------------------------------------


def test_who_goes_on_is_bitwise_what_it_would_be_without_the_others(grow):
    both = [Candidate(), Candidate(Architecture((PlacedSeed("one", "norm", "ADD"),)))]

    def staged(candidates: list[Candidate], *kept: int) -> Growth:
        growth = grow("plain", steps=6, flops=1e12)
        growth.stages = tuple(Stage(until, of) for until, of in zip((0.5, 1.0), kept, strict=True))
        growth.begin(candidates)
        return finished(growth)

    growth = staged(both, 2, 1)
    last = growth.entries[growth.rows[0]]
    assert len(last.val) == 6
    alone = staged([last.candidate], 1, 1)
    assert (alone.entries[0].val, alone.entries[0].loss) == (last.val, last.loss)


def test_the_rate_and_the_architecture_are_chosen_apart(grow, step_flops):
    growth = grow("halving", flops=60 * step_flops)
    assert {entry.candidate.rate for entry in growth.entries} == set(RATES)
    for entry in growth.entries:  # the rate 3 is best for the network alone, norm is best at rate 1
        entry.val, entry.loss = [50.0], [0.1 if "norm" in str(entry.candidate) else 1.0 - 0.1 * entry.candidate.rate]
    growth._next_stage()
    assert str(growth.entries[growth.rows[0]].candidate).startswith("norm")
    assert growth.entries[growth.rows[0]].candidate.rate == 3.0


def test_twice_the_price_must_lower_the_loss_by_a_tenth(grow, step_flops):
    growth = grow("halving", flops=60 * step_flops)
    alone, twice = growth.rows[:2]
    growth.entries[twice].flops = 2.0 * growth.entries[alone].flops
    growth.entries[alone].loss, growth.entries[twice].loss = [0.99], [0.91]  # 0.91 * 1.1 = 1.001
    assert growth._merit(twice) < growth._merit(alone)
    growth.entries[twice].loss = [0.89]  # 0.979
    assert growth._merit(twice) > growth._merit(alone)
    growth.entries[twice].loss = [0.98]
    rich = grow("halving", flops=200 * STEP * growth.entries[alone].flops)
    rich.entries = growth.entries
    assert growth._merit(twice) < growth._merit(alone)
    assert rich._merit(twice) > rich._merit(alone)
    growth.entries[twice].loss = [math.nan]
    assert growth._merit(twice) == -math.inf


def test_a_copy_begins_as_its_parent_was_and_has_one_seed_more(grow, step_flops):
    growth = grow("hill_climbing", flops=60 * step_flops)
    while len(growth.entries) == 3:
        growth.step()
    first = growth.entries[3]
    assert first.born == growth.t
    parent = growth.entries[first.parent]
    assert len(first.candidate.architecture.slots) == 1
    assert first.val == parent.val
    growth.step()
    assert first.val[:-1] == parent.val[:-1]
    assert abs(first.loss[-1] - parent.loss[-1]) < 0.1 * parent.loss[-1]
    assert first.loss[-1] != parent.loss[-1]
    assert growth.births(3) == [(first.candidate.architecture.slots[0], first.born)]


def test_the_result_is_the_best_candidate_of_the_last_step_with_its_test_figure(grow):
    growth = finished(grow("portfolio", steps=2, flops=1e12))
    best = max(entry.val[-1] for entry in growth.entries)
    network, entry, _ = growth.result()
    assert growth.entries[entry].val[-1] == best == pytest.approx(network.description.val)
    x, y = vectors(50)
    right = (network.module(x).argmax(dim=1) == y).float().mean()
    assert network.description.test == pytest.approx(100.0 * float(right))


@pytest.mark.parametrize("method", ["halving", "hill_climbing"])
def test_a_growth_that_is_stopped_behind_a_stage_keeps_the_best_that_was_trained(grow, step_flops, method):
    growth = grow(method, flops=60 * step_flops)
    while growth.stage == 0:
        growth.step()
    best = max(entry.val[-1] for entry in growth.entries if entry.born < growth.t)
    network, entry, _ = growth.result()
    assert growth.entries[entry].val[-1] == best == pytest.approx(network.description.val)
    assert growth.entries[entry].spent > 0.0
    assert all(spent or not points for _, spent, points, _ in growth.leaderboard(entry, growth.t, None).courses)


@pytest.mark.parametrize(
    ("keep", "ahead", "goes_back"), [("best", 16.0, True), ("best", 15.0, False), ("last", 16.0, False)]
)
def test_what_an_earlier_stage_ended_with_is_kept_only_if_it_is_clearly_better(
    grow, step_flops, keep, ahead, goes_back
):  # than by 100 / sqrt(40), the examples of validation
    last = finished(grow("plain", flops=60 * step_flops, keep=keep))
    of_last = last._points(*last.best)
    assert last.best[1] == last.t
    growth = grow("plain", flops=60 * step_flops, keep=keep)
    while growth.stage == 0:
        growth.step()
    row, t = growth.best
    assert row in growth.rows  # it is trained further
    growth.entries[row].val[t - 1] = of_last + ahead
    finished(growth)
    _, entry, steps = growth.result()
    assert (entry, steps) == ((row, t) if goes_back else last.best)
    board = growth.leaderboard(entry, steps, 99.0)
    assert board.val == (of_last + ahead if goes_back else of_last)
    (shown,) = [line for line in str(board).splitlines() if " 99.00 " in line]
    assert f" {steps}  {board.val:.2f}  99.00 " in shown  # of the network that is kept, not of the last step


def test_minutes_are_kept_where_the_first_stage_has_one_step(grow):
    growth = finished(grow("halving", steps=9, minutes=5.0))
    assert growth.t == 9
    assert 0.0 < growth.training_seconds <= growth.seconds


def in_one_stage(growth: Growth, figures: Sequence[float]) -> Growth:
    """After one stage at a high rate, in whose steps the few examples seem to have these figures."""
    growth.stages = (Stage(1.0, 1),)
    growth.begin([Candidate(rate=30.0)])
    listeners = growth._engine.listeners
    (listen,) = listeners
    for figure in figures:
        listeners[0] = lambda report, v=figure: listen(replace(report, val_acc=np.full(1, v, np.float32)))
        growth.step()
    return growth


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("clear", [100.0, 10.0])
def test_the_step_that_seems_best_is_kept_if_it_is_clearly_better_on_all_examples(
    grow, tmp_path: Path, monkeypatch, resumed, clear
):
    monkeypatch.setattr("esper.runs.growth._CLEAR", clear)
    kept = []
    for best in (8, 9, 10):
        growth = in_one_stage(grow("plain", steps=12, seed=5), [99.0 * (step == best) for step in range(12)])
        assert growth.likely == (0, best + 1)
        if resumed:
            growth.write(tmp_path / "unfinished")
            growth = grow("plain", steps=12, seed=5)
            growth.read(tmp_path / "unfinished")
        before, (x, y), last = growth.spent, vectors(40), growth.entries[0].val[-1]
        network, entry, steps = growth.result()
        right = (network.module(x).argmax(dim=1) == y).float().mean()
        val = growth.entries[entry].val[steps - 1]
        assert val == pytest.approx(100.0 * float(right)) == network.description.val
        assert growth.spent == before + 40 * growth.entries[0].flops
        assert growth.leaderboard(entry, steps, None).val == pytest.approx(val)
        is_better = growth.entries[0].val[best] > last + clear / math.sqrt(40.0)
        assert steps == (best + 1 if is_better else 12)
        kept.append(steps)
    assert kept == ([12, 12, 12] if clear == 100.0 else [12, 10, 12])  # step 10 has 85.0, the last one 82.5


def test_the_last_step_is_kept_on_request_though_another_seems_better(grow):
    growth = in_one_stage(grow("plain", steps=12, seed=5, keep="last"), [99.0, *[0.0] * 11])
    spent = growth.spent
    _, _, steps = growth.result()
    assert (steps, growth.spent) == (12, spent)


@pytest.mark.parametrize("warmup", [3, 11])
def test_a_warm_up_is_as_large_a_share_of_each_stage_as_of_the_episode(grow, step_flops, warmup):
    growth = grow("plain", flops=60 * step_flops, warmup=warmup)
    episode = growth._config.episode_length

    def rising() -> int:
        """Steps of this stage before the first one with the whole rate."""
        whole = growth.entries[growth.rows[0]].candidate.rate
        factors = [growth._engine.executor.data.lr_factors(t)[0, 0] for t in range(growth.begun + 1, growth.end + 1)]
        return [float(factor) for factor in factors].index(whole)

    for stage in range(2):
        assert growth.stage == stage
        length = growth.end - growth.begun
        assert rising() == min(-(-length * warmup // episode), length - 1) >= 1
        while growth.stage == stage:
            growth.step()


# -- a stop and its continuation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "stop"), [("halving", 5), pytest.param("hill_climbing", 4, marks=pytest.mark.slow)])
def test_a_growth_that_was_stopped_continues_bitwise(grow, tmp_path: Path, method, stop):
    undisturbed = finished(grow(method))
    growth = grow(method)
    for _ in range(stop):
        growth.step()
    growth.write(tmp_path / "unfinished")
    again = grow(method)
    again.read(tmp_path / "unfinished")
    assert again.t == stop
    assert curves(finished(again)) == curves(undisturbed)
    assert again.spent == undisturbed.spent


def test_the_file_of_another_growth_is_refused(grow, begun, tmp_path: Path):
    growth, file = begun
    with pytest.raises(CheckpointError, match=r"belongs to another growth \(seed 3, here 4\); give the same"):
        grow("halving", seed=4).read(file)
    content = bytearray(file.read_bytes())
    content[-20] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        growth.read(tmp_path / "damaged")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("t", -1, "t is -1; it must be at least 0"),
        ("t", 2, "do not fit together"),
        ("t", 7, "do not fit together"),
        ("steps", {}, r"steps is \{\}; it must be a whole number"),
        ("spent", math.nan, "spent is nan"),
        ("rows", [0, 0], "do not fit together"),
        ("rows", [99], "do not fit together"),
        ("rows", [], "do not fit together"),
        ("stage", 3, "do not fit together"),
        ("batch", 17, "has batches of 17 examples, but those of the task have 16"),
        ("best", [0, 99], "do not fit together"),
        ("entries", [], "do not fit together"),
        ("entries", ["x"], r"entries\[0\] is \"x\""),
        ("stages", [{"until": 0.5, "kept": 0}] * 3, r"stages\[0\].kept is 0; it must be at least 1"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_though_its_checksum_is_right(
    begun, tmp_path: Path, name, value, message
):
    growth, file = begun
    about, state = read_state(file)
    write_state(tmp_path / "altered", about | {name: value}, state)
    with pytest.raises(CheckpointError, match=f"{message}.*; remove it to begin again"):
        growth.read(tmp_path / "altered")


# -- impossible budgets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"flops": 0.0}, "budget.flops is 0.0; it must be above 0"),
        ({"minutes": -1.0}, "budget.minutes is -1.0; it must be above 0"),
        ({"params": 0}, "budget.params is 0; it must be at least 1"),
        ({"params": 10}, "the budget allows 10 parameters, but the network alone has 155"),
        ({"flops": 10.0}, r"the budget holds 10 FLOPs, too few for 1 step of 1 candidate \(\d[^)]*\); allow more"),
        ({"minutes": 1e-9}, "the budget holds .* FLOPs, too few for 1 step of 1 candidate"),
    ],
)
def test_an_impossible_budget_is_refused_with_the_way_out(grow, budget, message):
    with pytest.raises(ConfigError, match=message):
        grow("halving", **budget)


# -- the leaderboard ---------------------------------------------------------------------------------------------------


def entry(val: float, params: int, name: str = "norm") -> Entry:
    made = Entry(candidate=Candidate(Architecture((PlacedSeed("one", name, "ADD"),))), params=params, flops=10.0)
    made.val, made.loss, made.spent = [val], [1.0], 5.0
    return made


def board_of(*entries: Entry, chosen: int = 0, guessing: float | None = None) -> Leaderboard:
    return Leaderboard(
        entries=entries, chosen=chosen, steps=1, test=89.0, unit="accuracy", spent=25.0, seconds=61.0, budget=30.0,
        guessing=guessing,
    )  # fmt: skip


def test_the_pareto_set_has_what_no_smaller_network_beats():
    board = board_of(*(entry(*of) for of in ((90.0, 300), (88.0, 100), (87.0, 200), (85.0, 50), (85.0, 60))))
    assert board.pareto == (0, 1, 3)
    first, *_ = [line for line in str(board).splitlines() if "norm" in line]
    assert first.split()[:6] == ["norm", "in", "one", "1", "90.00", "89.00"]
    assert "In all 25 FLOPs and 1:01." in str(board)


def test_a_factor_of_the_learning_rate_is_a_word_so_that_no_table_wraps_it():
    assert [str(Candidate(rate=rate)).split()[3:] for rate in (1.0, 3.0, 1 / 3)] == [[], ["lr×3"], ["lr×0.33"]]


def test_what_is_kept_has_one_figure_in_the_whole_table():
    entries = tuple(entry(*of) for of in ((81.0, 100), (82.0, 300), (80.0, 90)))
    entries[0].val, entries[0].loss = [83.0, 81.0], [1.0, 1.0]  # the first step is kept
    board = board_of(*entries)
    assert [board.points(i) for i in range(3)] == [83.0, 82.0, 80.0]
    assert board.pareto == (0, 2)
    said = "is kept is the network of step 1 of 2 (spent counts them all); that of the last step has 81.00. Later steps"
    assert said in str(board)
    # a step of the first costs 5 / 2
    assert [kept for _, _, _, kept in board.courses] == [(2.5, 83.0), None, None]


def test_what_did_not_go_on_and_is_kept_all_the_same_is_named_with_those_that_did():
    left, on = entry(90.0, 100), entry(0.0, 300)
    on.val, on.loss = [1.0, 2.0, 85.0], [1.0] * 3
    said = "What is kept did not go on after its 1 step: the best of those that did has 85.00 after 3."
    assert said in str(board_of(left, on))
    assert "did not go on" not in str(replace(board_of(left, on, chosen=1), steps=3))


def test_a_growth_that_was_stopped_says_nothing_of_later_steps():
    left, on = entry(90.0, 100), entry(0.0, 300)
    left.val, left.loss, on.val, on.loss = [90.0, 80.0], [1.0] * 2, [1.0, 2.0, 85.0], [1.0] * 3
    assert str(board_of(left, on)).count("Later steps did not help") == 2
    assert "Later steps did not help" not in str(replace(board_of(left, on), is_over=False))


def test_a_rival_that_is_better_on_val_is_named():
    ours, better, worse = (board_of(entry(points, 10)) for points in (80.0, 81.0, 79.0))
    said = "note: plain is better on val here, and not what is kept; method='plain' gives it"
    assert compared({"this network": ours, "plain": better, "halving": worse}).endswith(said)
    assert "note" not in compared({"this network": ours, "halving": worse})


def test_steps_that_were_rolled_back_are_counted_for_what_is_kept_alone():
    kept, other = entry(81.0, 100), entry(80.0, 90)
    other.val, other.loss = [math.nan, 80.0], [1.0, 1.0]
    assert "went back to the step before" not in str(board_of(kept, other))
    kept.val, kept.loss = [math.nan, 83.0, 81.0], [1.0, 1.0, 1.0]
    said = "In 1 of 2 steps what is kept had a NaN or infinite loss or gradient and went back to the step before: lower"
    assert said in str(replace(board_of(kept, other), steps=2))


@pytest.mark.parametrize(
    ("found", "guessing", "said"),
    [(90.0, 90.0, True), (90.0, 89.9, False), (90.0, None, False), (97.80000305, 97.8, True), (100.0, 100.0, False)],
    ids=["as good", "better", "unknown", "as good but for rounding", "all right"],
)
def test_candidates_that_only_guess_are_noticed(found, guessing, said):
    board = str(board_of(entry(found, 10), guessing=guessing))
    assert ("No candidate is better than one answer for all examples, which has " in board) is said


def test_a_long_leaderboard_shows_the_best_the_kept_and_those_of_the_pareto_set():
    entries = tuple(entry(90.0 - i, 300 if i < 19 else 100, f"norm{i}") for i in range(20))
    board = board_of(*entries, chosen=15)
    shown = [line.split()[0] for line in str(board).splitlines() if line.startswith("norm")]
    assert shown == [f"norm{i}" for i in (*range(12), 15, 19)]
    assert "\n6 more candidates.\n" in str(board)


def test_a_candidate_without_a_finite_loss_is_never_the_best():
    broken, fine = entry(99.0, 10), entry(10.0, 10)
    broken.loss = [math.nan]
    assert broken.score == -math.inf < fine.score
