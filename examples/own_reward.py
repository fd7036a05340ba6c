"""A reward of your own: the gain in accuracy minus a price for parameters. Fifteen seconds.

python examples/own_reward.py
"""

import torch
from torch import Tensor

import esper
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards import RewardConfig


@tensor_dataclass
class Memory:
    """The reward of a rollback for each host [N]."""

    penalty: Tensor


class GainMinusSize:
    """Change of validation accuracy in a step, minus the share of parameters that seeds add."""

    terms = ("gain", "size")

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> Memory:
        """The state of N hosts."""
        return Memory(penalty=torch.full((n,), -1.0, device=device))

    def step(self, inputs: RewardInputs, state: Memory) -> tuple[RewardOutput, Memory]:
        """Rewards of all hosts at once."""
        hosts = inputs.hosts
        gain = torch.nan_to_num(hosts.val_acc - hosts.prev_val_acc)  # the first step has no accuracy before it
        size = -inputs.slots.params.sum(dim=1) / hosts.host_params
        breakdown = torch.stack((0.1 * gain, 0.01 * size), dim=1)
        flags = torch.zeros(len(gain), 2, dtype=torch.bool, device=gain.device)
        return RewardOutput(total=breakdown.sum(dim=1), breakdown=breakdown, flags=flags), state

    def rollback_reward(self, state: Memory) -> Tensor:
        """What a host gets in the step in which it is rolled back."""
        return state.penalty

    def reset_hosts(self, state: Memory, mask: Tensor) -> Memory:
        """The state after the marked hosts were rolled back."""
        return state


@esper.register_reward("gain_minus_size")
def build(config: RewardConfig) -> GainMinusSize:
    """The reward of a run."""
    return GainMinusSize()


def main() -> None:
    """Train with it. J, which is printed, stays what it is, so that rewards can be compared."""
    run = esper.train("digits", rounds=2, num_envs=4, episode_length=20, reward="gain_minus_size")
    print(f"100·J of each round: {', '.join(f'{value:.1f}' for value in run.objective)}")


if __name__ == "__main__":
    main()
