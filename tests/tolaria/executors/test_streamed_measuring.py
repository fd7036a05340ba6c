"""The streamed executor measures: every coalition as a pass of its own would, and without leaving a trace."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.tasks.datasets import Split
from esper.tolaria.executors import network
from plain import PlainTraining
from tiny import EXECUTION_ORDER, SLOTS, Bench, dataset, same_tree, with_players

S = SeedStage
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


@pytest.mark.parametrize("shapley", [False, True])
def test_every_coalition_is_what_a_separate_pass_measures(shapley):
    bench = grown_bench()
    coalitions, outputs = bench.measure(shapley=shapley)
    checked = 0
    for host, k in itertools.product(range(2), range(coalitions.sets.shape[1])):
        if coalitions.valid[host, k]:
            accuracy, loss = plain_measure(bench, host, coalitions.sets[host, k].numpy())
            assert outputs.accuracy[host, k].item() == pytest.approx(accuracy), (host, k)
            if k == 0:
                assert outputs.loss[host].item() == pytest.approx(loss, rel=1e-5)
            checked += 1
    assert checked == (16 if shapley else 12)  # all 8 subsets of host 0; 4 of host 1, whose fossil is background
    assert len(set(outputs.accuracy[coalitions.valid].tolist())) > 3  # the coalitions do differ


def test_the_order_of_slots_in_the_network_is_not_that_of_actions():
    bench = Bench(1)
    assert tuple(bench.population.host_module.execution_order()) == EXECUTION_ORDER
    assert [point.slot_id for point in bench.population.points] == list(SLOTS)


def test_chunks_do_not_change_what_is_measured(monkeypatch):
    bench = grown_bench()
    sets, want = bench.measure()
    monkeypatch.setattr(
        network, "_MAX_FLOATS_ON_CPU", 5 * 8 * bench.executor.data.host.largest_activation
    )  # 5 examples
    assert bench.executor.data.examples_at_once(8) == 5
    _, found = bench.measure()
    assert torch.equal(found.accuracy[sets.valid], want.accuracy[sets.valid])
    torch.testing.assert_close(found.loss, want.loss)


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


def test_an_executor_is_stored_and_loaded_to_the_bit():
    bench, other = grown_bench(), Bench(2)
    other.executor.load_state_dict({name: x.clone() for name, x in bench.executor.state_dict().items()})
    other.slots = bench.slots
    other.t = bench.t
    other.executor.apply_structure(other.structure())
    assert same_tree(vars(other.train()), vars(bench.train()))
    assert same_tree(other.executor.state_dict(), bench.executor.state_dict())
