import pytest
import torch
from scripted_observations import engine_spec, legal_only, observation, step

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.tamiyo.schedules import (
    FEATURES,
    FollowRule,
    Schedule,
    ScheduleEntry,
    ScriptedPolicy,
    ThresholdRule,
    canonical_action,
)

WAIT, GERMINATE = LifecycleOp.WAIT, LifecycleOp.GERMINATE
NAN = float("nan")


def germinate(slot: int, *, at: int = 1) -> Schedule:
    action = canonical_action(GERMINATE, slot=slot, blueprint=3)
    return Schedule(id=f"slot {slot}", version=1, entries=(ScheduleEntry(at, action),))


def rule(**changes) -> ThresholdRule:
    values = {"feature": "val_acc", "step": 2, "threshold": 50.0, "below": germinate(0), "above": germinate(1)}
    return ThresholdRule(**(values | changes))


def slots_grown(rule: ThresholdRule, val_acc: dict[int, list[float]], **hosts) -> list[list[int | None]]:
    """The slot in which each host germinates in each step, None where it waits; every germination is legal."""
    n = len(val_acc[1])
    policy = ScriptedPolicy(FollowRule(rule, engine_spec(num_envs=n)), engine_spec(num_envs=n))
    legal = legal_only(n, 3, (GERMINATE, 0), (GERMINATE, 1))
    grown = []
    for t, values in val_acc.items():
        obs = observation(t, legal, hosts={"val_acc": torch.tensor(values), **hosts})
        act = policy.act(obs)
        policy.store(step(obs, act))
        pairs = zip(act.actions[:, Head.OP].tolist(), act.actions[:, Head.SLOT].tolist(), strict=True)
        grown.append([slot if op == GERMINATE else None for op, slot in pairs])
    return grown


def test_each_host_follows_the_schedule_of_its_side_from_the_step_of_the_rule_on():
    # step 1: too early. step 2: 49.9 < 50 follows slot 0; 50.0 and NaN are not below and follow slot 1.
    seen = slots_grown(rule(), {1: [10.0, 90.0, 10.0], 2: [49.9, 50.0, NAN], 3: [90.0, 10.0, 10.0]})
    assert seen == [[None, None, None], [0, 1, 1], [None, None, None]]


def test_what_a_host_shows_after_the_step_of_the_rule_changes_nothing():
    late = rule(below=germinate(0, at=3), above=germinate(1, at=4))
    seen = slots_grown(late, {1: [0.0, 0.0], 2: [49.0, 51.0], 3: [99.0, 1.0], 4: [99.0, 1.0]})
    assert seen == [[None, None], [None, None], [0, None], [None, 1]]


def test_a_rule_of_step_1_loses_no_step():
    assert slots_grown(rule(step=1), {1: [49.0, 51.0]}) == [[0, 1]]


def test_an_episode_begins_undecided():
    script = FollowRule(rule(), engine_spec(num_envs=2))
    assert script.begin(3, torch.arange(2)).which.tolist() == [1, 1]


def test_features_are_differences_of_what_was_measured():
    obs = observation(
        2,
        legal_only(1, 3),
        hosts={"val_acc": 60.0, "prev_val_acc": 52.0, "train_acc": 65.0, "val_loss": 1.5, "prev_val_loss": 2.0,
               "train_loss": 1.25, "best_acc": 61.0},
    )  # fmt: skip
    assert {name: read(obs).item() for name, read in FEATURES.items()} == {
        "val_acc": 60.0, "val_loss": 1.5, "train_acc": 65.0, "train_loss": 1.25, "best_acc": 61.0,
        "acc_gap": 5.0, "loss_gap": 0.25, "acc_slope": 8.0, "loss_slope": -0.5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"feature": "val_ac"}, "unknown feature 'val_ac'; did you mean 'val_acc'"),
        ({"step": 0}, "decides in step 0; it must be one of the steps 1 to "),
        ({"above": germinate(7)}, "schedule 'slot 7': slot is 7"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        FollowRule(rule(**changes), engine_spec())
