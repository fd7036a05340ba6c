"""The benchmark of a static graph, with two hosts and a few images."""

import json

from static_graph import Options, main

TINY = {"hosts": (2,), "examples": 16, "val_examples": 8, "repetitions": 1}


def test_both_topologies_are_measured_with_seeds_and_without(tmp_path, capsys):
    path = tmp_path / "static.json"
    assert main(Options(**TINY, json=path)) == 0
    rows = json.loads(path.read_text())["rows"]
    works = ["train", "measure", "settle", "step"]
    assert [(row["seeds"], row["work"]) for row in rows] == [(seeds, work) for seeds in (3, 0) for work in works]
    assert all(row["static_ms"] > 0.0 for row in rows)
    assert "times longer" in capsys.readouterr().out
