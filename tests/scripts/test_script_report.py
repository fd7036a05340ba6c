"""The file of JSON that a script leaves."""

import json

import torch

from script_report import write_result


def test_a_result_says_where_it_was_measured(tmp_path):
    write_result(tmp_path / "x.json", "some_script", torch.device("cpu"), {"hosts": 2}, [{"eps": float("nan")}])
    content = json.loads((tmp_path / "x.json").read_text())
    assert content.keys() == {"script", "version", "environment", "config", "results"}
    assert content["results"] == [{"eps": None}]
    assert content["environment"]["device"] == "cpu"
