"""What holds in every state of every episode: invariants, clocks and their only writer, purity."""

import torch
from episodes import MANUAL, differing, episode, every_rulebook, execute, same
from scalar_rules import BLENDING, DORMANT

from esper.leyline.tensor_dataclass import named_tensors

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
    given = {"slots": step.slots, "hosts": step.hosts}
    before = {name: {field: value.clone() for field, value in named_tensors(rec)} for name, rec in given.items()}
    first, second = (execute(step, step.actions, MANUAL) for _ in range(2))
    for one, two in ((first[0], second[0]), (first[1], second[1]), (first[2], second[2]), (first[3], second[3])):
        assert differing(one, two) == set()
    assert torch.equal(first[4], second[4])
    for name, rec in given.items():
        for field, value in named_tensors(rec):
            assert same(value, before[name][field]), (name, field)
