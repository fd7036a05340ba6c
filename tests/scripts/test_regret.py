"""Regret by cause: what a controller loses is split without a rest."""

import re
from pathlib import Path

import pytest

import regret
import tiny
from esper.tasks.registry import registered


@pytest.mark.slow
def test_regret_is_the_sum_of_its_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with registered(tiny.task(name="regretted", enabled=("r0c1",))):
        options = ["--hosts", "6", "--late", "1", "--out", str(tmp_path)]
        regret.main(["regretted", "fixed_schedule", "wait_only", *options])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    found = {row[0].strip("| "): row[1:] for row in rows if len(row) > 1}
    best = float(found["the best structure of each host"][0])
    for name in ("fixed_schedule", "wait_only"):
        own = float(found[name][0])
        whole, late, structure = (float(found[name][column].split()[0]) for column in (2, 4, 6))
        assert whole == pytest.approx(best - own, abs=0.06)
        assert whole == pytest.approx(late + structure, abs=0.02)
    assert found["wait_only"][4].startswith("+0.00")  # it is its own structure from step 1
    (born,) = [row for name, row in found.items() if re.match("r0c1 .* ADD", name)]
    assert len(born) == 1 + len(regret.BIRTHS)
