"""On a GPU: eager and compiled forms agree, and nothing waits for the device. `make test-gpu` runs them.

That each step keeps to one device is found without a GPU, by `tests/test_dry_run.py`.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace as replaced
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
import small_runs
from esper.kasmina.blueprints import blueprint_by_name
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from esper.leyline.structure import flatten
from esper.leyline.tensor_dataclass import named_tensors
from esper.runs.assembly.assemble import dataset_of, engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.simic.client import SimicClient
from esper.simic.compilation import graphs_compiled
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.protocol import TrainPass
from tiny import Bench

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device")]
pytestmark = [  # those of the compiler itself
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SYNC = "called a synchronizing CUDA operation"
assert small_runs.OPTIONS  # registers the tiny task


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that needs a GPU."""
    for mark in ON_GPU:
        test = mark(test)
    return test


STEPS = 8
NULL = {
    "task": "null", "num_envs": 6, "episode_length": STEPS, "reward": {"mode": "shaped"},
    "ppo": {"feature_width": 32, "hidden_width": 32, "update_epochs": 1, "num_minibatches": 2},
}  # fmt: skip
TINY = {**NULL, "task": "tiny", "num_envs": 3, "executor": "fused", "lifecycle": {"sequential": False}}


def config(device: torch.device, **told: object) -> RunConfig:
    eager = {"compile": "off"} if device.type == "cpu" else {}
    return resolve({**NULL, "device": str(device), **eager, **told})


def parts(chosen: RunConfig, device: torch.device) -> tuple[VectorizedEngine, SimicClient]:
    engine = engine_of(chosen, dataset_of(chosen, device), device)
    return engine, learner_of(chosen, engine.spec)


def check_decisions_and_rewards(device: torch.device, forms: RunConfig) -> None:
    """A second learner in other forms, shown the steps of an eager one, decides and rewards alike."""
    engine, client = parts(replaced(forms, compile="off"), device)
    other = learner_of(forms, engine.spec)
    for episode in range(2):
        engine.reset(client, episode)
        other.begin_rollout(episode, engine.spec.host_ids())
        act, pay = client.act, client.step

        def act_both(obs, *, deterministic=False, act=act):
            other._carried = client.hidden
            want, got = act(obs), other.act(obs)
            assert_close(got, want, atol=1e-4)
            assert torch.equal(got.actions, want.actions)
            return want

        def pay_both(inputs, state, pay=pay):
            want, after = pay(inputs, state)
            got, other_after = other.step(inputs, state)
            assert_close(got, want, atol=1e-4)
            assert_close(other_after, after, atol=1e-4)
            return want, after

        client.act, client.step = act_both, pay_both
        engine.rollout(client)
        client.act, client.step = act, pay
        client.update()
        other.load_state_dict(client.state_dict())


def check_control_plane(device: torch.device) -> None:
    """The phases of a step in another form answer as the eager ones, whatever happens, and are made before it does."""
    quick = {"sequential": False, "min_blending_epochs": 1, "embargo_epochs": 1, "min_prune_age": 1}
    chosen = config(device, compile="on", task="faulty_null", num_envs=32, episode_length=30, lifecycle=quick)
    engine, client = parts(chosen, device)
    eager, _ = parts(replaced(chosen, compile="off"), device)
    before = graphs_compiled()
    engine.reset(client, 0)
    assert graphs_compiled() == before + 4, (
        "`observe` in two forms, since the last step measures more, `execute` and `end_step`"
    )
    happened: Counter[str] = Counter()

    def both(name: str) -> Callable[..., object]:
        compiled = getattr(engine, name)

        def answer(*given: object) -> Any:
            want, got = getattr(eager, name)(*given), compiled(*given)
            (tensors, form), (expected, expected_form) = flatten(got), flatten(want)
            assert form == expected_form
            for a, b in zip(tensors, expected, strict=True):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5, equal_nan=True)
            if name == "_observe":
                happened.update(["panic"] * int(got[0].verdict.governor.panic.sum()))
            if name == "_execute":
                happened.update(SeedStage(stage).name for stage in got.state.slots.stage.flatten().tolist())
            return got

        return answer

    for name in ("_observe", "_execute", "_end_step"):
        setattr(engine, name, both(name))
    for episode in range(3):
        engine.reset(client, episode)
        engine.rollout(client)
        client.update()
    assert graphs_compiled() == before + 4
    passing = {SeedStage.UNKNOWN, SeedStage.GERMINATED}  # the first gate opens in the same step
    wanted = {"panic", *(stage.name for stage in SeedStage if stage not in passing)}
    assert not wanted - happened.keys(), happened


def assert_close(got: object, want: object, atol: float) -> None:
    for (name, a), (_, b) in zip(named_tensors(got), named_tensors(want), strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=1e-4, equal_nan=True, msg=lambda text, name=name: name + text)


def trained(
    device: torch.device, kind: str, dtype: torch.dtype | None = None, epochs: int = 2
) -> tuple[list[TrainPass], Tensor, Bench]:
    """Mixed seeds for some epochs: what was told, accuracies of all coalitions afterwards."""
    bench = Bench(3, device=device, scaler_dtype=dtype)
    executor = bench.executor if kind == "streamed" else FusedExecutor(bench.executor.data)
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0)
    bench.grow("r1c0", "conv_heavy", SeedStage.BLENDING, alpha=0.3, algorithm=Algorithm.GATE, hosts=[0, 2])
    bench.grow("r0c1", "norm", SeedStage.TRAINING, algorithm=Algorithm.MULTIPLY, hosts=[1])
    told = [executor.train_epoch(t, bench.slots) for t in range(1, epochs + 1)]
    found = bench.coalitions()
    executor.apply_structure(bench.structure(found))
    return told, executor.evaluate(epochs, bench.slots, found).loss, bench


def check_executors(device: torch.device) -> None:
    """Both executors on the device against the streamed one on the CPU."""
    want, loss, _ = trained(torch.device("cpu"), "streamed")
    for kind in ("streamed", "fused"):
        got, other_loss, _ = trained(device, kind)
        for a, b in zip(got, want, strict=True):
            for name in ("loss", "grad_norm", "grad_health"):
                x, y = getattr(a, name).cpu(), getattr(b, name)
                torch.testing.assert_close(x, y, atol=1e-3, rtol=1e-3, equal_nan=True, msg=f"{kind} {name}")
        torch.testing.assert_close(other_loss.cpu(), loss, atol=2e-3, rtol=2e-3)


def check_half_precision(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Training in half precision stays near that in float32, and loss scales move as they should."""
    want, _, _ = trained(device, kind)
    got, _, bench = trained(device, kind, dtype)
    for a, b in zip(got, want, strict=True):
        assert bool(a.loss.isfinite().all())
        torch.testing.assert_close(a.loss, b.loss, atol=0.1, rtol=0.1)
    steps = bench.executor.data.scaler.good_steps
    assert bool((steps == 0).all()) if dtype is torch.bfloat16 else bool((steps > 0).all())


def check_block_mask_attention(device: torch.device) -> None:
    """The blueprint `flex_attention` computes `attention`, values and gradients, for several sequences and widths."""
    generator = torch.Generator().manual_seed(0)
    for width, tokens in ((24, 5), (128, 17), (128, 128), (384, 200)):
        names = ("attention", "flex_attention")
        layers = [blueprint_by_name(name, HostFamily.TRANSFORMER).build(width).to(device) for name in names]
        for tensor, other in zip(*(layer.parameters() for layer in layers), strict=True):
            with torch.no_grad():
                other.copy_(tensor.copy_(torch.randn(tensor.shape, generator=generator) / width**0.5))
        h, pull = (torch.randn(3, tokens, width, generator=generator).to(device) for _ in range(2))
        passes = []
        for layer in layers:
            x = h.clone().requires_grad_()
            y = layer(x)
            passes.append((y.detach(), *torch.autograd.grad((y * pull).sum(), (x, *layer.parameters()))))
        for want, got in zip(*passes, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4 * max(1.0, float(want.abs().max())), rtol=0)


@on_gpu
def test_policy_step_and_reward_agree_when_they_are_compiled():
    check_decisions_and_rewards(CUDA, config(CUDA, compile="on"))


@pytest.mark.parametrize("device", [pytest.param(CPU, marks=pytest.mark.compiled), pytest.param(CUDA, marks=ON_GPU)])
@on_gpu
def test_the_compiled_phases_of_a_step_answer_as_the_eager_ones(device):
    check_control_plane(device)


@on_gpu
def test_nothing_is_compiled_after_the_first_round():
    engine, client = parts(config(CUDA, compile="on"), CUDA)
    engine.reset(client, 0)
    engine.rollout(client)
    warm = graphs_compiled()
    client.update()
    engine.reset(client, 1)
    engine.rollout(client)
    assert graphs_compiled() == warm


@on_gpu
def test_attention_with_a_block_mask_is_attention():
    check_block_mask_attention(CUDA)


@on_gpu
@pytest.mark.parametrize("task", ["null", "tiny"])
@on_gpu
def test_a_step_waits_for_the_device_only_where_it_says_so(task):
    told = {"task": task} if task == "null" else TINY
    engine, client = parts(config(CUDA, **told, compile="off"), CUDA)
    engine.reset(client, 0)
    for _ in range(3):
        engine.step(client)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(3):
                engine.step(client)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [f"{w.filename}:{w.lineno}" for w in found if SYNC in str(w.message)] == []


@on_gpu
def test_both_executors_give_on_cuda_what_the_streamed_one_gives_on_the_cpu():
    check_executors(CUDA)


@on_gpu
@pytest.mark.parametrize("kind", ["streamed", "fused"])
@on_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@on_gpu
def test_half_precision_trains_like_whole(kind, dtype):
    check_half_precision(CUDA, kind, dtype)


@on_gpu
def test_a_network_that_makes_tensors_on_the_cpu_is_refused_in_a_sentence():
    class Forgetful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) + torch.arange(8))

    x, y = torch.randn(40, 4), torch.arange(40) % 2
    task = esper.Task(name="forgetful", model=Forgetful, slots=["body"], train=(x, y), val=(x, y), batch=8)
    with pytest.raises(esper.ConfigError, match=r"run on the CPU, but not on cuda:0 .* set device to 'cpu'"):
        esper.grow(task, budget=esper.Budget(flops=1e6), device="cuda", progress=False)
