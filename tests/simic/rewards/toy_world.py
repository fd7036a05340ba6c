"""A world with known seeds: S = 3 slots, E = 60 steps, a host of 6 418 parameters, seeds of 1 000.

The host's accuracy is 50 + drift * t and a seed adds alpha * effect. A seed trains for ten steps, then alpha rises
from 0 to 1 in five, then it is held; all of that by itself. A pruned slot cools down for seven steps.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from reward_toys import NAN, reward_inputs

from esper.leyline.actions import LifecycleOp as Op
from esper.simic.rewards import RewardConfig, make_reward
from reference.rewards.step import HostStep, SlotRow

SLOTS, STEPS, HOST_PARAMS, SEED_PARAMS = 3, 60, 6418, 1000
TRAINING_STEPS, RAMP_STEPS, COOLDOWN_STEPS = 10, 5, 7
GAMMA = 0.995


@dataclass(frozen=True)
class Kind:
    """What a seed at alpha = 1 adds to the accuracy, and what removing it alone seems to cost."""

    effect: float
    contribution: float

    @staticmethod
    def worth(points: float) -> "Kind":
        return Kind(points, points)


@dataclass
class ToySlot:
    """The clocks of one slot, as the lifecycle keeps them."""

    stage: int = 1
    prev_stage: int = 1
    epochs: int = 0
    prev_epochs: int = 0
    age: int = 0
    alpha: float = 0.0
    kind: Kind = field(default_factory=lambda: Kind.worth(0.0))
    born_at: float = NAN
    entered_at: float = NAN
    cooling: int = 0

    def enter(self, stage: int, accuracy: float) -> None:
        self.prev_stage, self.prev_epochs = self.stage, self.epochs
        self.stage, self.epochs, self.entered_at = stage, -1, accuracy

    def tick(self, accuracy: float) -> "ToySlot":
        """The slot after a step; a stage entered in this step is observed with 0 in the next."""
        if self.cooling:
            self.cooling -= 1
            return self if self.cooling else ToySlot()
        if self.stage == 1:
            return self
        self.age += 1
        ready = self.stage == 3 and self.epochs + 1 >= TRAINING_STEPS
        if self.stage == 4:
            self.alpha = min(1.0, round(self.alpha + 1 / RAMP_STEPS, 9))
            ready = self.alpha == 1.0
        if self.stage == 2:  # training starts in the step of the germination; its potential was rewarded to GERMINATE
            self.stage = 3
        if ready:
            self.enter({3: 4, 4: 6}[self.stage], accuracy)
        self.epochs += 1
        return self


Script = Callable[[int, list[ToySlot]], tuple[Op, int]]
"""What to do in step t, given the slots: operation and target."""


@dataclass
class Actor:
    """A host with a script; `kind` is what it germinates, `refused` makes every FOSSILIZE fail."""

    script: Script
    kind: Kind = field(default_factory=lambda: Kind.worth(0.0))
    drift: float = 0.0
    refused: bool = False
    slots: list[ToySlot] = field(default_factory=lambda: [ToySlot() for _ in range(SLOTS)])
    history: list[float] = field(default_factory=list)
    contributing: int = 0
    earned: float = 0.0

    def observe(self, t: int, fossils_as_players: bool) -> HostStep:
        """Measure, then decide."""
        committed = 50 + self.drift * t + sum(s.kind.effect for s in self.slots if s.stage == 7)
        accuracy = committed + sum(s.alpha * s.kind.effect for s in self.slots if s.stage in (4, 6))
        players = [s for s in self.slots if s.alpha > 0 and (s.stage != 7 or fossils_as_players)]
        previous = self.history[-1] if self.history else NAN
        self.history.append(accuracy)
        op, target = self.script(t, self.slots)
        success = not (op == Op.FOSSILIZE and (self.refused or self.slots[target].stage != 6))
        return HostStep(
            epoch=t,
            max_epochs=STEPS,
            op=int(op),
            target=target,
            success=success,
            val_acc=accuracy,
            prev_val_acc=previous,
            acc_hist=tuple(self.history[-5:]),
            committed_acc=committed,
            cf_total=sum(s.alpha * s.kind.effect for s in players) if players else NAN,
            host_params=HOST_PARAMS,
            n_contributing=self.contributing,
            slots=tuple(self.row(s, accuracy, any(s is p for p in players)) for s in self.slots),
        )

    def row(self, slot: ToySlot, accuracy: float, measured: bool) -> SlotRow:
        live = slot.stage in (2, 3, 4, 6, 7)
        return SlotRow(
            stage=slot.stage,
            prev_stage=slot.prev_stage,
            epochs_in_stage=slot.epochs,
            prev_epochs=slot.prev_epochs,
            age=slot.age,
            alpha=slot.alpha,
            params=SEED_PARAMS if live else 0,
            acc_at_germination=slot.born_at,
            acc_at_stage_start=slot.entered_at,
            contribution=slot.alpha * slot.kind.contribution if measured else NAN,
        )

    def act(self, step: HostStep) -> None:
        """Execute the operation, then let every slot tick."""
        slot, accuracy = self.slots[step.target], step.val_acc
        if step.success and step.op == Op.GERMINATE:
            assert slot.stage == 1
            self.slots[step.target] = ToySlot(
                stage=2, prev_stage=2, epochs=-1, kind=self.kind, born_at=accuracy, entered_at=accuracy
            )
        elif step.success and step.op == Op.PRUNE:
            assert slot.stage in (2, 3, 4, 6)
            self.slots[step.target] = ToySlot(stage=8, prev_stage=slot.stage, cooling=COOLDOWN_STEPS)
        elif step.success and step.op == Op.FOSSILIZE:
            self.contributing += slot.kind.contribution >= 1
            slot.enter(7, accuracy)
        self.slots = [each.tick(accuracy) for each in self.slots]


def play(actors: dict[str, Actor], config: RewardConfig) -> dict[str, float]:
    """Discounted return of each actor in one episode of its own host."""
    hosts = [
        dataclasses.replace(actor, slots=[ToySlot() for _ in range(SLOTS)], history=[]) for actor in actors.values()
    ]
    fossils = config.mode == "basic_plus"
    reward = make_reward(config.mode, config)
    state = reward.initial_state(len(hosts), SLOTS, STEPS, torch.device("cpu"))
    for t in range(1, STEPS + 1):
        steps = [host.observe(t, fossils) for host in hosts]
        out, state = reward.step(reward_inputs(steps), state)
        for host, step, value in zip(hosts, steps, out.total.tolist(), strict=True):
            host.earned += GAMMA ** (t - 1) * value
            host.act(step)
    return dict(zip(actors, (host.earned for host in hosts), strict=True))
