"""Every executor trains on the same batches where a last example joins the batch before it."""

import pytest
import torch

from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from tiny import Bench, dataset


@pytest.mark.parametrize("wrap", [FusedExecutor, NativeExecutor])
def test_thirty_three_examples_are_batches_of_sixteen_and_seventeen_in_every_executor(wrap):
    streamed, other = (Bench(2, data=dataset(train=33)) for _ in range(2))
    want, found = (of.train_epoch(1, streamed.slots) for of in (streamed.executor, wrap(other.executor.data)))
    assert streamed.executor.data.train_batches(1).bounds == [(0, 16), (16, 33)]
    torch.testing.assert_close(found.loss, want.loss, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.acc, want.acc)
    torch.testing.assert_close(other.population.host.params, streamed.population.host.params, atol=2e-5, rtol=1e-3)
