"""The kernel compiled for the CPU: a graph is entered by arguments of its form alone, and the answer is the same."""

import pytest
import torch
from reward_toys import random_rows

from esper.simic.rewards import RewardConfig
from esper.simic.rewards.compiled_rewards import compute_reward_batched
from esper.simic.rewards.config import MODES
from esper.simic.rewards.cpu_kernel import CpuGraph, CpuKernel
from esper.simic.rewards.golden import kernel_arguments

by_compiler = pytest.mark.filterwarnings("ignore:.*deprecated")  # the compiler's own imports


def arguments(count, key=11, mode="shaped"):
    config = RewardConfig(mode=mode)
    weights = config.loss.pack() if mode == "loss" else config.pack()
    return kernel_arguments(list(random_rows(count, key))) | {"config_weights": weights, "mode": mode}


def assert_as_eager(got, given):
    for one, other in zip(got, compute_reward_batched(**given), strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


def graph_for(given):
    forms = tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else v for v in given.values())
    return CpuGraph(tuple(given), forms, 0, lambda tensors: tensors)


def test_a_graph_admits_arguments_of_its_form_whatever_their_values():
    x, y = torch.zeros(4), torch.ones(4)
    graph = graph_for({"a": x, "mode": "shaped", "b": None})
    admitted = graph.admitted({"a": y, "mode": "shaped", "b": None})
    assert admitted is not None
    assert admitted[0] is y


@pytest.mark.parametrize(
    "change",
    [{"a": torch.zeros(5)}, {"a": torch.zeros(4, dtype=torch.float64)}, {"a": torch.zeros(4, 2)[:, 0]},
     {"a": torch.zeros(4, device="meta")}, {"a": None}, {"a": torch.nn.Parameter(torch.zeros(4))}, {"mode": "escrow"},
     {"b": torch.zeros(4)}, {"c": None}],
)  # fmt: skip
def test_a_graph_admits_nothing_of_another_form(change):
    given = {"a": torch.zeros(4), "mode": "shaped", "b": None}
    assert graph_for(given).admitted(given | change) is None


def test_a_graph_admits_no_arguments_in_another_order():
    x, y = torch.zeros(4), torch.zeros(4)
    assert graph_for({"a": x, "b": y}).admitted({"b": y, "a": x}) is None


@pytest.mark.compiled
@by_compiler
@pytest.mark.parametrize("mode", MODES)
def test_the_compiled_kernel_gives_the_same_answer_in_every_mode(mode):
    given = arguments(64, mode=mode)
    assert_as_eager(CpuKernel()(**given), given)


@pytest.mark.compiled
@by_compiler
def test_one_graph_serves_every_step_and_another_form_never_enters_it():
    kernel, before = CpuKernel(), CpuKernel.compiled
    first = arguments(8)
    shared = first | {"seed_ages": first["epochs_in_stage"]}  # one tensor for two arguments
    kernel(**shared)
    spread = {"val_accs": torch.stack((first["val_accs"], first["acc_deltas"]), 1)[:, 0]}
    for given in (shared, first, arguments(8, key=12), first | spread, first | {"epoch": 3}):
        assert_as_eager(kernel(**given), given)
    assert CpuKernel.compiled - before <= 2, "step numbers of each row are one form, one step number is the other"

    built = CpuKernel.compiled
    with pytest.raises(TypeError, match=r"has_seed_mask is torch\.int64"):
        kernel(**first | {"has_seed_mask": first["has_seed_mask"].long()})
    with pytest.raises(ValueError, match=r"val_accs has shape \(7,\)"):
        kernel(**first | {"val_accs": first["val_accs"][:7]})
    assert CpuKernel.compiled == built
    more = arguments(9)
    assert_as_eager(kernel(**more), more)
    assert CpuKernel.compiled == built + 1
