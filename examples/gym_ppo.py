"""Masked PPO in one file, in the style of CleanRL, on esper's environment: a learner of your own. About a minute.

python examples/gym_ppo.py

It needs `pip install 'esper-growth[gym]'`.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import esper.gym
from esper.leyline.lifecycle import RELEVANCE, Head


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is learned, and how."""

    task: str = "null"
    num_envs: int = 64
    rollouts: int = 50
    steps: int = 61  # an episode, and the step that begins the next one
    epochs: int = 4
    minibatches: int = 4
    lr: float = 2e-3
    gamma: float = 0.995  # that of esper's rewards
    gae_lambda: float = 0.95
    clip: float = 0.2
    entropy: float = 0.01
    seed: int = 0


class Agent(nn.Module):
    """Actor and critic. The operation is drawn first, then the slot among those where it is legal: no draw is illegal.

    Only the heads that the operation reads count in the log-probability; the environment ignores the others.
    """

    def __init__(self, width: int, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.actor = nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
                                   nn.Linear(128, sum(sizes)))  # fmt: skip
        self.critic = nn.Sequential(nn.Linear(width, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
                                    nn.Linear(128, 1))  # fmt: skip
        nn.init.zeros_(self.actor[-1].weight)
        self.register_buffer("reads", torch.tensor(RELEVANCE))

    def value(self, obs: Tensor) -> Tensor:
        """Of each row [B]."""
        return self.critic(obs).squeeze(-1)

    def act(self, obs: Tensor, mask: Tensor, legal: Tensor, actions: Tensor | None = None) -> tuple[Tensor, ...]:
        """Actions [B, 8], drawn or given, and of each row log-probability and entropy [B]."""
        rows = torch.arange(len(obs))
        logits = self.actor(obs).masked_fill(~mask, -1e8).split(self.sizes, dim=-1)
        heads = [Categorical(logits=each) for each in logits]
        op = heads[Head.OP].sample() if actions is None else actions[:, Head.OP]
        heads[Head.SLOT] = Categorical(logits=logits[Head.SLOT].masked_fill(~legal[rows, op], -1e8))
        if actions is None:
            actions = torch.stack([*(head.sample() for head in heads[: Head.OP]), op], dim=1)
        log_prob = torch.stack([head.log_prob(actions[:, i]) for i, head in enumerate(heads)], dim=1)
        entropy = torch.stack([head.entropy() for head in heads], dim=1)
        reads = self.reads[op]
        return actions, (log_prob * reads).sum(1), (entropy * reads).sum(1)


def advantages(rewards: Tensor, values: Tensor, terminated: Tensor, ended: Tensor, settings: Settings) -> Tensor:
    """GAE [T, N]; `values` [T + 1, N]. After a last step comes the value of its final observation, the next row."""
    found, after = torch.zeros_like(rewards), torch.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + settings.gamma * values[t + 1] * ~terminated[t] - values[t]
        after = found[t] = delta + settings.gamma * settings.gae_lambda * after * ~ended[t]
    return found


def update(agent: Agent, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], settings: Settings) -> None:
    """PPO on the rows that were decided."""
    adv = batch["adv"]
    adv = (adv - adv.mean()) / (adv.std() + 1e-8)
    for _ in range(settings.epochs):
        for rows in torch.randperm(len(adv)).chunk(settings.minibatches):
            obs, mask, legal, actions = (batch[name][rows] for name in ("obs", "mask", "legal", "actions"))
            _, log_prob, entropy = agent.act(obs, mask, legal, actions)
            ratio = (log_prob - batch["log_prob"][rows]).exp()
            clipped = ratio.clamp(1.0 - settings.clip, 1.0 + settings.clip)
            policy_loss = -torch.minimum(ratio * adv[rows], clipped * adv[rows]).mean()
            value_loss = 0.5 * (agent.value(obs) - batch["returns"][rows]).square().mean()
            loss = policy_loss + 0.5 * value_loss - settings.entropy * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def train(settings: Settings) -> tuple[Agent, list[float]]:
    """The agent, and the mean reward per episode of each rollout that ended one."""
    torch.manual_seed(settings.seed)
    env = esper.gym.make_vec(settings.task, num_envs=settings.num_envs, seed=settings.seed, device="cpu")
    agent = Agent(env.single_observation_space.shape[0], env.single_action_space.nvec.tolist())
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.lr, eps=1e-5)
    obs, info = env.reset()
    ended, total, curve = np.zeros(settings.num_envs, dtype=bool), np.zeros(settings.num_envs), []
    for rollout in range(settings.rollouts):
        optimizer.param_groups[0]["lr"] = settings.lr * (1.0 - rollout / settings.rollouts)
        rows: list[dict[str, Tensor]] = []
        for _ in range(settings.steps):
            seen = [torch.from_numpy(x) for x in (obs, info["action_mask"], info["legal"])]
            with torch.no_grad():
                actions, log_prob, _ = agent.act(*seen)
                value = agent.value(seen[0])
            decided = ~ended  # NEXT_STEP: after a last step, the actions are ignored, and the next episode begins
            obs, reward, terminated, truncated, info = env.step(actions.numpy())
            ended = terminated | truncated
            total = np.where(decided, total, 0.0) + reward
            if ended.all():
                curve.append(float(total.mean()))
            row = [*seen, actions, log_prob, value, *map(torch.from_numpy, (reward, terminated, ended, decided))]
            names = ("obs", "mask", "legal", "actions", "log_prob", "value", "reward", "terminated", "ended", "decided")
            rows.append(dict(zip(names, row, strict=True)))
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        with torch.no_grad():
            values = torch.cat((batch["value"], agent.value(torch.from_numpy(obs))[None]))
        batch["adv"] = advantages(batch["reward"], values, batch["terminated"], batch["ended"], settings)
        batch["returns"] = batch["adv"] + batch["value"]
        decided = batch["decided"]
        update(agent, optimizer, {name: x[decided] for name, x in batch.items()}, settings)
        if rollout % 10 == 9 and curve:
            print(f"rollout {rollout + 1}: reward per episode {curve[-1]:.3f}", flush=True)
    env.close()
    return agent, curve


def play(agent: Agent | None, settings: Settings, episodes: int = 1) -> tuple[float, float, float]:
    """Per episode of the agent, or of random legal actions (None): reward, 100·J, and the share of illegal actions."""
    env = esper.gym.make_vec(settings.task, num_envs=settings.num_envs, seed=settings.seed + 1_000_000, device="cpu")
    if agent is None:
        agent = Agent(env.single_observation_space.shape[0], env.single_action_space.nvec.tolist())
        for parameter in agent.parameters():
            nn.init.zeros_(parameter)
    rewards, worths, illegal = [], [], []
    for _ in range(episodes):
        obs, info = env.reset()
        total, ended = np.zeros(settings.num_envs), np.zeros(settings.num_envs, dtype=bool)
        while not ended.all():
            with torch.no_grad():
                actions, *_ = agent.act(*(torch.from_numpy(x) for x in (obs, info["action_mask"], info["legal"])))
            obs, reward, terminated, truncated, info = env.step(actions.numpy())
            total, ended = total + reward, terminated | truncated
            illegal.append(info["illegal"].mean())
        rewards.append(total.mean())
        worths.append(100.0 * info["final_reward"].mean())
    env.close()
    return float(np.mean(rewards)), float(np.mean(worths)), float(np.mean(illegal))


def main(settings: Settings) -> tuple[float, float]:
    """Train and compare with random legal actions; the rewards per episode of both."""
    began = time.perf_counter()
    agent, _ = train(settings)
    seconds = time.perf_counter() - began
    found = {}
    for name, each in (("random legal actions", None), ("PPO", agent)):
        torch.manual_seed(settings.seed)
        found[name], worth, illegal = play(each, settings)
        print(f"{name}: reward per episode {found[name]:.3f}, 100·J {worth:.2f}, illegal {100 * illegal:.1f} %")
    print(f"{settings.rollouts} episodes of {settings.num_envs} hosts, {seconds:.0f} s, seed {settings.seed}")
    return found["random legal actions"], found["PPO"]


if __name__ == "__main__":
    main(Settings())
