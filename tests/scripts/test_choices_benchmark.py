"""The benchmark of choices, with two hosts and a few images."""

import json

import pytest
import torch

import choices
from choices import CHOICES, Options, builtin_pool, in_this_process, main
from esper.kasmina.hosts.cnn import max_pool_2x2
from esper.tamiyo import heads

TINY = {"hosts": 2, "many_hosts": 2, "examples": 16, "steps": 4, "passes": 1, "repetitions": 1, "minibatches": (2,)}
ONE_THREAD = tuple(name for name in CHOICES if name != "threads")  # a second thread may wait long for a busy core


def test_every_requested_choice_is_measured_and_the_clamp_is_restored(tmp_path, monkeypatch):
    monkeypatch.setattr(choices, "CALLS", 1)
    clamp = heads.MIN_RELATIVE
    assert main(Options(**TINY, only=ONE_THREAD, json=tmp_path / "choices.json")) == 0
    rows = json.loads((tmp_path / "choices.json").read_text())["rows"]
    assert len(rows) == 1 + 3 + 2 + 1 + 1
    assert all(row["first_ms"] > 0.0 and row["second_ms"] > 0.0 for row in rows)
    assert clamp == heads.MIN_RELATIVE


def test_an_unknown_choice_is_refused_with_the_known_ones():
    with pytest.raises(SystemExit, match=r"speed is unknown; choose from pooling, .*memory"):
        main(Options(only=("speed",)))


def test_the_built_in_pooling_equals_ours():
    x = torch.randn(8, 6, 4, 4)
    assert torch.equal(builtin_pool(x), max_pool_2x2(x))


@pytest.mark.slow
def test_page_faults_of_some_steps_are_counted():
    ms, faults = in_this_process(False, Options(**TINY))
    assert ms > 0.0
    assert faults > 0
