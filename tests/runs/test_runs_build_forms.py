"""What may be compiled: one place that chooses, the same answer in every form."""

import pytest
import torch

from esper.leyline.tensor_dataclass import named_tensors
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import learner_of, policy_form, reward_of
from esper.runs.assembly.presets import resolve
from esper.simic.client import PolicyStep, SimicClient, blank_inputs
from esper.simic.compilation import CompiledStep, graphs_compiled
from esper.simic.rewards import compute_reward_batched
from esper.tolaria.engine import VectorizedEngine

CPU = torch.device("cpu")
SMALL = {"ppo": {"feature_width": 16, "hidden_width": 16, "update_epochs": 1, "num_minibatches": 2}}
by_compiler = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # the compiler's own imports


def config(**told: object):
    return resolve({"task": "null", "num_envs": 4, "episode_length": 14, **SMALL, **told})


def parts(**told: object) -> tuple[VectorizedEngine, SimicClient]:
    chosen = config(**told)
    engine = engine_of(chosen, None, CPU)
    return engine, learner_of(chosen, engine.spec)


def rounds(engine: VectorizedEngine, client: SimicClient, episodes: range) -> None:
    """Play and learn, so that weights and statistics change between the episodes."""
    for episode in episodes:
        engine.reset(client, episode)
        engine.rollout(client)
        client.update()


def test_auto_is_eager_on_a_cpu():
    chosen = config()
    assert chosen.compile == "auto"
    engine, client = parts()
    step = PolicyStep(client.agent.network, client.agent.selectable, 14)
    assert policy_form(chosen, engine.spec)(step) is step
    assert not isinstance(engine._observe, CompiledStep)
    shaped = config(reward={"mode": "shaped"})
    assert reward_of(shaped, engine.spec)._kernel is compute_reward_batched


@pytest.mark.compiled
@by_compiler
def test_the_compiled_policy_step_decides_as_the_eager_one_and_is_compiled_once():
    torch.compiler.reset()
    engine, client = parts(compile="off")
    eager = PolicyStep(client.agent.network, client.agent.selectable, 14)
    before = graphs_compiled()
    compiled = policy_form(config(compile="on"), engine.spec)(eager)
    assert graphs_compiled() == before + 1
    seen: set[int] = set()

    def both(inputs, deterministic):
        seen.add(int(inputs.t))
        got, want = compiled(inputs, deterministic), eager(inputs, deterministic)
        for (name, a), (_, b) in zip(named_tensors(got), named_tensors(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=name)
        assert torch.equal(got.act.actions, want.act.actions)
        assert torch.equal(got.blueprint_index, want.blueprint_index)
        return got

    client._decide = both
    rounds(engine, client, range(2))  # other steps, masks, recurrent states; then other weights and statistics
    assert seen == set(range(1, 15))
    assert graphs_compiled() == before + 1

    compiled(blank_inputs(client.agent.network, 5, engine.spec.num_slots, CPU), False)
    assert graphs_compiled() == before + 2, "another number of hosts is another graph, and it is counted"
