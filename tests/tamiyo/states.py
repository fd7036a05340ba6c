"""Random observations that an engine could show, and what each head may say in a state."""

import torch

from esper.leyline.lifecycle import BLENDED, COOLDOWN, HAS_MODULE, AlphaMode, LifecycleOp, SeedStage, stages_mask
from esper.leyline.messages import HostState, Observation, SlotState
from esper.leyline.tensor_dataclass import replace

STORED_STAGES = torch.tensor([stage for stage in SeedStage if stage is not SeedStage.UNKNOWN])
NAN = float("nan")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_observation(seed: int, n: int = 32, s: int = 3, t: int = 40, episode_length: int = 60) -> Observation:
    """Slots in all stored stages, with the invariants of a state after ingest; measurements missing here and there."""
    g = generator(seed)
    return Observation(
        t=t,
        episode_length=episode_length,
        slots=random_slots(g, n, s, t),
        hosts=random_hosts(g, n),
        legal=random_legal(g, n, s),
    )


def random_legal(g: torch.Generator, n: int, s: int) -> torch.Tensor:
    """Any set of legal operations; WAIT is legal everywhere."""
    legal = torch.rand(n, 6, s, generator=g) < torch.rand(n, 6, 1, generator=g).square()
    legal[:, LifecycleOp.WAIT] = True
    return legal


def random_slots(g: torch.Generator, n: int, s: int, t: int) -> SlotState:
    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (n, s), generator=g)

    def floats(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(n, s, generator=g)

    def chance(p: float) -> torch.Tensor:
        return torch.rand(n, s, generator=g) < p

    stage = STORED_STAGES[integers(0, len(STORED_STAGES))]
    live = torch.tensor(stages_mask(HAS_MODULE))[stage]
    occupied = live | torch.tensor(stages_mask(COOLDOWN))[stage]
    blended = torch.tensor(stages_mask(BLENDED))[stage]
    full = blended & (stage != SeedStage.BLENDING)
    measured = live & chance(0.6)
    graded = measured & ~torch.isin(stage, torch.tensor([SeedStage.HOLDING, SeedStage.FOSSILIZED]))
    total = integers(0, 9)
    return SlotState(
        stage=stage,
        prev_stage=STORED_STAGES[integers(0, len(STORED_STAGES))],
        epochs_in_stage=integers(0, t) * occupied,
        prev_epochs=integers(0, t) * occupied,
        age=integers(0, t) * occupied,
        serial=integers(0, 5).where(occupied, -1),
        blueprint=integers(1, 13).where(occupied, -1),
        algorithm=integers(1, 4) * occupied,
        has_gate=live & chance(0.4),
        tempo=torch.tensor([3, 5, 8])[integers(0, 3)] * occupied,
        germ_curve=integers(1, 4) * occupied,
        params=integers(1, 10_000) * live,
        alpha=torch.where(full, 1.0, floats(0, 1) * blended),
        alpha_start=torch.where(full, 1.0, floats(0, 1) * blended),
        alpha_target=torch.where(full, 1.0, torch.tensor([0.0, 0.5, 0.7, 1.0])[integers(0, 4)] * live),
        alpha_mode=integers(0, 3) * (stage == SeedStage.BLENDING),
        alpha_curve=integers(1, 4) * live,
        alpha_steepness=torch.full((n, s), 12.0),
        alpha_total=total * blended,
        alpha_done=(total * torch.rand(n, s, generator=g)).long() * blended,
        acc_at_germination=floats(0, 100).where(live, NAN),
        acc_at_stage_start=floats(0, 100).where(occupied, NAN),
        acc_at_blending_start=floats(0, 100).where(blended, NAN),
        contribution=floats(-20, 20).where(measured, NAN),
        contribution_step=integers(0, t + 1).where(measured, -1),
        contribution_velocity=floats(-15, 15).where(measured & chance(0.5), NAN),
        interaction_sum=floats(-30, 30).where(measured & chance(0.5), NAN),
        boost_received=floats(0, 30).where(measured & chance(0.5), NAN),
        grad_norm=floats(0, 5).where(graded, NAN),
        grad_health=floats(0, 1).where(graded, NAN),
        grad_vanishing=graded & chance(0.5),
        grad_exploding=graded & chance(0.5),
        grad_health_prev=floats(0, 1).where(live & chance(0.5), NAN),
        grad_ratio_ema=floats(0, 1).where(graded, NAN),
    )


def random_hosts(g: torch.Generator, n: int) -> HostState:
    def floats(high: float) -> torch.Tensor:
        return high * torch.rand(n, generator=g)

    def count() -> torch.Tensor:
        return torch.randint(0, 9, (n,), generator=g)

    def history(now: torch.Tensor, high: float) -> torch.Tensor:
        values = torch.cat((high * torch.rand(n, 4, generator=g), now[:, None]), dim=1)
        known = torch.randint(1, 6, (n, 1), generator=g)
        return values.where(torch.arange(5) >= 5 - known, NAN)

    acc, loss = floats(100), floats(6)
    return HostState(
        val_acc=acc,
        val_loss=loss,
        train_acc=floats(100),
        train_loss=floats(6),
        prev_val_acc=floats(100),
        prev_val_loss=floats(6),
        acc_hist=history(acc, 100),
        loss_hist=history(loss, 6),
        committed_acc=floats(100),
        cf_total=floats(10),
        host_params=count() + 1000,
        compute=floats(80),
        last_op=torch.randint(0, 6, (n,), generator=g),
        last_success=torch.rand(n, generator=g) < 0.5,
        n_germinated=count(),
        n_pruned=count(),
        n_fossilized=count(),
        n_contributing=count(),
        best_acc=floats(100),
        plateau_count=count(),
        stable_count=count(),
        stabilized=torch.rand(n, generator=g) < 0.5,
        segment=count(),
    )


CNN = tuple(range(1, 8))
"""Blueprints that may be selected on convolutional hosts."""


def allowed(op: int, slot: int, legal: list, has_gate: list[bool], selectable: tuple[int, ...] = CNN) -> list[set[int]]:
    """Values of each head once op and slot are chosen, by the rules in words; nested lists of one host."""
    germinate, set_alpha_target, prune = 1, 2, 3

    def all_of(size: int, ops: set[int], canonical: int) -> set[int]:
        return set(range(size)) if op in ops else {canonical}

    style = all_of(4, {germinate, set_alpha_target}, 2)
    if op == set_alpha_target and not has_gate[slot]:
        style.remove(3)
    return [
        {s for s, ok in enumerate(legal[op]) if ok} if op else {0},
        set(selectable) if op == germinate else {0},
        style,
        all_of(3, {germinate}, 1),
        all_of(3, {germinate, set_alpha_target}, 2),
        all_of(4, {set_alpha_target, prune}, 0),
        all_of(5, {set_alpha_target, prune}, 0),
        {o for o in range(6) if any(legal[o])},
    ]


def with_slots(obs: Observation, **fields: torch.Tensor) -> Observation:
    return replace(obs, slots=replace(obs.slots, **fields))


def with_hosts(obs: Observation, **fields: torch.Tensor) -> Observation:
    return replace(obs, hosts=replace(obs.hosts, **fields))


def everywhere(obs: Observation, stage: SeedStage, **fields: float) -> Observation:
    """`obs` with every slot in `stage`, holding, and the named fields at one value."""
    filled = {name: torch.full_like(getattr(obs.slots, name), value) for name, value in fields.items()}
    hold = {"alpha_mode": torch.full_like(obs.slots.alpha_mode, int(AlphaMode.HOLD))}
    return with_slots(obs, stage=torch.full_like(obs.slots.stage, int(stage)), **(hold | filled))
