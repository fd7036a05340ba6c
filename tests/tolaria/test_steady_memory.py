"""A run of any length needs the memory of a short one."""

import gc
from collections.abc import Iterator

import pytest
import torch
from test_engine_reads import learner

import tiny
from esper.leyline.lifecycle import LifecycleOp
from esper.tasks.presets import NULL
from toys import ToyClient, action, script


@pytest.fixture(autouse=True)
def only_what_the_test_makes() -> Iterator[None]:
    """What all other tests and imports left is set aside; to look through it at every count takes most of the time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def living_tensors() -> tuple[int, int]:
    """Number and bytes of all tensors made in this test that something holds on to."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return len(found), sum(x.untyped_storage().nbytes() for x in found)


@pytest.mark.slow
def test_a_hundred_episodes_with_their_updates_hold_on_to_nothing():
    engine = tiny.engine(2, 4, of=NULL)
    client = learner(engine.spec)

    def rounds(first: int, last: int) -> None:
        engine.train(client, range(first, last), on_round=lambda stats, metrics: None)

    rounds(0, 3)
    before = living_tensors()
    rounds(3, 103)
    assert living_tensors() == before


@pytest.mark.slow
def test_seeds_that_come_and_go_leave_no_memory_behind():
    length = 8
    plan = {1: action(LifecycleOp.GERMINATE, slot=0, style=3), 4: action(LifecycleOp.PRUNE, slot=0)}
    plan[3] = action(LifecycleOp.GERMINATE, slot=1, blueprint=2)
    for name in ("streamed", "fused"):
        engine = tiny.engine(2, length, executor=name, rules={"sequential": False})
        sizes = []
        for episode in range(6):
            client = ToyClient(engine.spec, script(2, length, plan))  # it keeps every step
            engine.reset(client, episode)
            engine.rollout(client)
            del client
            sizes.append(living_tensors())
        assert len(set(sizes[2:])) == 1, (name, sizes)
