"""Where a measurement was taken."""

import re

import torch

from esper.telemetry.machine import commit, environment


def test_the_environment_of_a_measurement_names_machine_versions_and_threads():
    found = environment(torch.device("cpu"))
    assert found["device"] == "cpu"
    assert found["cuda"] == "none"
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(found["date"]))
    assert "cores" in str(found["cpu"])


def test_the_commit_is_a_hash_or_unknown():
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", commit())


def test_outside_a_repository_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit() == "unknown"
