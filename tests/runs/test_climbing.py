"""Hill climbing: who goes on, from what, and what it has cost."""

from typing import Any

import numpy as np
import pytest
import torch

import small_runs
import tiny
from esper.kasmina.blueprints import registry
from esper.leyline.architecture import PlacedSeed
from esper.runs.assembly.assemble import dataset_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import baseline, fixed
from esper.runs.evaluation.outcomes import run_controller
from esper.runs.evaluation.races import Climb, climbs_of
from esper.runs.evaluation.results import Outcome
from esper.tasks.instances import MixedImages
from esper.tasks.registry import register_task

CPU = torch.device("cpu")
assert small_runs
SLOTS = ("r0c0", "r1c0")
register_task(
    tiny.task(name="climbed", enabled=SLOTS, instances=MixedImages(num_classes=3, classes=(2, 3)), batches_per_step=2)
)
CONV, HEAVY = (registry.names().index(name) for name in ("conv_light", "conv_heavy"))
POOL, NAMES = [(0, CONV), (1, HEAVY)], [("r0c0", "conv_light"), ("r1c0", "conv_heavy")]
HOSTS, STEPS = 3, 10


def config(**reward: float) -> RunConfig:
    options = {"task": "climbed", "episode_length": STEPS, "executor": "streamed"}
    return resolve(options | {"reward": reward, "optimizer": {"host_lr": 0.05, "seed_lr": 0.5}})


def climbed(own: RunConfig, **changes: Any) -> Outcome:
    data = dataset_of(own, CPU)
    assert data is not None
    given = {"run_seed": 5, "num_envs": HOSTS, "copies": 1, "pool": POOL} | changes
    return Climb(own, data, CPU, **given).run()


def test_climbs_fill_half_of_the_episode() -> None:
    assert climbs_of(30, 2) == (3, 10, 18)
    assert climbs_of(100, 9) == (10, 22, 35, 48, 60)  # at most four
    assert climbs_of(4, 1) == (1, 2)
    assert climbs_of(1, 3) == (1,)  # no room for one


def test_where_nothing_improves_enough_the_host_is_trained_as_if_it_were_alone() -> None:
    own = config(objective_growth_weight=100.0)
    found = climbed(own)
    alone = run_controller(own, dataset_of(own, CPU), CPU, baseline("wait_only", own), run_seed=5, num_envs=HOSTS)
    assert not any(architecture.slots for architecture in found.grown)
    assert np.array_equal(found.val, alone.val)
    assert np.array_equal(found.test_acc, alone.test_acc)
    assert found.cost is not None
    assert alone.cost is not None
    # alone in steps 1 and 7 to 10; else beside a copy that has one of the two seeds
    apart = found.cost.training - alone.cost.training
    assert (apart[[0, 6, 7, 8, 9]] == 0).all()
    assert (apart[1:6] > alone.cost.training[1:6]).all()
    # validation is read at the end of each climb: after steps 1, 4 (3.5), 6 and 10
    looks = (found.cost.measuring > 0).all(axis=1)
    assert (np.flatnonzero(looks) + 1).tolist() == [1, *climbs_of(STEPS, 2)[1:], 10]
    assert np.array_equal(found.cost.measuring[9], alone.cost.measuring[0])
    total = found.cost.training.sum(axis=0) / alone.cost.training.sum(axis=0)
    assert found.stats.compute.tolist() == pytest.approx(total.tolist())


def test_a_seed_that_improves_a_host_stays_and_the_copy_is_what_goes_on() -> None:
    own = config(objective_growth_weight=0.0)
    found = climbed(own, copies=2, run_seed=11)
    grown = [architecture.slots for architecture in found.grown]
    assert [len(slots) for slots in grown] == [1, 0, 1]
    assert {seed for slots in grown for seed in slots} <= {PlacedSeed(*names, "ADD") for names in NAMES}
    assert found.stats.fossilized.tolist() == [len(slots) for slots in grown]
    assert found.val[-1].tolist() == pytest.approx(found.stats.committed_acc.tolist())
    # the first seed was kept at the end of a climb, because there it was better than the host alone
    alone = run_controller(own, dataset_of(own, CPU), CPU, baseline("wait_only", own), run_seed=11, num_envs=HOSTS)
    better = 0
    for n in range(HOSTS):
        changed = (end for end in climbs_of(STEPS, 2) if not np.array_equal(found.val[:end, n], alone.val[:end, n]))
        if end := next(changed, 0):
            assert found.val[end - 1, n] > alone.val[end - 1, n]
            better += 1
    assert better == sum(len(slots) > 0 for slots in grown)
    assert found.cost is not None
    kept = run_controller(own, dataset_of(own, CPU), CPU, fixed(found.grown, own), run_seed=11, num_envs=HOSTS)
    assert kept.cost is not None
    assert found.cost.per_example.tolist() == kept.cost.per_example.tolist()
    assert found.cost.training[-1].tolist() == kept.cost.training[-1].tolist()
    assert np.array_equal(found.stats.instance["classes"], kept.stats.instance["classes"])


@pytest.mark.slow
def test_a_host_climbs_the_same_in_any_company() -> None:
    own = config(objective_growth_weight=0.0)
    many, few = climbed(own), climbed(own, num_envs=2)
    assert np.array_equal(many.val[:, :2], few.val)
    assert many.grown[:2] == few.grown


@pytest.mark.slow
def test_a_host_that_has_no_seed_left_to_try_pays_for_no_copy() -> None:
    none = climbed(config(), pool=[])
    assert none.stats.compute.tolist() == [1.0] * HOSTS
