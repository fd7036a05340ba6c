"""The benchmark of choices, with two hosts and a few images: both ways do the same work, and nothing stays replaced."""

import json

import pytest
import torch

import choices
from choices import CHOICES, Options, builtin_pool, in_this_process, main
from esper.kasmina.hosts import cnn
from esper.kasmina.hosts.pooling import max_pool_2x2
from esper.tamiyo import heads

TINY = {
    "hosts": 2,
    "many_hosts": 2,
    "examples": 16,
    "steps": 4,
    "passes": 1,
    "repetitions": 1,
    "minibatches": (2,),
}
ONE_PROCESS = tuple(name for name in CHOICES if name != "threads")  # a second thread may wait long for a busy core


def test_every_choice_that_is_asked_for_is_measured_and_nothing_stays_replaced(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(choices, "CALLS", 1)
    clamp = heads.MIN_RELATIVE
    assert main(Options(**TINY, only=ONE_PROCESS, json=tmp_path / "choices.json")) == 0
    rows = json.loads((tmp_path / "choices.json").read_text())["rows"]
    assert len(rows) == 11
    assert all(row["first_ms"] > 0.0 and row["second_ms"] > 0.0 for row in rows)
    assert "PyTorch's pooling" in capsys.readouterr().out
    assert (cnn.max_pool_2x2, heads.MIN_RELATIVE) == (max_pool_2x2, clamp)


def test_a_choice_that_is_unknown_is_refused_with_those_that_exist():
    with pytest.raises(SystemExit, match=r"there is no speed; take some of pooling, .*memory"):
        main(Options(only=("speed",)))


def test_the_built_in_pooling_gives_what_ours_gives():
    x = torch.randn(8, 6, 4, 4)
    assert torch.equal(builtin_pool(x), max_pool_2x2(x))


def test_page_faults_of_some_steps_are_counted():
    ms, faults = in_this_process(False, Options(**TINY))
    assert ms > 0.0
    assert faults > 0
