"""On a GPU: eager and compiled forms agree, and nothing waits for the device. `make test-gpu` runs them."""

import warnings

import pytest
import torch
from checks import (
    TINY,
    check_block_mask_attention,
    check_control_plane,
    check_decisions_and_rewards,
    check_executors,
    check_half_precision,
    config,
    parts,
)

from esper.simic.compilation import graphs_compiled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # the compiler's own imports
]
CUDA = torch.device("cuda", 0)
SYNC = "called a synchronizing CUDA operation"


def test_policy_step_and_reward_agree_when_they_are_compiled():
    check_decisions_and_rewards(CUDA, config(CUDA, compile="on"))


def test_the_compiled_phases_of_a_step_answer_as_the_eager_ones():
    check_control_plane(CUDA)


def test_nothing_is_compiled_after_the_first_round():
    engine, client = parts(config(CUDA, compile="on"), CUDA)
    engine.reset(client, 0)
    engine.rollout(client)
    warm = graphs_compiled()
    client.update()
    engine.reset(client, 1)
    engine.rollout(client)
    assert graphs_compiled() == warm


def test_attention_with_a_block_mask_is_attention():
    check_block_mask_attention(CUDA)


@pytest.mark.parametrize("task", ["null", "tiny"])
def test_a_step_waits_for_the_device_only_where_it_says_so(task):
    told = {"task": task} if task == "null" else TINY
    engine, client = parts(config(CUDA, **told, compile="off"), CUDA)
    engine.reset(client, 0)
    for _ in range(3):
        engine.step(client)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(3):
                engine.step(client)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [f"{w.filename}:{w.lineno}" for w in found if SYNC in str(w.message)] == []


def test_both_executors_give_on_cuda_what_the_streamed_one_gives_on_the_cpu():
    check_executors(CUDA)


@pytest.mark.parametrize("kind", ["streamed", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_trains_like_whole(kind, dtype):
    check_half_precision(CUDA, kind, dtype)
