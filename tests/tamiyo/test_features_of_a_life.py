"""The features of one seed through its whole life in an engine: when a contribution counts as known, and as fresh."""

import pytest
import torch

from esper.leyline.lifecycle import LifecycleOp
from esper.tamiyo.features import SLOT_FEATURES, observe
from esper.tasks.registry import task_by_name
from tiny import engine
from toys import ToyClient, action, script

LENGTH = 24
COLUMN = {feature.name: 25 + i for i, feature in enumerate(SLOT_FEATURES)}


@pytest.fixture(scope="module")
def seen() -> torch.Tensor:
    """Features [T, D] of a host whose first slot is germinated in step 1 and fossilized in step 17.

    Ten passes of training, five ticks of blending: active from step 13, held from 17, permanent from 18. The
    second slot is germinated in step 12 and pruned in step 20.
    """
    plan = {
        1: action(LifecycleOp.GERMINATE, slot=0, blueprint=5),
        12: action(LifecycleOp.GERMINATE, slot=1, blueprint=3),
        17: action(LifecycleOp.FOSSILIZE, slot=0),
        20: action(LifecycleOp.PRUNE, slot=1),
    }
    built = engine(1, LENGTH, of=task_by_name("null"), rules={"min_training_epochs": 10})
    client = ToyClient(built.spec, script(1, LENGTH, plan))
    built.reset(client, 0)
    built.rollout(client)
    return torch.cat([observe(step.obs)[0] for step in client.steps])


def test_freshness_is_missing_until_the_seed_is_active_and_ages_while_it_is_not_measured(seen):
    fresh = seen[:, COLUMN["freshness"]].tolist()
    assert fresh[0] == 0.0  # the slot is empty
    assert fresh[1:12] == [-1.0] * 11  # steps 2 to 12
    assert fresh[12:17] == [1.0] * 5  # steps 13 to 17
    assert fresh[17:] == pytest.approx([0.995**k for k in range(1, LENGTH - 16)], abs=1e-6)


def test_a_slot_that_was_pruned_shows_its_stage_and_what_it_was_until_it_is_empty(seen):
    second = seen[:, 25 + 31 :][:, :31]
    assert not second[:12].any()
    learning = second[19]
    assert learning[24] == 1.0  # gradient health in step 20
    for t, row in enumerate(second[20:], start=1):
        shown = set(row.nonzero().flatten().tolist())
        # occupied, EMBARGOED (the stages are 1 to 10), tempo, health before, steps in the stage, freshness, age;
        # the algorithm is the first of three, which is 0
        assert shown - {28} == {0, 9, 14, 27, 29, 30}
        assert (row[27], row[29]) == (-1.0, -1.0)
        assert row[28].item() == pytest.approx((t - 1) / LENGTH)
        assert row[14].item() == pytest.approx(5 / 12)
        assert row[30].item() == pytest.approx((8 + t) / LENGTH)
