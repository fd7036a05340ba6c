"""The fused train pass replayed: weights and measurements of the eager one, through every change of structure."""

import pytest
import torch

import tiny
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import Algorithm, AlphaMode, SeedStage
from esper.tolaria.executors.fused.executor import FusedExecutor
from esper.tolaria.executors.fused.training_program import structure_key
from tape import TapeBackend
from tiny import Bench, adamw, same_tree
from toys import ToyClient, action, script

S, GATE = SeedStage, Algorithm.GATE


def references(num_envs: int = 3, **settings: object) -> tuple[Bench, FusedExecutor, Bench, FusedExecutor, TapeBackend]:
    """Two equal benches: one eager, one replayed."""
    eager, replayed, tape = Bench(num_envs, **settings), Bench(num_envs, **settings), TapeBackend()
    return (
        eager,
        FusedExecutor(eager.executor.data),
        replayed,
        FusedExecutor(replayed.executor.data, capture_backend=tape),
        tape,
    )


def train_both(found: tuple, t: int) -> None:
    """One epoch each; metrics and weights must be equal to the bit."""
    eager, plain, replayed, captured, _ = found
    want, got = plain.train_epoch(t, eager.slots), captured.train_epoch(t, replayed.slots)
    for name, value in vars(want).items():
        torch.testing.assert_close(getattr(got, name), value, rtol=0, atol=0, equal_nan=True, msg=name)
    assert same_tree(captured.state_dict(), plain.state_dict())


@pytest.mark.parametrize("optimizer", [tiny.SGD, adamw()], ids=["sgd", "adamw"])
def test_every_epoch_of_a_changing_population_is_that_of_the_eager_executor(optimizer):
    found = references(optimizer=optimizer)
    eager, _, replayed, _, tape = found
    train_both(found, 1)
    for bench in (eager, replayed):
        bench.grow("r0c0", "conv_light", S.HOLDING, alpha=1.0)
        bench.grow("r1c0", "conv_heavy", S.BLENDING, alpha=0.3, algorithm=GATE, hosts=[0, 2])
        bench.grow("r0c1", "norm", S.TRAINING, algorithm=Algorithm.MULTIPLY, hosts=[1])
    train_both(found, 2)
    captures = tape.captured
    for bench in (eager, replayed):
        bench.set("r1c0", [0, 2], alpha=0.7)
    train_both(found, 3)
    assert tape.captured == captures + 1, "another alpha is no other structure; the short last batch came again"
    for bench in (eager, replayed):
        bench.set("r0c0", 0, stage=int(S.BLENDING), alpha=0.5, alpha_mode=int(AlphaMode.DOWN))
    train_both(found, 4)
    train_both(found, 5)
    for bench in (eager, replayed):
        bench.set("r0c0", 0, alpha=0.2)
    captures = tape.captured
    train_both(found, 6)
    assert tape.captured == captures
    assert tape.replayed > 10


def test_a_structure_that_returns_is_replayed_with_the_weights_of_now():
    found = references(2)
    eager, _, replayed, _, tape = found
    for t in (1, 2):
        train_both(found, t)
    for bench in (eager, replayed):
        bench.grow("r0c0", "conv_light", S.TRAINING, hosts=[1])
    train_both(found, 3)
    for bench in (eager, replayed):
        bench.set("r0c0", 1, stage=int(S.DORMANT), alpha=0.0)
    captures = tape.captured
    train_both(found, 4)
    assert tape.captured == captures


def test_a_frozen_seed_is_replayed_with_the_weights_it_has_learned_meanwhile():
    found = references(2)
    eager, _, replayed, _, tape = found
    falling = {"stage": int(S.BLENDING), "alpha": 0.5, "alpha_mode": int(AlphaMode.DOWN)}
    for bench in (eager, replayed):
        bench.grow("r0c0", "conv_light", S.BLENDING, alpha=0.5)
        bench.grow("r1c0", "norm", S.HOLDING, alpha=1.0, algorithm=GATE)
    t = 0
    for mode in (AlphaMode.DOWN, AlphaMode.HOLD, AlphaMode.DOWN):
        for bench in (eager, replayed):
            for slot in ("r0c0", "r1c0"):
                bench.set(slot, 0, **falling | {"alpha_mode": int(mode)})
        for _ in range(2):
            t += 1
            train_both(found, t)
    assert tape.captured == 2 * 3, "two structures: a batch, a short batch, a step"


def test_half_precision_is_replayed_with_its_loss_scales():
    found = references(2, scaler_dtype=torch.bfloat16)
    for bench in (found[0], found[2]):
        bench.executor.data.scaler.enabled = True
        bench.executor.data.scaler.scale.copy_(torch.tensor([4.0, torch.inf]))
    for t in (1, 2, 3):
        train_both(found, t)
    assert found[2].executor.data.scaler.good_steps.tolist() == found[0].executor.data.scaler.good_steps.tolist()
    assert found[2].executor.data.scaler.good_steps[0] == 9  # three batches in each of three epochs


def test_whatever_changes_the_operations_of_a_pass_is_in_the_key():
    bench = Bench(2)
    keys = [structure_key(bench.structure())]
    bench.grow("r0c0", "conv_light", S.TRAINING)
    keys.append(structure_key(bench.structure()))
    for change in (
        {"alpha": 0.5, "stage": int(S.BLENDING)},
        {"alpha_mode": int(AlphaMode.DOWN)},
        {"blueprint": 4},
        {"algorithm": int(Algorithm.MULTIPLY)},
        {"algorithm": int(GATE), "has_gate": True},
    ):
        bench.set("r0c0", 1, apply_structure=False, **change)
        keys.append(structure_key(bench.structure()))
    assert len(set(keys)) == len(keys)
    bench.set("r0c0", 1, apply_structure=False, alpha=0.7)
    assert structure_key(bench.structure()) == keys[-1]
    bench.set("r1c0", 1, apply_structure=False, blueprint=3)  # of an empty slot
    assert structure_key(bench.structure()) == keys[-1]


def test_a_whole_episode_replayed_is_the_eager_one_to_the_bit():
    length = 9
    plan = {t: action(LifecycleOp.GERMINATE, slot=t // 2, style=t, tempo=0, blueprint=t) for t in (1, 3)}
    plan |= {5: action(LifecycleOp.PRUNE, slot=0, alpha_speed=1), 7: {0: action(LifecycleOp.FOSSILIZE, slot=1)}}
    trees, tape = [], TapeBackend()
    for recorder in (None, tape):
        engine = tiny.engine(3, length, executor="fused", rules={"sequential": False})
        engine.executor = FusedExecutor(engine.executor.data, capture_backend=recorder)
        client = ToyClient(engine.spec, script(3, length, plan))
        for episode in (0, 1):
            engine.reset(client, episode)
            engine.rollout(client)
        trees.append(engine.state_dict())
    assert same_tree(*trees)
    assert tape.replayed > tape.captured > 0
