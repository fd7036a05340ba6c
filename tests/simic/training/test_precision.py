"""Which precision a run on a CPU takes when it may choose: measured once, kept, said, and written down."""

import json
import math

import pytest
import torch

from esper.simic.training import precision
from esper.simic.training.build import assemble, dataset_of, device_of
from esper.simic.training.precision import (
    MIN_GAIN,
    calibration_file,
    fastest_precision,
    measured_gain,
    with_fastest_precision,
)
from esper.simic.training.presets import resolve

CPU = torch.device("cpu")
IMAGE = (8, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def run(**told):
    return resolve({"task": "digits", "preset": "small", "num_envs": 2, "episode_length": 16, "workers": 1} | told)


def gains(value):
    """A measurement that always finds `value`, and how often it was asked."""
    asked = []

    def measure(config, image_size):
        asked.append(image_size)
        return value

    return measure, asked


@pytest.mark.parametrize(("gain", "amp"), [(3.0, "bf16"), (MIN_GAIN, "bf16"), (MIN_GAIN - 0.01, "off"), (0.5, "off")])
def test_bf16_is_taken_where_it_is_a_tenth_faster(gain, amp):
    assert fastest_precision(run(), IMAGE, gains(gain)[0]).amp == amp


def test_a_result_is_kept_and_not_measured_again():
    measure, asked = gains(2.0)
    first = fastest_precision(run(), IMAGE, measure)
    again = fastest_precision(run(), IMAGE, gains(0.1)[0])
    assert asked == [IMAGE]
    assert (again.amp, again.gain) == (first.amp, first.gain) == ("bf16", 2.0)
    assert f"kept in {calibration_file()}" in first.told
    assert f"as {calibration_file()} says" in again.told
    assert list(calibration_file().parent.iterdir()) == [calibration_file()]  # no draft is left


@pytest.mark.parametrize("other", [{"batch_train": 32}, {"task": "fashion_mnist"}, "image", "threads", "processor"])
def test_another_kind_of_work_is_measured_for_itself(other, monkeypatch):
    fastest_precision(run(), IMAGE, gains(2.0)[0])
    config, image = (run(**other), IMAGE) if isinstance(other, dict) else (run(), IMAGE)
    if other == "image":
        image = (16, 16)
    elif other == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif other == "processor":
        monkeypatch.setattr(precision, "cpu_name", lambda: "another one")
    measure, asked = gains(0.5)
    assert fastest_precision(config, image, measure).amp == "off"
    assert len(asked) == 1
    assert len(json.loads(calibration_file().read_text())) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"a": "b"}', '{"a": -1.0}', '{"a": 2}'])
def test_a_file_that_is_no_calibration_is_said_and_left_alone(text):
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text(text)
    found = fastest_precision(run(), IMAGE, gains(2.0)[0])
    assert found.amp == "bf16"
    assert "not kept" in found.told
    assert f"{calibration_file()}" in found.told
    assert "delete it" in found.told
    assert calibration_file().read_text() == text


def test_a_result_that_cannot_be_kept_is_used_and_said(cache):
    cache.write_text("a file where a folder should be")
    found = fastest_precision(run(), IMAGE, gains(2.0)[0])
    assert found.amp == "bf16"
    assert "not kept" in found.told


def test_what_is_measured_is_a_ratio_of_times_and_changes_no_generator():
    before = torch.get_rng_state()
    gain = measured_gain(run(), IMAGE)
    assert math.isfinite(gain)
    assert gain > 0
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("told", [{"amp": "off"}, {"amp": "bf16"}, {"task": "null", "amp": "auto"}])
def test_nothing_is_measured_where_nothing_is_to_be_chosen(told):
    config = run(**told)
    assert with_fastest_precision(config, dataset_of(config, CPU), CPU) == (config, "")
    assert not calibration_file().exists()


def test_a_run_names_the_precision_it_took():
    chosen = run(amp="auto")
    parts = assemble(chosen, device_of(chosen))
    assert parts.config.amp in ("bf16", "off")
    assert parts.engine.config.amp == parts.config.amp
    assert parts.told.startswith(f"amp: {parts.config.amp}, bf16 takes ")
