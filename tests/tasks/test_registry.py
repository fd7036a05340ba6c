import dataclasses
import math

import numpy as np
import pytest

from esper.leyline.errors import ConfigError, RegistryError
from esper.tasks import presets, register_task, task_by_name
from esper.tasks.losses import Classification, NextToken
from esper.tasks.registry import TaskSpec


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.raises(RegistryError, match="unknown task 'digit'; did you mean 'digits'"):
        task_by_name("digit")


def test_a_name_is_registered_once():
    with pytest.raises(RegistryError, match="a task 'null' is registered already"):
        register_task(task_by_name("null"))


PRE, POST = ([f"r{row}c{column}" for column in range(5)] for row in (0, 1))
PRESETS = [
    # host parameters, slots offered and enabled, steps, batches of training and validation, M
    ("digits", 6_058, (*PRE[:2], "r1c0"), (*PRE[:2], "r1c0"), 30, (64, 360), 3),
    ("fashion_mnist", 1_702, (*PRE[:3], *POST[:3]), PRE[:3], 60, (256, 2_000), 5),
    ("cifar_baseline", 6_418, (*PRE[:3], *POST[:3]), PRE[:3], 150, (512, 1_000), 10),
    ("cifar_scale", 99_922, (*PRE, *POST), PRE, 150, (512, 1_000), 10),
    ("cifar_impaired", 77, (*PRE[:3], *POST[:3]), PRE[:3], 150, (512, 1_000), 10),
    ("cifar_minimal", 164, PRE[:3], PRE[:3], 150, (512, 1_000), 10),
    ("cifar_multichannel", 6_418, (*PRE[:3], *POST[:3]), (*PRE[:3], *POST[:3]), 150, (512, 1_000), 10),
    ("cifar_postpool", 24_346, (*PRE[:3], *POST[:3]), POST[:3], 150, (512, 1_000), 10),
    ("cifar_highres", 24_346, (*PRE[:3], *POST[:3]), PRE[:3], 150, (512, 1_000), 10),
    ("cifar_deep_multichannel", 99_922, (*PRE, *POST), (*PRE, *POST), 150, (512, 1_000), 10),
    ("cifar_deep_impaired", 1_140, (*PRE, *POST), (*PRE, *POST), 150, (512, 1_000), 10),
    ("tinyshakespeare", 842_496, PRE[:4], PRE[:4], 60, (32, 64), 5),
    ("tinystories", 10_844_544, PRE[:3], PRE[:3], 150, (32, 32), 10),
    ("tinyshakespeare_small", 220_544, PRE[:4], PRE[:4], 40, (32, 64), 5),
    ("tinystories_small", 170_624, PRE[:3], PRE[:3], 40, (32, 64), 5),
]


@pytest.mark.parametrize(("name", "host_params", "offered", "enabled", "length", "batches", "least_epochs"), PRESETS)
def test_presets_of_trained_tasks(name, host_params, offered, enabled, length, batches, least_epochs):
    task = task_by_name(name)
    assert task.host is not None
    assert task.host.num_params() == host_params
    assert task.offered == tuple(offered)
    assert task.enabled == tuple(enabled)
    assert (task.episode_length, task.batch_train, task.batch_val) == (length, *batches)
    assert task.min_training_epochs == least_epochs


@pytest.mark.parametrize(
    ("name", "lr", "batches_per_step", "blind_loss"),
    [("tinyshakespeare", 1e-3, 50, math.log(256)), ("tinystories", 3e-4, 200, math.log(257))],
)
def test_language_tasks_take_a_number_of_batches_per_step_with_adamw(name, lr, batches_per_step, blind_loss):
    task = task_by_name(name)
    assert (task.optimizer.kind, task.optimizer.host_lr, task.optimizer.seed_lr) == ("adamw", lr, lr)
    assert task.batches_per_step == batches_per_step
    assert task.objective.blind_loss == blind_loss


def test_tinystories_in_other_tokens_has_their_vocabulary_everywhere():
    class Letters:
        vocabulary, end, identity = 28, 27, "letters"

        def encode(self, texts):
            return (np.frombuffer(text, np.uint8).astype(np.int32) % 27 for text in texts)

        def check(self, path, content):
            pass

    task = presets.tinystories("stories_of_letters", Letters())
    assert task.host == dataclasses.replace(task_by_name("tinystories").host, vocabulary=28)
    assert task.objective == NextToken(28)
    assert task.load.tokenizer.end == 27


def test_the_null_task_is_scripted_and_offers_sixteen_slots():
    task = task_by_name("null")
    assert task.host is None
    assert task.load is None
    assert task.script is not None
    assert task.script.host_params == 10_000
    assert len(task.offered) == 16
    assert task.enabled == ("r0c0", "r0c1", "r0c2")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"enabled": ()}, "no slots are enabled"),
        ({"enabled": ("r0c0", "r9c9")}, "no slot 'r9c9'"),
        ({"enabled": ("r1c0", "r0c0")}, "list them as r0c0, r1c0"),
        ({"episode_length": 0}, "task.episode_length is 0"),
        ({"episode_length": 5_000}, "at most 4095"),
        ({"batch_train": 0}, "task.batch_train is 0"),
        ({"batches_per_step": 0}, "task.batches_per_step is 0"),
        ({"objective": Classification(7)}, "10 logits but the task has 7"),
        ({"load": None}, "needs either a host and a loader, or a script"),
        ({"host": None}, "needs either a host and a loader, or a script"),
    ],
)
def test_an_impossible_task_cannot_be_made(changes, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(task_by_name("digits"), **changes)


@pytest.mark.parametrize(("enabled", "said"), [((), "enables no slot"), (("r1c0",), "has no slot 'r1c0'")])
def test_a_scripted_task_checks_its_slots_too(enabled, said):
    with pytest.raises(ConfigError, match=said):
        dataclasses.replace(task_by_name("null"), enabled=enabled)


def test_a_task_of_ones_own_can_be_registered():
    mine: TaskSpec = dataclasses.replace(task_by_name("null"), name="null_of_five", enabled=("r0c0",), episode_length=5)
    assert register_task(mine) is task_by_name("null_of_five")
