"""The verification of tasks and its page."""

import math
from dataclasses import replace

import pytest

from esper.tasks.registry import task_by_name
from tasks_page import Agreement, Result, Trial, failures, gain
from verify_tasks import CPU, Options, grow_one, verify

WAITS = Trial(val=[20.0, 22.0, 24.0], test=[21.0, 20.0, 22.0], fossilized=0, rollbacks=0, seconds=1.0)
GROWN = replace(WAITS, test=[22.0, 22.0, 25.0], fossilized=3)
AGREEMENT = Agreement(
    early={"fused": 1e-7, "native": 2e-7}, late={"fused": 1e-6, "native": 2e-6}, repeats=True, seeds_differ=True
)
RESULT = Result(
    task="cifar_impaired", measured="today, commit abc",
    data="CIFAR-10 (JPEG q75)", figure="accuracy", host_params=77, slot="r0c1",
    executor="native", budget="12 x 16 batches of 32", measured_on=(500, 2_000), wait_only=WAITS,
    grown={"conv_light": GROWN}, agreement=AGREEMENT,
)  # fmt: skip


def test_a_gain_is_the_mean_of_paired_differences_with_an_interval_of_students_t():
    mean, half = gain(GROWN, WAITS)  # differences 1, 2, 3: deviation 1, t = 4.3027 with two degrees of freedom
    assert mean == pytest.approx(2.0)
    assert half == pytest.approx(4.3027 / math.sqrt(3), abs=1e-4)
    alone = gain(replace(GROWN, test=[22.0]), replace(WAITS, test=[21.0]))
    assert alone[0] == 1.0
    assert math.isnan(alone[1])


def test_nothing_is_wrong_with_a_good_result_and_each_fault_is_named():
    assert failures([RESULT]) == []
    for fault, words in (
        ({"wait_only": replace(WAITS, val=[20.0, 22.0, math.nan])}, "expected numbers"),
        ({"grown": {"conv_light": replace(GROWN, fossilized=2)}}, "2 of 3 hosts kept the seed"),
        ({"agreement": replace(AGREEMENT, early={"fused": 2e-3})}, "losses of fused differ"),
        ({"agreement": replace(AGREEMENT, early={"fused": math.nan})}, "losses of fused differ"),
        ({"agreement": replace(AGREEMENT, repeats=False)}, "two runs of one seed differ"),
        ({"agreement": replace(AGREEMENT, seeds_differ=False)}, "two seeds give the same hosts"),
    ):
        (sentence,) = failures([replace(RESULT, **fault)])
        assert sentence.startswith("cifar_impaired")
        assert words in sentence


def test_a_seed_is_fossilized_as_soon_as_it_may_be():
    rows = [(entry.earliest, entry.op.name) for entry in grow_one(1, 0, 2).entries]
    assert rows == [(1, "GERMINATE"), (7, "FOSSILIZE")]  # training 2, blending 3, one step of holding


@pytest.mark.slow
def test_digits_are_verified_with_a_small_budget():
    found = verify(task_by_name("digits"), Options(steps=7, examples=64, hosts=2), CPU)
    assert failures([found]) == []
    assert found.budget == "7 x 1 batches of 64"
    assert found.measured_on == (360, 360)
    assert list(found.grown) == [
        "conv_light", "attention", "norm", "depthwise", "bottleneck", "conv_small", "conv_heavy"
    ]  # fmt: skip
    assert 0.0 < found.agreement.late["native"] < 1e-3
