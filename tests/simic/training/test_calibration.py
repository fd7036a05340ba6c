"""Ratios that are measured once: kept by machine and work, and never lost or half-written."""

import json

import pytest
import torch

from esper.simic.training import calibration
from esper.simic.training.calibration import calibrated, calibration_file

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own, which does not exist yet."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def measuring(ratio):
    """A measurement that always finds `ratio`, and a list as long as it was asked."""
    asked = []

    def measure():
        asked.append(ratio)
        return ratio

    return measure, asked


def test_without_a_cache_folder_in_the_environment_it_is_the_usual_one(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert calibration_file() == tmp_path / ".cache" / "esper" / "calibration.json"


def test_a_ratio_is_kept_and_not_measured_again():
    measure, asked = measuring(2.0)
    first = calibrated("work", CPU, measure)
    again = calibrated("work", CPU, measuring(0.1)[0])
    assert asked == [2.0]
    assert (first.ratio, again.ratio) == (2.0, 2.0)
    assert first.source == f"kept in {calibration_file()}"
    assert again.source == f"as {calibration_file()} says"
    assert list(calibration_file().parent.iterdir()) == [calibration_file()]  # no draft is left


@pytest.mark.parametrize("other", ["work", "threads", "processor", "version"])
def test_other_work_and_other_machines_are_measured_for_themselves(other, monkeypatch):
    calibrated("work", CPU, measuring(2.0)[0])
    if other == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    elif other == "processor":
        monkeypatch.setattr(calibration, "cpu_name", lambda: "another one")
    elif other == "version":
        monkeypatch.setattr(torch, "__version__", "0.0")
    measure, asked = measuring(0.5)
    assert calibrated("other work" if other == "work" else "work", CPU, measure).ratio == 0.5
    assert len(asked) == 1
    assert sorted(json.loads(calibration_file().read_text()).values()) == [0.5, 2.0]


@pytest.mark.parametrize("text", ["{", "[]", '{"a": "b"}', '{"a": -1.0}', '{"a": 2}'])
def test_a_file_that_holds_no_ratios_is_said_and_left_alone(text):
    calibration_file().parent.mkdir(parents=True)
    calibration_file().write_text(text)
    found = calibrated("work", CPU, measuring(2.0)[0])
    assert found.ratio == 2.0
    assert found.source.startswith(f"not kept: {calibration_file()}")
    assert found.source.endswith("delete it")
    assert calibration_file().read_text() == text


def test_a_ratio_that_cannot_be_kept_is_used_and_said(cache):
    cache.write_text("a file where a folder should be")
    found = calibrated("work", CPU, measuring(2.0)[0])
    assert found.ratio == 2.0
    assert found.source.startswith("not kept: ")
