"""A blueprint of your own: what the controller may grow in a slot. Fifteen seconds.

python examples/own_blueprint.py
"""

from torch import nn

import esper


@esper.register_blueprint(family="cnn", init={"2.weight": 0.0, "2.bias": 0.0})
def dilated(channels: int) -> nn.Module:
    """A dilated 3x3 convolution and a 1x1 convolution that starts at zero, so a new seed changes nothing."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=2, dilation=2), nn.SiLU(), nn.Conv2d(channels, channels, 1)
    )


def main() -> None:
    """Let the controller choose between it and the built-in blueprints."""
    run = esper.train("digits", rounds=2, num_envs=4, episode_length=20)
    print(f"100·J of each round: {', '.join(f'{value:.1f}' for value in run.objective)}")
    print(esper.grow("digits", method=run, best_of=4).timeline)


if __name__ == "__main__":
    main()
