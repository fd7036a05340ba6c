"""A form of one minute of what scripts/torture.py does for hours."""

import subprocess
import sys
from pathlib import Path

import pytest

TORTURE = Path(__file__).parents[2] / "scripts" / "torture.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="calls are intercepted with LD_PRELOAD")
@pytest.mark.parametrize(
    "given",
    [
        "files --operations null --faults kill ENOSPC half EIO --every 120 --seed 5",
        "signals --tries 5 --seed 5",
        "inputs --tries 25 --seed 5",
        "settings --tries 4 --seed 5",
        "values --tries 2 --seed 5",
    ],
)
def test_ill_treatment_loses_nothing_and_every_error_is_a_sentence(given):
    done = subprocess.run(
        [sys.executable, TORTURE, *given.split()], capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("0 faults\n")
