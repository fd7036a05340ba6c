"""Hosts that have their structure from the first step: the same as hosts without one but for what was planted."""

import numpy as np
import pytest
import torch

from esper.leyline.architecture import Architecture, PlacedSeed, architectures_of
from esper.leyline.lifecycle import AlphaMode, SeedStage
from esper.tasks.registry import task_by_name
from tiny import SLOTS, engine, same_tree
from toys import ToyClient, script

NOTHING = Architecture()
TWO = Architecture((PlacedSeed("r0c0", "conv_light", "ADD"), PlacedSeed("r1c0", "norm", "GATE")))
LENGTH = 4
S = SeedStage


def planted(*grown: Architecture, **settings: object):
    """An engine after `reset` and `plant`, and who waits on it."""
    built = engine(len(grown), LENGTH, **settings)
    client = ToyClient(built.spec, script(len(grown), LENGTH, {}))
    built.reset(client, 0)
    built.add_fossils(grown)
    return built, client


def test_a_planted_seed_is_permanent_and_new() -> None:
    built, _ = planted(TWO, NOTHING)
    slots, hosts = built.state.slots, built.state.hosts
    assert slots.stage.tolist() == [[S.FOSSILIZED, S.DORMANT, S.FOSSILIZED], [S.DORMANT] * 3]
    here = slots.stage == S.FOSSILIZED
    expected = {
        "prev_stage": S.HOLDING, "epochs_in_stage": 0, "age": 0, "alpha": 1.0, "alpha_target": 1.0,
        "alpha_mode": AlphaMode.HOLD,
    }  # fmt: skip
    for name, value in expected.items():
        assert set(getattr(slots, name)[here].tolist()) == {value}, name
    assert slots.serial[0].tolist() == [0, -1, 1]
    assert slots.has_gate[0].tolist() == [False, False, True]
    assert bool(slots.acc_at_germination[here].isnan().all())
    costs, names = built.executor.costs, built.spec.blueprint_names
    conv, norm = names.index("conv_light"), names.index("norm")
    assert slots.params[0].tolist() == [
        costs.seed_params[0, conv], 0, costs.seed_params[2, norm] + costs.gate_params[2],
    ]  # fmt: skip
    assert (hosts.n_germinated.tolist(), hosts.n_fossilized.tolist()) == ([2, 0], [2, 0])
    assert hosts.n_contributing.tolist() == [0, 0]


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_planted_seed_is_heard_learns_from_the_first_step_and_stays(executor: str) -> None:
    built, client = planted(TWO, TWO, executor=executor)
    seeds = built.executor.population.seeds
    born = seeds.params.clone()
    drawn = born.view(2, len(SLOTS), -1)
    assert bool(drawn[:, 0].any())
    assert not torch.equal(drawn[0, 0], drawn[1, 0])  # each host draws its own weights
    assert not bool(drawn[:, 1].any())
    built.step(client)
    built.apply_structure()
    learned = (seeds.params != born).any(dim=1).view(2, -1)
    assert learned.tolist() == [[True, False, True]] * 2
    stats = built.rollout(client)
    assert architectures_of(stats.stage, stats.blueprint, stats.algorithm, built.spec) == (TWO, TWO)
    assert stats.ops[:, 0].tolist() == [LENGTH, LENGTH]
    assert stats.growth.min() > 1.0
    assert stats.val_acc.tolist() == stats.committed_acc.tolist()  # all active seeds are fossils
    assert built.state.slots.age[0].tolist() == [LENGTH, 0, LENGTH]


def test_planted_weights_are_those_of_step_zero_and_not_of_a_germination() -> None:
    grown = engine(1, LENGTH)
    grown.reset(ToyClient(grown.spec, script(1, LENGTH, {})), 0)
    population = grown.executor.population
    conv = grown.spec.blueprint_names.index("conv_light")

    one = np.array([[True, False, False]])
    drawn = {}
    for t in (0, 1):
        population.germinate(one, np.array([[conv, -1, -1]]), ~one, 0, t)
        drawn[t] = population.seeds.params[0].clone()
    built, _ = planted(TWO)
    assert torch.equal(built.executor.population.seeds.params[0], drawn[0])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_rollback_before_the_first_snapshot_of_the_run_keeps_what_was_planted() -> None:
    built, _ = planted(TWO)
    population = built.executor.population
    assert torch.equal(population.seeds.snapshot["params"], population.seeds.params)
    assert torch.equal(population.gates.snapshot["params"], population.gates.params)


def test_an_empty_structure_is_a_host_that_waits_to_the_bit() -> None:
    built, client = planted(NOTHING, NOTHING)
    plain = engine(2, LENGTH)
    waits = ToyClient(plain.spec, script(2, LENGTH, {}))
    plain.reset(waits, 0)
    for one, who in ((built, client), (plain, waits)):
        one.rollout(who)
    assert same_tree(built.state_dict(), plain.state_dict())


def test_a_scripted_host_can_be_planted_too() -> None:
    task = task_by_name("null")
    some = Architecture(tuple(PlacedSeed(slot, "conv_light", "ADD") for slot in task.enabled[:2]))
    both = {}
    for name, grown in (("planted", some), ("empty", NOTHING)):
        built, client = planted(grown, of=task)
        both[name] = built.rollout(client)
    assert both["planted"].committed_acc[0] > both["empty"].committed_acc[0]
    assert both["planted"].fossilized.tolist() == [2]
