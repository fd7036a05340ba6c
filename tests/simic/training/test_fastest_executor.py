"""Which executor a run takes when it measures."""

import math

import numpy as np
import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.stages import SeedStage
from esper.simic.training.build import assemble, dataset_of, device_of
from esper.simic.training.calibration import calibration_file
from esper.simic.training.fastest_executor import NEVER, half_grown, measured_ratio, with_fastest_executor
from esper.simic.training.presets import resolve

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(**told):
    small = {"task": "digits", "preset": "small", "num_envs": 3, "episode_length": 16, "workers": 1}
    return resolve(small | {"executor": "measured"} | told)


@pytest.mark.parametrize(
    ("fused", "native", "executor", "told"),
    [
        (2.0, 8.0, "native", "training takes fused 0.50 and native 0.12 of the time of streamed here (kept in "),
        (2.0, 1.0, "fused", "training takes fused 0.50 and native 1.00 of the time of streamed here (kept in "),
        (1.0, 0.5, "fused", "training takes fused 1.00 and native 2.00 of the time"),
        (0.9, 0.8, "streamed", "training takes fused 1.11 and native 1.25 of the time"),
        (NEVER, 2.0, "native", "training takes native 0.50 of the time"),
        (NEVER, NEVER, "streamed", "these hosts run streamed alone, so nothing was measured"),
    ],
)
def test_the_fastest_executor_is_taken(fused, native, executor, told):
    config, ratios = run(), {"fused": fused, "native": native}
    chosen, said = with_fastest_executor(config, dataset_of(config, CPU), CPU, lambda *asked: ratios[asked[-1]])
    assert chosen.executor == executor
    assert said.startswith(told)


@pytest.mark.parametrize("told", [{"amp": "bf16"}, {}])
def test_what_cannot_run_natively_is_not_measured_so(told, monkeypatch):
    if not told:
        monkeypatch.setattr("esper.simic.training.fastest_executor.compiler", lambda: None)
    config = run(**told)
    asked = []
    with_fastest_executor(config, dataset_of(config, CPU), CPU, lambda *given: asked.append(given[-1]) or 2.0)
    assert asked == ["fused"]


def test_the_kind_of_work_is_what_one_process_trains():
    asked = []

    def measure(config, dataset, device, other):
        if other == "fused":
            asked.append((config.num_envs, config.workers))
        return 1.0

    for told in ({}, {}, {"num_envs": 6, "workers": 2}, {"num_envs": 6}, {"batch_train": 32}, {"amp": "bf16"}):
        config = run(**told)
        with_fastest_executor(config, dataset_of(config, CPU), CPU, measure)
    assert asked == [(3, 1), (6, 1), (3, 1), (3, 1)]


@pytest.mark.parametrize("other", ["fused", "native"])
def test_what_is_measured_is_a_ratio_of_times_and_touches_no_run(other):
    config, before = run(), torch.get_rng_state()
    data = dataset_of(config, CPU)
    ratio = measured_ratio(config, data, CPU, other)
    assert math.isfinite(ratio)
    assert ratio > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert len(data.train.x) > 1000


def test_every_other_host_grows_all_kinds():
    structure = half_grown(6, (2, 3, 5), 2)
    assert (structure.stage[::2] == SeedStage.BLENDING).all()
    assert (structure.stage[1::2] == SeedStage.DORMANT).all()
    assert structure.blueprint.tolist() == [[2, 3], [-1, -1], [5, 2], [-1, -1], [3, 5], [-1, -1]]
    assert np.array_equal(structure.germinated, structure.blueprint >= 0)


@pytest.mark.parametrize("told", [{"executor": "auto"}, {"executor": "fused"}, {"executor": "streamed"}])
def test_nothing_is_measured_where_it_was_not_asked_for(told):
    config = run(**told)
    assert with_fastest_executor(config, dataset_of(config, CPU), CPU) == (config, "")
    assert not calibration_file().exists()


def test_a_task_without_networks_has_no_executor():
    config = run(task="null")
    chosen, told = with_fastest_executor(config, None, CPU)
    assert (chosen.executor, told) == ("auto", "")


def test_a_run_names_the_executor_it_took():
    chosen = run()
    parts = assemble(chosen, device_of(chosen))
    assert parts.config.executor in ("native", "fused", "streamed")
    assert parts.engine.config.executor == parts.config.executor
    assert len(parts.told) == 1


def test_a_topology_that_has_one_executor_leaves_nothing_to_measure():
    with pytest.raises(ConfigError, match=r"executor is 'measured', but topology is 'static'.*leave executor out"):
        run(topology="static")
