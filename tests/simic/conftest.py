"""A toy engine: observations of hosts that never change their slots, rollbacks on demand, a known best decision."""

from collections.abc import Callable, Mapping

import pytest
import torch

from esper.leyline.lifecycle import Head, HostFamily, LifecycleOp, SeedStage
from esper.leyline.messages import (
    ActResult,
    EngineSpec,
    HostState,
    Observation,
    RewardInputs,
    RewardOutput,
    SlotState,
    StoredStep,
)
from esper.leyline.tensor_dataclass import blank
from esper.simic.client import SimicClient, policy_network
from esper.simic.ppo_config import PPOConfig
from esper.tamiyo.network import initialize
from toys import menu

NUM_SLOTS, STEPS = 2, 6
FAVOURITE_SLOT = 1
PENALTY = -10.0


class ToyReward:
    """A reward with one term; the engine below computes its own rewards, this only shows that calls are forwarded."""

    terms = ("reward",)

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> torch.Tensor:
        return torch.full((n,), float(slots * steps), device=device)

    def step(self, inputs: RewardInputs, state: torch.Tensor) -> tuple[RewardOutput, torch.Tensor]:
        total = inputs.ops.float()
        flags = torch.zeros(len(total), 2, dtype=torch.bool)
        return RewardOutput(total=total, breakdown=total[:, None], flags=flags), state + 1

    def rollback_reward(self, state: torch.Tensor) -> torch.Tensor:
        return -state

    def reset_hosts(self, state: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return state.masked_fill(mask, 0.0)


class ToyEngine:
    """Rewards GERMINATE in slot 1 with 1, else 0, so the best policy is known in advance.

    What is observed of a host depends on its global number and the step alone. In step 3 only WAIT is legal.
    `panics` maps a step to the local hosts that are rolled back in it.
    """

    def __init__(self, hosts: list[int], steps: int = STEPS) -> None:
        self.hosts, self.steps = torch.tensor(hosts), steps

    def observation(self, t: int) -> Observation:
        n, s = len(self.hosts), NUM_SLOTS
        number = self.hosts.float() * 0.37 + t * 0.11
        cpu = torch.device("cpu")
        slots, hosts = vars(blank(SlotState, {"N": n, "S": s}, cpu)), vars(blank(HostState, {"N": n}, cpu))
        slots["stage"][:] = torch.tensor([int(SeedStage.TRAINING), int(SeedStage.DORMANT)])
        slots["prev_stage"][:] = torch.tensor([int(SeedStage.GERMINATED), int(SeedStage.UNKNOWN)])
        slots["blueprint"][:] = torch.tensor([1, -1])
        slots["algorithm"][:, 0] = 1
        slots["tempo"][:] = 5
        slots["serial"][:, 0] = 1
        slots["age"][:, 0] = slots["epochs_in_stage"][:, 0] = t
        slots["contribution"][:, 0] = number.sin() * 5
        slots["contribution_step"][:] = torch.tensor([t, -1])
        slots["grad_health"][:, 0] = number.cos().abs()
        hosts["val_acc"] = 50 + 40 * number.sin()
        hosts["acc_hist"] = hosts["val_acc"][:, None].repeat(1, 5)
        hosts["val_loss"] = 1 + number.cos()
        hosts["loss_hist"] = hosts["val_loss"][:, None].repeat(1, 5)
        legal = torch.zeros(n, 6, s, dtype=torch.bool)
        legal[:, LifecycleOp.WAIT] = True
        if t != 3:
            legal[:, LifecycleOp.GERMINATE] = True
            legal[:, LifecycleOp.PRUNE, 0] = True
        return Observation(
            t=t, episode_length=self.steps, slots=SlotState(**slots), hosts=HostState(**hosts), legal=legal
        )

    def run(
        self,
        client: SimicClient,
        episode: int,
        panics: Mapping[int, list[int]] | None = None,
        first_step: int = 1,
        last_step: int | None = None,
    ) -> list[ActResult]:
        """One episode, or a part of it."""
        if first_step == 1:
            client.begin_rollout(episode, self.hosts)
        n, acts = len(self.hosts), []
        for t in range(first_step, (last_step or self.steps) + 1):
            panic = torch.zeros(n, dtype=torch.bool)
            panic[(panics or {}).get(t, [])] = True
            client.rollback(panic, torch.full((n,), PENALTY))
            obs = self.observation(t)
            act = client.act(obs)
            op, slot = act.actions[:, Head.OP], act.actions[:, Head.SLOT]
            paid = ((op == LifecycleOp.GERMINATE) & (slot == FAVOURITE_SLOT)).float()
            truncated = ~panic & (t == self.steps)
            bootstrap = client.bootstrap(self.observation(t + 1)) if t == self.steps else torch.zeros(n)
            client.store(
                StoredStep(
                    t=t,
                    obs=obs,
                    act=act,
                    effective_op=op.masked_fill(panic, LifecycleOp.WAIT),
                    reward=paid,
                    terminal=torch.zeros(n, dtype=torch.bool),
                    truncated=truncated,
                    bootstrap_value=bootstrap * truncated,
                    valid=~panic,
                )
            )
            acts.append(act)
        return acts


def new_client(
    hosts: list[int],
    *,
    steps: int = STEPS,
    run_seed: int = 7,
    width: int = 32,
    total_updates: int = 20,
    read: Callable[[torch.Tensor], list[float]] = torch.Tensor.tolist,
    **config: float,
) -> SimicClient:
    """A client for the toy engine with a small network."""
    spec = EngineSpec(
        run_seed=run_seed,
        num_envs=len(hosts),
        slot_ids=("r0c0", "r0c1"),
        episode_length=steps,
        family=HostFamily.CNN,
        selectable=(1, 2, 3),
    )
    ppo = PPOConfig(**{"feature_width": width, "hidden_width": width, "num_minibatches": 2} | config)
    network = policy_network(menu(NUM_SLOTS), ppo)
    initialize(network, run_seed)
    return SimicClient(network, ToyReward(), ppo, spec, read=read, device="cpu", total_updates=total_updates)


@pytest.fixture
def make_client() -> Callable[..., SimicClient]:
    return new_client


@pytest.fixture
def make_engine() -> type[ToyEngine]:
    return ToyEngine
