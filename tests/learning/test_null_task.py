"""A controller learns the scripted task, whose best and idle values are known, within a minute on one core."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).parents[2] / "scripts" / "learning_curve.py"
ROUNDS, HOSTS = 40, 64


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> dict:
    """Every number of one run with the settings of the script."""
    report = tmp_path_factory.mktemp("learning") / "curve.json"
    options = ["--seeds", "0", "--rounds", str(ROUNDS), "--num-envs", str(HOSTS), "--json", str(report)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(report.read_text())["results"]
    return run


def gap_closed(run, objective) -> float:
    return (objective - run["idle"]) / (run["best"] - run["idle"])


def test_it_closes_the_gap_between_waiting_and_the_best_schedule(learned):
    last = learned["curve"][-1]
    assert last["episodes"] == ROUNDS * HOSTS
    assert gap_closed(learned, last["learned"]["mean"]) >= 0.97
    assert last["seconds"] < 180


def test_it_beats_random_operations_and_what_it_was_before(learned):
    gap = learned["best"] - learned["idle"]
    assert learned["gain_on_random"]["low"] >= 0.5 * gap
    assert learned["curve"][-1]["learned"]["low"] > learned["untrained"]["high"] + 0.3 * gap


def test_what_it_gained_was_learned_from_the_rollouts(learned):
    # the gap is not closed from the start, and not by the first rounds either
    assert gap_closed(learned, learned["untrained"]["mean"]) < 0.3
    assert [point["episodes"] for point in learned["curve"]] == [640, 1280, 1920, 2560]
    assert learned["curve"][0]["learned"]["mean"] < learned["curve"][-1]["learned"]["mean"]


def test_the_controllers_that_it_is_compared_with_know_more_from_one_to_the_next(tmp_path):
    # where hosts differ, a constant schedule is better than none, exploration than that, and hindsight best
    report = tmp_path / "curve.json"
    options = ["--task", "null_permuted", "--seeds", "0", "--rounds", "1", "--num-envs", "4", "--json", str(report)]
    done = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(report.read_text())["results"]
    known = [run["idle"], run["constant"]["mean"], run["explore"]["mean"], run["oracle"]["mean"]]
    assert known == sorted(known)
    assert known[2] - known[1] > 5.0
