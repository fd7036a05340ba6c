"""Which precision a run on a CPU takes when it may choose."""

import math

import pytest
import torch

from esper.simic.training.build import assemble, dataset_of, device_of
from esper.simic.training.calibration import calibration_file
from esper.simic.training.precision import MIN_GAIN, measured_gain, with_fastest_precision
from esper.simic.training.presets import resolve

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(**told):
    small = {"task": "digits", "preset": "small", "num_envs": 2, "episode_length": 16, "workers": 1, "amp": "auto"}
    return resolve(small | {"executor": "fused"} | told)


@pytest.mark.parametrize(("gain", "amp"), [(3.0, "bf16"), (MIN_GAIN, "bf16"), (MIN_GAIN - 0.01, "off"), (0.5, "off")])
def test_bf16_is_taken_where_it_is_a_tenth_faster(gain, amp):
    config = run()
    chosen, told = with_fastest_precision(config, dataset_of(config, CPU), CPU, lambda config, image: gain)
    assert chosen.amp == amp
    assert told.startswith(f"amp: {amp} (bf16 takes {1 / gain:.2f} of the time of float32")


def test_the_kind_of_work_is_host_image_and_batch():
    asked = []

    def measure(config, image):
        asked.append((config.batch_train, image))
        return 1.0

    for config in (run(), run(), run(batch_train=32), run(num_envs=4)):
        with_fastest_precision(config, dataset_of(config, CPU), CPU, measure)
    assert asked == [(64, (8, 8)), (32, (8, 8))]


def test_what_is_measured_is_a_ratio_of_times_and_changes_no_generator():
    before = torch.get_rng_state()
    gain = measured_gain(run(), (8, 8))
    assert math.isfinite(gain)
    assert gain > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("told", [{"amp": "off"}, {"amp": "bf16"}, {"task": "null"}])
def test_nothing_is_measured_where_nothing_is_to_be_chosen(told):
    config = run(**told)
    assert with_fastest_precision(config, dataset_of(config, CPU), CPU) == (config, "")
    assert not calibration_file().exists()


def test_a_run_names_the_precision_it_took():
    chosen = run()
    parts = assemble(chosen, device_of(chosen))
    assert parts.config.amp in ("bf16", "off")
    assert parts.engine.config.amp == parts.config.amp
    assert len(parts.told) == 1
    assert parts.told[0].startswith(f"amp: {parts.config.amp} (bf16 takes ")


@pytest.mark.parametrize("executor", ["auto", "native"])
def test_hosts_that_run_natively_are_in_float32_and_nothing_is_measured(executor):
    config = run(executor=executor)
    chosen, told = with_fastest_precision(config, dataset_of(config, CPU), CPU, lambda *_: 9.0)
    assert chosen.amp == "off"
    assert told == "amp: off (hosts are run by compiled C++, in float32)"
    assert not calibration_file().exists()
