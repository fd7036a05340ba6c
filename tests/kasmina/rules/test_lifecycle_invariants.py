"""What holds in every state of every episode: invariants, clocks and their only writer, purity."""

import ast
import re
from pathlib import Path

import torch
from driver import RandomScript, seed_costs
from episodes import HOSTS, MANUAL, SLOTS, differing, episode, every_rulebook, execute, same
from scalar_rules import BLENDING, DORMANT, EMPTY_SLOT

import esper.kasmina
from esper.kasmina.rules.lifecycle import apply_ops, tick
from esper.leyline.tensor_dataclass import named_tensors, row

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


@every_rulebook
def test_a_dormant_slot_is_empty_in_every_field(name):
    for step in episode(name)[::5]:
        dormant = step.after.stage == DORMANT
        for field, value in named_tensors(step.after):
            assert same(value[dormant], torch.full((int(dormant.sum()),), float(EMPTY_SLOT[field]))), field


@every_rulebook
def test_clocks_tell_how_long_ago_the_seed_was_born_and_the_stage_entered(name):
    born = torch.full((HOSTS, SLOTS), -1)
    entered = born.clone()
    for step in episode(name):
        occupied = step.began.stage != DORMANT
        # observed at u: age = u - birth, epochs_in_stage = u - 1 - entry; a rollback enters before the observation
        assert torch.equal(step.began.age, torch.where(occupied, step.t - born, 0))
        assert torch.equal(step.began.epochs_in_stage, torch.where(occupied, step.t - 1 - entered, 0))
        born = torch.where(step.ops.germinated, step.t, born)
        entered = torch.where(step.after.stage != step.began.stage, step.t, entered)
        # left and entered again within a step: TRAINING of a new seed in a slot is never entered from itself
        assert torch.equal(step.ticks.transitions.cause > 0, step.after.stage != step.ticks.transitions.from_stage)


@every_rulebook
def test_ages_and_clocks_are_not_moved_by_measurements_or_ops(name):
    for step in episode(name):
        still = ~step.rolled_back
        assert torch.equal(step.slots.age, step.began.age)
        assert torch.equal(step.slots.epochs_in_stage[still], step.began.epochs_in_stage[still])


def test_every_field_of_a_host_is_filled_and_changes_in_the_course_of_an_episode():
    steps = episode("automatic")
    idle = {
        name
        for name, value in named_tensors(steps[0].hosts)
        if all(same(getattr(step.hosts_after, name), value) for step in steps)
    }
    assert idle == {"host_params"}


# -- who writes the clocks --------------------------------------------------------------------------------------------


KASMINA = Path(esper.kasmina.__file__).parent


def functions():
    """(function, its syntax tree) of every function of the package that holds the rules."""
    for path in KASMINA.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from ((node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def writers(field):
    """(function, source of the written value) wherever a call or a dictionary names the field."""
    found = set()
    for name, function in functions():
        for node in ast.walk(function):
            written = []
            if isinstance(node, ast.Call):
                written = [keyword.value for keyword in node.keywords if keyword.arg == field]
            elif isinstance(node, ast.Dict):
                keys = zip(node.keys, node.values, strict=True)
                written = [value for key, value in keys if isinstance(key, ast.Constant) and key.value == field]
            found |= {(name, "0" if ast.unparse(value) == "0" else "computed") for value in written}
    return found


def test_only_the_tick_advances_the_clocks_and_others_only_reset_them():
    assert writers("age") == {("tick", "computed")}
    assert writers("epochs_in_stage") == {("tick", "computed"), ("transition", "0")}


def test_nothing_outside_the_rules_makes_another_state_with_a_clock_in_it():
    makers = re.compile(r"(\w*replace|select|SlotState|setattr|object\.__setattr__)\b")
    for path in KASMINA.parent.rglob("*.py"):
        if KASMINA in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and makers.fullmatch(ast.unparse(node.func).split(".")[-1]):
                named = {keyword.arg for keyword in node.keywords} | {
                    part.value for part in ast.walk(node) if isinstance(part, ast.Constant)
                }
                assert not named & {"age", "epochs_in_stage"}, (path.name, ast.unparse(node))


def test_nobody_writes_into_a_state_that_exists():
    in_place = re.compile(r"(slots|hosts)\.(?!grad\b)\w+(\[[^]]*\]\s*([-+*|&]?=)(?!=)|\.\w+_\()")
    for path in KASMINA.parent.rglob("*.py"):
        assert not in_place.search(path.read_text(encoding="utf-8")), path.name


# -- purity -----------------------------------------------------------------------------------------------------------


def test_equal_calls_agree_and_change_nothing_that_they_were_given():
    step = episode("manual")[-1]
    given = {"slots": step.slots, "hosts": step.hosts}
    before = {name: {field: value.clone() for field, value in named_tensors(rec)} for name, rec in given.items()}
    first, second = (execute(step, step.actions, MANUAL) for _ in range(2))
    for one, two in ((first[0], second[0]), (first[1], second[1]), (first[2], second[2]), (first[3], second[3])):
        assert differing(one, two) == set()
    assert torch.equal(first[4], second[4])
    for name, rec in given.items():
        for field, value in named_tensors(rec):
            assert same(value, before[name][field]), (name, field)


def test_ticking_twice_is_two_ticks_not_a_flag_that_is_used_up():
    step = episode("manual")[-1]
    ops, rules = step.ops, MANUAL
    slots, hosts, _ = apply_ops(
        step.slots, step.hosts, step.actions, step.legal, ~step.panic, step.t, seed_costs(SLOTS), rules
    )
    ticked = [tick(slots, hosts, ops, step.rolled_back, rules)[0] for _ in range(2)]
    assert differing(ticked[0], ticked[1]) == set()
    assert differing(ticked[0], step.after) == set()


def test_a_script_gives_every_host_the_same_draws_however_many_are_driven():
    slots = episode("manual")[-1].after
    seen = RandomScript(3, HOSTS, SLOTS).measure(4, slots)
    part = RandomScript(3, HOSTS, SLOTS, slice(5, 6)).measure(4, row(slots, 5))
    assert differing(row(seen, 5), part) == set()
