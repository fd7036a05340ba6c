"""Both implementations against an excerpt of recorded rewards (`scripts/check_golden_rewards.py --excerpt`)."""

import json
from pathlib import Path

import pytest

from esper.leyline.errors import DataError
from reference.rewards.golden import batched_rewards, check_golden, error_of, load_golden

GOLDEN = Path(__file__).parents[2] / "golden"
MODES = ("shaped", "escrow", "basic", "basic_plus", "sparse", "minimal", "simplified", "loss")


@pytest.mark.parametrize("mode", MODES)
def test_recorded_rewards_are_paid_by_kernel_and_scalar_reference(mode):
    report = check_golden(GOLDEN / f"reward_{mode}.json")
    assert report.mode == mode
    assert report.cases >= 40
    assert report.scalar <= 1e-6
    assert report.batched <= 1e-6


def test_a_changed_recording_is_noticed():
    case = load_golden(GOLDEN / "reward_shaped.json")[0]
    got = batched_rewards([case])[0]
    assert error_of(case, got) < 1e-9
    got.terms["rent"] += 0.25
    assert error_of(case, got) == pytest.approx(0.25)


def test_a_file_without_cases_is_refused_with_its_path(tmp_path):
    path = tmp_path / "reward.json"
    path.write_text(json.dumps({"mode": "shaped"}))
    with pytest.raises(DataError, match=r"reward\.json"):
        load_golden(path)
