from dataclasses import replace

from scripted_observations import NAMES, engine_spec

from esper.leyline.lifecycle import Head, LifecycleOp, Style
from esper.tamiyo.baselines import scheduled
from esper.tamiyo.schedules import Plan, Schedule, grid, neighbours

SPEC = engine_spec(episode_length=60, min_training_epochs=10, blueprint_names=NAMES)
GERMINATE, FOSSILIZE = LifecycleOp.GERMINATE, LifecycleOp.FOSSILIZE


def rows(schedule: Schedule) -> list[tuple[int, LifecycleOp, int, int]]:
    return [(e.earliest, e.op, e.action[Head.SLOT], e.action[Head.BLUEPRINT]) for e in schedule.entries]


def test_seeds_germinate_as_soon_as_legal_and_are_fossilized_in_their_first_legal_step():
    # M = 10, tempo 5: a seed of step 3 can be fossilized in step 3 + 10 + 5 + 1 = 19, the next one M + 1 steps later
    plan = Plan(seeds=((1, 5), (0, 3)), start=3)
    assert rows(plan.schedule(SPEC)) == [(3, GERMINATE, 1, 5), (3, GERMINATE, 0, 3), (19, FOSSILIZE, 1, 0),
                                         (30, FOSSILIZE, 0, 0)]  # fmt: skip


def test_a_seed_can_be_held_and_blended_faster():
    plan = Plan(seeds=((0, 3),), hold=5, style=Style.GATED_GATE, tempo=0)
    schedule = plan.schedule(SPEC)
    assert rows(schedule)[1] == (1 + 10 + 3 + 1 + 5, FOSSILIZE, 0, 0)
    assert schedule.entries[0].action == (0, 3, Style.GATED_GATE, 0, 2, 0, 0, GERMINATE)
    assert schedule.id == "norm in r0c0, from step 1, held 5 steps, GATED_GATE, FAST"


def test_words_name_seeds_in_the_order_of_germination():
    assert (
        Plan(seeds=((0, 1), (2, 1), (1, 3)), start=5).words(SPEC)
        == "conv_light in r0c0, r0c2; norm in r0c1, from step 5"
    )
    assert Plan().words(SPEC) == "wait"


def test_the_grid_has_waiting_and_every_blueprint_in_one_two_and_all_slots():
    # 7 blueprints x (3 slots + 3 pairs + all 3) x 4 starts; three seeds: the last one needs 22 + 16 < 60 - start
    plans = grid(SPEC)
    assert len(plans) == 1 + 7 * 7 * 4
    assert len(set(plans)) == len(plans)
    for plan in plans:
        scheduled(plan.schedule(SPEC), SPEC)  # refuses what does not fit


def test_the_grid_leaves_out_what_would_be_fossilized_too_late():
    # step 17 is the first FOSSILIZE of a seed of step 1, 19 of step 3, 21 of step 5; it must come before the last step
    short = replace(SPEC, episode_length=20)
    assert {(len(plan.seeds), plan.start) for plan in grid(short)} == {(0, 1), (1, 1), (1, 3)}


def test_neighbours_differ_in_one_choice():
    plan = Plan(seeds=((0, 3), (1, 5)), start=3)
    others = neighbours(plan, SPEC)
    # 2 x 6 other blueprints, 2 seeds left out, 7 seeds in the free slot, the other order, 3 starts, 2 holds, 3 styles,
    # 2 tempos
    assert len(set(others)) == len(others) == 12 + 2 + 7 + 1 + 3 + 2 + 3 + 2
    assert plan not in others
    assert replace(plan, seeds=((0, 3),)) in others
    assert replace(plan, seeds=((0, 3), (1, 5), (2, 7))) in others
    assert neighbours(Plan(), SPEC) == [Plan(seeds=((slot, kind),)) for slot in range(3) for kind in SPEC.selectable]


def test_a_delayed_plan_starts_no_earlier():
    plan = Plan(seeds=((0, 3),), start=3)
    assert plan.delayed(5).start == 5
    assert plan.delayed(1) == plan
    assert Plan().delayed(5) == Plan()
