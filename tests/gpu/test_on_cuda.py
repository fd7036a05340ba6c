"""On a GPU: eager, compiled and replayed forms agree, and nothing waits for the device. `make test-gpu` runs them."""

import warnings

import pytest
import torch
from checks import (
    TINY,
    check_block_mask_attention,
    check_captured_run,
    check_control_plane,
    check_decisions_and_rewards,
    check_executors,
    check_half_precision,
    check_replayed_training,
    check_step_is_an_argument,
    config,
    parts,
)

from esper.simic.agent.advantages import gae_scan
from esper.simic.compilation import graphs_compiled
from esper.tolaria.capture import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device"),
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # the compiler's own imports
]
CUDA = torch.device("cuda", 0)
SYNC = "called a synchronizing CUDA operation"


def backend() -> CudaGraphs:
    return CudaGraphs(CUDA)


@pytest.mark.parametrize(
    ("compile", "replayed"), [("off", True), ("on", False), ("on", True)], ids=["replayed", "compiled", "both"]
)
def test_policy_step_and_reward_agree_in_every_form(compile, replayed):
    check_decisions_and_rewards(CUDA, config(CUDA, compile=compile), backend if replayed else None)


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


def test_a_replayed_policy_step_sees_the_step_number():
    check_step_is_an_argument(CUDA, backend)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["float32", "bf16", "fp16"])
def test_fused_training_is_replayed_as_it_is_run(dtype):
    check_replayed_training(CUDA, backend, dtype)


def test_a_run_with_everything_replayed_is_the_eager_run():
    check_captured_run(CUDA, backend)


@pytest.mark.parametrize("capture", ["off", "on"])
@pytest.mark.parametrize("task", ["null", "tiny"])
def test_a_step_waits_for_the_device_only_where_it_says_so(task, capture):
    told = {"task": task} if task == "null" else TINY
    engine, client = parts(config(CUDA, **told, compile="off", capture=capture, experimental=True), CUDA)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 40), (300, 33)], ids=str)
def test_the_triton_kernel_of_advantages_is_its_twin(shape, dtype):
    pytest.importorskip("triton")
    from esper.simic.agent.gae_kernel import gae_on_cuda

    draw = torch.Generator().manual_seed(3)
    numbers = [torch.randn(shape, generator=draw, dtype=dtype).to(CUDA) for _ in range(3)]
    flags = [(torch.rand(shape, generator=draw) < share).to(CUDA) for share in (0.1, 0.1, 0.9)]
    got, want = (f(*numbers, *flags, 0.99, 0.95) for f in (gae_on_cuda, gae_scan))
    torch.testing.assert_close(got, want)
