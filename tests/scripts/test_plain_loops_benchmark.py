"""The benchmark against plain loops: the reference computes what esper computes, and its limits can fail."""

from dataclasses import replace

import pytest
import torch

from grown_hosts import IMAGES, TEXT, SharedHosts
from plain_loops import Options, Row, complaints, loops_of

SMALL_TEXT = replace(TEXT, name="small text", width=16, context=12, batch=4, vocabulary=20)
SMALL_IMAGES = replace(IMAGES, name="small images", size=8, batch=16)


@pytest.mark.parametrize(("shape", "hosts"), [(SMALL_IMAGES, 7), (SMALL_TEXT, 7)], ids=["images", "text"])
def test_the_plain_networks_train_and_measure_as_streamed_hosts_do(shape, hosts):
    """Seven hosts hold every blueprint, in every algorithm."""
    ours = SharedHosts.build(shape, hosts, 2 * shape.batch, 24, executor="streamed")
    loops = loops_of(shape, ours)
    kinds = {(grown.seed.__class__, grown.blend) for net in loops.nets for grown in net.seeds.children()}
    assert {blend for _, blend in kinds} == {"ADD", "MULTIPLY", "GATE"}
    assert all(len(net.seeds) == 3 for net in loops.nets)
    torch.testing.assert_close(torch.tensor(loops.train()), ours.train().loss, atol=1e-5, rtol=1e-5)
    losses, shares = torch.tensor(loops.evaluate()).unbind(1)
    measured = ours.measure()
    torch.testing.assert_close(losses, measured.loss, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(100.0 * shares, measured.accuracy[:, 0], atol=0.5, rtol=0)


ROW = Row(
    name="8 x toy", executor="native", train_loops_ms=20.0, train_ms=10.0, speed_up=2.0, lowest=1.9, highest=2.1,
    evaluation_ms=1.0, coalitions_ms=3.5, coalitions=3.5,
)  # fmt: skip


def test_each_limit_applies_to_its_kind_of_hosts():
    both = {"images": ROW, "text": replace(ROW, name="8 x words", coalitions=2.0)}
    assert complaints(both, Options()) == []
    found = complaints(both, Options(min_native=2.2, min_transformer=1.5, max_coalitions=3.0))
    assert found == [
        "8 x toy: training is 2.00 times as fast; at least 2.2",
        "8 x toy: all coalitions take 3.50 evaluations; at most 3",
    ]
    assert complaints(both, Options(min_transformer=2.5)) == ["8 x words: training is 2.00 times as fast; at least 2.5"]
