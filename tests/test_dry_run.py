"""A step, the rewards and the update on the device "meta": each device of a GPU run stays on its side, without a GPU.

What only a GPU can show is in `tests/gpu`.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import small_runs
import tokens
from dry_run import META, OneDevice, on_meta
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.leyline.lifecycle import Algorithm, AlphaMode, HostFamily, SeedStage
from esper.runs.assembly.assemble import dataset_of, engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.simic.rewards.reward_config import MODES
from esper.tasks.registry import register_task, task_by_name
from esper.tolaria.coalitions import enumerate_coalitions
from esper.tolaria.executors.protocol import Structure, empty_structure
from esper.tolaria.runtime import host_read

CPU = torch.device("cpu")
STEPS, HOSTS = 2, 3
SMALL = {
    "num_envs": HOSTS, "episode_length": STEPS, "compile": "off", "executor": "fused",
    "ppo": {"feature_width": 16, "hidden_width": 16, "update_epochs": 1, "num_minibatches": 2},
}  # fmt: skip
assert small_runs.OPTIONS  # registers the tiny task
register_task(
    replace(
        task_by_name("tiny"),
        name="tiny_transformer",
        family=HostFamily.TRANSFORMER,
        enabled=("r0c0", "r0c1"),
        host=TransformerHostSpec(vocabulary=7, width=16, heads=2, layers=2, segments=2, context=5, dropout=0.1),
        objective=tokens.OBJECTIVE,
        load=lambda folder, seed: tokens.tokens(),
    )
)


def grown(num_slots: int, blueprints: tuple[int, ...]) -> Structure:
    """A seed in each slot of each host, by turns of each algorithm, hidden in the first slot; and two coalitions."""
    one = np.ones((HOSTS, num_slots), dtype=np.int64)
    algorithm = 1 + (np.arange(HOSTS)[:, None] + np.arange(num_slots)) % 3
    alpha = np.full((HOSTS, num_slots), 0.5, dtype=np.float32)
    alpha[:, 0] = 0.0
    sets = np.ones((HOSTS, 2, num_slots), dtype=np.bool_)
    sets[:, :, 0], sets[:, 1] = False, False
    return replace(
        empty_structure(HOSTS, num_slots),
        stage=np.where(alpha > 0.0, int(SeedStage.BLENDING), int(SeedStage.TRAINING)),
        blueprint=one * np.array([blueprints[s % len(blueprints)] for s in range(num_slots)]),
        algorithm=algorithm, has_gate=algorithm == Algorithm.GATE,
        alpha=alpha, alpha_mode=one * int(AlphaMode.UP), germinated=one.astype(np.bool_),
        sets=sets, sets_valid=np.ones((HOSTS, 2), dtype=np.bool_),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "mode"),
    [
        *(pytest.param("null", mode, marks=pytest.mark.slow) for mode in MODES if mode != "objective"),
        *((task, "objective") for task in ("null", "tiny", "tiny_transformer")),
    ],
)
def test_a_round_keeps_to_one_device_and_reads_nothing_but_by_host_read(task, mode):
    config = resolve({**SMALL, "task": task, "reward": {"mode": mode}})
    engine = engine_of(config, dataset_of(config, CPU), CPU)
    engine.executor.measures_together = True  # as on a GPU
    engine, client = on_meta(engine, learner_of(config, engine.spec))
    with OneDevice():
        engine.reset(client, 0)
        if task != "null":
            engine.executor.apply_structure(grown(engine.spec.num_slots, engine.spec.selectable))
        assert engine.rollout(client).cost.reads == STEPS  # the one of the statistics comes after
        if mode == "objective":  # an update does not know the mode
            assert client.update()["optimizer_steps"] == 0.0


def test_host_read_gives_zeros():
    flag, number = host_read(torch.ones(2, dtype=torch.bool, device=META), torch.ones((), device=META))
    assert flag.tolist() == [False, False]
    assert number == 0.0


@pytest.mark.parametrize(
    "mistake",
    [
        lambda x: x + torch.ones(2),
        lambda x: x * torch.tensor(2.0),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_dry_run_refuses_two_devices_and_other_reads(mistake: Callable[[Tensor], object]):
    with OneDevice(), pytest.raises((AssertionError, NotImplementedError, RuntimeError, TypeError)):
        mistake(torch.ones(2, device=META))


@pytest.mark.parametrize("task", ["tiny", "tiny_transformer"])
def test_hosts_one_by_one_keep_to_one_device_too(task):
    config = resolve({**SMALL, "task": task, "executor": "streamed"})
    engine = engine_of(config, dataset_of(config, CPU), CPU)
    engine, client = on_meta(engine, learner_of(config, engine.spec))
    with OneDevice():
        engine.reset(client, 0)
        structure = grown(engine.spec.num_slots, engine.spec.selectable)
        engine.executor.apply_structure(structure)
        assert engine.executor.train_epoch(1, engine.state.slots).loss.device == META
        coalitions = enumerate_coalitions(engine.state.slots.stage, engine.state.slots.alpha > 0.0)
        engine.executor.evaluate(1, engine.state.slots, coalitions)
