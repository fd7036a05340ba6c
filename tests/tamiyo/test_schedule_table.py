"""Many schedules in one engine are the same as each alone."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scripted_observations import engine_spec, observation, step

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.tamiyo.schedules import FixedSchedules, Schedule, ScheduleEntry, ScriptedPolicy, canonical_action

OPS = (LifecycleOp.GERMINATE, LifecycleOp.PRUNE, LifecycleOp.FOSSILIZE, LifecycleOp.SET_ALPHA_TARGET)


ROWS = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(OPS), st.integers(0, 2)), max_size=5)


def schedule(rows: list[tuple[int, LifecycleOp, int]]) -> Schedule:
    """A schedule of (earliest step, operation, slot)."""
    entries = [
        ScheduleEntry(earliest, canonical_action(op, slot=slot, blueprint=3 * (op == LifecycleOp.GERMINATE)))
        for earliest, op, slot in sorted(rows)
    ]
    return Schedule(id="drawn", version=1, entries=tuple(entries))


def actions(policy, legal_tN6S, refused_tN) -> torch.Tensor:
    """The actions of an episode [T, N, 8]; in the marked steps the gate refuses the operation."""
    said = []
    for t, (legal, refused) in enumerate(zip(legal_tN6S, refused_tN, strict=True), 1):
        obs = observation(t, legal)
        act = policy.act(obs)
        policy.store(step(obs, act, effective_op=act.actions[:, Head.OP] * ~refused))
        said.append(act.actions)
    return torch.stack(said)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(ROWS, min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_host_by_host_a_table_is_the_single_schedule(drawn, numbers, seed, manual):
    several, which = [schedule(rows) for rows in drawn], [number % len(drawn) for number in numbers]
    own = torch.Generator().manual_seed(seed)
    n, steps = len(which), 8
    legal = torch.rand(steps, n, 6, 3, generator=own) < 0.5
    legal[:, :, LifecycleOp.WAIT] = True
    refused = torch.rand(steps, n, generator=own) < 0.3
    changes = {"auto_gates": (True, not manual, True)}
    spec = engine_spec(num_envs=n, **changes)
    together = ScriptedPolicy(FixedSchedules(several, spec).following(torch.tensor(which)), spec)
    said = actions(together, legal, refused)
    for host, k in enumerate(which):
        one = engine_spec(num_envs=1, **changes)
        alone = ScriptedPolicy(FixedSchedules([several[k]], one), one)
        mine = slice(host, host + 1)
        assert said[:, mine].tolist() == actions(alone, legal[:, mine], refused[:, mine]).tolist()


def test_every_schedule_of_a_table_must_fit_the_engine():
    good = Schedule(id="good", version=1, entries=())
    bad = Schedule(id="bad", version=1, entries=(ScheduleEntry(1, canonical_action(LifecycleOp.PRUNE, slot=3)),))
    with pytest.raises(ConfigError, match=r"schedule 'bad': slot is 3 at step 1; this run has 0\.\.2"):
        FixedSchedules([good, bad], engine_spec())
