"""The benchmark of users' networks: both sides compute the same, and it says so where they do not."""

from dataclasses import replace

import pytest

from own_networks import Hosts, Options, cases, check_same, compared, markdown, share_of_peak, task_of, ways_of

CASES = {case.name: case for case in cases()}
FEW = Options(batches=2, val_examples=8, repetitions=1)


def small(name):
    case = CASES[name]
    shape = (16,) if case.tokens else (case.x[0], 16, 16) if case.images else case.x
    return replace(case, hosts=2, batch=4, x=shape)


@pytest.mark.parametrize("executor", ["streamed", "native"])
@pytest.mark.parametrize(
    "name",
    [
        "ResNet-8, width 8, batch 32, 3 seeds", "MobileNet, batch 32", "MLP 64-128-128-10, batch 32",
        "GPT 4 x 64, dropout 0, batch 16", "U-Net, own loss, batch 32",
    ],
)  # fmt: skip
def test_loops_and_executors_have_the_same_losses(name, executor):
    (row,) = compared(small(name), (executor,), FEW)
    assert row.executor == executor
    assert row.lowest <= row.ratio <= row.highest
    assert name in markdown([row], {"threads": 1})


def test_a_network_without_a_rule_stays_in_pytorch(capsys):
    case = small("LSTM of 64, batch 32")
    assert compared(case, ("native",), FEW) == []
    assert "there is no rule for lstm" in capsys.readouterr().err


def test_loops_that_compute_something_else_are_noticed():
    case = small("ResNet-8, width 8, batch 32, 3 seeds")
    task = task_of(case, FEW)
    hosts = Hosts.build(case, task, "streamed")
    loops = ways_of(case, task, hosts.executor, FEW)["eager, 1 thread"]
    for optimizer in loops.args[0].optimizers:
        optimizer.param_groups[0]["lr"] *= 2
    with pytest.raises(AssertionError, match="the training losses of eager are off"):
        check_same(case, "eager", loops(), hosts.step())


def test_the_share_of_the_peak_is_a_share():
    said = share_of_peak(small("ResNet-8, width 8, batch 32"), FEW, "native")
    share = float(said.split(", ")[-1].split(" %")[0])
    assert 0 < share < 100
