"""When things happen in a running engine: the life of a seed, by whole control steps on scripted hosts.

e = step of the germination, M = epochs of training, tau = ticks of the first ramp.
"""

import dataclasses

import pytest
import torch

import tiny
from esper.leyline.lifecycle import LifecycleOp
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from toys import ToyClient, action, ops_of, script

Op = LifecycleOp
NAN = float("nan")
FULL, HALF = 2, 0


def born(slot=0, tempo=0, target=FULL):
    return action(Op.GERMINATE, slot=slot, blueprint=5, style=0, tempo=tempo, alpha_target=target)


def live(plan, length, *, faults=(), script_of=None, **rules):
    """Everything that was observed and reported of one host."""
    spec = NullSpec(faults=tuple(Fault(host=0, t=t, loss=NAN) for t in faults)) if script_of is None else script_of
    reports = []
    engine = tiny.engine(1, length, of=dataclasses.replace(NULL, script=spec), rules=rules, on_step=reports.append)
    client = ToyClient(engine.spec, script(1, length, plan))
    engine.reset(client, 0)
    engine.rollout(client)
    return client, reports


def stages(client, slot=0):
    return [step.obs.slots.stage[0, slot].item() for step in client.steps]


def alphas(client):
    return [round(step.obs.slots.alpha[0, 0].item(), 4) for step in client.steps]


def ticks_to(reports, stage, slot=0):
    """The steps whose tick brought the slot to `stage`."""
    return [r.t for r in reports if r.tick_moves[2, 0, slot] > 0 and r.tick_moves[1, 0, slot] == stage]


def legal(client, op, slot=0):
    return [step.t for step in client.steps if step.obs.legal[0, op, slot]]


def test_ten_epochs_of_training_and_five_ticks_from_step_1():
    client, reports = live({1: born(tempo=1), 17: action(Op.FOSSILIZE)}, 18, min_training_epochs=10, min_prune_age=5)
    assert stages(client) == [1] + [3] * 10 + [4] * 5 + [6, 7]
    assert alphas(client) == [0.0] * 12 + [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert [ticks_to(reports, stage) for stage in (3, 4, 6)] == [[1], [11], [16]]
    measured = [step.t for step in client.steps if step.obs.slots.contribution_step[0, 0] == step.t]
    assert measured == [13, 14, 15, 16, 17]  # a fossil is not in question any more
    assert legal(client, Op.FOSSILIZE) == [17]
    assert legal(client, Op.PRUNE) == [*range(6, 12), 17]
    assert legal(client, Op.GERMINATE, slot=1) == [1, *range(12, 19)]


@pytest.mark.parametrize("t", [3, 5, 8])
def test_after_a_rollback_a_slot_is_germinable_in_seven_steps_too(t):
    # M = 3, tau = 3: TRAINING, BLENDING, HOLDING; the op of the panicking host is not executed
    client, reports = live({1: born(), t: action(Op.FOSSILIZE)}, t + 7, faults=(t,), min_training_epochs=3)
    assert reports[t - 2].stage[0, 0] == {3: 3, 5: 4, 8: 6}[t]
    assert reports[t - 1].rolled_back.tolist() == [[True, False, False]]
    assert ops_of(client)[t - 1] == [Op.WAIT]
    assert [ticks_to(reports, stage) for stage in (9, 10, 1)] == [[t], [t + 5], [t + 6]]
    assert legal(client, Op.GERMINATE)[1:] == [t + 7]


# -- two players ------------------------------------------------------------------------------------------------------


def interactions(weight):
    """What was measured in each step with two seeds, active together from step 4 on."""
    plan = {1: born(slot=0), 2: born(slot=2)}
    client, reports = live(plan, 8, script_of=NullSpec(interaction=weight), sequential=False)
    return [(inputs.slots, inputs.interactions[0]) for inputs in client.inputs], reports


@pytest.mark.parametrize("weight", [0.0, 0.05, -0.05])
def test_two_players_tell_their_interaction_in_every_step_and_it_is_zero_where_they_only_add_up(weight):
    additive, _ = interactions(0.0)
    found, reports = interactions(weight)
    assert [r.num_coalitions.item() for r in reports] == [1, 1, 1, 2, 4, 4, 4, 4]
    for t, ((plain, _), (slots, measured)) in enumerate(zip(additive, found, strict=True), start=1):
        together = t >= 5
        assert bool(measured[0, 2].isnan()) is not together, t
        assert bool(slots.interaction_sum[0, [0, 2]].isnan().any()) is not together, t
        assert bool(measured.diagonal().isnan().all() & measured[1].isnan().all())
        if together:
            v = plain.contribution[0]  # with nothing between them, what each adds is what it is worth
            want = weight * v[0].item() * v[2].item()
            assert abs(want) > 1e-3 or weight == 0.0
            assert measured[0, 2].item() == measured[2, 0].item() == pytest.approx(want, abs=2e-5)
            assert slots.interaction_sum[0, [0, 2]].tolist() == pytest.approx([want] * 2, abs=2e-5)
            assert slots.boost_received[0, [0, 2]].tolist() == pytest.approx([max(want, 0.0)] * 2, abs=2e-5)
            torch.testing.assert_close(slots.contribution[0, [0, 2]], v[[0, 2]] + want, atol=2e-5, rtol=0.0)
