"""Hosts in an engine do not know each other: any number, any order and any share of them gives equal results."""

import dataclasses

import pytest
import torch

import tiny
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.tensor_dataclass import named_tensors
from esper.tasks.null import NullSpec
from esper.tasks.presets import NULL
from tiny import bit_equal
from toys import ToyClient, action, script

Op = LifecycleOp
LENGTH = 8
NOISY = dataclasses.replace(NULL, script=NullSpec(sigma=2.0, interaction=0.1))


def lives(num_envs, first=0):
    """Every host lives its own life: slots, blueprints, styles, prunes and fossils by its global number."""
    plan = {}
    for local in range(num_envs):
        host = first + local
        s, born = host % 3, 1 + host % 2
        end = action(Op.FOSSILIZE, slot=s) if host % 3 else action(Op.PRUNE, slot=s, alpha_speed=host % 4)
        own = {
            born: action(Op.GERMINATE, slot=s, blueprint=1 + host % 7, style=host % 4, tempo=0),
            born + 3: action(Op.GERMINATE, slot=(s + 1) % 3, blueprint=1 + (host + 3) % 7, style=1),
            born + 5: end,
            born + 6: end,
        }
        for t, row in own.items():
            plan.setdefault(t, {})[local] = row
    return script(num_envs, LENGTH, plan)


def run(num_envs, *, first=0, order=None, of=None):
    """States after each step, and at the end the parameters; `order` permutes the hosts of the engine."""
    engine = tiny.engine(num_envs, LENGTH, of=of, host_offset=first)
    actions = lives(num_envs, first)
    if order is not None:
        owner = getattr(engine.executor, "population", engine.executor)
        owner.host_ids = engine.spec.host_ids()[order]
        actions = actions[:, order]
    client, states = ToyClient(engine.spec, actions), []
    engine.reset(client, 2)
    for _ in range(LENGTH):
        engine.step(client)
        states.append({name: x for name, x in named_tensors(engine.state)})
    engine.apply_structure()
    tree = {name: x for name, x in engine.executor.state_dict().items() if x.dim() == 2}
    return states, tree


def assert_rows_equal(found, want, found_rows, want_rows):
    """States and parameters of the hosts `found_rows` of one run are those of `want_rows` of another."""
    for t, (mine, theirs) in enumerate(zip(found[0], want[0], strict=True), start=1):
        for name in theirs:
            assert bit_equal(mine[name][found_rows], theirs[name][want_rows]), (t, name)
    num_found, num_want = len(found[0][0]["hosts.val_acc"]), len(want[0][0]["hosts.val_acc"])
    for name in want[1]:
        mine = found[1][name].view(num_found, -1)[found_rows]
        assert bit_equal(mine, want[1][name].view(num_want, -1)[want_rows]), name


@pytest.fixture(scope="module")
def twelve():
    return run(12)


def test_the_lives_of_the_hosts_are_full_of_events(twelve):
    states, tree = twelve
    seen = {stage for state in states for stage in state["slots.stage"].flatten().tolist()}
    assert seen >= {1, 3, 4, 6, 7, 9}
    assert len(set(states[-1]["hosts.val_acc"].tolist())) > 4
    assert bool(tree["population.gates.params"].any())


def test_the_first_hosts_in_another_order_are_the_first_of_more(twelve):
    order = torch.tensor([3, 0, 4, 1, 2])
    assert_rows_equal(run(5, order=order), twelve, torch.arange(5), order)


def test_a_share_of_the_hosts_runs_as_it_does_in_the_whole(twelve):
    assert_rows_equal(run(3, first=7), twelve, torch.arange(3), torch.arange(7, 10))


def test_scripted_hosts_with_noise_do_not_know_each_other_either():
    whole = run(64, of=NOISY)
    assert_rows_equal(run(10, of=NOISY, first=40), whole, torch.arange(10), torch.arange(40, 50))
    order = torch.arange(64).flip(0)
    assert_rows_equal(run(64, of=NOISY, order=order), whole, torch.arange(64), order)
    noise = [state["hosts.val_acc"] for state in whole[0]]
    assert len(set(noise[0].tolist())) == 64
