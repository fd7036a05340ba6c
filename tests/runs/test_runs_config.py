"""What a configuration refuses, and that it survives its own file."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.leyline.errors import ConfigError, EsperError
from esper.runs.assembly.presets import config_of_run, resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.assembly.values import flat, merge, parse, plain, read_toml
from esper.telemetry.run_directory import RunDirectory


def refusal(told: dict[str, Any]) -> str:
    with pytest.raises(EsperError) as caught:
        resolve({"task": "null"} | told)
    return str(caught.value)


def test_a_configuration_is_frozen():
    config = resolve({"task": "null"})
    with pytest.raises(FrozenInstanceError):
        config.rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize("task", ["null", "digits", "fashion_mnist"])
@pytest.mark.parametrize("preset", ["quickstart", "small", "paper"])
def test_every_task_and_preset_survives_the_file_that_records_it(tmp_path, task, preset):
    config = resolve({"task": task, "preset": preset})
    with RunDirectory.create(tmp_path / "run", plain(config)) as run:
        assert config_of_run(run.path) == config
        assert resolve({}, run.path / "config.toml") == config


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"rounds": 0}, "rounds is 0; it must be at least 1"),
        ({"rounds": -3}, "rounds is -3"),
        ({"rounds": 2**20 + 1}, "at most 1048576"),
        ({"rounds": "ten"}, 'rounds is "ten"; it must be a whole number'),
        ({"rounds": "3"}, 'rounds is "3"; it must be a whole number'),
        ({"rounds": True}, "rounds is true; it must be a whole number"),
        ({"rounds": 1.5}, "rounds is 1.5; it must be a whole number"),
        ({"episode_length": 0}, "episode_length is 0; it must be at least 1"),
        ({"episode_length": 4096}, "episode_length is 4096"),
        ({"num_envs": 0}, "num_envs is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0"),
        ({"batch_train": -1}, "batch_train is -1"),
        ({"task": "digits", "batch_val": 0}, "batch_val is 0; both must be at least 1"),
        ({"ppo": {"lr": math.nan}}, "ppo.lr is nan"),
        ({"ppo": {"lr": math.inf}}, "ppo.lr is inf"),
        ({"ppo": {"lr": "fast"}}, 'ppo.lr is "fast"; it must be a number'),
        ({"ppo": 3}, "ppo is 3; it must be a table"),
        ({"reward": "sparse"}, "reward is \"sparse\"; it must be a table"),
        ({"ppo": {"adam_betas": [0.9]}}, "ppo.adam_betas"),
        ({"reward": {"mode": "basic_plus"}, "lifecycle": {"fossils_as_players": False}}, "fossils_as_players = true"),
        ({"optimizer": {"host_lr": math.nan}}, "optimizer.host_lr is nan"),
        ({"lifecycle": {"sequential": 1}}, "lifecycle.sequential is 1; it must be true or false"),
        ({"lifecycle": {"gate_mode": "strct"}}, "'permissive' or 'strict'"),
        ({"device": 0}, "device is 0; it must be text in quotation marks"),
        ({"amp": "fp16", "device": "cpu"}, "'off' or 'bf16'"),
        ({"amp": "fp8"}, "amp is"),
        ({"compile": "sometimes"}, "compile is"),
        ({"slots": "r0c0"}, "slots is \"r0c0\"; it must be a list"),
        ({"slots": ["r9c9"]}, "no slot 'r9c9'; did you mean"),
        ({"slots": ["r0c1", "r0c0"]}, "in the order r0c0, r0c1"),
        ({"slots": ["r0c1", "r0c1"]}, "list each once"),
        ({"slots": []}, "enables no slot"),
        ({"task": "digits", "slots": ["r0c0", "r9c9"]}, "r9c9"),
        ({"task": "digit"}, "did you mean 'digits'?"),
        ({"task": 3}, "task is 3; it must be a name"),
        ({"preset": "smal"}, "did you mean 'small'?"),
        ({"preset": ["small"]}, 'preset is ["small"]; it must be a name'),
        ({"reward": {"mode": "shapd"}}, "did you mean 'shaped'?"),
        ({"reward": {"mode": 3}}, "mode is 3; it must be a name"),
        ({"custom_reward": "sparse"}, "which is built in; set reward.mode"),
        ({"custom_reward": "unheard_of"}, "no reward is named 'unheard_of'"),
        ({"compute_budget": 2.0, "reward": {"mode": "shaped"}}, "reward 'shaped' pays in the last step"),
        *(({"governor": {"window": size}}, "governor.window is 1") for size in (10**4, 10**12)),
        ({"rounds": 10**12}, "rounds is 1000000000000; it must be at most"),
        ({"threads": 10**12}, "threads is 1000000000000; it must be at most"),
        ({"episode_length": 10**9}, "episode_length is 1000000000; it must be at most"),
        ({"ppo": {"num_minibatches": 10**12}}, "ppo.num_minibatches is 1000000000000; it must be at most"),
        ({"ppo": {"hidden_width": 10**9}}, "ppo.hidden_width is 1000000000; it must be at most"),
        ({"ppo": {"ent_coef": 1e308}}, "ppo.ent_coef is 1e+308; its size must be 1e-30 to 1e+30, or 0"),
        ({"optimizer": {"betas": [1e-300, 0.9]}}, "optimizer.betas is 1e-300; its size must be"),
        ({"reward": {"rent_weight": -1e308}}, "reward.rent_weight is -1e+308; its size must be"),
        ({"reward": {"min_prune_bonus_age": 10**400}}, "reward.min_prune_bonus_age is 1000"),
        ({"compute_budget": 0.0}, "compute_budget is 0.0; it must be above 0"),
        ({"plugins": "mine.py"}, 'plugins is "mine.py"; it must be a list'),
        ({"plugins": [3]}, "plugins is [3]"),
        ({"record_steps": True}, "unknown key record_steps"),
        ({"roundz": 3}, "unknown key roundz; did you mean 'rounds'?"),
        ({"lr": 3}, "unknown key lr; did you mean optimizer.host_lr and optimizer.seed_lr, of the network and"),
        ({"batch": 8}, "unknown key batch; did you mean batch_train?"),
        ({"ppo": {"learning_rate": 3}}, "unknown key ppo.learning_rate; did you mean ppo.lr?"),
        ({"reward": {"lr": 3}}, "unknown key reward.lr; did you mean ppo.lr?"),
        ({"ppo": {"seed": 3}}, "unknown key ppo.seed; did you mean seed?"),
        ({"reward": {"loss": {"typical": 3}}}, "unknown key reward.loss.typical"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_way_out(told, said):
    assert said in refusal(told)


@settings(max_examples=25)
@given(st.sampled_from(["rounds", "num_envs", "episode_length", "seed"]), st.text(max_size=5) | st.floats() | st.none())
def test_a_whole_number_is_nothing_else(name, value):
    with pytest.raises(EsperError):
        resolve({"task": "null", name: value})


def test_a_whole_number_stands_for_a_float():
    assert resolve({"task": "null", "ppo": {"vf_coef": 1}}).ppo.vf_coef == 1.0


def test_a_value_that_is_missing_is_named():
    values = plain(resolve({"task": "null"}))
    del values["num_envs"]
    with pytest.raises(ConfigError, match="num_envs is missing"):
        parse(RunConfig, values)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("rounds = \n", "not valid TOML"),
        ("\xff\xfe", r"not text in UTF-8 \(byte 0\)"),
        (None, "cannot be read"),
        ("", None),
    ],
)
def test_a_file_that_is_no_toml_is_refused(tmp_path, content, said):
    file = tmp_path / "run.toml"
    if content is not None:
        file.write_bytes(content.encode("latin-1"))
    if said is None:
        assert read_toml(file) == {}
    else:
        with pytest.raises(ConfigError, match=said):
            read_toml(file)


def test_tables_are_merged_key_by_key():
    assert merge({"a": 1, "t": {"x": 1, "y": 2}}, {"t": {"y": 3}, "b": 4}) == {"a": 1, "b": 4, "t": {"x": 1, "y": 3}}
    assert merge({"t": {"x": 1}}, {"t": 5}) == {"t": 5}


def test_values_have_dotted_names():
    assert flat({"a": 1, "t": {"x": {"y": 2}}}) == {"a": 1, "t.x.y": 2}


def test_the_time_limit_follows_the_reward_unless_it_is_told():
    assert resolve({"task": "null"}).engine().time_limit == "terminate"  # objective
    assert resolve({"task": "null", "reward": {"mode": "shaped"}}).engine().time_limit == "truncate"
    assert resolve({"task": "null", "time_limit": "truncate"}).engine().time_limit == "truncate"


def test_an_evaluation_may_have_other_hosts_than_the_run():
    engine = resolve({"task": "null", "seed": 3}).engine(run_seed=1_000_003, num_envs=5)
    assert (engine.run_seed, engine.num_envs) == (1_000_003, 5)
