"""Tasks for training one policy over many networks, which are drawn at random; a plugin. And the packing of a policy.

    esper train --plugins scripts/pretraining.py $(python scripts/pretraining.py) --out X ...   # docs/experiments.md
    python scripts/pretraining.py RUN FILE      # the policy of a run as a file of its own (make pretrained)

Ten tasks on pictures of digits and clothes: convolutional hosts of 2 or 3 blocks with 1 to 4 slots, of which eight see
their neighbours only through a seed. Episodes have 24 to 36 steps. Within a task hosts differ by their classes,
examples, wrong labels, learning rate and view. Two tasks are an MLP on vectors and a transformer on characters. No
network of `practice_hosts.py` is among them, nor a built-in task, nor CIFAR-10.
"""

import random
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import esper
from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.lifecycle import HostFamily
from esper.runs.assembly.clients import read_learned, write_learned
from esper.runs.assembly.values import read_toml
from esper.runs.training.checkpoint import checkpoints
from esper.tasks.datasets import fashion_mnist, images
from esper.tasks.datasets.text import SHAKESPEARE, Shakespeare
from esper.tasks.instances import MixedImages
from esper.tasks.losses import Classification, NextToken
from esper.tasks.registry import TaskSpec, register_task
from esper.telemetry.machine import commit
from esper.telemetry.run_directory import CHECKPOINTS, CONFIG


def pictures(number: int) -> TaskSpec:
    """A convolutional host on digits or clothes, and hosts that differ."""
    draw = random.Random(number)
    digits = number % 2 == 0
    blocks, kernel = draw.choice((2, 2, 3)), 3 if number >= 8 else 1
    spec = CNNHostSpec(
        in_channels=1,
        unshuffle=2 if digits else 3,
        base=draw.choice((8, 12, 16, 24)),
        blocks=blocks,
        kernel=kernel,
        pools=draw.randint(1, 2),
        classes=10,
    )
    points = spec.points()
    kept = sorted(draw.sample(range(len(points)), draw.randint(1, min(4, len(points)))))
    optimizer = OptimizerSpec(
        kind="sgd", host_lr=(rate := draw.choice((0.05, 0.1))), seed_lr=rate,
        schedule=draw.choice(("constant", "cosine")),
    )  # fmt: skip
    return TaskSpec(
        name=f"pictures_{number}",
        description="A network drawn at random, for the pretrained policy.",
        family=HostFamily.CNN,
        host=spec,
        load=images.load_digit_views if digits else fashion_mnist.load_views,
        source=None if digits else fashion_mnist.SOURCE,
        enabled=tuple(points[i].slot_id for i in kept),
        objective=Classification(10),
        episode_length=draw.randint(24, 36),
        batch_train=32,
        batch_val=500,
        batches_per_step=8,
        optimizer=optimizer,
        instances=MixedImages(
            num_classes=10,
            classes=(5, 10),
            fractions=(0.15, 0.3, 0.6) if digits else (0.15, 0.3),
            noises=(0.0, 0.05),
            lr_factors=(0.8, 1.0),
            views=2,
        ),
        min_training_epochs=3,
    )


class Blocks(nn.Module):
    """An MLP with layer norms and two slots."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem, self.middle = nn.Linear(inputs, width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [B, classes] of vectors [B, inputs]."""
        return self.head(self.norm(torch.relu(self.middle(torch.relu(self.stem(x))))))


def vectors(number: int) -> TaskSpec:
    """Clusters of vectors around random centres, some for each class."""
    draw, generator = random.Random(100 + number), torch.Generator().manual_seed(number)
    inputs, classes, clusters = 12, 4, 24
    width, spread = draw.choice((16, 24)), draw.choice((1.0, 1.5))
    centres = 2.0 * torch.randn(clusters, inputs, generator=generator)
    which = torch.randint(clusters, (1_500,), generator=generator)
    x = centres[which] + spread * torch.randn(1_500, inputs, generator=generator)
    parts = [(x[part], which[part] % classes) for part in (slice(500), slice(500, 1_000), slice(1_000, None))]
    task = esper.Task(
        lambda: Blocks(inputs, width, classes),
        ["stem", "middle"],
        *parts,
        32,
        name=f"vectors_{number}",
        lr=3e-3,
        schedule=draw.choice(("constant", "cosine")),
        episode_length=draw.randint(16, 28),
        batches_per_step=6,
        min_training_epochs=2,
    )
    return task.spec


def characters(number: int) -> TaskSpec:
    """A small transformer on Shakespeare's plays."""
    draw = random.Random(200 + number)
    return TaskSpec(
        name=f"characters_{number}",
        description="A network drawn at random, for the pretrained policy.",
        family=HostFamily.TRANSFORMER,
        host=TransformerHostSpec(
            vocabulary=Shakespeare.vocabulary, width=16 * (1 + number), heads=2, layers=2, segments=2, context=32
        ),
        load=Shakespeare(context=32, val_windows=64),
        source=SHAKESPEARE,
        enabled=("r0c0", "r0c1"),
        objective=NextToken(Shakespeare.vocabulary),
        episode_length=draw.randint(16, 24),
        batch_train=8,
        batch_val=64,
        batches_per_step=8,
        optimizer=OptimizerSpec(kind="adamw", host_lr=1e-2, seed_lr=1e-2, schedule=draw.choice(("constant", "cosine"))),
        min_training_epochs=2,
    )


TASKS = [register_task(spec) for spec in (*map(pictures, range(10)), vectors(0), characters(0))]

if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(" ".join(f"--task {task.name}" for task in TASKS))
    else:
        run, file = map(Path, sys.argv[1:])
        settings = read_toml(run / CONFIG)
        card = {name: settings[name] for name in ("task", "rounds", "num_envs", "seed")} | {"commit": commit()}
        write_learned(file, read_learned(checkpoints(run / CHECKPOINTS)[0]), card)
