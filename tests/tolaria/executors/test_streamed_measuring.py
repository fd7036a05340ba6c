"""The streamed executor measures: every coalition as a pass of its own would, and without leaving a trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.tasks.datasets import Split
from plain import PlainTraining
from tiny import EXECUTION_ORDER, SLOTS, Bench, dataset, with_players

MULTIPLY, GATE = Algorithm.MULTIPLY, Algorithm.GATE


def grown_bench() -> Bench:
    return with_players(Bench(2))


@torch.no_grad()
def plain_measure(bench: Bench, host: int, on: np.ndarray, split: str = "val", every: int = 1) -> tuple[float, float]:
    """Accuracy and loss of one coalition by one pass of a plain network over the whole split, or a part of it."""
    model = PlainTraining(bench, host).model
    model.grown = {slot: grown for slot, grown in model.grown.items() if on[SLOTS.index(slot)]}
    model.eval()
    data = bench.data.split(split)
    x, y = data.x[::every], data.y[::every]
    logits = model(x)
    accuracy = 100.0 * (logits.argmax(dim=1) == y).float().mean().item()
    return accuracy, F.cross_entropy(logits, y).item()


def test_the_order_of_slots_in_the_network_is_not_that_of_actions():
    bench = Bench(1)
    assert tuple(bench.population.host_module.execution_order()) == EXECUTION_ORDER
    assert [point.slot_id for point in bench.population.points] == list(SLOTS)


def test_a_step_measures_a_share_of_the_examples_and_what_is_kept_all_of_them():
    bench = Bench(measured_share=0.5)  # 15 of 30 examples: every second one
    bench.grow("r0c1", "conv_light", SeedStage.HOLDING, alpha=1.0)
    coalitions, outputs = bench.measure()
    for k in range(2):
        accuracy, loss = plain_measure(bench, 0, coalitions.sets[0, k].numpy(), every=2)
        assert outputs.accuracy[0, k].item() == pytest.approx(accuracy)
    kept = bench.executor.committed("val", bench.slots)
    assert kept.loss[0].item() == pytest.approx(plain_measure(bench, 0, np.zeros(3, dtype=bool))[1])
    assert kept.loss[0].item() != pytest.approx(loss)


def test_the_test_split_is_measured_with_fossils_alone():
    bench = grown_bench()
    found = bench.executor.committed("test", bench.slots)
    for host, on in enumerate(([False] * 3, [True, False, False])):
        accuracy, loss = plain_measure(bench, host, np.array(on), "test")
        assert found.accuracy[host].item() == pytest.approx(accuracy)
        assert found.loss[host].item() == pytest.approx(loss)


def test_all_correct_is_exactly_one_hundred_percent():
    data = dataset(train=45, val=45)  # 45 * (100 / 45) is above 100 in float32
    data = replace(data, **{name: Split(of.x, of.y.zero_()) for name, of in (("train", data.train), ("val", data.val))})
    bench = Bench(1, data=data)
    outputs = bench.train(6)
    _, measured = bench.measure()
    assert outputs.acc.item() == 100.0
    assert measured.accuracy[0, 0].item() == 100.0
