"""A plain function as augmentation in every executor: a host is the same alone and among others."""

import dataclasses

import pytest
import torch
from torch import Tensor

import tiny
from esper.tasks.datasets import Dataset, RandomFunction
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import network_executor
from tiny import CPU, SLOTS


def noisy(x: Tensor) -> Tensor:
    return x + 0.5 * torch.randn_like(x)


def data() -> Dataset:
    return dataclasses.replace(tiny.dataset(), augmentation=RandomFunction(noisy))


def trained(executor: str, num_envs: int, *, offset: int = 0, of: Dataset | None = None) -> Tensor:
    """Parameters [N, P] of the hosts after two steps."""
    config = EngineConfig(
        num_envs=num_envs, episode_length=4, slots=SLOTS, run_seed=5, executor=executor, host_offset=offset
    )
    found, _ = network_executor(config, tiny.task(), data() if of is None else of, CPU)
    found.reset(0)
    slots = tiny.empty_slots(num_envs, len(SLOTS), CPU)
    for t in (1, 2):
        found.train_epoch(t, slots)
    return found.population.host.params


@pytest.mark.parametrize("executor", ["streamed", "fused", "native"])
def test_a_host_trains_to_the_same_weights_alone_and_as_one_of_three(executor):
    together = trained(executor, 3)
    for host in range(3):
        torch.testing.assert_close(trained(executor, 1, offset=host)[0], together[host], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(together, trained(executor, 3, of=tiny.dataset()), atol=1e-4)


@pytest.mark.parametrize("executor", ["fused", "native"])
def test_executors_agree(executor):
    torch.testing.assert_close(trained(executor, 2), trained("streamed", 2), atol=2e-5, rtol=1e-3)
