import dataclasses

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
