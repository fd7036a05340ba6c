"""Hyper-parameters are checked when they are made; schedules move them over the run."""

import dataclasses

import pytest

from esper.leyline.errors import ConfigError
from esper.simic.ppo_config import (
    PPOConfig,
    entropy_coefficient,
    floor_scale,
    inverse_temperature,
    learning_rate,
    value_coefficient,
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gae_lambda", -0.1),
        ("clip_coef", 0.0),
        ("update_epochs", 0),
        ("num_minibatches", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("target_kl", -1.0),
        ("max_grad_norm", float("inf")),
        ("ent_coef", -0.01),
        ("final_inverse_temperature", 0.0),
        ("vf_coef", float("nan")),
        ("vf_coef_warmup", -1),
        ("return_momentum", 1.0),
        ("adam_betas", (0.9, 1.0)),
        ("feature_width", 0),
        ("hidden_width", 0),
        ("num_layers", 0),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=rf"ppo\.{name}.* is "):
        PPOConfig(**{name: value})


def test_a_configuration_is_never_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PPOConfig().lr = 1.0


def test_the_entropy_coefficient_falls_linearly_over_the_run():
    found = [entropy_coefficient(PPOConfig(), k, 101) for k in (0, 50, 100, 500)]
    assert found == pytest.approx([0.02, 0.015, 0.01, 0.01])


def test_the_learning_rate_falls_in_equal_steps_to_its_final_fraction():
    config = PPOConfig(lr=1e-3, lr_final_fraction=0.1)
    assert [learning_rate(config, k, 4) for k in (0, 1, 3, 9)] == pytest.approx([1e-3, 0.7e-3, 1e-4, 1e-4])
    assert learning_rate(PPOConfig(lr=1e-3), 9, 10) == 1e-3


def test_the_value_coefficient_rises_over_ten_updates():
    found = [value_coefficient(PPOConfig(), k) for k in (0, 5, 10, 11)]
    assert found == pytest.approx([0.05, 0.275, 0.5, 0.5])
    assert value_coefficient(PPOConfig(vf_coef_warmup=0), 0) == 0.5


def test_the_entropy_floor_is_strong_early_and_weak_late():
    found = [floor_scale(k, 101) for k in (0, 24, 25, 75, 80, 100)]
    assert found == pytest.approx([1.5, 1.5, 1.0, 1.0, 0.9, 0.5])


def test_the_policy_becomes_certain_in_the_last_tenth_of_the_run():
    config = PPOConfig(final_inverse_temperature=5.0)
    found = [inverse_temperature(config, updates, 100) for updates in (0, 90, 95, 100, 120)]
    assert found == pytest.approx([1.0, 1.0, 3.0, 5.0, 5.0])
    assert inverse_temperature(PPOConfig(), 100, 100) == 1.0


def test_a_run_of_one_update_has_schedules_too():
    assert entropy_coefficient(PPOConfig(), 0, 1) == 0.02
    assert floor_scale(0, 1) == 1.5
