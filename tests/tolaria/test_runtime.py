import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dry_run import CountedReads
from esper.leyline.errors import ConfigError
from esper.tolaria.runtime import CUDATimer, PhaseTimer, choose_device, host_read, start_read, tried_on

CPU = torch.device("cpu")
DTYPES = (torch.bool, torch.int64, torch.float32, torch.float64, torch.int32, torch.int8)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=8))
def test_a_read_returns_each_tensor_with_its_type_shape_and_values(kinds):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randint(0, 2, shape, generator=generator).to(dtype) for dtype, shape in kinds]
    arrays = host_read(*tensors)
    assert len(arrays) == len(tensors)
    for array, tensor in zip(arrays, tensors, strict=True):
        assert array.shape == tuple(tensor.shape)
        assert array.flags.aligned
        np.testing.assert_array_equal(array, tensor.numpy(), strict=True)


def test_a_transposed_tensor_and_one_with_a_gradient_are_read_by_value():
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    a, b, c = host_read(x.T, x[:, 1], x[1:, 1])
    assert a.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert b.tolist() == [1.0, 4.0]
    assert c.tolist() == [4.0]


@pytest.mark.parametrize("count", [1, 2])
def test_writing_after_the_start_of_a_read_does_not_change_it(count):
    x = torch.ones(4)
    pending = start_read(*[x] * count)
    x.zero_()
    assert all(array.tolist() == [1.0] * 4 for array in pending.wait())


def test_waiting_twice_gives_the_same_and_counts_one_read():
    with CountedReads() as reads:
        pending = start_read(torch.arange(3))
        assert pending.wait()[0].tolist() == pending.wait()[0].tolist() == [0, 1, 2]
    assert reads.number == 1


def test_a_type_that_numpy_does_not_know_is_refused():
    with pytest.raises(AssertionError, match="bfloat16"):
        host_read(torch.zeros(2, dtype=torch.bfloat16))


def test_tensors_of_two_devices_are_refused():
    with pytest.raises(AssertionError, match="one device"):
        host_read(torch.zeros(2), torch.zeros(2, device="meta"))


def test_a_timer_measures_its_block():
    with CUDATimer(CPU) as timer:
        time.sleep(0.02)
    first = timer.elapsed_ms()
    time.sleep(0.02)
    assert timer.elapsed_ms() == first >= 20.0


def test_a_timer_that_measured_nothing_says_so():
    with pytest.raises(AssertionError, match="nothing was measured"):
        CUDATimer(CPU).elapsed_ms()


def test_phases_are_summed_by_name_and_forgotten_after_reading():
    timer = PhaseTimer(CPU, enabled=True)
    for _ in range(2):
        with timer.span("train"):
            time.sleep(0.01)
        with timer.span("observe"):
            pass
    spent = timer.read()
    assert list(spent) == ["train", "observe"]
    assert spent["train"] >= 20.0
    assert spent["train"] > spent["observe"] >= 0.0
    assert timer.read() == {}


def test_a_phase_that_raises_is_still_measured():
    timer = PhaseTimer(CPU, enabled=True)
    with pytest.raises(ZeroDivisionError), timer.span("train"):
        raise ZeroDivisionError
    assert list(timer.read()) == ["train"]


def test_a_phase_is_a_range_of_a_profiler_that_runs():
    timer = PhaseTimer(CPU, enabled=True)
    with torch.profiler.profile(acc_events=True) as found, timer.span("train"):
        torch.ones(2)
    assert "train" in [event.key for event in found.key_averages()]
    assert list(timer.read()) == ["train"]


def test_a_timer_that_is_off_keeps_nothing():
    timer = PhaseTimer(CPU, enabled=False)
    with timer.span("train"), timer.span("nested"):
        pass
    assert timer.read() == {}


@pytest.fixture
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_auto_is_the_cpu_and_cuda_is_an_error():
    assert choose_device("auto") == choose_device("cpu") == CPU
    for name in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"device is '{name}' but PyTorch finds no CUDA"):
            choose_device(name)


@pytest.mark.usefixtures("two_cuda_devices")
def test_a_cuda_device_comes_with_its_number():
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == CPU
    with pytest.raises(ConfigError, match="cuda:0 to cuda:1"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["gpu", "cuda:", "cuda:x", "", "meta", "auto:1", "CPU"])
def test_another_name_is_an_error(name):
    with pytest.raises(ConfigError, match="must be 'auto', 'cpu', 'cuda'"):
        choose_device(name)


@pytest.mark.gpu
def test_a_read_from_cuda_gives_the_values_and_waits_only_once():
    device = choose_device("cuda")
    tensors = (torch.arange(5, device=device), torch.ones(2, 2, device=device), torch.tensor(True, device=device))
    with CountedReads() as reads:
        pending = start_read(*tensors)
        tensors[1].zero_()
        ints, floats, flag = pending.wait()
    assert (ints.tolist(), floats.tolist(), flag.item()) == ([0, 1, 2, 3, 4], [[1.0, 1.0], [1.0, 1.0]], True)
    assert reads.number == 1


@pytest.mark.gpu
def test_a_timer_on_cuda_measures_the_work_of_the_device():
    device = choose_device("cuda")
    x = torch.ones(2048, 2048, device=device)
    with CUDATimer(device) as timer:
        for _ in range(10):
            x = x @ x * 1e-4
    assert timer.elapsed_ms() > 0.0


def test_code_of_the_user_that_fails_on_a_gpu_alone_is_told_what_to_do():
    gpu, mixed = torch.device("cuda", 0), RuntimeError("Expected all tensors to be on the same device")
    with (
        pytest.raises(
            ConfigError, match=r"run on the CPU, but not on cuda:0 \(RuntimeError: Expected .* device=x.device"
        ),
        tried_on(gpu),
    ):
        raise mixed
    with (
        pytest.raises(
            ConfigError, match=r"one host does not fit on cuda:0 \(.*OutOfMemoryError: .*use a smaller batch"
        ),
        tried_on(gpu),
    ):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(ConfigError, match=r"^as it is$"), tried_on(gpu):
        raise ConfigError("as it is")
    with pytest.raises(RuntimeError, match="Expected"), tried_on(CPU):
        raise mixed
