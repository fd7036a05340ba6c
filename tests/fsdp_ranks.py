"""The FSDP executor of examples/ beside the streamed one, on the ranks of a mesh: every check takes the mesh.

As a program, started by torchrun, it runs all of them on all ranks, and the first rank prints their names.
"""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import fsdp_host
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.lifecycle import LifecycleOp, SeedStage, Style
from esper.leyline.tensor_dataclass import below
from esper.tamiyo.schedules import canonical_action
from esper.tolaria.build import build_engine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.governor import GovernorConfig, PanicReason
from fsdp.executor import FsdpExecutor
from toys import ToyClient, script

CPU = torch.device("cpu")
STEPS = 14
HOST = TransformerHostSpec(vocabulary=11, width=8, heads=2, layers=2, segments=2, context=12, dropout=0.2)
SGD = OptimizerSpec(kind="sgd", host_lr=0.3, seed_lr=0.3, grad_clip=0.1)
ADAM = OptimizerSpec(kind="adam", host_lr=3e-3, seed_lr=3e-3, schedule="linear", warmup=1)
Op = LifecycleOp


def task(optimizer=SGD):
    return replace(fsdp_host.TASK, host=HOST, optimizer=optimizer, episode_length=STEPS, min_training_epochs=1)


def engine(mesh, optimizer=SGD):
    """37 examples in batches of 16, the last of which has 5; snapshots every third step."""
    data = fsdp_host.periods()
    data = replace(data, train=data.train.part(37 / 157), val=data.val.part(0.5))
    config = EngineConfig(
        num_envs=1, episode_length=STEPS, slots=("r0c0", "r0c1"), run_seed=5,
        lifecycle=LifecycleConfig(min_training_epochs=1, min_prune_age=1, sequential=False, embargo_epochs=1,
                                  fossils_as_players=True),
        governor=GovernorConfig(snapshot_every=3),
    )  # fmt: skip
    executor = None if mesh is None else FsdpExecutor(config, task(optimizer), data, mesh)
    steps = []
    return build_engine(config, task(optimizer), data, CPU, executor=executor, on_step=steps.append), steps


def plan(spec):
    """The first seed, with a gate, becomes permanent; the second fades and is pruned; a third one begins."""
    named = spec.blueprint_names.index
    fast = {"tempo": 0, "alpha_target": 2}
    return {
        1: canonical_action(Op.GERMINATE, slot=0, blueprint=named("norm"), style=Style.GATED_GATE, **fast),
        2: canonical_action(Op.GERMINATE, slot=1, blueprint=named("mlp_small"), style=Style.LINEAR_MULTIPLY, **fast),
        6: canonical_action(Op.FOSSILIZE, slot=0),
        7: canonical_action(Op.PRUNE, slot=1, alpha_speed=1),  # while it fades it is frozen
        13: canonical_action(Op.GERMINATE, slot=1, blueprint=named("lora"), style=Style.LINEAR_ADD, **fast),
    }


def begun(mesh, optimizer=SGD):
    run, steps = engine(mesh, optimizer)
    client = ToyClient(run.spec, script(1, STEPS, plan(run.spec)))
    run.reset(client, 3)
    return run, client, steps


def to_the_end(run, client):
    while not run.is_over:
        run.step(client)
    run.apply_structure()


@cache
def streamed(optimizer=SGD):
    """A whole episode of the streamed executor."""
    run, client, steps = begun(None, optimizer)
    to_the_end(run, client)
    return run, steps


def same_steps(want, found, atol=2e-5):
    assert len(want) == len(found) > 0
    for a, b in zip(want, found, strict=True):
        for name in ("stage", "blueprint", "effective_op", "panic_reason", "measured_sets", "measured_valid"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), (a.t, name)
        for name in ("val_loss", "train_loss", "val_acc", "train_acc", "alpha", "contribution", "reward"):
            np.testing.assert_allclose(
                getattr(b, name), getattr(a, name), atol=atol, rtol=1e-5, err_msg=f"{name} of step {a.t}"
            )
        measured = a.measured_valid
        np.testing.assert_allclose(b.measured_acc[measured], a.measured_acc[measured], atol=atol)


def an_episode_is_that_of_the_streamed_executor(mesh, optimizer=SGD):
    (a, want), (b, client, found) = streamed(optimizer), begun(mesh, optimizer)
    to_the_end(b, client)
    same_steps(want, found)
    for name in ("grad_norm", "grad_health", "grad_ratio_ema", "grad_vanishing", "grad_exploding"):
        torch.testing.assert_close(
            getattr(b.state.slots, name), getattr(a.state.slots, name), rtol=1e-3, atol=1e-6, equal_nan=True
        )
    stages = [step.stage[0].tolist() for step in want]
    assert stages[-1][0] == SeedStage.FOSSILIZED
    assert any(stage[1] == SeedStage.PRUNED for stage in stages)
    assert want[-1].train_loss < want[0].train_loss - 0.02, "it learns"
    torch.testing.assert_close(b.test(), a.test(), atol=1e-4, rtol=0)
    torch.testing.assert_close(b.kept_network().loss, a.kept_network().loss, atol=2e-5, rtol=0)


def adam_decays_gradients_as_the_streamed_executor_does(mesh):
    an_episode_is_that_of_the_streamed_executor(mesh, ADAM)


def a_host_in_panic_goes_back_to_its_snapshot(mesh):
    (a, of_a, want), (b, of_b, found) = begun(None), begun(mesh)
    for run, client in ((a, of_a), (b, of_b)):
        for _ in range(7):
            run.step(client)
        run.apply_structure()
        spoil(run.executor)
        to_the_end(run, client)
    assert want[7].panic_reason[0] == PanicReason.NAN
    assert np.isfinite(want[8].val_loss[0])
    assert want[-1].stage[0, 0] == SeedStage.FOSSILIZED
    same_steps(want, found)


@torch.no_grad()
def spoil(executor):
    """All weights become NaN."""
    if isinstance(executor, FsdpExecutor):
        rows = [weights for part in executor.parts().values() for weights in part.params]
    else:
        rows = [executor.population.host.params, executor.population.seeds.params]
    for weights in rows:
        weights.fill_(torch.nan)


def a_checkpoint_continues_on_the_other_executor(mesh):
    _, steps = streamed(ADAM)
    for first, second in ((None, mesh), (mesh, None)):
        run, client, _ = begun(first, ADAM)
        for _ in range(7):  # with a fossil, an empty slot, and moments of both
            run.step(client)
        saved = run.state_dict()
        other, client, found = begun(second, ADAM)
        other.load_state_dict(saved, client)
        to_the_end(other, client)
        same_steps(steps[7:], found)


def a_state_is_that_of_the_streamed_executor(mesh):
    found = []
    for of in (None, mesh):
        run, client, _ = begun(of, ADAM)
        for _ in range(3):  # the second seed is not pruned yet
            run.step(client)
        found.append(below("executor", run.state_dict()))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=2e-6, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")
    assert found[0]["population.gates.exp_avg"].any()


def a_rank_keeps_its_part_of_the_weights(mesh):
    run, client, _ = begun(mesh)
    run.step(client)
    host = run.executor.parts()["host"]
    kept = torch.tensor([host.bytes_here()["weights"], sum(p.numel() for p in host.params) * 4])
    whole = int(kept[1])
    assert whole == 4 * run.executor.host_params
    assert abs(int(kept[0]) - whole / mesh.size()) <= 0.05 * whole
    dist.all_reduce(kept, group=mesh.get_group())
    assert int(kept[0]) == whole  # nothing twice, nothing lost


CHECKS = (
    a_state_is_that_of_the_streamed_executor,
    a_rank_keeps_its_part_of_the_weights,
    an_episode_is_that_of_the_streamed_executor,
    adam_decays_gradients_as_the_streamed_executor_does,
    a_host_in_panic_goes_back_to_its_snapshot,
    a_checkpoint_continues_on_the_other_executor,
)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for check in CHECKS:
        check(DeviceMesh("cpu", torch.arange(dist.get_world_size())))
        if dist.get_rank() == 0:
            print(check.__name__, flush=True)
    dist.destroy_process_group()
