"""Transitions, operations, the rulebook against its scalar twin, and invariants, over random episodes."""

import copy
import functools

import pytest
import torch
from driver import HOST_PARAMS, Driver, RandomScript, action, measured, seed_costs
from scalar_rules import cost_dict, measurement_dicts, new_host
from scalar_rules import step as scalar_step

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.lifecycle import apply_ops, feedback, tick
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.tensor_dataclass import named_tensors

Op = LifecycleOp
DORMANT, GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED, PRUNED, EMBARGOED, RESETTING = 1, 2, 3, 4, 6, 7, 8, 9, 10

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
    """A random episode of many hosts, rollbacks included; shared by these tests, which only read it."""
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


# -- transitions ------------------------------------------------------------------------------------------------------


_OP, _AUTO, _ADVANCE, _SCHEDULED, _COOLDOWN = range(1, 6)
CAUSES = {
    (DORMANT, GERMINATED): {_OP},
    (GERMINATED, TRAINING): {_AUTO, _ADVANCE},
    (GERMINATED, PRUNED): {_OP},
    (TRAINING, BLENDING): {_AUTO, _ADVANCE},
    (TRAINING, PRUNED): {_OP},
    (BLENDING, HOLDING): {_AUTO, _ADVANCE},
    (BLENDING, PRUNED): {_OP, _SCHEDULED},
    (HOLDING, FOSSILIZED): {_OP},
    (HOLDING, BLENDING): {_OP},
    (HOLDING, PRUNED): {_OP},
    (PRUNED, EMBARGOED): {_COOLDOWN},
    (EMBARGOED, RESETTING): {_COOLDOWN},
    (RESETTING, DORMANT): {_COOLDOWN},
}
"""By what each transition comes about; there are no others."""


def test_each_transition_has_the_cause_that_makes_it():
    causes = {}
    for name in RULES:
        for step in episode(name):
            for part in (step.ops.transitions, step.ticks.transitions):
                assert torch.equal(part.from_stage != part.to_stage, part.cause > 0)
                told = torch.stack((part.from_stage, part.to_stage, part.cause), dim=-1)[part.cause > 0]
                for source, target, cause in told.unique(dim=0).tolist():
                    causes.setdefault((source, target), set()).add(cause)
    assert causes == CAUSES


# -- operations -------------------------------------------------------------------------------------------------------


@every_rulebook
def test_the_random_states_offer_every_op_both_legally_and_illegally(name):
    legal = torch.stack([step.legal for step in episode(name)])
    manual = not (RULES[name].auto_g1 and RULES[name].auto_g2 and RULES[name].auto_g3)
    for op in Op:
        assert legal[:, :, op].any().item() == (op != Op.ADVANCE or manual)
        assert legal[:, :, op].all().item() == (op == Op.WAIT)


def test_a_seed_that_contributes_one_point_exactly_is_counted_as_contributing():
    strict = LifecycleConfig(gate_mode="strict", min_training_epochs=1, min_blending_epochs=1)

    def contributes(t, slots):
        worth = torch.tensor([[1.0], [1.0 - 2.0**-24], [0.5]])
        return measured(t, slots, contribution=torch.where(slots.alpha > 0.0, worth, float("nan")))

    for config, kept in ((LifecycleConfig(min_training_epochs=1), [1, 1, 1]), (strict, [1, 0, 0])):
        driver = Driver(3, 1, config, contributes)
        driver.run({1: action(Op.GERMINATE, tempo=0), 6: action(Op.FOSSILIZE)}, until=6)
        assert driver.hosts.n_fossilized.tolist() == kept
        assert driver.hosts.n_contributing.tolist() == [1, 0, 0]


# -- when things happen -----------------------------------------------------------------------------------------------


def tick_of(steps, stage):
    """The steps whose tick brought the first slot to `stage`."""
    moves = {step.t: step.ticks.transitions for step in steps}
    return [t for t, m in moves.items() if m.cause[0, 0] > 0 and m.to_stage[0, 0] == stage]


def legal_in(steps, op, slot=0, after=0):
    """The steps later than `after` in which the op is legal on the slot."""
    return [step.t for step in steps if step.legal[0, op, slot] and step.t > after]


@pytest.mark.parametrize(("m", "tempo", "ticks", "e"), [(10, 1, 5, 1), (3, 0, 3, 1), (3, 2, 8, 4)])
def test_every_event_of_an_automatic_life_has_its_step(m, tempo, ticks, e):
    """Germinated in step e, with m epochs of training and `ticks` of the first ramp. A tick is seen a step later."""
    born, rules = action(Op.GERMINATE, tempo=tempo, style=0), LifecycleConfig(min_training_epochs=m)
    steps = Driver(1, 2, rules).run({e: born}, until=e + m + ticks + 2)
    assert tick_of(steps, 3) == [e]
    assert tick_of(steps, 4) == [e + m]
    assert tick_of(steps, 6) == [e + m + ticks]
    # the train pass of step u runs with the state that step u began with
    assert [step.t for step in steps if step.began.stage[0, 0] == 3] == list(range(e + 1, e + m + 1))
    silent = [step.t for step in steps if step.slots.stage[0, 0] == 4 and step.slots.alpha[0, 0] == 0.0]
    assert silent == [e + m + 1]
    moved = [step.t for step in steps if step.after.alpha[0, 0] != step.slots.alpha[0, 0]]
    assert moved == list(range(e + m + 1, e + m + ticks + 1))
    measured = [step.t for step in steps if step.slots.contribution_step[0, 0] == step.t]
    assert measured[0] == e + m + 2
    assert legal_in(steps, Op.FOSSILIZE)[0] == e + m + ticks + 1
    assert legal_in(steps, Op.GERMINATE, slot=1, after=e)[0] == e + m + 1
    resting = [step.t for step in steps if step.t >= e + 5 and step.slots.alpha_mode[0, 0] == 0]
    assert legal_in(steps, Op.PRUNE) == resting


# -- manual gates -----------------------------------------------------------------------------------------------------


# -- the way out ------------------------------------------------------------------------------------------------------


# -- partial targets --------------------------------------------------------------------------------------------------


# -- the scalar twin --------------------------------------------------------------------------------------------------


def assert_equal_to_twins(slots, hosts, references, t):
    """Field by field; floats up to single precision."""
    for name, value in named_tensors(slots):
        want = torch.tensor(
            [[slot[name] for slot in reference["slots"]] for reference in references], dtype=value.dtype
        )
        torch.testing.assert_close(
            value, want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, n=name: f"{t} {n} {m}"
        )
    for name, value in named_tensors(hosts):
        want = torch.tensor([reference[name] for reference in references], dtype=value.dtype)
        torch.testing.assert_close(
            value, want, rtol=1e-4, atol=1e-4, equal_nan=True, msg=lambda m, n=name: f"{t} {n} {m}"
        )


@every_rulebook
def test_the_batched_rules_are_their_scalar_twin_host_by_host_over_whole_episodes(name):
    config, costs = RULES[name], cost_dict(seed_costs(SLOTS))
    references = [new_host(SLOTS, HOST_PARAMS) for _ in range(HOSTS)]
    for step in episode(name):
        seen, panic, chosen = measurement_dicts(step.seen), step.panic.tolist(), step.actions.tolist()
        told = [
            scalar_step(reference, seen[n], chosen[n], step.t, panic[n], costs, config)
            for n, reference in enumerate(references)
        ]
        assert step.success.tolist() == [success for success, _ in told]
        assert step.effective.tolist() == [effective for _, effective in told]
        assert_equal_to_twins(step.after, step.hosts_after, references, step.t)


# -- invariants -------------------------------------------------------------------------------------------------------


@every_rulebook
def test_the_invariants_of_a_slot_hold_in_every_observed_and_every_final_state(name):
    for step in episode(name):
        for slots in (step.slots, step.after):
            stage, alpha, mode = slots.stage, slots.alpha, slots.alpha_mode
            active, arrived = torch.isin(stage, torch.tensor([4, 6, 7])), torch.isin(stage, torch.tensor([6, 7]))
            has_module = torch.isin(stage, torch.tensor([2, 3, 4, 6, 7]))
            assert torch.isin(stage, torch.tensor([1, 2, 3, 4, 6, 7, 8, 9, 10])).all()
            assert ((alpha >= 0.0) & (alpha <= 1.0)).all()
            assert (slots.alpha_done == slots.alpha_total)[mode == 0].all()
            assert (slots.alpha_done < slots.alpha_total)[mode != 0].all()
            assert ((alpha == 1.0) & (slots.alpha_target == 1.0) & (mode == 0))[arrived].all()
            assert (alpha == 0.0)[~active].all()
            assert (stage == BLENDING)[mode != 0].all()
            assert ((slots.params > 0) == has_module).all()
            assert ((slots.alpha_curve > 0) == has_module).all()
            assert (slots.has_gate <= has_module).all()
            assert ((slots.serial >= 0) == (stage != DORMANT)).all()
            assert ((slots.blueprint > 0) == (stage != DORMANT)).all()
            assert (torch.isnan(slots.acc_at_blending_start) == ~active).all()
            assert ((slots.contribution_step >= 0) == ~torch.isnan(slots.contribution)).all()


def test_every_field_of_a_host_is_filled_and_changes_in_the_course_of_an_episode():
    steps = episode("automatic")
    idle = {
        name
        for name, value in named_tensors(steps[0].hosts)
        if all(same(getattr(step.hosts_after, name), value) for step in steps)
    }
    assert idle == {"host_params"}


# -- purity -----------------------------------------------------------------------------------------------------------


def test_equal_calls_agree_and_change_nothing_that_they_were_given():
    step = episode("manual")[-1]
    before, nothing = copy.deepcopy(step), torch.zeros_like(step.rolled_back)
    active, costs = torch.ones(HOSTS, dtype=torch.bool), seed_costs(SLOTS)

    def execute():
        slots, hosts, ops = apply_ops(step.slots, step.hosts, step.actions, step.legal, active, step.t, costs, MANUAL)
        after, hosts_after, ticks = tick(slots, hosts, ops, nothing, MANUAL)
        hosts_after, _, _ = feedback(hosts_after, step.actions, ops, ticks, active)
        return slots, hosts, ops, after, hosts_after

    for one, two in zip(execute(), execute(), strict=True):
        assert differing(one, two) == set()
    assert differing(before.slots, step.slots) == differing(before.hosts, step.hosts) == set()
