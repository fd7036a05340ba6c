"""The cost of training and measuring hosts, counted by hand from reports."""

import numpy as np
import pytest
from test_runs_report import step

import tiny
from esper.export.network import GrownNetwork
from esper.kasmina.blueprints import registry
from esper.leyline.architecture import Architecture, PlacedSeed
from esper.leyline.lifecycle import SeedStage
from esper.runs.evaluation.costs import CostMeter
from esper.simic.client import ScriptedClient
from esper.simic.rewards import RewardConfig, make_reward
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import fill

HOST = 2 * (36 * 9 * 4 + 9 * 9 * 4 * 8 + 8 * 3)  # 6x6 pixels in block 0, 3x3 in block 1
CONV_LIGHT = registry.names().index("conv_light")


def meter(
    hosts: int = 2, steps: int = 12, architectures: tuple[Architecture, ...] = (), share: float = 1.0
) -> CostMeter:
    engine = tiny.engine(hosts, steps)
    return CostMeter(tiny.task(), tiny.dataset(), engine.spec, engine.executor.costs, architectures, share)


def report(t: int, seed: int | None = None, *, gate: int = 0, measured: tuple[bool, ...] = (False,)):
    """After step t the second of two hosts has a seed in slot r0c1 or none; the first never has one.

    `measured` are the coalitions of the second host in step t: whether the seed is on.
    """
    shape = (2, 3)
    fields = {
        "stage": np.full(shape, int(SeedStage.DORMANT)),
        "blueprint": np.full(shape, -1),
        "params": np.zeros(shape, dtype=np.int64),
        "measured_sets": np.zeros((2, len(measured), 3), dtype=bool),
        "measured_valid": np.ones((2, len(measured)), dtype=bool),
    }
    fields["measured_sets"][1, :, 1] = measured
    fields["measured_valid"][0, 1:] = False
    if seed is not None:
        at = 1, 1
        fields["stage"][at], fields["blueprint"][at] = int(SeedStage.TRAINING), seed
        fields["params"][at] = seed_params(1, seed) + gate
    for values in fields.values():
        values.setflags(write=False)
    return step(t=t, **fields)


def total(steps: list[np.ndarray]) -> list[float]:
    """Of all steps so far."""
    return np.sum(steps, axis=0).tolist()


def seed_params(slot: int, blueprint: int) -> int:
    return int(tiny.engine(1).executor.costs.seed_params[slot, blueprint])


def added(slot: int, blueprint: int, gated: bool = False) -> float:
    """What a seed adds to the forward pass."""
    table = meter(1)
    assert table.host == HOST
    present, kind = np.zeros((1, 3), dtype=bool), np.full((1, 3), blueprint)
    present[0, slot] = True
    return float(table.of_seeds(present, kind, np.full((1, 3), gated)).sum())


def test_a_host_alone_costs_three_passes_over_its_training_examples_and_one_over_the_others():
    found = meter()
    for t in (1, 2):
        found(report(t))
    assert total(found.training) == [2 * 40 * 3 * HOST] * 2
    assert total(found.measuring) == [2 * 30 * HOST] * 2
    a_third = meter(share=0.34)  # 10.2 examples, rounded up
    a_third(report(1))
    assert total(a_third.measuring) == [11 * HOST] * 2


def test_a_seed_costs_from_the_step_after_it_germinates_and_is_measured_once_it_is_active():
    seed, found = added(1, CONV_LIGHT), meter()
    found(report(1, CONV_LIGHT))  # germinates in step 1
    found(report(2, CONV_LIGHT))  # trained in step 2, not active yet
    assert total(found.training) == [2 * 40 * 3 * HOST, 40 * 3 * (HOST + HOST + seed)]
    assert total(found.measuring) == [2 * 30 * HOST] * 2
    found(report(3, measured=(True, False)))  # with it and without it
    assert total(found.measuring) == [3 * 30 * HOST, 30 * (2 * HOST + 2 * HOST + seed)]


def test_a_seed_with_more_parameters_than_its_blueprint_has_a_gate():
    plain, gated = added(1, CONV_LIGHT), added(1, CONV_LIGHT, True)
    assert gated - plain == 2 * (8 * 8 + 8)  # 8 channels to 8 hidden units to 1
    found = meter()
    found(report(1, CONV_LIGHT, gate=81))
    found(report(2))
    assert total(found.training)[1] == 40 * 3 * (2 * HOST + gated)


def test_planted_seeds_cost_from_the_first_step():
    grown = Architecture((PlacedSeed("r0c1", "conv_light", "GATE"),))
    found = meter(architectures=(Architecture(), grown))
    assert found.of_structures[0] == 12 * 40 * 3 * HOST  # steps, examples, forward and backward passes
    found(report(1, measured=(True,)))
    gated = added(1, CONV_LIGHT, True)
    assert total(found.training) == [40 * 3 * HOST, 40 * 3 * (HOST + gated)]
    assert total(found.measuring) == [30 * HOST, 30 * (HOST + gated)]


def test_the_cost_of_a_kept_network_is_that_of_its_export():
    task = tiny.task()
    found = meter(2, 30)
    engine = tiny.engine(2, 30, on_step=found)
    client = ScriptedClient(
        scheduled(fill(engine.spec), engine.spec), make_reward("objective", RewardConfig(mode="objective"))
    )
    engine.reset(client, 0)
    stats = engine.rollout(client)
    assert stats is not None
    assert stats.fossilized.tolist() == [3, 3]
    cost = found.cost(stats)
    exported = [GrownNetwork.of(engine, task, tiny.dataset(), stats, host=n).description.flops for n in (0, 1)]
    assert cost.per_example.tolist() == exported
    assert exported[0] > HOST
    assert cost.training.shape == cost.measuring.shape == (30, 2)
    assert (cost.training.sum(axis=0) > 30 * 40 * 3 * HOST).all()
    assert (cost.training + cost.measuring)[0].tolist() == [40 * 3 * HOST + 30 * HOST] * 2
    # the state of the engine counts by the same rule, and so does J
    assert stats.compute.tolist() == pytest.approx(
        (cost.training.sum(axis=0) / (30 * 40 * 3 * HOST)).tolist(), rel=1e-6
    )
