"""Where a measurement was taken."""

import re

import pytest
import torch

from esper.telemetry.machine import commit, driver_version, environment


def test_the_environment_of_a_measurement_names_machine_versions_and_threads():
    found = environment(torch.device("cpu"))
    assert found["device"] == "cpu"
    assert found["cuda"] == "none"
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", str(found["date"]))
    assert "cores" in str(found["cpu"])


def test_outside_a_repository_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert commit() == "unknown"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.14  Release Build  (dvs)\n", "550.54.14"),
        ("GCC version:  gcc version 12.3.0\n", "unknown"),
    ],
)
def test_the_version_of_a_driver_is_that_of_its_kernel_module(text, version, tmp_path):
    assert driver_version(tmp_path / "version") == "unknown"
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == version
