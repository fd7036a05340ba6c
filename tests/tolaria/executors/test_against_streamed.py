"""Executors x cases: what the streamed executor trains and measures, the others do too, up to rounding."""

import pytest
from against_streamed import CASES, EXECUTORS, compare_case, compare_whole_runs


@pytest.mark.parametrize("executor", ["fused", "native"])
@pytest.mark.parametrize("case", list(CASES))
def test_hosts_train_and_measure_as_host_by_host(case, executor):
    compare_case(EXECUTORS[executor], CASES[case])


@pytest.mark.parametrize("executor", ["fused", "native"])
def test_a_whole_run_is_the_same_as_streamed(executor):
    compare_whole_runs(executor)
