"""The checks of `tests/gpu` on the CPU: a rehearsal, not a proof."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import checks

CPU = torch.device("cpu")


def test_decisions_and_rewards():
    checks.check_decisions_and_rewards(CPU, checks.config(CPU))


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # the compiler's own imports
def test_the_compiled_phases_of_a_step():
    checks.check_control_plane(CPU)


def test_attention_with_a_block_mask():
    checks.check_block_mask_attention(CPU)


def test_both_executors():
    checks.check_executors(CPU)


@pytest.mark.parametrize("kind", ["streamed", "fused"])
def test_half_precision(kind):
    checks.check_half_precision(CPU, kind, torch.bfloat16)
