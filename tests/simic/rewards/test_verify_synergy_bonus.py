"""`scripts/verify_synergy_bonus.py` as a user runs it, and that it finds a bonus that is wrong."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from esper.leyline.tensor_dataclass import replace

SCRIPTS = Path(__file__).parents[3] / "scripts"
SCRIPT = SCRIPTS / "verify_synergy_bonus.py"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> tuple[str, dict]:
    """What it prints, and what it writes."""
    target = tmp_path_factory.mktemp("synergy") / "synergy.json"
    done = run("--device", "cpu", "--quick", "--json", str(target))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(target.read_text())


def run(*options: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SCRIPT, *options], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def script(monkeypatch):
    """The script as a module, to be broken."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("verify_synergy_bonus", SCRIPT)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_bonus_of_an_interaction_of_two_and_a_half_is_shown(report):
    printed, _ = report
    assert " I = 2.5 " in printed
    assert "0.0848284" in printed


def test_every_case_is_paid_as_worked_out_by_hand(report):
    lines = {line["name"]: line for line in report[1]["results"]["synergy"]}
    assert len(lines) >= 12
    assert lines["I = 2.5"]["batched"] == pytest.approx(0.0848284, abs=5e-8)
    assert lines["I = 2.5, no seed"]["batched"] == 0.0
    for line in lines.values():
        assert line["batched"] == pytest.approx(line["scalar"], abs=1e-9), line["name"]
        assert line["single"] == pytest.approx(line["expected"], abs=1e-5), line["name"]


def test_interactions_come_from_pairs_and_not_from_sums(report):
    # v = 3.1, 4.3, -2.2 and 0.5 v_i v_j for each pair: I_01 = 6.665, I_02 = -3.41; a fossil is no player
    found = {line["name"]: line["batched"] for line in report[1]["results"]["interactions"]}
    assert found["additive: I_01"] == pytest.approx(0.0, abs=1e-9)
    assert found["superadditive: I_01"] == pytest.approx(6.665, abs=1e-9)
    assert found["superadditive: I of slot 0"] == pytest.approx(6.665 - 3.41, abs=1e-9)
    assert found["superadditive, slot 2 fossilized: I of slot 0"] == pytest.approx(6.665, abs=1e-9)


def test_the_report_says_where_its_numbers_come_from(report):
    entry = report[1]
    assert set(entry) == {"script", "version", "environment", "config", "results"}
    assert entry["script"] == "verify_synergy_bonus"
    assert entry["environment"]["torch"] == torch.__version__


def test_a_device_that_does_not_exist_ends_with_two():
    refused = run("--device", "toaster")
    assert refused.returncode == 2
    assert "toaster" in refused.stderr


def test_a_kernel_that_pays_a_millionth_too_much_is_found(script, monkeypatch):
    true = script.compute_reward_batched

    def generous(*args, **kwargs):
        output = true(*args, **kwargs)
        return output._replace(breakdown=output.breakdown + 1e-6)

    monkeypatch.setattr(script, "compute_reward_batched", generous)
    assert script.main(script.Options(device="cpu")) == 1


def test_interactions_that_forget_the_empty_coalition_are_found(script, monkeypatch):
    true = script.derive

    def forgetful(coalitions, accuracy):
        entry = true(coalitions, accuracy)
        all_off = coalitions.split(coalitions.names).all_off
        return replace(entry, interactions=entry.interactions - accuracy.gather(1, all_off)[..., None])

    monkeypatch.setattr(script, "derive", forgetful)
    assert script.main(script.Options(device="cpu")) == 1
