"""Where the kernel is compiled: that one graph serves a whole run, and what is said where it cannot be."""

import pytest
import torch
from reward_toys import random_hosts, reward_inputs

from esper.leyline.tensor_dataclass import named_tensors
from esper.runs.assembly.clients import compiled_reward
from esper.simic.compilation import explained, graphs_compiled, is_compiled
from esper.simic.rewards import RewardConfig, make_reward, reward_step
from esper.simic.rewards.reward import _blank_inputs

CPU = torch.device("cpu")
by_compiler = pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # the compiler's own imports


@pytest.mark.parametrize(
    ("choice", "device", "steps", "compiled"),
    [("off", "cpu", 10**6, False), ("off", "cuda", 10**6, False), ("on", "cpu", 1, True), ("on", "cuda", 1, True),
     ("auto", "cpu", 10**6, False), ("auto", "cuda", 10_000, True), ("auto", "cuda", 9_999, False)],
)  # fmt: skip
def test_auto_compiles_long_runs_on_cuda_alone(choice, device, steps, compiled):
    assert is_compiled(choice, torch.device(device), steps) is compiled


def test_blank_inputs_have_the_form_of_real_ones_and_are_paid_nothing():
    config = RewardConfig(mode="shaped")
    blank, real = _blank_inputs(3, 2, CPU), reward_inputs(random_hosts(3, 2, 1, 1, key=2), dtype=torch.float32)
    forms = [{name: (v.shape, v.dtype) for name, v in named_tensors(x)} for x in (blank, real)]
    assert forms[0] == forms[1]
    start = make_reward("shaped").initial_state(3, 2, 1, CPU)
    output, _ = reward_step(blank, start, config)
    assert not output.breakdown.any()


def test_a_failed_compilation_names_the_way_out():
    message = str(explained("the toy", RuntimeError("no compiler\nand a long log")))
    assert message.startswith("the toy could not be compiled")
    assert "no compiler" in message
    assert "log" not in message
    assert "compile = 'off'" in message
    assert "raised: no GPU)" in str(explained("the toy", RuntimeError("backend raised:\nno GPU\nand a long log")))


@pytest.mark.compiled
@by_compiler
@pytest.mark.parametrize("mode", ["shaped", "basic_plus"])
def test_after_the_warm_up_no_step_of_a_run_compiles_again(mode):
    torch.compiler.reset()
    hosts, slots, steps = 6, 3, 5
    reward = make_reward(mode)
    reward.warm_up(compiled_reward, hosts, slots, CPU)
    warm = graphs_compiled()
    for length in (steps, 4):
        for numbers in (
            RewardConfig(mode=mode),
            RewardConfig(mode=mode, contribution_weight=0.5, min_prune_bonus_age=0),
        ):
            reward.config = numbers
            mine = its = reward.initial_state(hosts, slots, steps, CPU)
            for epoch in range(1, length + 1):
                inputs = reward_inputs(random_hosts(hosts, slots, epoch, length, key=epoch), dtype=torch.float32)
                got, mine = reward.step(inputs, mine)
                want, its = reward_step(inputs, its, numbers)
                torch.testing.assert_close(got.breakdown.double(), want.breakdown.double(), rtol=1e-6, atol=1e-6)
                assert torch.equal(got.flags, want.flags)
            for (name, value), (_, expected) in zip(named_tensors(mine), named_tensors(its), strict=True):
                torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12, msg=name)
    assert graphs_compiled() == warm

    more = reward_inputs(random_hosts(hosts + 1, slots, 1, 5, key=1), dtype=torch.float32)
    reward.step(more, reward.initial_state(hosts + 1, slots, steps, CPU))
    assert graphs_compiled() == warm + 1, "another number of hosts is another graph, and it is counted"
