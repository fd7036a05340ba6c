"""The benchmark of the executors, with three hosts and a few images."""

import json

import pytest

import executors
from executors import Options, complaints, main
from grown_hosts import grown

TINY = {
    "hosts": 2, "image_hosts": 1, "growth": (1, 2), "memory_hosts": 1, "examples": 16, "val_examples": 8,
    "repetitions": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    return executors.measure(Options(**TINY))


def test_every_slot_holds_an_active_seed_and_three_of_them_make_eight_sets():
    _, coalitions, structure = grown(32, 3)
    assert (structure.alpha > 0.0).all()
    assert coalitions.valid.sum(dim=1).tolist() == [8] * 32
    assert all(len({*row}) == 3 for row in structure.blueprint.tolist())
    assert len({*structure.blueprint.ravel().tolist()}) == len({*structure.blueprint[:, 0].tolist()}) > 3


@pytest.mark.slow
def test_all_executors_are_measured_on_all_shapes_and_the_choice_of_auto_is_reported(measured, tmp_path, monkeypatch):
    monkeypatch.setattr(executors, "measure", lambda options: measured)
    path = tmp_path / "executors.json"
    assert main(Options(**TINY, json=path)) == 0
    report = json.loads(path.read_text())
    assert all(row["first_ms"] > 0.0 and row["second_ms"] > 0.0 for row in report["rows"].values())
    assert {f"train {name} {how}" for name in ("digits", "blocks", "images") for how in ("fused", "native")} < set(
        report["rows"]
    )
    assert report["facts"]["auto"] == dict.fromkeys(("digits", "blocks", "images"), "native")
    assert set(report["facts"]["share"]) == {"streamed", "fused", "native"}
    assert report["facts"]["memory_gib"] > report["facts"]["state_mib"] / 1024 > 0.0


@pytest.mark.slow
def test_every_limit_that_is_missed_is_named_and_fails(measured, monkeypatch, capsys):
    monkeypatch.setattr(executors, "measure", lambda options: measured)
    least = dict.fromkeys(("min_train", "min_measure", "min_blocks", "min_peak", "min_auto"), 1e9)
    most = dict.fromkeys(("max_coalitions", "max_growth", "max_gib"), 0.0)
    assert main(Options(**TINY, **least, **most)) == 1
    assert capsys.readouterr().err.count("is required") == 8
    assert complaints(*measured, Options(**TINY)) == []
