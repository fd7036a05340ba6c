"""Every executor trains on the same batches where the last batch is not full."""

import pytest
import torch
from test_own_blueprints import registered
from torch import Tensor, nn

import tiny
from esper.kasmina.blueprints import registry
from esper.leyline.errors import ConfigError
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from tiny import Bench, dataset


@pytest.mark.parametrize("wrap", [FusedExecutor, NativeExecutor])
@pytest.mark.parametrize(
    ("last", "examples", "bounds"),
    [
        ("merge", 33, [(0, 16), (16, 33)]),
        ("drop", 33, [(0, 16), (16, 32)]),
        ("drop", 47, [(0, 16), (16, 32)]),
        ("keep", 33, [(0, 16), (16, 32), (32, 33)]),
    ],
)
def test_batches_of_sixteen_are_merged_dropped_or_kept_in_every_executor(wrap, last, examples, bounds):
    streamed, other = (Bench(2, data=dataset(train=examples), last_batch=last) for _ in range(2))
    want, found = (of.train_epoch(1, streamed.slots) for of in (streamed.executor, wrap(other.executor.data)))
    assert streamed.executor.data.train_batches(1).bounds == bounds
    torch.testing.assert_close(found.loss, want.loss, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found.acc, want.acc)
    torch.testing.assert_close(other.population.host.params, streamed.population.host.params, atol=2e-5, rtol=1e-3)


class PooledNorm(nn.Module):
    """Shifts each channel by its mean over the image, normalized over the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.mean(dim=(2, 3)))[:, :, None, None]


def test_a_blueprint_that_normalizes_single_values_needs_batches_of_two():
    with registered(PooledNorm):
        of = tiny.task(batch_train=32, last_batch="keep")
        assert registry.names().index("own") in tiny.engine(of=of).spec.selectable
        with pytest.raises(ConfigError, match=r"blueprint 'own' .* \(1, .*more than 1 value.*give a larger batch"):
            tiny.engine(of=tiny.task(batch_train=1))
