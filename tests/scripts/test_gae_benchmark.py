"""The benchmark of GAE, with a rollout of a few steps."""

import json

import gae
from gae import Options, main

TINY = {"hosts": 4, "steps": 5, "repetitions": 1, "calls": 1, "tensor_hosts": 2}


def test_both_types_are_measured_and_float64_equals_the_scalar_loop(tmp_path):
    path = tmp_path / "gae.json"
    assert main(Options(**TINY, json=path)) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["dtype"], row["equal"]) for row in rows if row["dtype"] == "float64"] == [("float64", True)]
    assert all(row["scan_ms"] > 0.0 and row["ratio_tensors"] > 0.0 for row in rows)


def test_a_scan_that_is_too_slow_fails(capsys):
    assert main(Options(**TINY, min_ratio=1e9, max_ms=0.0)) == 1
    assert capsys.readouterr().err.count("is required") == 2


def test_another_order_of_rounding_fails(monkeypatch, capsys):
    scan = gae.compute_gae
    monkeypatch.setattr(gae, "compute_gae", lambda *x: scan(*x) * (1.0 + 1e-15))
    assert main(Options(**TINY)) == 1
    assert "bit for bit" in capsys.readouterr().err
