"""Esper as environments of Gymnasium, for learners that are not esper's own.

import esper.gym
env = esper.gym.make_vec("null", num_envs=64)            or gymnasium.make_vec("esper/null-v0", num_envs=64)
obs, info = env.reset(seed=0)
obs, reward, terminated, truncated, info = env.step(actions)

docs/gym.md says what observations, actions and masks are. Needs gymnasium: `pip install 'esper-growth[gym]'`.
"""

from typing import Any

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "esper.gym needs gymnasium, which is not installed; pip install 'esper-growth[gym]'.", name=error.name
    ) from None

from esper.api.arguments import checked
from esper.api.run import AnyTask, given, in_process, spec_of
from esper.gym.environment import GrowingHosts as GrowingHosts
from esper.leyline.errors import ConfigError
from esper.runs.assembly.assemble import device_of, engine_of
from esper.runs.assembly.clients import reward_of
from esper.runs.assembly.presets import resolve
from esper.tasks.registry import task_names
from esper.tolaria.build import load_dataset
from esper.tolaria.engine import VectorizedEngine

_OF_A_RUN = ("rounds", "schedule_rounds", "ppo", "policy", "architecture", "checkpoint_every", "sinks")
"""Settings of a learner or of its records, which an environment does not have."""


@checked
def make_vec(
    task: AnyTask,
    num_envs: int = 8,
    *,
    reward: str | None = None,
    seed: int = 0,
    episode_length: int | None = None,
    device: str | None = None,
    render_mode: str | None = None,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> GrowingHosts:
    """A vector environment of Gymnasium whose environments are the hosts of a task.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        num_envs: hosts, which train in parallel.
        reward: name of a reward, built in or registered ("objective").
        seed: of the hosts, until `reset` gives another one.
        episode_length: control steps of an episode, set by the task if not given.
        device: "auto", "cpu", "cuda" or "cuda:N".
        render_mode: None; hosts are not drawn.
        settings: any key of the configuration of a run that is not about its learner, such as time_limit="truncate" or
            **{"lifecycle.min_prune_age": 3}.

    Raises:
        ConfigError, RegistryError, DataError: what is wrong, and how to continue.
    """
    if render_mode is not None:
        raise ConfigError(f"render_mode is {render_mode!r}, but hosts are not drawn; leave it out.")
    for name in settings:
        if name.partition(".")[0] in _OF_A_RUN:
            raise ConfigError(f"{name} is a setting of a run, which an environment does not have; leave it out.")
    spec = spec_of(task)
    values = given(settings, num_envs=num_envs, reward=reward, seed=seed, episode_length=episode_length, device=device)
    values["task"] = task if isinstance(task, str) else spec.name
    own = None if isinstance(task, str) else spec
    with in_process(own):
        config = resolve(values)
        where, hosts = device_of(config), config.task_spec()

    def build(run_seed: int) -> VectorizedEngine:
        engine_config = config.engine(run_seed=run_seed, num_envs=num_envs)
        with in_process(own):
            dataset = load_dataset(hosts, run_seed, where, config.data_path())
            return engine_of(config, dataset, where, engine_config=engine_config, task=hosts)

    return GrowingHosts(build, lambda engine: reward_of(config, engine), config.seed)


def _no_single(task: str, **_: object) -> gymnasium.Env[Any, Any]:
    raise ConfigError(f'hosts are trained together; use gymnasium.make_vec("esper/{task}-v0", num_envs=1).')


for _name in task_names():
    gymnasium.register(
        f"esper/{_name}-v0",
        entry_point="esper.gym:_no_single",
        vector_entry_point="esper.gym:make_vec",
        kwargs={"task": _name},
    )
