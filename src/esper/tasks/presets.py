"""The built-in tasks."""

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.stages import HostFamily
from esper.tasks.datasets import digits, fashion_mnist
from esper.tasks.null import NullSpec
from esper.tasks.objectives import Classification
from esper.tasks.registry import TaskSpec, register_task

DIGITS = register_task(
    TaskSpec(
        name="digits",
        description="8x8 digits; a host with 1x1 convolutions, which grown seeds improve within seconds.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=1, base=8, blocks=2, kernel=1, pools=1, classes=10),
        load=digits.load,
        enabled=("r0c0", "r0c1", "r1c0"),
        objective=Classification(10),
        episode_length=40,
        batch_train=64,
        batch_val=360,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.02, seed_lr=0.02),
        min_training_epochs=3,
        target_loss=0.1,
        typical_loss_delta_std=0.1,
    )
)

FASHION_MNIST = register_task(
    TaskSpec(
        name="fashion_mnist",
        description="28x28 pictures of clothes; a small but capable host.",
        family=HostFamily.CNN,
        host=CNNHostSpec(in_channels=1, base=4, blocks=3, kernel=3, pools=3, classes=10),
        load=fashion_mnist.load,
        needs_data_dir=True,
        enabled=("r0c0", "r0c1", "r0c2"),
        objective=Classification(10),
        episode_length=60,
        batch_train=256,
        batch_val=2_000,
        optimizer=OptimizerSpec(kind="sgd", host_lr=0.05, seed_lr=0.05),
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
