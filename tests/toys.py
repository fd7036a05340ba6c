"""Toy parts that satisfy the protocols: a client that plays a fixed script, and an executor that only pretends.

Both write the names of the calls they get into one list, so that a test can read the order of a step.
"""

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.blueprints.registry import KINDS
from esper.leyline.lifecycle import (
    CANONICAL_ACTION,
    NUM_HEADS,
    NUM_OPS,
    Head,
    LifecycleOp,
    canonical_action,
    head_sizes,
)
from esper.leyline.messages import (
    ActResult,
    EngineSpec,
    Hidden,
    KeptNetwork,
    Menu,
    Observation,
    RewardInputs,
    RewardOutput,
    SeedCosts,
    SlotState,
    StoredStep,
)
from esper.leyline.tensor_dataclass import copy_into, replace, tensor_dataclass
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.executors.protocol import (
    EvaluationSplit,
    Executor,
    Structure,
    TrainPass,
    ValidationPass,
)

PENALTY = -7.0
NUM_BLUEPRINTS = 13


def menu(num_slots: int, num_blueprints: int = NUM_BLUEPRINTS) -> Menu:
    """A menu of random numbers; those of a slot, and of a blueprint, do not depend on how many there are."""
    generator = torch.Generator().manual_seed(5)
    places = torch.rand(100, 8, generator=generator)[:num_slots]
    seeds = torch.rand(100, 100, 12, generator=generator)[:num_slots, :num_blueprints]
    return Menu(places=places, seeds=seeds)


def even_logits(*rows: int, num_slots: int) -> list[Tensor]:
    """Logits of zeros for so many rows, in the shapes of `esper.tamiyo.heads.Logits`."""
    of_all, sizes = (Head.SLOT, Head.OP), head_sizes(num_slots)
    return [torch.zeros(*rows, *(num_slots,) * (head not in of_all), sizes[head]) for head in Head]


def script(num_envs: int, length: int, plan: Mapping[int, object]) -> Int[Tensor, "T N 8"]:
    """Actions [T, N, 8]: `plan[t]` is the action of all hosts in step t, or {host: action}; else WAIT."""
    actions = torch.tensor(CANONICAL_ACTION).expand(length, num_envs, NUM_HEADS).clone()
    for t, chosen in plan.items():
        rows = chosen if isinstance(chosen, Mapping) else dict.fromkeys(range(num_envs), chosen)
        for host, action in rows.items():
            actions[t - 1, host] = torch.tensor(action)
    return actions


@tensor_dataclass
class Carry:
    """What the toy reward remembers: the steps of this segment, and whether anything was paid."""

    steps: Int[Tensor, " N"]
    sum: Float[Tensor, " N"]


class ToyReward:
    """Pays nothing, or (`paying`) the accuracy in units and 0.25 for an op that worked.

    A rollback costs 7 and one more for each step of the segment, so that its state can be told from the amount.
    """

    terms = ("accuracy", "success")

    def __init__(self, paying: bool = True) -> None:
        self.paying = paying

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Carry:
        return Carry(steps=torch.zeros(n, dtype=torch.int64, device=device), sum=torch.zeros(n, device=device))

    def step(self, inputs: RewardInputs, state: Carry) -> tuple[RewardOutput, Carry]:
        accuracy = torch.nan_to_num(inputs.hosts.val_acc) / 100.0
        worked = 0.25 * (inputs.success & (inputs.ops != LifecycleOp.WAIT))
        breakdown = torch.stack((accuracy, worked), dim=1) * self.paying
        total = breakdown.sum(dim=1)
        flags = torch.zeros(len(total), 2, dtype=torch.bool, device=total.device)
        carried = Carry(steps=state.steps + 1, sum=state.sum + total)
        return RewardOutput(total=total, breakdown=breakdown, flags=flags), carried

    def rollback_reward(self, state: Carry) -> Tensor:
        return PENALTY - state.steps.float()

    def reset_hosts(self, state: Carry, mask: Tensor) -> Carry:
        return Carry(steps=state.steps * ~mask, sum=state.sum * ~mask)


class ToyClient:
    """Plays `actions` [T, N, 8] (WAIT without them) and keeps everything it is told.

    Its recurrent state counts the steps of the segment; its value is that count, its bootstrap the count and one half.
    """

    def __init__(
        self,
        spec: EngineSpec,
        actions: Int[Tensor, "T N 8"] | None = None,
        *,
        paying: bool = True,
        calls: list[str] | None = None,
    ) -> None:
        self.spec, self.reward = spec, ToyReward(paying)
        self.actions = script(spec.num_envs, spec.episode_length, {}) if actions is None else actions
        self.calls = [] if calls is None else calls
        self.terms = self.reward.terms
        self.begin_rollout(0, spec.host_ids())

    def initial_hidden(self, n: int) -> Hidden:
        zeros = torch.zeros(1, n, 1, device=self.spec.device)
        return Hidden(h=zeros, c=zeros.clone())

    def begin_rollout(self, episode: int, hosts: Tensor) -> None:
        self.calls.append("begin_rollout")
        self.episode, self.hosts = episode, hosts
        self.hidden = self.initial_hidden(len(hosts))
        self.steps: list[StoredStep] = []
        self.inputs: list[RewardInputs] = []
        self.rollbacks: list[tuple[Bool[Tensor, " N"], Float[Tensor, " N"]]] = []
        self.bootstraps: list[Observation] = []

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        self.calls.append("act")
        self.hidden = replace(self.hidden, h=self.hidden.h + 1.0)
        seen = torch.stack((obs.hosts.val_acc, torch.full_like(obs.hosts.val_acc, float(obs.t))), dim=1)
        return ActResult(
            actions=self.actions[obs.t - 1],
            log_prob=torch.zeros(obs.num_envs, NUM_HEADS, device=seen.device),
            op_prob=torch.full((obs.num_envs, NUM_OPS), torch.nan, device=seen.device),
            constrained=torch.zeros(obs.num_envs, NUM_HEADS, dtype=torch.bool, device=seen.device),
            value=self.hidden.h[0, :, 0],
            hidden=self.hidden,
            raw_features=seen,
            features=torch.nan_to_num(seen),
        )

    def store(self, step: StoredStep) -> None:
        self.calls.append("store")
        self.steps.append(step)
        self.hidden = replace(self.hidden, h=self.hidden.h * step.valid[:, None])

    def bootstrap(self, obs: Observation) -> Tensor:
        self.calls.append("bootstrap")
        self.bootstraps.append(obs)
        return self.hidden.h[0, :, 0] + 0.5

    def rollback(self, mask: Tensor, reward: Tensor) -> None:
        self.calls.append("rollback")
        self.rollbacks.append((mask, reward))

    def finish(self, kept: KeptNetwork) -> None:
        self.calls.append("finish")
        self.kept = kept

    def update(self) -> Mapping[str, float]:
        self.calls.append("update")
        return {"steps": float(len(self.steps))}

    def state_dict(self) -> dict[str, Tensor]:
        return {"h": self.hidden.h, "c": self.hidden.c}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        fresh = Hidden(h=self.hidden.h.clone(), c=self.hidden.c.clone())
        copy_into({"h": fresh.h, "c": fresh.c}, state, "toy client")
        self.hidden = fresh

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Carry:
        return self.reward.initial_state(n, slots, steps, device)

    def step(self, inputs: RewardInputs, state: Carry) -> tuple[RewardOutput, Carry]:
        self.calls.append("step")
        self.inputs.append(inputs)
        return self.reward.step(inputs, state)

    def rollback_reward(self, state: Carry) -> Tensor:
        self.calls.append("rollback_reward")
        return self.reward.rollback_reward(state)

    def reset_hosts(self, state: Carry, mask: Tensor) -> Carry:
        self.calls.append("reset_hosts")
        return self.reward.reset_hosts(state, mask)


def ops_of(client: ToyClient) -> list[list[int]]:
    """Effective op of each stored step, [T][N]."""
    return [step.effective_op.tolist() for step in client.steps]


class ToyExecutor:
    """N hosts without parameters: seed s is worth 3^s pp on top of 10 pp; losses are 1 unless `losses[t]` says else.

    Its only state counts train passes.
    """

    def __init__(
        self,
        num_envs: int,
        num_slots: int,
        *,
        losses: Mapping[int, list[float]] | None = None,
        calls: list[str] | None = None,
    ) -> None:
        self.num_envs, self.num_slots = num_envs, num_slots
        self.losses, self.calls = dict(losses or {}), [] if calls is None else calls
        self.passes = torch.zeros(num_envs, dtype=torch.int64)
        self.structures: list[Structure] = []
        self.host_params = 100
        self.costs = SeedCosts(
            seed_params=torch.full((num_slots, NUM_BLUEPRINTS), 5),
            gate_params=torch.full((num_slots,), 2),
            seed_flops=torch.full((num_slots, NUM_BLUEPRINTS), 10),
            gate_flops=torch.full((num_slots,), 4),
            host_flops=torch.tensor(200),
            selectable=torch.arange(NUM_BLUEPRINTS) > 0,
            kinds=torch.zeros(num_slots, NUM_BLUEPRINTS, len(KINDS)),
        )

    def reset(self, episode: int) -> None:
        self.calls.append("reset")
        self.passes.zero_()
        self.structures.clear()

    def apply_structure(self, structure: Structure) -> None:
        self.calls.append("apply_structure")
        self.structures.append(structure)

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        self.calls.append("train_epoch")
        self.passes += 1
        learning = (slots.stage == 3) | (slots.stage == 4)
        healthy = torch.where(learning, 1.0, torch.nan)
        never = torch.zeros_like(learning)
        return TrainPass(
            acc=10.0 * self.passes.float(), loss=1.0 / self.passes.float(), grad_norm=healthy, grad_health=healthy,
            grad_vanishing=never, grad_exploding=never, grad_ratio=healthy,
        )  # fmt: skip

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        self.calls.append("evaluate")
        worth = torch.from_numpy(3.0 ** np.arange(self.num_slots)).float()
        loss = torch.tensor(self.losses.get(t, [1.0] * self.num_envs))
        return ValidationPass(accuracy=10.0 + (coalitions.sets * worth).sum(dim=2), loss=loss)

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        self.calls.append(f"committed {split}")
        worth = torch.from_numpy(3.0 ** np.arange(self.num_slots)).float()
        accuracy = 10.0 + ((slots.stage == 7) * worth).sum(dim=1)
        return ValidationPass(accuracy=accuracy[:, None], loss=2.0 - accuracy / 50.0)

    def state_dict(self) -> dict[str, Tensor]:
        return {"passes": self.passes}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        copy_into(self.state_dict(), state, "toy executor")


class WithFaults:
    """Another executor whose validation losses are replaced: `faults[t]` is {local host: loss}."""

    def __init__(self, executor: Executor, faults: Mapping[int, Mapping[int, float]]) -> None:
        self.executor, self.faults = executor, faults
        self.costs, self.host_params = executor.costs, executor.host_params
        self.reset, self.apply_structure, self.train_epoch = (
            executor.reset,
            executor.apply_structure,
            executor.train_epoch,
        )
        self.committed = executor.committed
        self.state_dict, self.load_state_dict = executor.state_dict, executor.load_state_dict

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        told = self.executor.evaluate(t, slots, coalitions)
        loss = told.loss.clone()
        for host, value in self.faults.get(t, {}).items():
            loss[host] = value
        return replace(told, loss=loss)


def action(op: LifecycleOp, **heads: int) -> tuple[int, ...]:
    """Eight head values; heads that are not named are canonical (blueprint 1, because 0 cannot be chosen)."""
    return canonical_action(op, **{"blueprint": 1} | heads)
