"""The checks of `tests/gpu` on the CPU, with a tape in the place of CUDA graphs: a rehearsal, not a proof."""

import sys
from pathlib import Path

import pytest
import torch

from tape import TapeBackend

sys.path.insert(0, str(Path(__file__).parent / "gpu"))
import checks

CPU = torch.device("cpu")


@pytest.mark.slow
def test_replayed_decisions_and_pay():
    checks.check_decisions_and_rewards(CPU, checks.config(CPU), TapeBackend)


def test_a_replayed_policy_step_sees_the_step_number():
    checks.check_step_is_an_argument(CPU, TapeBackend)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bf16"])
def test_replayed_training(dtype):
    checks.check_replayed_training(CPU, TapeBackend, dtype)


@pytest.mark.slow
def test_a_run_with_everything_replayed():
    checks.check_captured_run(CPU, TapeBackend)


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
