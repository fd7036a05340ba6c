"""Hosts that unshuffle their images, 6x10 with two channels, train and are measured alike in every executor."""

import numpy as np
import pytest
import torch
from against_streamed import compare, grow_different_seeds

import tiny
from esper.kasmina.hosts.cnn import CNNHost, CNNHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.lifecycle import Algorithm, LifecycleOp, SeedStage
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.images import CropAndFlip
from esper.tolaria.build import build_engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from tiny import CLASSES, CPU, SLOTS, Bench, bit_equal
from toys import ToyClient, action, script

SPEC = CNNHostSpec(in_channels=2, base=4, blocks=2, kernel=3, pools=1, classes=CLASSES, unshuffle=2)
SIZE = (6, 10)  # 3x5 after it, which is odd
WRAP = {
    "streamed": StreamedExecutor,
    "native": NativeExecutor,
    "fused": lambda data: FusedExecutor(data, measures_together=True),
}


def images(augmentation: CropAndFlip | None = None) -> Dataset:
    generator = torch.Generator().manual_seed(6)

    def split(count: int) -> Split:
        return Split(torch.randn(count, 2, *SIZE, generator=generator), torch.arange(count) % CLASSES)

    splits = {"train": split(40), "val": split(30), "test": split(20)}
    return Dataset(identity={"name": "wide"}, **splits, num_classes=CLASSES, augmentation=augmentation)


def settings(augmentation: CropAndFlip | None = None) -> dict[str, object]:
    host = deterministic_build(lambda: CNNHost(SPEC, SLOTS, image_size=SIZE))
    return {"host": host, "data": images(augmentation)}


@pytest.mark.parametrize("executor", ["native", "fused"])
@pytest.mark.parametrize("augmentation", [None, CropAndFlip(1)], ids=["plain", "augmented"])
def test_hosts_with_seeds_are_those_of_the_streamed_executor(executor, augmentation):
    compare(WRAP[executor], grow_different_seeds, num_envs=5, **settings(augmentation))


@pytest.mark.parametrize("executor", list(WRAP))
def test_a_new_seed_does_not_change_its_host_by_a_bit(executor):
    alone, grown = Bench(1, **settings()), Bench(1, **settings())
    for bench in (alone, grown):
        bench.executor = WRAP[executor](bench.executor.data)
    grown.grow("r0c0", "bottleneck", SeedStage.TRAINING)
    grown.grow("r1c0", "conv_light", SeedStage.BLENDING, alpha=0.0, algorithm=Algorithm.GATE)
    for bench in (alone, grown):
        bench.train()
    for name, value in alone.host_params().items():
        assert bit_equal(grown.host_params()[name], value), name


def losses(executor: str, workers: int) -> np.ndarray:
    """Of training and validation in four steps [4, 2, N], in which a seed begins to blend."""
    task = tiny.task(host=SPEC, load=lambda folder, seed: images())
    config = EngineConfig(
        num_envs=3, episode_length=4, slots=SLOTS, run_seed=5, executor=executor, workers=workers,
        lifecycle=tiny.LifecycleConfig(min_training_epochs=1),
    )  # fmt: skip
    seen = []
    engine = build_engine(config, task, images(), CPU, on_step=seen.append)
    client = ToyClient(engine.spec, script(3, 4, {1: action(LifecycleOp.GERMINATE, slot=0, blueprint=4)}))
    engine.reset(client, 0)
    engine.rollout(client)
    if workers > 1:
        engine.executor.close()
    return np.array([(report.train_loss, report.val_loss) for report in seen])


@pytest.mark.slow
def test_processes_that_share_the_hosts_and_compiled_code_have_the_losses_of_one_streamed_process():
    want = losses("streamed", 1)
    assert losses("streamed", 2).tobytes() == want.tobytes()
    np.testing.assert_allclose(losses("native", 1), want, rtol=1e-4)
