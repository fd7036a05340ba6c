"""Random episodes under three rulebooks; computed once, shared by the tests that read them."""

import functools

import pytest
import torch
from driver import Driver, RandomScript, seed_costs

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.lifecycle import apply_ops, feedback, tick
from esper.leyline.tensor_dataclass import named_tensors

AUTOMATIC = LifecycleConfig(min_training_epochs=2, min_prune_age=2, embargo_epochs=2, sequential=False)
MANUAL = LifecycleConfig(
    min_training_epochs=1, min_prune_age=1, embargo_epochs=1, max_seeds=2, auto_g1=False, auto_g2=False, auto_g3=False
)
STRICT = LifecycleConfig(
    gate_mode="strict", min_training_epochs=1, min_blending_epochs=3, min_prune_age=3, embargo_epochs=0, max_seeds=0,
    sequential=False, auto_g2=False,
)  # fmt: skip
RULES = {"automatic": AUTOMATIC, "manual": MANUAL, "strict": STRICT}
SEEDS = {"automatic": 11, "manual": 12, "strict": 13}
HOSTS, SLOTS, LENGTH = 160, 3, 26

every_rulebook = pytest.mark.parametrize("name", list(RULES))


@functools.cache
def episode(name):
    """A random episode of many hosts, rollbacks included; shared by the tests of this file, which only read it."""
    script = RandomScript(SEEDS[name], HOSTS, SLOTS)
    driver = Driver(HOSTS, SLOTS, RULES[name], script.measure)
    for t in range(1, LENGTH + 1):
        driver.step(policy=script.act, panic=script.panic(t))
    return driver.steps


def same(a, b):
    return torch.allclose(a.double(), b.double(), rtol=0.0, atol=0.0, equal_nan=True)


def differing(before, after):
    """Names of the tensors in which two records differ."""
    return {name for name, value in named_tensors(after) if not same(value, dict(named_tensors(before))[name])}


def execute(step, chosen, config):
    """The op phase and the rest of the step, on the state that the policy saw in `step`."""
    active = torch.ones(len(chosen), dtype=torch.bool)
    costs = seed_costs(step.slots.stage.shape[1])
    slots, hosts, ops = apply_ops(step.slots, step.hosts, chosen, step.legal, active, step.t, costs, config)
    after, hosts_after, ticks = tick(slots, hosts, ops, torch.zeros_like(step.rolled_back), config)
    _, success, effective = feedback(hosts_after, chosen, ops, ticks, active)
    return slots, hosts, ops, after, success, effective
