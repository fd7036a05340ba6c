"""The executor of examples/fsdp/: its pieces in this process, and whole on the ranks that torchrun starts."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_host
import fsdp_ranks
import tiny
from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.registry import AbstractBlueprint
from esper.kasmina.parameters.dropout import Draws, Moment
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.protocol import Executor
from fsdp.executor import FsdpExecutor, Share, SharedDraws, require_fit

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mesh():
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DeviceMesh("cpu", torch.arange(1))
    dist.destroy_process_group()


def torchrun(ranks: int, program: Path, seconds: float) -> str:
    """What a program prints on so many ranks; torchrun ends its ranks when it is told to stop."""
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone"]
    with subprocess.Popen(
        [*command, f"--nproc-per-node={ranks}", str(program)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as started:  # fmt: skip
        try:
            printed, _ = started.communicate(timeout=seconds)
        finally:
            if started.poll() is None:
                started.terminate()
    assert started.returncode == 0, printed[-4000:]
    return printed


def test_on_three_ranks_of_torchrun():
    printed = torchrun(3, ROOT / "tests" / "fsdp_ranks.py", 400)  # whose shares of a batch differ
    assert printed.split() == [check.__name__ for check in fsdp_ranks.CHECKS]


def test_the_program_finds_the_streamed_numbers_on_two_ranks():
    printed = torchrun(2, ROOT / "examples" / "fsdp_host.py", 400)
    assert printed.count("fossilized, fossilized") >= 2
    assert printed.endswith("FSDP is within 0.0001 of the streamed executor: yes\n")


def test_it_is_an_executor(mesh):
    run, _ = fsdp_ranks.engine(mesh)
    assert isinstance(run.executor, FsdpExecutor)
    assert isinstance(run.executor, Executor)


# -- pieces -----------------------------------------------------------------------------------------------------------


def test_ranks_share_a_batch_in_neighbouring_rows():
    assert [Share.of(5, rank, 2) for rank in range(2)] == [Share(5, 0, 2, 2), Share(5, 2, 5, 3)]
    x = torch.arange(5)
    assert torch.cat([Share.of(5, rank, 3).rows(x) for rank in range(3)]).tolist() == [0, 1, 2, 3, 4]


def test_a_rank_without_examples_runs_one_and_counts_none():
    assert [Share.of(2, rank, 3) for rank in range(3)] == [Share(2, 0, 1, 0), Share(2, 0, 1, 1), Share(2, 1, 2, 1)]


def test_ranks_drop_what_one_process_would_drop():
    def draws():
        return Draws(Moment(7), torch.zeros(1, dtype=torch.int64), 0)

    whole = draws().kept((5, 4, 3), 0.5)
    parts = [SharedDraws(draws(), Share.of(5, rank, 2)).kept((rows, 4, 3), 0.5) for rank, rows in enumerate((2, 3))]
    assert torch.equal(torch.cat(parts), whole)
    flat = [SharedDraws(draws(), Share.of(5, rank, 2)).kept((4 * rows, 3), 0.5) for rank, rows in enumerate((2, 3))]
    assert torch.equal(torch.cat(flat), whole.flatten(0, 1))


# -- what is refused --------------------------------------------------------------------------------------------------


def test_without_torchrun_the_program_says_how_it_is_started(monkeypatch, capsys):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert fsdp_host.main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "torchrun --standalone --nproc-per-node 2 examples/fsdp_host.py" in said


def test_without_gloo_the_program_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setattr(dist, "is_gloo_available", lambda: False)
    assert fsdp_host.main() == 2
    assert "was built without gloo" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "changes", "ranks", "says"),
    [
        ({}, {}, 17, "17 ranks cannot share a batch of 16 examples; start at most 16"),
        ({"num_envs": 2}, {}, 2, "set num_envs to 1"),
        ({"amp": "bf16"}, {}, 2, "set amp to 'off'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(config, changes, ranks, says):
    with pytest.raises(ConfigError, match=says):
        require_fit(
            EngineConfig(**{"num_envs": 1, "slots": ("r0c0",), **config}), replace(fsdp_ranks.task(), **changes), ranks
        )


def test_a_host_that_normalizes_over_a_batch_is_refused(mesh):
    config = EngineConfig(num_envs=1, slots=tiny.SLOTS)
    with pytest.raises(ConfigError, match="the host of task 'tiny' normalizes over a batch"):
        FsdpExecutor(config, tiny.task(), tiny.dataset(), mesh)


class Normalized(AbstractBlueprint):
    """A seed that sees the other examples of its batch."""

    name, family = "normalized", HostFamily.TRANSFORMER
    init = {"2.weight": 0.0, "2.bias": 0.0}  # noqa: RUF012

    def build(self, channels: int) -> nn.Module:
        return nn.Sequential(nn.Linear(channels, 12), nn.BatchNorm1d(12), nn.Linear(12, channels))


def test_a_blueprint_that_normalizes_over_a_batch_is_not_offered(mesh):
    registry.register(Normalized())
    try:
        with pytest.warns(UserWarning, match="'normalized' is not grown in this run: it normalizes over a batch"):
            run, _ = fsdp_ranks.engine(mesh)
        index = run.spec.blueprint_names.index("normalized")
        assert index not in run.spec.selectable
        assert run.spec.blueprint_names.index("lora") in run.spec.selectable
    finally:
        registry.unregister("normalized")
