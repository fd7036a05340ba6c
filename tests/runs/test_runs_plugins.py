"""Code of the user: found, imported once, and named with its line where it fails."""

import importlib
import sys
from pathlib import Path

import pytest

import small_runs
from esper.cli import main
from esper.leyline.errors import ConfigError
from esper.runs.assembly.plugins import load_plugins
from esper.runs.assembly.presets import config_of_run

SPARING = """
from esper.simic.rewards import RewardConfig, make_reward, register_reward

@register_reward("sparing", time_limit="truncate", fossils_as_players=True)
def build(config: RewardConfig):
    return make_reward("sparse", RewardConfig(mode="sparse", param_penalty_weight=config.param_penalty_weight))
"""


def plugin(folder: Path, name: str, content: str) -> Path:
    path = folder / f"{name}.py"
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = 1\n\ndef f():\n    return x / 0\n\nf()\n", "in line 4 of {path}: ZeroDivisionError: division by zero"),
        ("def f(:\n", "in line 1 of {path}: SyntaxError"),
        ("import no_such_module\n", "in line 1 of {path}: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("raise ValueError('two\\nlines')\n", "ValueError: two lines"),
        ("import json\njson.loads('x')\n", "in line 2 of {path}: JSONDecodeError"),
        (
            "from esper.simic.rewards import register_reward\nregister_reward('sparse')\n",
            "in line 2 of {path}: RegistryError: a reward named 'sparse' is registered already",
        ),
    ],
)
def test_a_plugin_that_fails_is_named_with_the_line(tmp_path, content, said):
    path = plugin(tmp_path, "broken", content)
    with pytest.raises(ConfigError) as caught:
        load_plugins([str(path)])
    assert said.format(path=path) in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):  # and again: half a module is not taken for a whole one
        load_plugins([str(path)])


def test_plugins_that_are_missing_are_told_apart(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.py"):
        load_plugins([str(tmp_path / "nowhere.py")])
    with pytest.raises(ConfigError, match=r"there is no plugin module 'no_such_package\.inner'"):
        load_plugins(["no_such_package.inner"])


def test_a_file_that_was_imported_by_its_name_is_not_executed_again(tmp_path, monkeypatch, capsys):
    path = plugin(tmp_path, "imported_already", "print('executed')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("imported_already")
    load_plugins([str(path)])
    assert capsys.readouterr().out == "executed\n"
    del sys.modules[module.__name__]


def test_a_policy_of_a_plugin_is_compared_like_a_baseline(tmp_path, capsys):
    path = plugin(
        tmp_path,
        "patient",
        "import esper\nfrom esper.tamiyo.baselines import WaitOnly\nesper.register_policy('patient')(WaitOnly)\n",
    )
    assert main(["evaluate", "wait_only", "patient", "--task", "null", "--num-envs", "2", "--plugins", str(path)]) == 0
    assert "patient" in capsys.readouterr().out


def test_a_file_is_imported_once(tmp_path, capsys):
    path = plugin(tmp_path, "once", "print('imported')\n")
    load_plugins([str(path), str(path)])
    load_plugins([str(path)])
    assert capsys.readouterr().out == "imported\n"


def test_a_module_of_the_working_directory_can_be_named(tmp_path, monkeypatch, capsys):
    plugin(tmp_path, "growth_of_mine", "print('imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    load_plugins(["growth_of_mine"])
    assert capsys.readouterr().out == "imported\n"


def test_a_run_with_a_reward_of_the_user_is_recorded_continued_and_evaluated(tmp_path):
    path = plugin(tmp_path, "sparing", SPARING)
    run = tmp_path / "run"
    with small_runs.interrupted_at(1, 3):
        assert small_runs.train(run, "null", 1, "--plugins", str(path), "--reward", "sparing") == 130
    config = config_of_run(run, trust=True)
    assert config.reward_name == config.custom_reward == "sparing"
    assert config.plugins == (str(path),)
    assert config.engine().time_limit == "truncate"  # what the reward asks for, not the mode beneath it
    assert config.lifecycle.fossils_as_players
    assert small_runs.resume(run, "--plugins", str(path)) == 0
    assert small_runs.summary(run)["reward"] == "sparing"
    assert small_runs.main(["evaluate", str(run), "wait_only", "--num-envs", "2", "--trust"]) == 0


def test_a_plugin_that_changed_since_the_start_is_named_and_edited_settings_are_refused(tmp_path, capsys):
    path, run = plugin(tmp_path, "edited", SPARING.replace("sparing", "edited")), tmp_path / "run"
    with small_runs.interrupted_at(1, 3):
        assert small_runs.train(run, "null", 1, "--plugins", str(path), "--reward", "edited") == 130
    for extra, notes in (("", 0), ("# another line\n", 1)):
        path.write_text(path.read_text() + extra)
        capsys.readouterr()
        config_of_run(run, trust=True)
        said = f"esper: {path} was changed after the run was started: its network, data or rewards may be others."
        assert capsys.readouterr().err.count(said) == notes
    config = run / "config.toml"
    config.write_text(config.read_text().replace("episode_length = ", "episode_length = 1"))
    with pytest.raises(
        ConfigError, match=r"^episode_length is 1\d in config.toml, but the run was made with \d; restore"
    ):
        config_of_run(run, trust=True)


@pytest.mark.parametrize("kind", ["file", "module"])
def test_code_that_a_run_directory_names_is_executed_only_where_that_is_allowed(
    tmp_path, monkeypatch, capfd, finished_run, kind
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    run = finished_run("null", 1)
    mine = plugin(tmp_path, f"planted_{kind}", "print('executed')\n")
    other = plugin(tmp_path, f"other_{kind}", "print('executed')\n")
    names = (str(mine), "./" + mine.name, str(other)) if kind == "file" else (mine.stem, mine.stem, other.stem)
    planted, same, another = names
    config = run / "config.toml"
    config.write_text(config.read_text().replace("plugins = []", f'plugins = ["{planted}"]'))
    assert planted in config.read_text()
    before = small_runs.contents(run)
    commands = (["train", "--resume", "run", "--rounds", "2"], ["evaluate", "run", "wait_only", "--num-envs", "1"])
    commands = (*commands, ["train", "--config", "run/config.toml", "--out", "again"])
    for command in commands:
        assert small_runs.main(command) == 2
        out, err = capfd.readouterr()
        assert "executed" not in out
        assert f"names code that would be executed: {planted}. " in err
        assert f"--plugins {planted}" in err
        assert "--trust" in err
    for command in commands[:2]:
        assert small_runs.main([*command, "--plugins", another]) == 2
        assert f"{another} is not a plugin of this run, which names {planted}" in capfd.readouterr().err
    assert small_runs.contents(run) == before
    for allowed in (["--trust"], ["--plugins", same]):
        assert small_runs.main([*commands[1], *allowed]) == 0
    assert capfd.readouterr().out.count("executed") == 1  # a plugin is imported once in a process
    assert small_runs.main([*commands[2], "--trust"]) == 0


def test_a_task_and_a_blueprint_of_the_user_take_part_in_a_run(tmp_path):
    path = plugin(
        tmp_path,
        "own_task",
        "from dataclasses import replace\n"
        "from torch import nn\n"
        "import tiny\n"
        "from esper.kasmina.blueprints import AbstractBlueprint, register\n"
        "from esper.leyline.lifecycle import HostFamily\n"
        "from esper.tasks import register_task\n"
        "class Pointwise(AbstractBlueprint):\n"
        "    name, family, init = 'pointwise_of_a_plugin', HostFamily.CNN, {'weight': 0.0}\n"
        "    def build(self, channels):\n"
        "        return nn.Conv2d(channels, channels, 1, bias=False)\n"
        "register(Pointwise())\n"
        "register_task(tiny.task(name='task_of_a_plugin'))\n",
    )
    from esper.kasmina.blueprints import registry

    run = tmp_path / "run"
    arguments = ["--task", "task_of_a_plugin", "--plugins", str(path), "--out", str(run), *small_runs.FAST]
    try:
        assert small_runs.main(["train", "--rounds", "1", "--num-envs", "2", "--episode-length", "3", *arguments]) == 0
        started = small_runs.records(run)["events.jsonl"][0]
        assert started["blueprints"][-1] == "pointwise_of_a_plugin"
    finally:
        registry.unregister("pointwise_of_a_plugin")
    # without the blueprint it is another run
    assert small_runs.resume(run, "--rounds", "2") == 2
