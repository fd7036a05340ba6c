import pytest
import torch
from scripted_observations import TRANSFORMER, engine_spec, legal_only, observation, step

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp, Style
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Schedule, ScheduleEntry, canonical_action, fill, single

WAIT, GERMINATE, SET_TARGET, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp


def entry(earliest: int, op: LifecycleOp, **heads: int) -> ScheduleEntry:
    return ScheduleEntry(earliest, canonical_action(op, **heads))


def schedule(*entries: ScheduleEntry) -> Schedule:
    return Schedule(id="test", version=1, entries=entries)


def summary(s: Schedule) -> list[tuple[int, LifecycleOp, int, int]]:
    return [(e.earliest, e.op, e.action[Head.SLOT], e.action[Head.BLUEPRINT]) for e in s.entries]


def drive(policy, legal: torch.Tensor, steps: range, refused: set[int] = frozenset()) -> list[tuple[int, int]]:
    """(op, slot) of host 0 per step under constant `legal`; in the steps of `refused` the gate says no."""
    said = []
    for t in steps:
        obs = observation(t, legal)
        act = policy.act(obs)
        effective = act.actions[:, Head.OP] * (t not in refused)
        policy.store(step(obs, act, effective_op=effective))
        said.append((act.actions[0, Head.OP].item(), act.actions[0, Head.SLOT].item()))
    return said


def test_single_grows_one_norm_seed():
    # M = 10, tempo 5: GERMINATE in step 1, first legal FOSSILIZE in step 1 + 10 + 5 + 1 = 17
    assert summary(single(engine_spec())) == [(1, GERMINATE, 0, 3), (17, FOSSILIZE, 0, 0)]
    assert single(engine_spec()).entries[0].action == (0, 3, Style.SIGMOID_ADD, 1, 2, 0, 0, GERMINATE)


def test_fill_grows_a_light_seed_in_every_slot():
    assert summary(fill(engine_spec())) == [
        (1, GERMINATE, 0, 1), (12, GERMINATE, 1, 1), (17, FOSSILIZE, 0, 0),
        (23, GERMINATE, 2, 1), (28, FOSSILIZE, 1, 0), (39, FOSSILIZE, 2, 0),
    ]  # fmt: skip
    assert summary(fill(engine_spec(num_slots=1, **TRANSFORMER)))[0] == (1, GERMINATE, 0, 10)


def test_fill_puts_fossilization_first_where_both_fall_on_one_step():
    # M = 4: slot 2 germinates in step 11, where slot 0 can be fossilized
    at_11 = [row for row in summary(fill(engine_spec(min_training_epochs=4))) if row[0] == 11]
    assert at_11 == [(11, FOSSILIZE, 0, 0), (11, GERMINATE, 2, 1)]


def test_an_entry_waits_for_its_step_and_is_executed_once():
    policy = scheduled(schedule(entry(3, GERMINATE, slot=1, blueprint=2)), engine_spec())
    legal = legal_only(1, 3, (GERMINATE, 1))
    assert drive(policy, legal, range(1, 6)) == [(WAIT, 0), (WAIT, 0), (GERMINATE, 1), (WAIT, 0), (WAIT, 0)]


def test_a_due_entry_that_is_not_legal_is_skipped_over_and_tried_again():
    policy = scheduled(schedule(entry(1, FOSSILIZE, slot=0), entry(1, GERMINATE, slot=1, blueprint=2)), engine_spec())
    assert drive(policy, legal_only(1, 3, (GERMINATE, 1)), range(1, 3)) == [(GERMINATE, 1), (WAIT, 0)]
    assert drive(policy, legal_only(1, 3, (FOSSILIZE, 0)), range(3, 5)) == [(FOSSILIZE, 0), (WAIT, 0)]


def test_an_entry_that_its_gate_refuses_is_tried_again():
    policy = scheduled(schedule(entry(1, FOSSILIZE, slot=0)), engine_spec())
    said = drive(policy, legal_only(1, 3, (FOSSILIZE, 0)), range(1, 5), refused={1, 2})
    assert said == [(FOSSILIZE, 0), (FOSSILIZE, 0), (FOSSILIZE, 0), (WAIT, 0)]


def test_a_host_that_was_rolled_back_executed_nothing():
    policy = scheduled(single(engine_spec(num_envs=2)), engine_spec(num_envs=2))
    obs = observation(1, legal_only(2, 3, (GERMINATE, 0)))
    act = policy.act(obs)
    policy.store(step(obs, act, valid=torch.tensor([True, False])))
    again = policy.act(observation(2, legal_only(2, 3, (GERMINATE, 0)))).actions
    assert again[:, Head.OP].tolist() == [WAIT, GERMINATE]


def test_hosts_follow_the_schedule_independently():
    policy = scheduled(single(engine_spec(num_envs=2)), engine_spec(num_envs=2))
    legal = legal_only(2, 3, (GERMINATE, 0))
    legal[1, GERMINATE, 0] = False
    obs = observation(1, legal)
    act = policy.act(obs)
    assert act.actions[:, Head.OP].tolist() == [GERMINATE, WAIT]
    policy.store(step(obs, act))
    later = policy.act(observation(2, legal_only(2, 3, (GERMINATE, 0)))).actions
    assert later[:, Head.OP].tolist() == [WAIT, GERMINATE]


def test_a_new_episode_starts_the_schedule_anew():
    policy = scheduled(single(engine_spec()), engine_spec())
    legal = legal_only(1, 3, (GERMINATE, 0))
    assert drive(policy, legal, range(1, 3)) == [(GERMINATE, 0), (WAIT, 0)]
    policy.begin_rollout(1, torch.arange(1))
    assert drive(policy, legal, range(1, 3)) == [(GERMINATE, 0), (WAIT, 0)]


def test_switching_to_the_gate_needs_a_gate():
    policy = scheduled(schedule(entry(1, SET_TARGET, slot=1, style=Style.GATED_GATE)), engine_spec())
    legal = legal_only(1, 3, (SET_TARGET, 1))
    assert policy.act(observation(1, legal)).actions.tolist() == [list(CANONICAL_ACTION)]
    gates = torch.tensor([[False, True, False]])
    assert policy.act(observation(1, legal, has_gate=gates)).actions[0, Head.OP] == SET_TARGET


def test_gates_that_open_by_hand_are_opened_when_nothing_else_can_be_done():
    spec = engine_spec(auto_gates=(True, False, True))
    policy = scheduled(schedule(entry(2, GERMINATE, slot=2, blueprint=2)), spec)
    legal = legal_only(1, 3, (ADVANCE, 1), (ADVANCE, 2), (GERMINATE, 2))
    assert drive(policy, legal, range(1, 5)) == [(ADVANCE, 1), (GERMINATE, 2), (ADVANCE, 1), (ADVANCE, 1)]


def test_rows_of_plain_values_make_the_same_schedule():
    a = single(engine_spec())
    assert Schedule.from_rows("single", 1, [(e.earliest, e.action) for e in a.entries]) == a


@pytest.mark.parametrize(
    ("entries", "complaint"),
    [
        ((entry(5, WAIT), entry(4, WAIT)), "step 4 comes after step 5; sort the entries"),
        ((ScheduleEntry(1, (0, 0)),), "has 2 values; give 8"),
        ((entry(1, PRUNE, slot=3),), r"slot is 3 at step 1; this run has 0\.\.2"),
        ((entry(1, GERMINATE, blueprint=8),), "blueprint 8 at step 1 cannot be selected"),
    ],
)
def test_a_schedule_that_cannot_be_followed_is_refused(entries, complaint):
    with pytest.raises(ConfigError, match=complaint):
        scheduled(schedule(*entries), engine_spec())
