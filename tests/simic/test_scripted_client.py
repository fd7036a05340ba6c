"""A controller that does not learn, with a reward beside it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hindsight
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, Head
from esper.leyline.messages import ClientProtocol, Observation
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import baseline_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import ScriptedClient
from esper.simic.rewards import make_reward
from esper.tamiyo.baselines import BASELINES, scheduled
from esper.tamiyo.schedules import Schedule, ScriptedPolicy, Stateless
from esper.tasks import null
from esper.tolaria.state import RolloutStats

CPU = torch.device("cpu")
CONFIG = resolve({"task": "null", "num_envs": 3, "episode_length": 12, "lifecycle": {"min_training_epochs": 2}})


def test_every_baseline_drives_an_engine_and_learns_nothing() -> None:
    for name in BASELINES:
        engine = engine_of(CONFIG, None, CPU)
        client = baseline_of(name, CONFIG, engine.spec)
        assert isinstance(client, ClientProtocol)
        engine.reset(client, episode=0)
        stats = engine.rollout(client)
        assert stats is not None
        assert stats.ops.sum() == 3 * 12
        assert client.update() == {}
        if name != "heuristic":  # which grows no seed that could not be judged within these twelve steps
            assert (stats.germinated.sum() == 0) == (name in ("wait_only", "static_final"))


def follow_the_best_schedule(num_slots: int, episode_length: int, training: int) -> RolloutStats:
    """An episode of two hosts of the null task, driven by the schedule that is worked out for it."""
    lifecycle = {"min_training_epochs": training}
    slots = tuple(f"r0c{i}" for i in range(num_slots))
    settings = {"task": "null", "num_envs": 2, "episode_length": episode_length, "slots": slots, "lifecycle": lifecycle}
    config = resolve(settings)
    engine = engine_of(config, None, CPU)
    rows = null.best_schedule(episode_length, training, num_slots)
    policy = scheduled(Schedule.from_rows("best", 1, rows), engine.spec)
    client = ScriptedClient(policy, make_reward("objective"))
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert stats is not None
    return stats


@pytest.mark.parametrize(
    ("num_slots", "episode_length", "training", "worth"),
    [
        # a(E) + 6 sum_i (1 - e^(-(E - e_i) / 10)), a(E) = 50 (1 - e^(-E / 10)), seeds born in e_i = 1 + i (M + 1)
        (3, 60, 10, 67.6619),  # 49.876062 + 6 (3 - e^-5.9 - e^-4.8 - e^-3.7)
        (3, 20, 3, 56.9998),  # 43.233236 + 6 (3 - e^-1.9 - e^-1.5 - e^-1.1)
    ],
)
def test_the_best_schedule_of_the_null_task_reaches_its_value_in_the_engine(num_slots, episode_length, training, worth):
    stats = follow_the_best_schedule(num_slots, episode_length, training)
    assert stats.committed_acc.tolist() == pytest.approx([worth] * 2, abs=1e-4)
    assert stats.val_acc.tolist() == pytest.approx([worth] * 2, abs=1e-4)  # only permanent seeds are active
    assert stats.fossilized.tolist() == [num_slots] * 2
    assert stats.refused.tolist() == [0, 0]
    assert hindsight.best_schedule_value(episode_length, training, num_slots) == pytest.approx(worth, abs=5e-5)


class Own(Stateless):
    """A script of the user's."""

    def __init__(self, actions: Callable[[Tensor], object]) -> None:
        self._actions = actions

    def decide(self, obs: Observation, memory: object) -> object:
        return self._actions(torch.tensor([CANONICAL_ACTION] * obs.num_envs))


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (lambda x: x.float(), r"gives actions \[3, 8\] of torch.float32; they must be int64 \[3, 8\]"),
        (lambda x: x[:1], r"gives actions \[1, 8\] of torch.int64"),
        (lambda x: None, "gives actions NoneType"),
        (lambda x: x - 1, r"gives host 0 slot = -1 in step 1; it must be in 0 to 2"),
        (lambda x: x.index_fill(1, torch.tensor([Head.OP]), 9), "gives host 0 op = 9 in step 1; it must be in 0 to 5"),
        (lambda x: 1 / 0, "fails in step 1: ZeroDivisionError"),
    ],
)
def test_actions_of_a_script_of_the_users_are_whole_numbers_in_the_action_space(actions, said):
    engine = engine_of(CONFIG, None, CPU)
    client = ScriptedClient(ScriptedPolicy(Own(actions), engine.spec), make_reward("objective"))
    engine.reset(client, episode=0)
    with pytest.raises(ConfigError, match=f"the policy Own {said}"):
        engine.rollout(client)
