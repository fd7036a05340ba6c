import dataclasses

import pytest

from esper.leyline.errors import ConfigError, RegistryError
from esper.tasks import register_task, task_by_name, task_names
from esper.tasks.objectives import Classification
from esper.tasks.registry import TaskSpec


def test_the_built_in_tasks_are_known():
    assert {"digits", "fashion_mnist", "null"} <= set(task_names())


def test_an_unknown_name_suggests_the_nearest_one():
    with pytest.raises(RegistryError, match="unknown task 'digit'; did you mean 'digits'"):
        task_by_name("digit")


def test_a_name_is_registered_once():
    with pytest.raises(RegistryError, match="a task 'null' is registered already"):
        register_task(task_by_name("null"))


@pytest.mark.parametrize(
    ("name", "host_params", "offered", "enabled", "length", "min_training_epochs"),
    [
        ("digits", 354, ("r0c0", "r0c1", "r1c0"), ("r0c0", "r0c1", "r1c0"), 40, 3),
        ("fashion_mnist", 1_702, ("r0c0", "r0c1", "r0c2", "r1c0", "r1c1", "r1c2"), ("r0c0", "r0c1", "r0c2"), 60, 5),
    ],
)
def test_presets_of_trained_tasks(name, host_params, offered, enabled, length, min_training_epochs):
    task = task_by_name(name)
    assert task.host is not None
    assert task.host.num_params() == host_params
    assert task.offered == offered
    assert task.enabled == enabled
    assert (task.episode_length, task.min_training_epochs) == (length, min_training_epochs)


def test_the_null_task_is_scripted_and_offers_sixteen_slots():
    task = task_by_name("null")
    assert task.host is None
    assert task.load is None
    assert task.script is not None
    assert task.script.host_params == 10_000
    assert len(task.offered) == 16
    assert task.enabled == ("r0c0", "r0c1", "r0c2")


@pytest.mark.parametrize(
    ("changes", "complaint"),
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
def test_an_impossible_task_cannot_be_made(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        dataclasses.replace(task_by_name("digits"), **changes)


@pytest.mark.parametrize(("enabled", "complaint"), [((), "enables no slot"), (("r1c0",), "has no slot 'r1c0'")])
def test_a_scripted_task_checks_its_slots_too(enabled, complaint):
    with pytest.raises(ConfigError, match=complaint):
        dataclasses.replace(task_by_name("null"), enabled=enabled)


def test_a_task_of_ones_own_can_be_registered():
    mine: TaskSpec = dataclasses.replace(task_by_name("null"), name="null_of_five", enabled=("r0c0",), episode_length=5)
    assert register_task(mine) is task_by_name("null_of_five")
