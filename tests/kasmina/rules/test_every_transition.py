"""Every pair of stages, from every state that a slot could be brought into: what does not exist never happens."""

import torch
from driver import CPU, HOST_PARAMS, action, everybody, seed_costs
from test_lifecycle import CAUSES, RULES

from esper.kasmina.rules.conditions import legal_ops
from esper.kasmina.rules.lifecycle import apply_ops, memory_of, rollback, tick
from esper.kasmina.rules.slot_fields import empty_slots, new_hosts
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.tensor_dataclass import replace

Op = LifecycleOp
T = 20
VALUES = range(11)
PAIRS = set(CAUSES)


def every_state(stages=VALUES):
    """Hosts of one slot in all combinations of stage and of what gates, guards and ramps look at, reachable or not."""
    grid = torch.cartesian_prod(
        torch.tensor([float(stage) for stage in stages]),
        torch.tensor([0.0, 1.0, 2.0]),  # alpha_mode
        torch.tensor([0.0, 1.0]),  # alpha
        torch.tensor([0.0, 0.5, 1.0]),  # alpha_target
        torch.tensor([0.0, 1.0]),  # ticks that are left
        torch.tensor([0.0, 30.0]),  # age and epochs in stage
        torch.tensor([0.0, 1.0]),  # measurements missing, or good enough for every gate
    )
    stage, mode, weight, target, left, clock, good = (column[:, None] for column in grid.unbind(1))
    measured = good > 0.0
    slots = replace(
        empty_slots(len(grid), 1, CPU),
        stage=stage.long(), alpha_mode=mode.long(), alpha=weight, alpha_target=target, alpha_done=3 - left.long(),
        alpha_total=torch.full_like(stage, 3).long(), age=clock.long(), epochs_in_stage=clock.long(),
        tempo=torch.full_like(stage, 3).long(), has_gate=measured,
        grad_health=torch.where(measured, 1.0, torch.nan), grad_ratio_ema=torch.where(measured, 1.0, torch.nan),
        acc_at_stage_start=torch.where(measured, 10.0, torch.nan),
        contribution=torch.where(measured, 5.0, torch.nan), contribution_step=torch.where(measured, T, -1),
    )  # fmt: skip
    hosts = replace(new_hosts(len(grid), HOST_PARAMS, CPU), val_acc=torch.full((len(grid),), 50.0))
    return slots, hosts


def pairs_of(before, after):
    """The (from, to) pairs that differ."""
    both = torch.stack((before, after), dim=-1)[before != after]
    return {tuple(pair) for pair in both.unique(dim=0).tolist()}


def single_moves(config, slots, hosts):
    """What any op makes of the stage, and what the tick then makes of it: each at most one transition."""
    active = torch.ones(len(slots.stage), dtype=torch.bool)
    nothing = torch.zeros_like(slots.has_gate)
    legal, costs = legal_ops(slots, config), seed_costs(1)
    by_op, by_tick = set(), set()
    for op in Op:
        for speed, target in ((0, 0), (0, 2), (1, 0), (1, 2)):
            chosen = everybody(len(active), action(op, alpha_speed=speed, alpha_target=target))
            done, counted, ops = apply_ops(slots, hosts, chosen, legal, active, T, costs, config)
            after, _, ticks = tick(done, counted, ops, nothing, config)
            by_op |= pairs_of(slots.stage, done.stage)
            by_tick |= pairs_of(done.stage, after.stage)
            assert torch.equal(ticks.transitions.cause > 0, after.stage != done.stage)
    return by_op, by_tick


def test_of_all_eleven_times_eleven_pairs_only_those_of_the_table_come_from_ops_ticks_and_rollbacks():
    found = set()
    for config in RULES.values():
        for moves in single_moves(config, *every_state()):
            assert moves <= PAIRS
            found |= moves
    slots, hosts = every_state()
    back, _, pruned = rollback(slots, hosts, torch.ones(len(slots.stage), dtype=torch.bool), memory_of(slots))
    assert pairs_of(slots.stage, back.stage) == {(2, 8), (3, 8), (4, 8), (6, 8)}
    assert torch.equal(pruned, slots.stage != back.stage)
    assert found == PAIRS
    assert not {0, 5} & {stage for pair in found for stage in pair}
