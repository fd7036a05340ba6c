"""What every executor guarantees: gradients, measurements, and what they leave unchanged."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from against_streamed import EXECUTORS, bench_of
from torch.overrides import TorchFunctionMode

from esper.leyline.lifecycle import Algorithm, AlphaMode, HostFamily, SeedStage
from esper.tasks.datasets import Split
from plain import PlainTraining, assert_close
from tiny import SLOTS, VAL_BATCH, Bench, bit_equal, dataset, same_tree, with_players

S = SeedStage
ADD, MULTIPLY, GATE = Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE

every_executor = pytest.mark.parametrize("executor", list(EXECUTORS))
every_algorithm = pytest.mark.parametrize("algorithm", [ADD, MULTIPLY, GATE])


def grown_bench(executor: str) -> Bench:
    return with_players(bench_of(executor, 2))


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executor", "family", "algorithm"),
    [*((executor, HostFamily.CNN, algorithm) for executor in EXECUTORS for algorithm in (ADD, MULTIPLY, GATE)),
     *((executor, HostFamily.TRANSFORMER, GATE) for executor in ("streamed", "fused"))],
)  # fmt: skip
def test_hidden_seeds_do_not_change_the_training_of_their_host_by_a_bit(executor, family, algorithm):
    alone, grown = bench_of(executor, 2), bench_of(executor, 2)
    for bench in (alone, grown):
        bench.population.family = family
    grown.grow("r0c0", "conv_small", S.TRAINING, algorithm=algorithm)
    grown.grow("r1c0", "conv_heavy", S.BLENDING, alpha=0.0, algorithm=algorithm, hosts=[1])
    born = [grown.seed_params("r0c0", 0), grown.seed_params("r0c0", 1), grown.seed_params("r1c0", 1)]
    for bench in (alone, grown):
        bench.train(2)
    for host in (0, 1):
        for name, value in alone.host_params(host).items():
            assert bit_equal(grown.host_params(host)[name], value), (host, name)
    now = [grown.seed_params("r0c0", 0), grown.seed_params("r0c0", 1), grown.seed_params("r1c0", 1)]
    for before, after in zip(born, now, strict=True):
        assert all(not torch.equal(after[name], x) for name, x in before.items())


@every_algorithm
@every_executor
def test_below_a_fossil_every_parameter_of_host_and_seeds_gets_a_gradient(executor, algorithm):
    bench = bench_of(executor)
    bench.grow("r0c1", "conv_heavy", S.FOSSILIZED, alpha=1.0, algorithm=algorithm)  # the last slot of the network
    bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=algorithm)
    bench.grow("r1c0", "conv_light", S.TRAINING, algorithm=algorithm)
    bench.train()  # the last layer of a gate or a seed may be zero at birth
    host, seeds = bench.host_params(), {slot: bench.seed_params(slot) for slot in SLOTS}
    gates = {slot: bench.gate_params(slot) for slot in SLOTS}
    for flat in (bench.population.host, bench.population.seeds, bench.population.gates):
        flat.optimizer.momentum.zero_()  # so that only the gradients of this pass move anything
    bench.train()
    for name, before in host.items():
        if "running" not in name:  # without a gradient only the decay would act: a factor near 1
            assert not torch.allclose(bench.host_params()[name], before, rtol=1e-3, atol=0.0), name
    for slot in SLOTS:
        for name, before in seeds[slot].items():
            assert not torch.equal(bench.seed_params(slot)[name], before), (slot, name)
        if algorithm is GATE:
            for name, before in gates[slot].items():
                assert not torch.equal(bench.gate_params(slot)[name], before), (slot, name)


@every_algorithm
@every_executor
def test_under_a_falling_seed_the_host_trains_as_plain_pytorch_with_that_seed_fixed(executor, algorithm):
    bench = bench_of(executor)
    bench.grow("r1c0", "conv_light", S.BLENDING, alpha=0.6, algorithm=algorithm)
    bench.set("r1c0", alpha_mode=int(AlphaMode.DOWN))
    born = bench.seed_params("r1c0")
    plain = PlainTraining(bench, frozen=("r1c0",))
    bench.train()
    plain.epoch(1)
    assert_close(bench.host_params(), plain.model.give())
    assert same_tree(bench.seed_params("r1c0"), born)


# -- measuring --------------------------------------------------------------------------------------------------------


def plain_logits(bench: Bench, host: int, on: np.ndarray, split: str = "val") -> torch.Tensor:
    """Logits of one coalition by one pass of a plain network over a whole split."""
    model = PlainTraining(bench, host).model
    model.grown = {slot: grown for slot, grown in model.grown.items() if on[SLOTS.index(slot)]}
    with torch.no_grad():
        return model.eval()(bench.data.split(split).x)


@every_executor
def test_every_coalition_counts_what_a_separate_pass_counts(executor):
    bench = grown_bench(executor)
    found, outputs = bench.measure(shapley=True)
    for host in range(2):
        for k in found.valid[host].nonzero().flatten().tolist():
            logits = plain_logits(bench, host, found.sets[host, k].numpy())
            hits = int((logits.argmax(dim=1) == bench.data.val.y).sum())
            assert outputs.accuracy[host, k].item() == pytest.approx(100.0 * hits / len(bench.data.val.y)), (host, k)
            if k == 0:
                loss = torch.nn.functional.cross_entropy(logits, bench.data.val.y)
                assert outputs.loss[host].item() == pytest.approx(loss.item(), rel=1e-5)
    assert len(set(outputs.accuracy[found.valid].tolist())) > 3


class Answers(TorchFunctionMode):
    """Keeps the logits that answers are taken from."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.max and kwargs == {"dim": -1} and args[0].is_floating_point():
            self.seen.append(args[0].clone())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("executor", ["streamed", "fused"])  # native keeps no logits: tests/kasmina/native
def test_the_logits_of_coalitions_are_those_of_separate_passes(executor):
    bench = bench_of(executor)
    bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0)
    bench.grow("r1c0", "conv_light", S.BLENDING, alpha=0.6, algorithm=MULTIPLY)
    bench.grow("r0c1", "conv_heavy", S.BLENDING, alpha=0.3, algorithm=GATE)
    bench.train()
    bench.population.seeds.params.mul_(6.0)
    found = bench.coalitions()
    bench.executor.apply_structure(bench.structure(found))
    with Answers() as answers:
        bench.executor.evaluate(bench.t, bench.slots, found)
    # in some order of states; all eight subsets of three players are asked for
    first = answers.seen[0]
    states = first.view(8, VAL_BATCH, 3) if executor == "streamed" else first.view(VAL_BATCH, 8, 3).transpose(0, 1)
    matched = []
    for k in range(8):
        want = plain_logits(bench, 0, found.sets[0, k].numpy())[:VAL_BATCH]
        apart = (states - want).abs().amax(dim=(1, 2)) / want.abs().max()
        assert apart.min() <= 1e-6, k
        matched.append(int(apart.argmin()))
    assert sorted(matched) == list(range(8))


@pytest.mark.parametrize(
    ("executor", "limit"),
    [("streamed", "network._MAX_FLOATS_ON_CPU"), ("fused", "network._MAX_FLOATS_ON_CPU"),
     ("native", "native.executor._EXAMPLES")],
)  # fmt: skip
def test_one_example_at_a_time_is_measured_like_all_at_once(executor, limit, monkeypatch):
    bench = grown_bench(executor)
    found, whole = bench.measure(shapley=True)
    tested = bench.executor.committed("test", bench.slots).accuracy[:, 0]
    monkeypatch.setattr(f"esper.tolaria.executors.{limit}", 1)
    with Answers() as answers:
        pieces = bench.executor.evaluate(bench.t, bench.slots, found)
    assert executor == "native" or len(answers.seen) >= len(bench.data.val.y)
    assert torch.equal(pieces.accuracy[found.valid], whole.accuracy[found.valid])
    torch.testing.assert_close(pieces.loss, whole.loss)
    assert torch.equal(bench.executor.committed("test", bench.slots).accuracy[:, 0], tested)


@every_executor
def test_measuring_changes_no_tensor_and_no_generator(executor):
    bench = grown_bench(executor)
    before = {name: x.clone() for name, x in bench.executor.state_dict().items()}
    flats = [f"population.{part}.{name}" for part in ("host", "seeds", "gates") for name in ("params", "buffers")]
    assert before.keys() >= {*flats}
    splits = [bench.data.split(name) for name in ("train", "val", "test")]
    data = [x.clone() for split in splits for x in (split.x, split.y)]
    # that of Python is no witness: the type checks of these tests draw from it
    of_numpy, of_torch = np.random.get_state(legacy=False)["state"], torch.random.get_rng_state()
    bench.measure(shapley=True)
    bench.executor.committed("test", bench.slots)
    assert same_tree(bench.executor.state_dict(), before)
    assert all(bit_equal(a, b) for a, b in zip([x for s in splits for x in (s.x, s.y)], data, strict=True))
    now = np.random.get_state(legacy=False)["state"]
    assert (now["key"].tobytes(), now["pos"]) == (of_numpy["key"].tobytes(), of_numpy["pos"])
    assert torch.equal(torch.random.get_rng_state(), of_torch)


def test_a_step_measures_a_share_of_the_examples_and_what_is_kept_all_of_them():
    bench = Bench(measured_share=0.5)  # 15 of 30 examples: every second one
    bench.grow("r0c1", "conv_light", S.HOLDING, alpha=1.0)
    found, outputs = bench.measure()
    y = bench.data.val.y
    for k in range(2):
        hits = plain_logits(bench, 0, found.sets[0, k].numpy()).argmax(dim=1) == y
        assert outputs.accuracy[0, k].item() == pytest.approx(100.0 * hits[::2].float().mean().item())
    kept = bench.executor.committed("val", bench.slots)
    loss = torch.nn.functional.cross_entropy(plain_logits(bench, 0, np.zeros(3, dtype=bool)), y)
    assert kept.loss[0].item() == pytest.approx(loss.item())


@every_executor
def test_the_test_split_is_measured_with_fossils_alone(executor):
    bench = grown_bench(executor)
    found, split = bench.executor.committed("test", bench.slots), bench.data.test
    for host, on in enumerate(([False] * 3, [True, False, False])):
        logits = plain_logits(bench, host, np.array(on), "test")
        hits, loss = logits.argmax(dim=1) == split.y, torch.nn.functional.cross_entropy(logits, split.y)
        assert found.accuracy[host].item() == pytest.approx(100.0 * hits.float().mean().item())
        assert found.loss[host].item() == pytest.approx(loss.item(), rel=1e-5)


def test_all_correct_is_exactly_one_hundred_percent():
    data = dataset(train=45, val=45)  # 45 * (100 / 45) is above 100 in float32
    data = replace(data, **{name: Split(of.x, of.y.zero_()) for name, of in (("train", data.train), ("val", data.val))})
    bench = Bench(1, data=data)
    assert bench.train(6).acc.item() == 100.0
    assert bench.measure()[1].accuracy[0, 0].item() == 100.0


# -- rows that are not trained ----------------------------------------------------------------------------------------


def rows(bench: Bench, host: int) -> dict[str, torch.Tensor]:
    """Weights, buffers and optimizer state of the seed in r1c0 and its gate; copies."""
    row, both = bench.seed_row("r1c0", host), (("seed", bench.population.seeds), ("gate", bench.population.gates))
    return {f"{part}.{name}": x[row].clone() for part, flat in both for name, x in flat.tensors().items()}


@every_algorithm
@every_executor
def test_a_falling_seed_keeps_every_bit_while_its_host_and_other_seeds_are_trained(executor, algorithm):
    bench = bench_of(executor, 2)
    bench.grow("r1c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=algorithm)
    bench.train()
    frozen = rows(bench, 0)
    assert bool(frozen["seed.momentum"].any())
    for alpha in (0.8, 0.4):
        bench.set("r1c0", 0, stage=int(S.BLENDING), alpha=alpha, alpha_mode=int(AlphaMode.DOWN))
        other, host = rows(bench, 1), bench.host_params(0)
        bench.train()
        assert same_tree(rows(bench, 0), frozen)
        assert not torch.equal(rows(bench, 1)["seed.params"], other["seed.params"])
        assert not same_tree(bench.host_params(0), host)


@every_executor
def test_a_gate_that_is_not_in_use_is_not_stepped(executor):
    bench = bench_of(executor, 2)
    bench.grow("r1c0", "conv_light", S.HOLDING, alpha=1.0, algorithm=GATE)
    bench.train()
    bench.set("r1c0", 0, algorithm=int(ADD))
    unused, used = rows(bench, 0), rows(bench, 1)
    bench.train()
    now = [rows(bench, host) for host in (0, 1)]
    for name in (name for name in unused if name.startswith("gate.")):
        assert torch.equal(now[0][name], unused[name]), name
    assert not torch.equal(now[1]["gate.params"], used["gate.params"])
    assert not torch.equal(now[0]["seed.params"], unused["seed.params"])


@pytest.mark.parametrize("stage", [S.GERMINATED, S.DORMANT])
@every_executor
def test_seeds_before_training_keep_their_first_weights(executor, stage):
    bench = bench_of(executor, 2)
    bench.grow("r1c0", "conv_light", S.GERMINATED)
    bench.set("r1c0", 0, stage=int(stage))
    born = rows(bench, 0)
    bench.train()
    assert same_tree(rows(bench, 0), born)


# -- outputs that are not finite --------------------------------------------------------------------------------------


@every_executor
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_network_with_broken_weights_is_wrong_everywhere_has_no_loss_and_disturbs_nobody(executor, value):
    broken, whole = bench_of(executor, 2), bench_of(executor, 2)
    for bench in (broken, whole):
        bench.grow("r0c0", "conv_light", S.TRAINING)
    broken.population.host.params[1].fill_(value)
    (_, measured), (_, expected) = broken.measure(), whole.measure()
    # a third of the examples have class 0, the first of equal maxima
    assert measured.accuracy[1, 0] == 0.0
    assert not measured.loss[1].isfinite()
    assert measured.accuracy[0, 0] > 0.0
    assert measured.loss[0] == expected.loss[0]
    trained = broken.train()
    whole.train()
    assert trained.acc[1] == 0.0
    assert not trained.loss[1].isfinite()
    assert trained.grad_health[1, 0] == 0.0
    assert trained.grad_exploding[1, 0]
    assert same_tree(broken.host_params(0), whole.host_params(0))
