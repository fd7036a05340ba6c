"""Presets, and how a configuration is resolved from preset, task, file and command line.

quickstart   10 rounds of 16 hosts, minutes on two CPU cores: `make train`
small        100 rounds of 16 hosts, network of width 64 for each slot
learn        120 rounds of 128 hosts of mixed_digits, 32 instances with four hosts each: a controller that beats
             the best schedule and the best rule that a search of equal cost finds (`make learn`)
paper        the published size: 200 rounds of 12 hosts, network of width 512, one full-batch epoch per update
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from esper.leyline.errors import ConfigError
from esper.leyline.files import absolute, expanded
from esper.runs.assembly.plugins import (
    is_file,
    load_plugins,
    names_task,
    not_among,
    require_trusted,
    task_in_file,
    warn_of_changed,
)
from esper.runs.assembly.run_config import RunConfig, task_values
from esper.runs.assembly.values import Values, merge, parse, plain, read_toml, suggest
from esper.simic.ppo_config import PPOConfig
from esper.simic.rewards import MODES, RewardConfig, reward_names
from esper.tamiyo.policy_files import is_policy_file
from esper.tasks import presets as _presets  # registers the built-in tasks
from esper.tasks.registry import task_by_name, task_names
from esper.telemetry.run_directory import CONFIG, about_of, changed_settings, is_run, require_run

assert _presets
DEFAULT_PRESET = "quickstart"


_SMALL: Values = {
    "task": "digits",
    "rounds": 100,
    "schedule_rounds": 100,
    "num_envs": 16,
    "executor": "auto",
    "threads": 1,
    "reward": plain(RewardConfig(mode="objective")),
    "ppo": plain(PPOConfig()),
}
_LEARN = PPOConfig(
    group_size=4,
    lr=2e-3,
    update_epochs=6,
    num_minibatches=8,
    target_kl=0.05,
    gae_lambda=0.98,
    ent_coef=0.04,
    ent_coef_end=0.01,
    lr_final_fraction=0.05,
    final_inverse_temperature=5.0,
)
_PAPER = PPOConfig(
    feature_width=512,
    hidden_width=512,
    update_epochs=1,
    num_minibatches=1,
    gae_lambda=0.98,
    lr=3e-4,
    max_grad_norm=5.0,
    ent_coef=0.05,
)
_LEARN_SIZE = {"rounds": 120, "schedule_rounds": 120, "num_envs": 128, "checkpoint_every": 10}
PRESETS: Mapping[str, Values] = {
    "quickstart": {**_SMALL, "rounds": 10, "schedule_rounds": 10, "ppo": plain(PPOConfig(vf_coef_warmup=3))},
    "small": _SMALL,
    "learn": {**_SMALL, **_LEARN_SIZE, "task": "mixed_digits", "ppo": plain(_LEARN)},
    "paper": {**_SMALL, "rounds": 200, "schedule_rounds": 200, "num_envs": 12, "ppo": plain(_PAPER)},
}


def resolve(overrides: Mapping[str, Any], file: Path | None = None, *, trust: bool = False) -> RunConfig:
    """The complete configuration of a run from a file and the command line; imports its plugins.

    Paths in a file are relative to its folder, those of the command line to the working directory. A registered name in
    `reward.mode` that is not built in becomes `custom_reward`. A task FILE.py:NAME becomes a plugin. Plugins named only
    by the file of a run directory need `trust`.

    Raises:
        ConfigError, RegistryError: unknown task, preset or key, invalid value or combination, or a failing plugin.
    """
    above = _with_absolute_paths(overrides, Path())
    below = _with_absolute_paths(read_toml(file), file.parent) if file else {}
    plugins, named = _plugins_of(merge(below, above)), _plugins_of(above)
    if file is not None and is_run(file.parent):
        require_trusted(plugins, named, trust=trust)
    load_plugins(plugins)
    given = merge(_with_custom_reward(below), _with_custom_reward(above)) | {"plugins": plugins}
    if isinstance(given.get("task"), str) and names_task(given["task"]):
        given["task"] = task_in_file(given["task"]).name
    preset = _name(given, "preset", DEFAULT_PRESET)
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}; {suggest(preset, PRESETS)}")
    base = PRESETS[preset] | {"preset": preset}
    task = task_by_name(_name(given, "task", base["task"]))
    mode = _name(_table(given, "reward"), "mode", base["reward"]["mode"])
    reward = _name(given, "custom_reward", "") or mode
    return parse(RunConfig, merge(merge(base, task_values(task, reward)), given))


def config_of_run(run: Path, changes: Mapping[str, Any] = MappingProxyType({}), *, trust: bool = False) -> RunConfig:
    """The configuration of an existing run; imports its plugins.

    Args:
        run: its directory.
        changes: settings to change. Its `plugins` are those of the run that may be imported. With another `task`, the
            settings of the policy stay, all others become those of that task, and `plugins` may name more.
        trust: whether all plugins of the run may be imported.

    Raises:
        RunDirectoryError: there is no run. ConfigError, RegistryError: as `resolve`, or a plugin is not allowed.
    """
    require_run(run)
    values, changes = read_toml(run / CONFIG), _with_absolute_paths(changes, Path())
    plugins, allowed = plugin_names(values), changes.pop("plugins", [])
    others, task = not_among(allowed, plugins), _name(values, "task", "")
    is_same = changes.get("task", task) == task
    if others and is_same:
        raise ConfigError(
            f"{', '.join(others)} is not a plugin of this run, which names {', '.join(plugins) or 'none'}; leave it "
            "out, or name controllers before --plugins."
        )
    require_trusted(plugins, allowed, trust=trust)
    for changed in changed_settings(run, values):
        raise ConfigError(f"{changed}; restore it, or start a new run for other settings.")
    if not is_same:
        kept = {name: values[name] for name in ("seed", "preset", "num_envs", "reward", "custom_reward", "ppo")}
        lifecycle = {name: value for name, value in values["lifecycle"].items() if name != "min_training_epochs"}
        return resolve({**kept, "lifecycle": lifecycle, **changes, "plugins": [*plugins, *others]})
    load_plugins(plugins)
    warn_of_changed(plugins, about_of(run).get("sources"))
    if task not in task_names():
        raise ConfigError(
            f"the task {task!r} of the run is registered neither here nor by its plugins: it was made in a Python "
            "program. Continue there, with esper.load(RUN, task=task).resume(rounds=N); a task that commands are to "
            "find is started with esper train --task FILE.py:NAME."
        )
    return parse(RunConfig, merge(values, changes))


def plugin_names(values: Mapping[str, Any]) -> list[str]:
    """The list of plugins; raises ConfigError if it is not a list of names."""
    names = values.get("plugins", [])
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"plugins is {json.dumps(names, default=str)}; it must be a list of modules or .py files.")
    return list(names)


def absolute_plugins(names: Sequence[str], folder: Path) -> list[str]:
    """Plugins with absolute paths of files; relative ones lie in `folder`."""
    return [absolute(folder / expanded(name)) if is_file(name) else name for name in names]


def _plugins_of(values: Mapping[str, Any]) -> list[str]:
    """The plugins, and the file of the task if it is named by one."""
    names, task = plugin_names(values), values.get("task")
    from_file = isinstance(task, str) and names_task(task) and task not in names
    return [*names, str(task)] if from_file else names


def _name(values: Mapping[str, Any], key: str, default: str) -> str:
    name = values.get(key, default)
    if not isinstance(name, str):
        raise ConfigError(f"{key} is {json.dumps(name, default=str)}; it must be a name, such as {default!r}.")
    return name


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = values.get(key, {})
    return table if isinstance(table, Mapping) else {}


def _with_absolute_paths(values: Mapping[str, Any], folder: Path) -> Values:
    """Absolute paths, so that a run can be resumed from any folder."""
    is_path: dict[str, Callable[[str], bool]] = {"data_dir": bool, "policy": is_policy_file, "task": names_task}
    given = {name: values[name] for name in is_path if isinstance(values.get(name), str | Path)}
    changed: Values = {n: absolute(folder / expanded(of)) for n, of in given.items() if is_path[n](str(of))}
    if "plugins" in values:
        changed["plugins"] = absolute_plugins(plugin_names(values), folder)
    return {**values, **changed}


def _with_custom_reward(values: Mapping[str, Any]) -> Values:
    """A built-in mode resets `custom_reward`; any other registered reward sets it."""
    reward = _table(values, "reward")
    mode = reward.get("mode")
    if not isinstance(mode, str):
        return dict(values)
    if mode in MODES:
        return {"custom_reward": "", **values}
    if mode not in reward_names():
        raise ConfigError(
            f"unknown reward {mode!r}; {suggest(mode, reward_names())} "
            "Register your own in a module and name it in plugins."
        )
    return {**values, "custom_reward": mode, "reward": {k: v for k, v in reward.items() if k != "mode"}}
