"""Accuracies on a changed copy of a data set are labelled with it wherever they are printed."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

import tiny
from esper.tasks import registry
from esper.tasks.datasets import data_label
from esper.tasks.registry import register_task
from small_runs import OPTIONS, main

LABEL = "CIFAR-10 (JPEG q75)"


@pytest.fixture(autouse=True)
def copied() -> Iterator[None]:
    data = replace(tiny.dataset(), identity={"name": "CIFAR-10", "copy": "JPEG q75"})
    register_task(tiny.task(name="copied", load=lambda folder, seed: data))
    yield
    del registry._TASKS["copied"]


def test_a_data_set_is_named_with_its_copy():
    assert data_label({"name": "CIFAR-10", "copy": "JPEG q75", "files": ()}) == LABEL
    assert data_label({"name": "digits", "split_seed": 0}) == "digits"


def test_training_and_evaluation_say_which_copy_they_measured(tmp_path, capfd):
    options = ["--task", "copied", *OPTIONS["tiny"][2:]]
    assert main(["train", "--rounds", "1", "--out", str(tmp_path / "run"), *options]) == 0
    assert f"\ndata: {LABEL}\n" in capfd.readouterr().out
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["data"] == LABEL
    out = tmp_path / "out"
    assert main(["evaluate", str(tmp_path / "run"), "wait_only", "--num-envs", "1", "--out", str(out)]) == 0
    assert f"copied, data {LABEL}, 1 host of seed" in capfd.readouterr().out
    assert json.loads((out / "evaluation.json").read_text())["data"] == LABEL
