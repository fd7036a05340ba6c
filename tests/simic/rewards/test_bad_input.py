"""What a user can get wrong about rewards, in a process without checked annotations, as users run it.

In this process the annotations themselves would refuse most of it, in words that no user ever sees.
"""

import json
import os
import subprocess
import sys

import pytest

PRELUDE = """
import json, sys, torch
from esper.simic.rewards import LossRewardConfig, RewardConfig, compute_reward_batched, make_reward, register_reward
from esper.runs.assembly.presets import resolve

def kernel(mode="shaped", **changes):
    two, x = torch.zeros(2, dtype=torch.int64), torch.full((2,), 50.0)
    given = {"actions": two, "seed_contributions": x, "val_accs": x, "acc_deltas": x, "stages": two + 3,
             "has_seed_mask": torch.ones(2, dtype=torch.bool), "total_improvements": x, "epochs_in_stage": two,
             "seed_ages": two, "previous_stages": two, "previous_epochs": two, "epoch": 3, "max_epochs": 9,
             "config_weights": RewardConfig(mode='shaped').pack()}
    compute_reward_batched(**(given | changes), mode=mode)

def settings(**reward):
    resolve({"task": "null", "reward": reward})

def outcome(source):
    try:
        exec(source)
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]

print(json.dumps([outcome(source) for source in json.load(sys.stdin)]))
"""

FINITE, NUMBER = "it must be a finite number.", "it must be a number."
CONFIG, SHAPE, KIND = "ConfigError", "ValueError", "TypeError"
CASES = {
    # unknown names
    "RewardConfig(mode='shapd')": (CONFIG, 'reward.mode is "shapd"', "'shaped', 'escrow'"),
    "RewardConfig(mode=3)": (CONFIG, "reward.mode is 3", "'shaped', 'escrow'"),
    "RewardConfig(mode=['shaped'])": (CONFIG, 'reward.mode is ["shaped"]', "'shaped', 'escrow'"),
    "settings(mode='shapd')": (CONFIG, "unknown reward 'shapd'", "did you mean 'shaped'?"),
    "make_reward('shapd')": ("RegistryError", "no reward is named 'shapd'", "did you mean 'shaped'?"),
    "make_reward('sparse', RewardConfig())": (
        CONFIG,
        "reward 'sparse' was given",
        "config.with_mode('sparse')",
    ),
    "register_reward('sparse')": ("RegistryError", "'sparse' is registered already", "choose another name"),
    "RewardConfig(attribution='mean')": (CONFIG, 'reward.attribution is "mean"', "'harmonic' or 'minimum'"),
    "settings(max_rents=1.0)": (CONFIG, "unknown key reward.max_rents", "did you mean 'max_rent'"),
    "settings(loss={'target': 1.0})": (CONFIG, "unknown key reward.loss.target", "target_loss"),
    # numbers that are none, or of the wrong kind
    "RewardConfig(max_rent=float('nan'))": (CONFIG, "reward.max_rent is nan", FINITE),
    "RewardConfig(max_rent=float('-inf'))": (CONFIG, "reward.max_rent is -inf", FINITE),
    "RewardConfig(max_rent=10**400)": (CONFIG, "reward.max_rent is 1000", NUMBER),
    "RewardConfig(max_rent='1')": (CONFIG, 'reward.max_rent is "1"', NUMBER),
    "RewardConfig(max_rent=True)": (CONFIG, "reward.max_rent is true", NUMBER),
    "RewardConfig(max_rent=None)": (CONFIG, "reward.max_rent is null", NUMBER),
    "RewardConfig(deferred_fraction='most')": (CONFIG, 'reward.deferred_fraction is "most"', NUMBER),
    "RewardConfig(rollback_penalty=float('nan'))": (CONFIG, "reward.rollback_penalty is nan", FINITE),
    "RewardConfig(free_slots=1.5)": (CONFIG, "reward.free_slots is 1.5", "it must be a whole number."),
    "RewardConfig(min_deferred_epochs=True)": (
        CONFIG,
        "reward.min_deferred_epochs is true",
        "it must be a whole number.",
    ),
    "RewardConfig(disable_pbrs=1)": (CONFIG, "reward.disable_pbrs is 1", "it must be true or false."),
    "LossRewardConfig(target_loss=float('inf'))": (CONFIG, "reward.loss.target_loss is inf", FINITE),
    "LossRewardConfig(grace_epochs=2.5)": (CONFIG, "reward.loss.grace_epochs is 2.5", "a whole number."),
    "settings(max_rent=float('nan'))": (CONFIG, "reward.max_rent is nan", FINITE),
    "settings(max_rent='1')": (CONFIG, 'reward.max_rent is "1"', "it must be a number."),
    # numbers that cannot be
    "settings(gamma=0.99)": (CONFIG, "unknown key reward.gamma", ""),
    "RewardConfig(rent_host_params_floor=0.999)": (CONFIG, "reward.rent_host_params_floor is 0.999", "at least 1"),
    "settings(rent_host_params_floor=0)": (CONFIG, "reward.rent_host_params_floor is 0", "at least 1"),
    # shapes and kinds of columns
    "kernel(val_accs=torch.zeros(3))": (SHAPE, "val_accs has shape (3,)", "it must be (2,)"),
    "kernel(deferred_scales=torch.zeros(3, 2))": (SHAPE, "deferred_scales has shape (3, 2)", "it must be (2, S)"),
    "kernel(deferred_scales=torch.zeros(2, 3), deferred_contributions=torch.zeros(2, 2))": (
        SHAPE,
        "deferred_contributions has shape (2, 2) but deferred_scales (2, 3)",
        "both must be (N, S)",
    ),
    "kernel(mode='basic_plus', deferred_scales=torch.zeros(2, 2), deferred_contributions=torch.zeros(2, 1))": (
        SHAPE,
        "deferred_contributions has shape (2, 1) but deferred_scales (2, 2)",
        "one column per slot",
    ),
    "kernel(epoch=torch.tensor([1, 2, 3]))": (SHAPE, "epoch has shape (3,)", "or one per host: (2,)"),
    "kernel(max_epochs=torch.zeros(2, 1, dtype=torch.int64))": (SHAPE, "max_epochs has shape (2, 1)", "(2,)"),
    "kernel(epoch=torch.zeros(0, dtype=torch.int64))": (SHAPE, "epoch has shape (0,)", "one number for all hosts"),
    "kernel(epoch=torch.tensor([1.0, 2.0]))": (KIND, "epoch is torch.float32", "it must be torch.int64"),
    "kernel(val_accs=torch.zeros(2, 1))": (SHAPE, "val_accs has shape (2, 1)", "it must be (2,)"),
    "kernel(stages=torch.zeros(2, dtype=torch.int32))": (KIND, "stages is torch.int32", "it must be torch.int64"),
    "kernel(has_seed_mask=torch.zeros(2))": (KIND, "has_seed_mask is torch.float32", "it must be torch.bool"),
    "kernel(val_losses=torch.zeros(2, dtype=torch.int64))": (KIND, "val_losses is torch.int64", "a floating type"),
    "kernel(attribution='mean')": (CONFIG, "attribution 'mean' is unknown", "'harmonic' or 'minimum'"),
    "kernel(seed_ages=torch.zeros(2))": (KIND, "seed_ages is torch.float32", "it must be torch.int64"),
    "kernel(config_weights=LossRewardConfig().pack())": (SHAPE, "config_weights is", "mode 'shaped' takes floats"),
    "kernel(mode='shapd')": (CONFIG, "reward mode 'shapd' has no formula", "did you mean 'shaped'?"),
}
SOUND = (
    "RewardConfig(max_rent=2)",
    "RewardConfig(loss=LossRewardConfig(target_loss=1), max_rent=2, deferred_fraction=1, mode='basic_plus')",
    "settings(rent_host_params_floor=1)",
    "settings(mode='loss', loss={'target_loss': 1})",
    "make_reward('escrow', RewardConfig(mode='escrow', rollback_penalty=None))",
    "kernel()",
    "kernel(epoch=torch.tensor(3), max_epochs=torch.tensor([9]))",
    "kernel(epoch=torch.tensor([3, 4]), max_epochs=torch.tensor([9, 9]))",
    "kernel(deferred_scales=torch.zeros(2, 3), deferred_contributions=torch.zeros(2, 3))",
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str]]:
    """What each of them ends with: the name of the error, and its message."""
    sources = [*CASES, *SOUND]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE], input=json.dumps(sources), env=environment, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(zip(sources, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("source", CASES)
def test_a_mistake_is_refused_with_the_name_of_the_field_and_what_it_must_be(outcomes, source):
    error, found, expected = CASES[source]
    name, message = outcomes[source]
    assert name == error, message
    assert found in message
    assert expected in message


@pytest.mark.parametrize("source", SOUND)
def test_what_is_sound_is_not_refused(outcomes, source):
    assert outcomes[source] == ["nothing", ""]
