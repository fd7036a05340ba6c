"""The counting of host reads in whole rounds."""

import json

import pytest
import torch

import profile_gpu_sync as script
from esper.simic import client as learner
from profile_gpu_sync import Options, Scope, compare_reads, complaints, main

FAST = "ppo.update_epochs=1,ppo.num_minibatches=1,ppo.feature_width=8,ppo.hidden_width=8"
TINY = {"hosts": 2, "steps": 4, "rounds": 1, "device": "cpu", "setting": FAST}


def test_a_round_keeps_its_budgets(tmp_path):
    path = tmp_path / "reads.json"
    assert main(Options(**TINY, json=path)) == 0
    scopes = {s["scope"]: s for s in json.loads(path.read_text())["results"]["scopes"]}
    found = {name: (s["instances"], s["least"], s["most"]) for name, s in scopes.items()}
    assert found == {"control step": (4, 1, 1), "update": (1, 1, 1), "round, besides these": (1, 1, 1)}


def test_the_number_of_reads_does_not_depend_on_the_number_of_hosts():
    for hosts in (2, 64):
        scopes = script.count(Options(**{**TINY, "task": "null", "hosts": hosts}))
        assert [set(scope.intended) for scope in scopes] == [{1}, {1}, {1}]


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_no_executor_reads_the_device_by_itself(executor):
    options = Options(**{**TINY, "hosts": 3, "steps": 8, "setting": f"{FAST},executor={executor}"})
    assert complaints(script.count(options), ()) == []


def test_a_budget_that_is_exceeded_fails(capsys):
    assert main(Options(**TINY, task="null", update_budget=0)) == 1
    assert "update: 1 reads; the budget is 0" in capsys.readouterr().err


def test_a_read_at_an_unlisted_site_fails_and_is_named(monkeypatch, capsys):
    features_of = learner.features_of

    def curious(*state):
        found = features_of(*state)
        float(found[0].sum())
        return found

    monkeypatch.setattr(learner, "features_of", curious)
    assert main(Options(**TINY, task="null")) == 1
    assert "esper/simic/client.py" in capsys.readouterr().err
    assert main(Options(**TINY, task="null", allow=("^esper/simic/client.py",))) == 0


def test_only_sites_with_a_reason_are_listed():
    scope = Scope(name="x", budget=1, intended=[1])
    scope.sites.update({"esper/runs/report.py:9 (numpy)": 2, "esper/runs/reporter.py:9 (item)": 1})
    assert dict(scope.unlisted(())) == {"esper/runs/reporter.py:9 (item)": 1}
    assert len(complaints([scope], ())) == 1
    assert complaints([scope], ("reporter",)) == []


def test_one_packed_read_replaces_one_per_element():
    found = compare_reads(3, torch.device("cpu"), repetitions=2)
    assert [row.reads for row in found] == [2 * 3 * 8, 1]


def test_settings_that_no_run_knows_are_refused(capsys):
    assert main(Options(**{**TINY, "setting": "exekutor=fused"})) == 2
    assert "executor" in capsys.readouterr().err
