"""What may be compiled or replayed: one list, one place that chooses, the same answer in every form."""

from dataclasses import replace

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.tensor_dataclass import named_tensors
from esper.runs import build, kernels
from esper.runs.build import engine_of, learner_of
from esper.runs.kernels import (
    phase_form,
    policy_form,
    reward_form,
)
from esper.runs.presets import resolve
from esper.simic.agent.policy_step import PolicyStep, blank_inputs
from esper.simic.client import SimicClient
from esper.simic.compilation import graphs_compiled
from esper.tolaria.capture import Captured
from esper.tolaria.control_plane import eager
from esper.tolaria.engine import VectorizedEngine
from tape import TapeBackend

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
    assert (chosen.compile, chosen.capture) == ("auto", "off")
    engine, client = parts()
    step = PolicyStep(client.agent.network, client.agent.selectable, 14)
    assert policy_form(chosen, engine.spec)(step) is step
    assert phase_form(chosen, CPU) is eager
    assert reward_form(chosen, engine.spec) is None


def test_capture_on_the_cpu_is_refused_by_every_part_of_a_run():
    with pytest.raises(ConfigError, match=r"capture is 'on' on the CPU.*leave capture out"):
        config(capture="on", device="cpu", experimental=True)
    told = config(capture="on", experimental=True)  # the device is found out later
    engine = engine_of(config(), None, CPU)
    for make in (policy_form, reward_form):
        with pytest.raises(ConfigError, match="capture is 'on', but the run is on cpu"):
            make(told, engine.spec)


def test_capture_of_a_fused_executor_on_the_cpu_is_refused():
    import small_runs

    assert small_runs.OPTIONS  # registers the tiny task
    chosen = config(task="tiny", executor="fused", capture="on", experimental=True)
    with pytest.raises(ConfigError, match="capture is 'on', but the run is on cpu"):
        engine_of(chosen, build.dataset_of(chosen, CPU), CPU)
    with pytest.raises(ConfigError, match="the executor is 'streamed'"):
        engine_of(replace(chosen, executor="streamed"), build.dataset_of(chosen, CPU), CPU)


def test_a_replayed_learner_plays_and_learns_as_the_eager_one_to_the_bit(monkeypatch):
    tapes: list[TapeBackend] = []

    def on_tape(choice: str, device: torch.device) -> TapeBackend:
        tapes.append(TapeBackend())
        return tapes[-1]

    eager = {"reward": {"mode": "shaped"}, "compile": "off"}
    want_engine, want = parts(**eager)
    rounds(want_engine, want, range(2))
    monkeypatch.setattr(kernels, "capture_backend_for", on_tape)
    engine, client = parts(**eager)
    assert [tape.captured for tape in tapes] == [1, 1], "captured before the first step"
    rounds(engine, client, range(2))
    for name, value in want.state_dict().items():
        assert torch.equal(client.state_dict()[name], value), name
    assert [tape.captured for tape in tapes] == [1, 1]
    assert all(tape.replayed > 2 * 14 for tape in tapes)


def test_a_new_number_of_hosts_or_another_way_to_decide_is_a_capture_of_its_own():
    engine, client = parts()
    step = PolicyStep(client.agent.network, client.agent.selectable, 14)
    replayed = Captured(step, TapeBackend(), name="the policy step")
    for n, deterministic in ((4, False), (3, False), (4, True)) * 2:
        inputs = blank_inputs(client.agent.network, n, engine.spec.num_slots, CPU)
        got, want = replayed(inputs, deterministic), step(inputs, deterministic)
        for (name, a), (_, b) in zip(named_tensors(got), named_tensors(want), strict=True):
            assert torch.equal(a, b), name
    assert replayed.num_captures == 3


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


@pytest.mark.compiled
@by_compiler
def test_a_policy_step_that_cannot_be_compiled_is_a_mistake_of_configuration(tmp_path):
    import torch._inductor.config as inductor

    absent = {"cpp.cxx": (str(tmp_path / "no-such-compiler"),), "force_disable_caches": True}
    engine, client = parts(compile="off")
    step = PolicyStep(client.agent.network, client.agent.selectable, 14)
    with inductor.patch(absent), pytest.raises(ConfigError, match=r"the policy step could not.*set compile = 'off'"):
        policy_form(config(compile="on"), engine.spec)(step)
