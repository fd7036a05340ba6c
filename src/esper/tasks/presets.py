"""The built-in tasks."""

from dataclasses import replace
from pathlib import Path

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.lifecycle import HostFamily
from esper.tasks.datasets import cifar10, fashion_mnist, images
from esper.tasks.datasets.text import SHAKESPEARE, STORIES, ByteTokenizer, Shakespeare, Stories, Tokenizer
from esper.tasks.instances import MixedImages
from esper.tasks.losses import Classification, NextToken
from esper.tasks.null import NullSpec
from esper.tasks.registry import TaskSpec, register_task

SCHEDULES = Path(__file__).parent / "schedules"

DIGITS = register_task(
    TaskSpec(
        name="digits",
        description="8x8 digits; a host that sees 2x2 pixels at a time, and grown seeds that see their neighbours.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=1, unshuffle=2, base=48, blocks=2, kernel=1, pools=1, classes=10),
        load=images.load_digits,
        enabled=("r0c0", "r0c1", "r1c0"),
        objective=Classification(10),
        episode_length=30,
        batch_train=64,
        batch_val=360,
        batches_per_step=12,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.05),
        best_schedule=SCHEDULES / "digits.json",
        min_training_epochs=3,
        target_loss=0.1,
        typical_loss_delta_std=0.1,
    )
)

MIXED = MixedImages(
    num_classes=10,
    classes=(5, 10),
    fractions=(0.15, 0.3),
    noises=(0.0, 0.05),
    lr_factors=(0.8, 1.0),
    views=len(images.DIGIT_VIEWS),
)
"""Few examples, so that a seed where no pattern is to be found learns them by heart, and harms its host."""

MIXED_DIGITS = register_task(
    replace(
        DIGITS,
        name="mixed_digits",
        description="8x8 digits; each host has its own classes, few examples, and a slot where a seed can help.",
        host=CNNHostSpec(in_channels=1, unshuffle=2, base=16, kernel=1, blocks=2, pools=1, classes=10),
        load=images.load_digit_views,
        enabled=("r0c0", "r0c1"),
        batch_train=32,
        batches_per_step=8,
        instances=MIXED,
        best_schedule=SCHEDULES / "mixed_digits.json",
        plans=SCHEDULES / "mixed_digits_plans.json",
    )
)

FASHION_MNIST = register_task(
    TaskSpec(
        name="fashion_mnist",
        description="28x28 pictures of clothes; a small but capable host.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=1, base=4, blocks=3, kernel=3, pools=3, classes=10),
        load=fashion_mnist.load,
        source=fashion_mnist.SOURCE,
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=Classification(10),
        episode_length=60,
        batch_train=256,
        batch_val=2_000,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.05),
        min_training_epochs=5,
    )
)

MIXED_DIGITS_WIDE = register_task(
    replace(
        MIXED_DIGITS,
        name="mixed_digits_wide",
        description="mixed_digits with hosts twice as wide; does a controller transfer?",
        host=CNNHostSpec(in_channels=1, unshuffle=2, base=32, kernel=1, blocks=2, pools=1, classes=10),
        best_schedule=None,
        plans=None,
    )
)

MIXED_FASHION_MNIST = register_task(
    replace(
        MIXED_DIGITS,
        name="mixed_fashion_mnist",
        description="Pictures of clothes; hosts differ as in mixed_digits.",
        host=CNNHostSpec(in_channels=1, unshuffle=3, base=16, kernel=1, blocks=2, pools=1, classes=10),
        load=fashion_mnist.load_views,
        source=fashion_mnist.SOURCE,
        best_schedule=None,
        plans=None,
        batch_val=500,
        instances=replace(MIXED, views=len(fashion_mnist.VIEWS)),
    )
)

_CIFAR = (
    # base, blocks, kernel, pools; slots of a run; what a controller finds there
    ("baseline", (8, 3, 3, 3), "r0c0 r0c1 r0c2", "a small but capable host."),
    ("scale", (8, 5, 3, 5), "r0c0 r0c1 r0c2 r0c3 r0c4", "five blocks: where does depth pay?"),
    ("impaired", (1, 3, 1, 3), "r0c0 r0c1 r0c2", "a host of 1, 2 and 4 channels that only growth can save."),
    ("minimal", (2, 3, 1, 0), "r0c0 r0c1 r0c2", "as impaired, a little wider and without pooling."),
    ("multichannel", (8, 3, 3, 3), "r0c0 r0c1 r0c2 r1c0 r1c1 r1c2", "baseline with slots before and after pooling."),
    ("postpool", (16, 3, 3, 3), "r1c0 r1c1 r1c2", "slots after pooling, where seeds are cheap."),
    ("highres", (16, 3, 3, 3), "r0c0 r0c1 r0c2", "slots before pooling, where seeds see more."),
    (
        "deep_multichannel",
        (8, 5, 3, 5),
        "r0c0 r0c1 r0c2 r0c3 r0c4 r1c0 r1c1 r1c2 r1c3 r1c4",
        "scale with ten slots to coordinate.",
    ),
    (
        "deep_impaired",
        (2, 5, 1, 5),
        "r0c0 r0c1 r0c2 r0c3 r0c4 r1c0 r1c1 r1c2 r1c3 r1c4",
        "five narrow blocks, ten slots to coordinate.",
    ),
)
CIFAR = tuple(
    register_task(
        TaskSpec(
            name=f"cifar_{name}",
            description=f"CIFAR-10; {intent}",
            family=HostFamily.CNN,
            host=CNNHostSpec(in_channels=3, base=base, blocks=blocks, kernel=kernel, pools=pools, classes=10),
            load=cifar10.load,
            source=cifar10.SOURCE,
            enabled=tuple(slots.split()),
            objective=Classification(10),
            episode_length=150,
            batch_train=512,
            batch_val=1_000,
            optimizer=OptimizerSpec(kind="sgd", host_lr=0.01, seed_lr=0.01),
            min_training_epochs=10,
        )
    )
    for name, (base, blocks, kernel, pools), slots, intent in _CIFAR
)

TINYSHAKESPEARE = register_task(
    TaskSpec(
        name="tinyshakespeare",
        description="Shakespeare's plays, byte by byte; for a GPU.",
        family=HostFamily.TRANSFORMER,
        host=TransformerHostSpec(
            vocabulary=Shakespeare.vocabulary, width=128, heads=4, layers=4, segments=4, context=128, dropout=0.1
        ),
        load=Shakespeare(context=128),
        source=SHAKESPEARE,
        enabled=("r0c0", "r0c1", "r0c2", "r0c3"),
        objective=NextToken(Shakespeare.vocabulary),
        episode_length=60,
        batch_train=32,
        batch_val=64,
        batches_per_step=50,
        optimizer=OptimizerSpec(kind="adamw", host_lr=1e-3, seed_lr=1e-3),
        min_training_epochs=5,
        target_loss=1.5,
        typical_loss_delta_std=0.1,
        rent_weight=0.01,
    )
)

TINYSHAKESPEARE_SMALL = register_task(
    replace(
        TINYSHAKESPEARE,
        name="tinyshakespeare_small",
        description="The same for two CPU cores: width 64, 64 bytes of context.",
        host=TransformerHostSpec(
            vocabulary=Shakespeare.vocabulary, width=64, heads=4, layers=4, segments=4, context=64, dropout=0.1
        ),
        load=Shakespeare(context=64, val_windows=320),
        episode_length=40,
        batches_per_step=25,
    )
)


def tinystories(name: str, tokenizer: Tokenizer) -> TaskSpec:
    """The task of TinyStories in the tokens of a tokenizer; register it in a plugin.

    For instance `register_task(tinystories("tinystories_gpt2", read_tokenizer(Path("gpt2/tokenizer.json"))))`.
    """
    vocabulary, context = tokenizer.vocabulary, 256
    return TaskSpec(
        name=name,
        description="Short stories in simple words; one window never holds two stories. For a GPU.",
        family=HostFamily.TRANSFORMER,
        host=TransformerHostSpec(
            vocabulary=vocabulary, width=384, heads=6, layers=6, segments=3, context=context, dropout=0.1
        ),
        load=Stories(context, tokenizer),
        source=STORIES,
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=NextToken(vocabulary),
        episode_length=150,
        batch_train=32,
        batch_val=32,
        batches_per_step=200,
        optimizer=OptimizerSpec(kind="adamw", host_lr=3e-4, seed_lr=3e-4),
        min_training_epochs=10,
        target_loss=3.5,
        typical_loss_delta_std=0.15,
        rent_weight=0.01,
    )


TINYSTORIES = register_task(tinystories("tinystories", ByteTokenizer()))

TINYSTORIES_SMALL = register_task(
    replace(
        TINYSTORIES,
        name="tinystories_small",
        description="The same for two CPU cores: 3 layers of width 64, 64 bytes of context.",
        host=TransformerHostSpec(
            vocabulary=ByteTokenizer().vocabulary, width=64, heads=4, layers=3, segments=3, context=64, dropout=0.1
        ),
        load=Stories(64, val_windows=320),
        episode_length=40,
        batch_val=64,
        batches_per_step=25,
        optimizer=OptimizerSpec(kind="adamw", host_lr=1e-3, seed_lr=1e-3),
        min_training_epochs=5,
    )
)

NULL = register_task(
    TaskSpec(
        name="null",
        description="Scripted dynamics with a known best policy; no networks, thousands of hosts.",
        family=HostFamily.CNN,
        script=NullSpec(),
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=Classification(10),
        episode_length=60,
        min_training_epochs=10,
    )
)

NULL_PERMUTED = register_task(
    replace(
        NULL,
        name="null_permuted",
        description="The same, but each host draws which blueprint is worth what; a controller must measure it.",
        script=NullSpec(permuted=True),
        min_training_epochs=3,
    )
)
