"""The full control step of the rulebook on scripted measurements, without networks.

    measure -> rollback (where the mask says so) -> ingest -> legal -> op -> tick -> feedback -> snapshot memory

Scripts: a measurement is `(t, slots) -> Measurements`, where `slots` is what the train pass of step t ran with.
"""

import torch
from torch import Tensor

from esper.kasmina.blueprints.registry import KINDS
from esper.kasmina.rules.conditions import LifecycleConfig, legal_ops
from esper.kasmina.rules.lifecycle import (
    OpEffects,
    TickEffects,
    apply_ops,
    feedback,
    memory_of,
    remember,
    rollback,
    tick,
    training_cost,
)
from esper.kasmina.rules.slot_fields import empty_slots, ingest, new_hosts
from esper.leyline.lifecycle import Head, LifecycleOp, canonical_action
from esper.leyline.messages import HostState, Measurements, SeedCosts, SlotState
from esper.leyline.tensor_dataclass import replace, tensor_dataclass

CPU = torch.device("cpu")
HOST_PARAMS = 1000
NUM_BLUEPRINTS = 13
NAN = float("nan")


def seed_costs(num_slots: int) -> SeedCosts:
    """Every (slot, blueprint) has its own number of parameters; blueprint 0 is not selectable."""
    slot_S1, blueprint_P = torch.arange(num_slots)[:, None], torch.arange(NUM_BLUEPRINTS)
    return SeedCosts(
        seed_params=100 * (slot_S1 + 1) + blueprint_P,
        gate_params=7 * (torch.arange(num_slots) + 1),
        seed_flops=1000 * (slot_S1 + 1) + 10 * blueprint_P,
        gate_flops=50 * (torch.arange(num_slots) + 1),
        host_flops=torch.tensor(4000),
        selectable=blueprint_P > 0,
        kinds=torch.zeros(num_slots, NUM_BLUEPRINTS, len(KINDS)),
    )


def action(op: LifecycleOp = LifecycleOp.WAIT, **heads: int) -> list[int]:
    """One host's action; heads that are not named are canonical (blueprint 1, because 0 is not selectable)."""
    return list(canonical_action(op, **{"blueprint": 1} | heads))


def actions(*rows: list[int]) -> Tensor:
    """Actions of N hosts, [N, 8]."""
    return torch.tensor(rows, dtype=torch.int64)


def everybody(num_envs: int, row: list[int]) -> Tensor:
    """The same action for all hosts."""
    return actions(row).expand(num_envs, -1)


def players(slots: SlotState) -> Tensor:
    """Slots whose contribution is measured: heard, and not permanent."""
    return (slots.alpha > 0.0) & (slots.stage != 7)


def gradients_seen(slots: SlotState) -> Tensor:
    """Slots whose gradients are measured: TRAINING or BLENDING, and not frozen by a falling alpha."""
    return ((slots.stage == 3) | (slots.stage == 4)) & (slots.alpha_mode != 2)


def measured(t: int, slots: SlotState, **changes: Tensor) -> Measurements:
    """Healthy gradients, contributions of 2 pp, accuracy that climbs by 1 pp per step; `changes` replaces fields."""
    num_envs, num_slots = slots.stage.shape
    row_N, heard_NS, graded_NS = torch.zeros(num_envs), players(slots), gradients_seen(slots)
    val_acc = row_N + 40.0 + t
    never = torch.zeros_like(heard_NS)
    fields = {
        "train_acc": val_acc + 5.0,
        "train_loss": row_N + 1.0 / t,
        "val_acc": val_acc,
        "val_loss": row_N + 2.0 / t,
        "committed_acc": val_acc - 2.0,
        "cf_total": torch.where(heard_NS.any(dim=1), 2.0, NAN),
        "contribution": torch.where(heard_NS, 2.0, NAN),
        "interactions": torch.full((num_envs, num_slots, num_slots), NAN),
        "grad_norm": torch.where(graded_NS, 1.0, NAN),
        "grad_health": torch.where(graded_NS, 1.0, NAN),
        "grad_vanishing": never,
        "grad_exploding": never,
        "grad_ratio": torch.where(graded_NS, 0.5, NAN),
        "subset_acc": torch.zeros(num_envs, 0),
    }
    return Measurements(**{**fields, **changes})


class RandomScript:
    """Measurements and actions that depend on (seed, t) only."""

    def __init__(self, seed: int, num_hosts: int, num_slots: int) -> None:
        self.seed, self.num_hosts, self.num_slots = seed, num_hosts, num_slots

    def _draw(self, t: int, kind: int, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + t * 31 + kind)
        return torch.rand(self.num_hosts, *shape, generator=generator)

    def measure(self, t: int, slots: SlotState) -> Measurements:
        """Good and bad gradients, rising and falling accuracies; now and then nothing was measured."""
        draw_NSM = self._draw(t, 0, self.num_slots, 6)
        heard_NS = players(slots) & (draw_NSM[..., 0] < 0.9)
        graded_NS = gradients_seen(slots) & (draw_NSM[..., 1] < 0.9)
        health_NS = torch.where(draw_NSM[..., 3] < 0.8, 0.7 + 0.3 * draw_NSM[..., 2], draw_NSM[..., 2])
        pair_NSS = heard_NS[:, :, None] & heard_NS[:, None, :] & ~torch.eye(self.num_slots, dtype=torch.bool)
        synergy_NSS = self._draw(t, 1, self.num_slots, self.num_slots) - 0.5
        told_N4 = self._draw(t, 2, 4)
        return measured(
            t,
            slots,
            val_acc=40.0 + t + 3.0 * told_N4[:, 0],
            val_loss=2.0 / t + 0.1 * told_N4[:, 1],
            committed_acc=40.0 + told_N4[:, 2],
            cf_total=torch.where(heard_NS.any(dim=1), told_N4[:, 3], NAN),
            contribution=torch.where(heard_NS, 4.0 * draw_NSM[..., 4] - 1.0, NAN),
            interactions=torch.where(pair_NSS, synergy_NSS + synergy_NSS.transpose(1, 2), NAN),
            grad_norm=torch.where(graded_NS, draw_NSM[..., 5], NAN),
            grad_health=torch.where(graded_NS, health_NS, NAN),
            grad_vanishing=graded_NS & (draw_NSM[..., 5] < 0.1),
            grad_exploding=graded_NS & (draw_NSM[..., 5] > 0.9),
            grad_ratio=torch.where(graded_NS, 0.3 * draw_NSM[..., 1], NAN),
        )

    def act(self, t: int, legal: Tensor) -> Tensor:
        """Mostly legal ops, sometimes anything."""
        num_envs = legal.shape[0]
        weight_O = torch.tensor([0.25, 1.0, 0.4, 0.25, 0.8, 1.2])
        wish_NO = self._draw(t, 3, 6) * weight_O
        wild_N = self._draw(t, 4) < 0.2
        op_N = torch.where(wild_N[:, None] | legal.any(dim=2), wish_NO, -1.0).argmax(dim=1)
        aim_NS = self._draw(t, 5, self.num_slots) + (legal[torch.arange(num_envs), op_N] & ~wild_N[:, None])
        slot_N = aim_NS.argmax(dim=1)
        sizes = torch.tensor([1, NUM_BLUEPRINTS, 4, 3, 3, 4, 5, 1])
        row_N8 = (self._draw(t, 6, 8) * sizes).to(torch.int64)
        row_N8[:, Head.SLOT], row_N8[:, Head.OP] = slot_N, op_N
        return row_N8

    def panic(self, t: int) -> Tensor:
        """A host panics in one step out of forty."""
        return self._draw(t, 7) < 0.025


@tensor_dataclass
class Step:
    """What one control step did: the state at its begin, as observed, and after the tick."""

    t: int
    seen: Measurements
    panic: Tensor
    actions: Tensor
    began: SlotState
    slots: SlotState
    hosts: HostState
    legal: Tensor
    rolled_back: Tensor
    ops: OpEffects
    ticks: TickEffects
    success: Tensor
    effective: Tensor
    after: SlotState
    hosts_after: HostState


class Driver:
    """N hosts with S slots, from before their first step."""

    def __init__(self, num_envs=1, num_slots=2, config=None, measure=measured) -> None:
        self.config = config or LifecycleConfig()
        self.costs = seed_costs(num_slots)
        self.measure = measure
        self.t = 0
        self.slots = empty_slots(num_envs, num_slots, CPU)
        self.hosts = new_hosts(num_envs, HOST_PARAMS, CPU)
        self.memory = memory_of(self.slots)
        self.steps: list[Step] = []

    def step(self, chosen: Tensor | None = None, *, policy=None, panic: Tensor | None = None) -> Step:
        """One control step; `policy(t, legal)` chooses where no actions are given, else everybody waits."""
        self.t += 1
        t, began, num_envs = self.t, self.slots, self.slots.stage.shape[0]
        panic_N = torch.zeros(num_envs, dtype=torch.bool) if panic is None else panic
        seen = self.measure(t, began)
        slots, hosts, rolled_back = rollback(began, self.hosts, panic_N, self.memory)
        slots, hosts = ingest(slots, hosts, seen, t, ~panic_N)
        hosts = replace(hosts, compute=hosts.compute + training_cost(began, self.costs))
        legal = legal_ops(slots, self.config)
        if chosen is None:
            chosen = everybody(num_envs, action()) if policy is None else policy(t, legal)
        after, hosts_after, ops = apply_ops(slots, hosts, chosen, legal, ~panic_N, t, self.costs, self.config)
        after, hosts_after, ticks = tick(after, hosts_after, ops, rolled_back, self.config)
        hosts_after, success, effective = feedback(hosts_after, chosen, ops, ticks, ~panic_N)
        due_N = ~panic_N & ((t % 5 == 0) | ops.fossilized.any(dim=1))
        self.memory = remember(self.memory, after, due_N[:, None].expand_as(after.stage))
        self.slots, self.hosts = after, hosts_after
        done = Step(
            t=t, seen=seen, panic=panic_N, actions=chosen, began=began, slots=slots, hosts=hosts, legal=legal,
            rolled_back=rolled_back, ops=ops, ticks=ticks, success=success, effective=effective,
            after=after, hosts_after=hosts_after,
        )  # fmt: skip
        self.steps.append(done)
        return done

    def run(self, script: dict[int, list[int] | Tensor], until: int) -> list[Step]:
        """Steps up to and including `until`; `script[t]` is the action in step t ([8] or [N, 8]), else WAIT."""
        num_envs = self.slots.stage.shape[0]
        while self.t < until:
            t = self.t + 1
            chosen = script.get(t, action())
            chosen = chosen if isinstance(chosen, Tensor) else everybody(num_envs, chosen)
            self.step(chosen)
        return self.steps
