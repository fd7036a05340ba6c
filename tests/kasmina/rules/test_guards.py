"""Guards: `legal` against an independent scalar function, and row by row by hand."""

import pytest
import torch
from driver import CPU
from scalar_rules import legal as scalar_legal
from scalar_rules import slot_dicts

from esper.kasmina.rules.conditions import LifecycleConfig, legal_ops, resolve_target_slot
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.leyline.tensor_dataclass import replace

STAGES = [1, 2, 3, 4, 6, 7, 8, 9, 10]
Op = LifecycleOp


def slots_of(stage, mode=None, age=None):
    """Slots with the given stages, modes (HOLD) and ages (100), nested lists [N, S]."""
    stage = torch.as_tensor(stage)
    mode = torch.zeros_like(stage) if mode is None else torch.as_tensor(mode)
    age = torch.full_like(stage, 100) if age is None else torch.as_tensor(age)
    return replace(empty_slots(*stage.shape, CPU), stage=stage, alpha_mode=mode, age=age)


def random_slots(seed, num_envs, num_slots):
    """Any stage with any mode and age, reachable or not."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_envs, num_slots)
    return slots_of(
        torch.tensor(STAGES)[torch.randint(len(STAGES), shape, generator=generator)],
        torch.randint(3, shape, generator=generator),
        torch.randint(9, shape, generator=generator),
    )


def legal_by_twin(slots, config):
    return torch.tensor([scalar_legal(host, config) for host in slot_dicts(slots)])


SWITCHES = [
    LifecycleConfig(),
    LifecycleConfig(sequential=False),
    LifecycleConfig(max_seeds=0),
    LifecycleConfig(max_seeds=0, sequential=False),
    *[LifecycleConfig(max_seeds=k, sequential=False) for k in (1, 2, 3, 4, 5)],
    *[LifecycleConfig(min_prune_age=k) for k in (0, 1, 8)],
    *[
        LifecycleConfig(auto_g1=bool(k & 1), auto_g2=bool(k & 2), auto_g3=bool(k & 4), gate_mode="strict")
        for k in range(8)
    ],
]


@pytest.mark.parametrize("config", SWITCHES)
def test_legal_is_what_an_independent_scalar_function_says(config):
    slots = random_slots(seed=3, num_envs=256, num_slots=4)
    assert torch.equal(legal_ops(slots, config), legal_by_twin(slots, config))


def test_a_slot_of_a_stage_that_does_not_exist_may_not_be_operated():
    for stage in (0, 5):
        legal = legal_ops(slots_of([[stage, 7]]), LifecycleConfig(auto_g1=False, auto_g2=False, auto_g3=False))
        assert not legal[0, 1:, 0].any()


def test_only_a_seed_with_a_gate_network_can_be_set_to_a_gated_style():
    cases = [  # op, style, gate in the target slot, gate in the other slot, valid
        (Op.SET_ALPHA_TARGET, 3, True, False, True),
        (Op.SET_ALPHA_TARGET, 3, False, True, False),
        (Op.SET_ALPHA_TARGET, 1, False, False, True),
        (Op.GERMINATE, 3, False, False, True),
    ]
    actions = torch.zeros(4, 8, dtype=torch.int64)
    actions[:, Head.OP], actions[:, Head.STYLE] = torch.tensor([case[:2] for case in cases]).t()
    has_gate = torch.tensor([case[2:4] for case in cases])
    _, valid = resolve_target_slot(actions, torch.ones(4, 6, 2, dtype=torch.bool), has_gate)
    assert valid.tolist() == [case[4] for case in cases]


def test_the_default_rules_are_those_of_the_manual():
    rules = LifecycleConfig()
    assert (rules.max_seeds, rules.sequential, rules.min_prune_age, rules.embargo_epochs) == (None, True, 5, 5)
    assert (rules.interaction_limit, rules.shapley_limit, rules.gate_mode) == (4, 6, "permissive")
    assert (rules.auto_g1, rules.auto_g2, rules.auto_g3) == (True, True, True)
    assert (rules.min_training_epochs, rules.min_blending_epochs) == (10, 10)
    assert (rules.g2_health, rules.g2_improvement, rules.g2_ratio, rules.g5_contribution) == (0.7, 0.5, 0.10, 1.0)
