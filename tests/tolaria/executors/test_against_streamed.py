"""Executors x cases: what the streamed executor trains and measures, the others do too, up to rounding."""

import pytest
from against_streamed import ALGORITHMS, CASES, CONDITIONS, EXECUTORS, compare, compare_case, compare_whole_runs, fused


@pytest.mark.parametrize("executor", ["fused", "native"])
@pytest.mark.parametrize("case", list(CASES))
def test_hosts_train_and_measure_as_host_by_host(case, executor):
    compare_case(EXECUTORS[executor], CASES[case])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("stage", "alpha"), CONDITIONS)
@pytest.mark.parametrize("blueprint", ["conv_light", "norm", "attention"])
def test_hosts_that_are_all_alike_train_and_measure_as_host_by_host(blueprint, stage, alpha, algorithm):
    def grow(bench):
        bench.grow("r0c1", blueprint, stage, alpha=alpha, algorithm=algorithm)

    compare(fused, grow, epochs=1)


@pytest.mark.parametrize("executor", ["fused", "native"])
def test_a_whole_run_is_the_same_as_streamed(executor):
    compare_whole_runs(executor)
