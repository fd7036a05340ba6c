"""Which of several values wins, and what presets say."""

from pathlib import Path

import pytest

from esper.leyline.errors import ConfigError
from esper.runs.assembly.presets import PRESETS, resolve
from esper.tasks.registry import task_by_name


def test_the_command_line_wins_over_the_file_and_the_file_over_task_and_preset(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('task = "null"\nrounds = 7\nepisode_length = 11\n[ppo]\nlr = 0.1\nclip_coef = 0.3\n')
    config = resolve({"episode_length": 13, "ppo": {"lr": 0.2}}, file)
    assert (config.rounds, config.episode_length) == (7, 13)
    assert (config.ppo.lr, config.ppo.clip_coef) == (0.2, 0.3)
    assert config.num_envs == 16  # of the preset
    assert config.lifecycle.min_training_epochs == task_by_name("null").min_training_epochs


def test_the_published_values():
    small, paper = resolve({"preset": "small"}), resolve({"preset": "paper"})
    assert (small.rounds, small.num_envs, small.reward.mode) == (100, 16, "objective")
    assert (small.ppo.hidden_width, small.ppo.update_epochs, small.ppo.num_minibatches) == (64, 4, 4)
    assert (small.ppo.lr, small.ppo.gae_lambda, small.ppo.max_grad_norm) == (5e-4, 0.95, 1.0)
    assert (paper.rounds, paper.num_envs, paper.reward.mode) == (200, 12, "objective")
    assert (paper.ppo.hidden_width, paper.ppo.update_epochs, paper.ppo.num_minibatches) == (512, 1, 1)
    assert (paper.ppo.lr, paper.ppo.gae_lambda, paper.ppo.max_grad_norm) == (3e-4, 0.98, 5.0)
    assert (paper.ppo.ent_coef, paper.ppo.ent_coef_end) == (0.05, 0.01)
    for config in (small, paper):
        assert (config.ppo.clip_coef, config.ppo.target_kl) == (0.2, 0.015)
        assert (config.ppo.vf_coef_start, config.ppo.vf_coef, config.ppo.vf_coef_warmup) == (0.05, 0.5, 10)
        assert config.optimizer.grad_clip == 1.0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_schedules_do_not_depend_on_how_many_rounds_are_asked_for(preset):
    """Else a run that is extended later would differ from one that was that long from the start."""
    short, long = resolve({"preset": preset, "rounds": 2}), resolve({"preset": preset, "rounds": 4})
    assert short.schedule_rounds == long.schedule_rounds == PRESETS[preset]["rounds"]


def test_a_task_decides_what_belongs_to_it():
    config, task = resolve({"task": "digits"}), task_by_name("digits")
    assert config.episode_length == task.episode_length
    assert config.slots == task.enabled
    assert config.optimizer == task.optimizer
    assert config.task_spec().batch_train == task.batch_train


def test_mode_loss_gets_the_constants_of_the_task():
    config, task = resolve({"task": "digits", "reward": {"mode": "loss"}}), task_by_name("digits")
    assert config.reward.loss.target_loss == task.target_loss
    assert config.reward.loss.typical_loss_delta_std == task.typical_loss_delta_std


def test_a_reward_that_pays_by_fossils_has_them_measured():
    assert resolve({"reward": {"mode": "basic_plus"}}).lifecycle.fossils_as_players
    assert not resolve({"reward": {"mode": "basic"}}).lifecycle.fossils_as_players


def test_paths_of_a_file_are_relative_to_it_and_those_of_options_to_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "settings").mkdir()
    (tmp_path / "elsewhere").mkdir()
    file = tmp_path / "settings" / "run.toml"
    file.write_text('data_dir = "data"\n')
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resolve({}, file).data_dir == str(tmp_path / "settings" / "data")
    for given in ("data", Path("data")):
        assert resolve({"data_dir": given}, file).data_dir == str(tmp_path / "elsewhere" / "data")


def test_the_environment_names_the_data_folder_of_tasks_that_need_one(tmp_path, monkeypatch):
    monkeypatch.setenv("ESPER_DATA", str(tmp_path))
    assert resolve({"task": "fashion_mnist", "data_dir": "/other"}).data_path() == Path("/other")
    assert resolve({"task": "fashion_mnist"}).data_path() == tmp_path
    monkeypatch.delenv("ESPER_DATA")
    assert resolve({"task": "digits"}).data_path() is None


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.toml cannot be read"):
        resolve({}, tmp_path / "nowhere.toml")


def test_paths_below_the_home_folder_do_not_name_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "code" / "nothing.py"
    file.parent.mkdir()
    file.write_text("")
    config = resolve({"data_dir": str(tmp_path / "data"), "plugins": [str(file)]})
    assert (config.data_dir, config.plugins) == ("~/data", ("~/code/nothing.py",))
    assert config.data_path() == tmp_path / "data"
