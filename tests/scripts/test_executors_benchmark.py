"""The benchmark of the executors, with three hosts and a few images."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import executors
from executors import Options, complaints, main
from grown_hosts import DIGITS_SHAPE, GrownHosts, Shape, grown, task_of
from peak import backward_flop

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


def test_arithmetic_of_a_grouped_convolution_is_counted_forward_and_backward():
    # 4 channels one by one, 3x3, on 2 images of 5x5: 2 * 2 * 25 * 36 forward, and as much for each of two gradients
    layer = torch.nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False)
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    told = {torch.ops.aten.convolution_backward: backward_flop}
    with FlopCounterMode(display=False, custom_mapping=told) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 2 * 25 * 36


def test_one_plain_evaluation_leaves_the_hosts_as_they_were():
    hosts = GrownHosts.build(DIGITS_SHAPE, 2, 16, 8)
    before = {name: x.clone() for name, x in hosts.streamed.state_dict().items()}
    hosts.measure(hosts.fused, all_sets=False)
    assert all(torch.equal(before[name], x) for name, x in hosts.streamed.state_dict().items())
    assert hosts.streamed.data.structure is hosts.structure


@pytest.mark.slow
def test_a_sweep_compares_hosts_with_seeds_and_without(monkeypatch, capsys):
    small = Shape("4x4", 8, base=1, batch=2)
    monkeypatch.setattr(executors, "SWEEP", ((small, 1),))
    assert task_of(small).host.channels() == (1, 2, 4)
    assert main(Options(sweep=True, repetitions=1, min_auto=1.1)) == 1
    out, err = capsys.readouterr()
    assert "3 seeds" in out
    assert "no seeds" in out
    assert "at least 1.1 is required" in err
