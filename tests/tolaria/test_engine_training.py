"""Whole lives in the engine, beside the same training written in plain PyTorch."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tiny
from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.leyline.lifecycle import Algorithm, HostFamily, LifecycleOp, SeedStage
from esper.simic.client import ScriptedClient
from esper.tamiyo.baselines import make_baseline
from esper.tasks.datasets import Dataset, Split
from plain import PlainTraining, assert_close
from tiny import Bench, same_tree
from toys import ToyClient, ToyReward, action, script

Op, S = LifecycleOp, SeedStage
EPISODE = Bench(1).episode
LIVE = {"tempo": 0, "alpha_target": 2}


class Watched:
    """An engine of the tiny task, and a bench that reads its population."""

    def __init__(self, length, plan, num_envs=1, **settings):
        self.engine = tiny.engine(num_envs, length, **settings)
        self.client = ToyClient(self.engine.spec, script(num_envs, length, plan))
        self.engine.reset(self.client, EPISODE)
        self.bench = Bench(num_envs)
        self.bench.population = self.engine.executor.population

    def step(self):
        self.engine.step(self.client)
        self.engine.apply_structure()
        self.bench.slots = self.engine.state.slots
        return self.client.steps[-1].obs


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_the_baseline_that_waits_is_plain_training_of_every_host(executor):
    steps, hosts = 6, 2
    run = tiny.engine(hosts, steps, executor=executor)
    client = ScriptedClient(make_baseline("wait_only", run.spec), ToyReward())
    run.reset(client, EPISODE)
    references, bench = [PlainTraining(Bench(hosts), n) for n in range(hosts)], Bench(hosts)
    for t in range(1, steps + 1):
        run.step(client)
        run.apply_structure()
        for reference in references:
            reference.epoch(t)
        found, seen = run.state.hosts, [reference.accuracy() for reference in references]
        assert found.val_acc.tolist() == pytest.approx(seen, abs=1e-3), t
        assert found.committed_acc.tolist() == pytest.approx(seen, abs=1e-3), t
        assert found.train_loss.tolist() == pytest.approx([x.loss / x.examples for x in references], abs=1e-4), t
        assert found.train_acc.tolist() == pytest.approx(
            [100 * r.correct / r.examples for r in references], abs=1e-3
        ), t
    bench.population = run.executor.population
    for n, reference in enumerate(references):
        assert_close(bench.host_params(n), reference.model.give())
    assert not run.state.slots.params.any()


@pytest.mark.parametrize("algorithm", [Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE])
def test_a_whole_life_is_plain_training_of_a_network_that_grows(algorithm):
    # born in 1; hidden in the passes 2 and 3; active with alpha 1/3, 2/3 and 1; fossilized from 7 on
    style = {Algorithm.ADD: 0, Algorithm.MULTIPLY: 1, Algorithm.GATE: 3}[algorithm]
    plan = {1: action(Op.GERMINATE, slot=2, blueprint=1, style=style, **LIVE), 6: action(Op.FOSSILIZE, slot=2)}
    run, reference = Watched(8, plan), PlainTraining(Bench(1))
    active = {4: 1 / 3, 5: 2 / 3, 6: 1.0, 7: 1.0, 8: 1.0}
    for t in range(1, 9):
        if t in active:
            seed, gate, _, _ = reference.model.grown["r1c0"]
            reference.model.grown["r1c0"] = (seed, gate, algorithm, active[t])
        seen = run.step()
        reference.epoch(t)
        assert seen.hosts.val_acc.item() == pytest.approx(reference.accuracy(), abs=1e-3), t
        if t == 1:
            gate = run.bench.gate_params("r1c0") if algorithm is Algorithm.GATE else None
            reference.grow("r1c0", 1, algorithm, None, run.bench.seed_params("r1c0"), gate)
    assert run.engine.state.slots.stage[0, 2] == S.FOSSILIZED
    assert_close(run.bench.host_params(), reference.model.give(), rtol=1e-3, atol=1e-4)
    assert_close(run.bench.seed_params("r1c0"), dict(reference.seeds["r1c0"].named_parameters()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_scheduled_prune_freezes_the_seed_to_the_bit_and_then_destroys_it(executor):
    # held from 6 on; falls in the ticks of 7 to 11, frozen in the passes 8 to 11
    plan = {1: action(Op.GERMINATE, slot=0, style=3, **LIVE), 7: action(Op.PRUNE, slot=0, alpha_speed=2)}
    run = Watched(12, plan, executor=executor)
    flats = (run.bench.population.seeds, run.bench.population.gates)
    weights, gates, hosts, counts, modes, everything = [], [], [], [], [], []
    for t in range(1, 13):
        counts.append(run.engine.state.slots.params[0, 0].item())
        modes.append(run.engine.state.slots.alpha_mode[0, 0].item())
        run.step()
        hosts.append(run.bench.host_params())
        if t <= 10:
            weights.append(run.bench.seed_params("r0c0"))
            gates.append(run.bench.gate_params("r0c0"))
            everything.append(
                {f"{k}.{name}": x[0].clone() for k, flat in enumerate(flats) for name, x in flat.tensors().items()}
            )
    assert [t for t, mode in enumerate(modes, start=1) if mode == 2] == [8, 9, 10, 11]
    for t in (8, 9, 10):
        assert same_tree(weights[t - 1], weights[6]), t
        assert same_tree(gates[t - 1], gates[6]), t
        assert same_tree(everything[t - 1], everything[6]), t  # momentum and statistics too
        assert not torch.equal(hosts[t - 1]["blocks.0.conv.weight"], hosts[t - 2]["blocks.0.conv.weight"])
    assert not same_tree(weights[6], weights[5])
    assert len(set(counts[1:11])) == 1
    assert counts[11] == 0
    assert bool(everything[6]["0.momentum"].any() & everything[6]["1.momentum"].any())
    for flat in flats:
        for name, tensor in flat.tensors().items():
            assert not tensor[0].any(), name


class Mute(nn.Module):
    """Says nothing, however long it is trained."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return 0.0 * h * self.scale[:, None, None]


class MuteBlueprint(AbstractBlueprint):
    name = "test_mute"
    family = HostFamily.CNN

    def build(self, channels: int) -> nn.Module:
        return Mute(channels)


@pytest.fixture
def mute() -> Iterator[int]:
    yield registry.register(MuteBlueprint())
    registry.unregister("test_mute")


def test_a_useless_seed_on_a_host_that_improves_is_worth_exactly_nothing(mute):
    plan = {1: action(Op.GERMINATE, slot=0, blueprint=mute, style=0, **LIVE)}
    run = Watched(8, plan, rules={"g2_health": 0.0})  # a seed without gradients would not be let through
    seen = [run.step() for _ in range(8)]
    contributions = [obs.slots.contribution[0, 0].item() for obs in seen]
    assert [t for t, c in enumerate(contributions, start=1) if c == c] == [4, 5, 6, 7, 8]
    assert set(contributions[3:]) == {0.0}
    assert len({obs.hosts.val_acc.item() for obs in seen}) > 3
    assert seen[-1].hosts.val_acc > seen[2].hosts.val_acc


def test_a_second_round_starts_with_other_hosts_and_without_seeds():
    run = Watched(3, {1: action(Op.GERMINATE, slot=0)})
    for _ in range(3):
        run.step()
    first = run.bench.host_params()
    run.engine.reset(run.client, EPISODE + 1)
    fresh = tiny.population(1)
    fresh.reset(EPISODE + 1)
    assert torch.equal(run.bench.population.host.params, fresh.host.params)
    assert not same_tree(run.bench.host_params(), first)
    assert not run.bench.population.seeds.params.any()


class Watching(Dataset):
    """A data set that remembers who asked for its test split; it stays itself on any device."""

    asked: list[str]

    def __getattribute__(self, name: str) -> object:
        if name == "test":
            object.__getattribute__(self, "asked").append(name)
        return object.__getattribute__(self, name)

    def split(self, name: str) -> Split:
        return getattr(self, name)

    def to(self, device: torch.device) -> Dataset:
        return self


@pytest.mark.parametrize("executor", ["streamed", "fused", "native"])
def test_nobody_looks_at_the_test_split_before_the_end(executor, monkeypatch):
    data, plain = object.__new__(Watching), tiny.dataset()
    vars(data).update(vars(plain), asked=[])
    monkeypatch.setattr(tiny, "dataset", lambda: data)
    run = Watched(4, {1: action(Op.GERMINATE, **LIVE)}, 1, executor=executor)
    for _ in range(4):
        run.step()
    run.engine.rollout(run.client)
    run.engine.reset(run.client, EPISODE + 1)
    run.step()
    assert data.asked == []
    run.engine.rollout(run.client)
    run.engine.test()
    assert data.asked


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_what_was_refused_touches_no_weight_and_no_momentum(executor):
    life = {1: action(Op.GERMINATE, slot=0, style=3, **LIVE)}
    # GERMINATE and FOSSILIZE where they are not legal, FOSSILIZE where its gate is shut, in TRAINING, BLENDING, HOLDING
    refused = life | {
        2: action(Op.FOSSILIZE, slot=0),
        3: action(Op.GERMINATE, slot=0, blueprint=2),
        4: action(Op.PRUNE, slot=1),
        5: action(Op.SET_ALPHA_TARGET, slot=2),
        **{t: action(Op.FOSSILIZE, slot=0) for t in range(6, 10)},
    }
    rules = {"g5_contribution": 1000.0, "gate_mode": "strict", "g2_improvement": -1000.0, "g2_ratio": -1.0}
    rules["min_blending_epochs"] = 1
    trees = []
    for plan in (life, refused):
        run = Watched(9, plan, executor=executor, rules=rules)
        stages = [run.step().slots.stage[0, 0].item() for _ in range(9)]
        assert [step.effective_op.item() for step in run.client.steps] == [Op.GERMINATE] + [Op.WAIT] * 8
        trees.append({name: x.clone() for name, x in run.bench.population.state_dict().items()})
    assert {S.TRAINING, S.BLENDING, S.HOLDING} <= set(stages)
    assert trees[0]["seeds.momentum"][0].any()
    assert trees[0]["gates.momentum"][0].any()
    assert same_tree(*trees)
