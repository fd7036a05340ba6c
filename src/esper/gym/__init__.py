"""Esper as environments of Gymnasium, for learners that are not esper's own.

import esper.gym
env = esper.gym.make_vec("null", num_envs=64)            or gymnasium.make_vec("esper/null-v0", num_envs=64)
obs, info = env.reset(seed=0)
obs, reward, terminated, truncated, info = env.step(actions)

docs/gym.md says what observations, actions and masks are. Needs gymnasium: `pip install 'esper-growth[gym]'`.
"""

try:
    import gymnasium
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "esper.gym needs gymnasium, which is not installed; pip install 'esper-growth[gym]'.", name=error.name
    ) from None

from esper.gym.environment import GrowingHosts as GrowingHosts
from esper.gym.making import make_vec as make_vec
from esper.tasks.registry import task_names

for _name in task_names():
    gymnasium.register(f"esper/{_name}-v0", vector_entry_point="esper.gym:make_vec", kwargs={"task": _name})
