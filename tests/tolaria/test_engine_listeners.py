"""Whoever listens to an engine, and whatever becomes of it, no number of a run is another one."""

import functools

import pytest
from test_engine_reads import learner

import tiny
from esper.leyline.lifecycle import LifecycleOp
from esper.tasks.presets import NULL
from tiny import same_tree
from toys import ToyClient, action, script

LENGTH = 4
PLAN = {t: action(LifecycleOp.GERMINATE, slot=t - 1, style=0, tempo=0) for t in (1, 2, 3)}
HOW = {
    "scripted": {"of": NULL},
    "streamed": {"executor": "streamed"},
    "fused": {"executor": "fused"},
}


class BrokenError(Exception):
    """What a listener raises that cannot do its work."""


def deaf(active):
    return None


def meddling(active):
    def listen(report):
        active.append(report.t)
        for value in vars(report).values():
            if hasattr(value, "fill"):
                with pytest.raises(ValueError, match="read-only"):
                    value.fill(0)

    return listen


def failing(active):
    def listen(report):
        active.append(report.t)
        raise BrokenError(f"step {report.t}")

    return listen


@functools.cache
def episode(executor, listener, trainable):
    """State of engine and client after an episode and its update, and their outputs."""
    active = []
    engine = tiny.engine(2, LENGTH, on_step=listener(active), rules={"sequential": False}, **HOW[executor])
    engine.timer.enabled = listener is not deaf
    client = learner(engine.spec) if trainable else ToyClient(engine.spec, script(2, LENGTH, PLAN))
    engine.reset(client, 0)
    stats = None
    while stats is None:
        try:
            stats = engine.rollout(client)
        except BrokenError:
            continue
    outputs = {name: str(value) for name, value in vars(stats).items() if name != "cost"}
    assert len(active) == (0 if listener is deaf else LENGTH)
    return engine.state_dict(), outputs, str(client.update()), client.state_dict()


@pytest.mark.parametrize("listener", [meddling, failing])
@pytest.mark.parametrize(
    ("executor", "trainable"),
    [("scripted", True), ("streamed", False), ("fused", False)],
)
def test_a_run_that_is_listened_to_comes_to_the_same_as_one_that_is_not(executor, trainable, listener):
    state, *outputs, policy = episode(executor, deaf, trainable)
    found, *outputs_too, its_policy = episode(executor, listener, trainable)
    assert same_tree(found, state)
    assert same_tree(its_policy, policy)
    assert outputs_too == outputs
    assert bool((state["control.slots.stage"] > 1).any())
