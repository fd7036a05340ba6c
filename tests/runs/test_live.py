"""The hosts of a run, as the live page shows them."""

import numpy as np
from test_runs_events import SPEC
from test_runs_report import step

from esper.leyline.stages import SeedStage
from esper.runs.live import LiveHosts

S = SeedStage
TERMS = ("gain", "rent")


def live() -> LiveHosts:
    return LiveHosts(SPEC, TERMS)


def report(**changes: object) -> object:
    return step(**{"breakdown": np.array([[1.0, -0.5], [3.0, 0.0]], dtype=np.float32), **changes})


def test_before_the_first_step_there_is_nothing_to_show() -> None:
    assert live().shown() is None


def test_accuracies_are_kept_for_each_step_of_the_round_only() -> None:
    hosts = live()
    hosts.add(report(t=1, val_acc=np.array([1.0, 2.0])))
    hosts.add(report(t=2, val_acc=np.array([3.0, np.nan])))
    np.testing.assert_array_equal(hosts.shown().accuracy, [[1.0, 2.0], [3.0, np.nan]])
    hosts.add(report(episode=1, t=1, val_acc=np.array([5.0, 6.0])))
    np.testing.assert_array_equal(hosts.shown().accuracy, [[5.0, 6.0]])


def test_reward_terms_are_sums_over_steps_and_means_over_hosts_without_rollbacks() -> None:
    hosts = live()
    hosts.add(report(t=1))  # gain 1 + 3, rent -0.5
    broken = np.array([[2.0, -1.0], [np.nan, np.nan]], dtype=np.float32)
    hosts.add(report(t=2, breakdown=broken, panic_reason=np.array([0, 1])))  # gain 2, rent -1
    assert hosts.shown().terms == {"gain": 3.0, "rent": -0.75}


def test_slots_are_counted_by_stage_and_live_seeds_by_blueprint() -> None:
    stage = np.array([[S.FOSSILIZED, S.DORMANT], [S.TRAINING, S.EMBARGOED]])
    blueprint = np.array([[1, -1], [1, 0]])
    hosts = live()
    hosts.add(report(stage=stage, blueprint=blueprint))
    shown = hosts.shown()
    assert shown.stages == ["F.", "te"]
    name = SPEC.blueprint_names[1]
    assert shown.slots == [
        (SPEC.slot_ids[0], {"TRAINING": 1, "FOSSILIZED": 1}, {name: 2}),
        (SPEC.slot_ids[1], {"EMBARGOED": 1}, {}),  # what is left of a pruned seed has no module
    ]


def test_what_is_kept_is_a_copy_because_a_report_is_part_of_one_large_array() -> None:
    accuracy = np.array([1.0, 2.0])
    hosts = live()
    hosts.add(report(val_acc=accuracy))
    accuracy[:] = 9.0
    np.testing.assert_array_equal(hosts.shown().accuracy, [[1.0, 2.0]])
