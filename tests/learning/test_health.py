"""The alarms of updates on the scripted task: none while a controller learns, several after it collapsed."""

from dataclasses import replace

import pytest
import torch

from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.telemetry.anomalies import of_update


def alarms(rounds: int, **ppo: float) -> list[set[str]]:
    """Names of the alarms of each round of preset `learn` on 16 scripted hosts, with other settings of PPO."""
    config = resolve({"task": "null_permuted", "preset": "learn", "num_envs": 16, "seed": 5, "device": "cpu"})
    config = replace(config, ppo=replace(config.ppo, **ppo))
    engine = engine_of(config, None, torch.device("cpu"))
    client = learner_of(config, engine.spec)
    found = []
    for episode in range(rounds):
        engine.reset(client, episode)
        engine.rollout(client)
        found.append({alarm.name for alarm in of_update(client.update())})
    return found


@pytest.mark.slow
def test_a_controller_that_learns_raises_no_alarm():
    assert alarms(10) == [set()] * 10


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "expected"), [(0.06, {"cell_rms"}), (0.12, {"cell_rms", "entropy_op"})])
def test_steps_that_are_many_times_too_large_raise_alarms_in_every_round(lr, expected):
    # the first update moves the policy by a divergence above 1; from then on the recurrent state is at its limits
    first, *later = alarms(4, lr=lr, ent_coef=0.0, ent_coef_end=0.0)
    assert first == {"approx_kl"}
    assert all(expected <= found for found in later)
