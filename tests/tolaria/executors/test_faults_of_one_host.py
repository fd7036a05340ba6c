"""A loss, a gradient, or data that go wrong for one host: it is rolled back, and no bit of the others changes."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import tiny
from esper.leyline.lifecycle import LifecycleOp
from esper.tasks.datasets import Split
from esper.tasks.instances import HostExamples, Instances
from esper.tasks.losses import Custom
from esper.tolaria.build import build_engine
from toys import ToyClient, action, script

HOSTS, STEPS, BROKEN = 3, 8, 1
NAN, INF = float("nan"), float("inf")


class _Backward(torch.autograd.Function):
    """Passes the loss on; its gradient is `value` where an output is above 50."""

    @staticmethod
    def forward(ctx, loss: Tensor, outputs: Tensor, value: float) -> Tensor:
        ctx.save_for_backward(outputs)
        ctx.value = value
        return loss.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (outputs,) = ctx.saved_tensors
        return torch.where(outputs.amax(dim=1) > 50.0, ctx.value, grad), None, None


def gradient_of(value: float):
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return _Backward.apply(cross_entropy(outputs, y, reduction="none"), outputs, value)

    return loss


def loss_of(value: float):
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return torch.where(outputs.amax(dim=1) > 50.0, value, cross_entropy(outputs, y, reduction="none"))

    return loss


class OneRowMore:
    """All hosts have 40 examples; one of those of the broken host is number 40, if `bad`."""

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def properties(self, run_seed, hosts, episode):
        return {}

    def draw(self, run_seed, hosts, episode, dataset):
        def of(split: Split, count: int) -> HostExamples:
            index = torch.arange(count).repeat(len(hosts), 1)
            return HostExamples(index, split.y[index], torch.full((len(hosts),), count))

        train = of(dataset.train, 40)
        if self.bad:
            train.index[BROKEN, 5] = 40
        return Instances(train=train, val=of(dataset.val, 30), test=of(dataset.test, 20), lr_factor=torch.ones(HOSTS))


def run(executor, *, loss=None, bad_row=None, instances=None, breaks=True):
    """Reports, and the rows of the hosts at the end; if a `loss` `breaks`, one has large outputs from step 4 on."""
    changes = {"loss": loss, "blind_loss": 1.1}
    given = {"objective": Custom(**changes)} if loss else {"instances": instances, "batches_per_step": 3}
    task = tiny.task(**given)
    data = tiny.dataset()
    if bad_row is not None:
        x = torch.cat((data.train.x, torch.full((1, 1, tiny.IMAGE, tiny.IMAGE), bad_row)))
        data = replace(data, train=Split(x, torch.cat((data.train.y, torch.zeros(1, dtype=torch.int64)))))
    config = tiny.engine(HOSTS, STEPS).config
    reports = []
    engine = build_engine(replace(config, executor=executor), task, data, tiny.CPU, on_step=reports.append)
    germinate = action(LifecycleOp.GERMINATE, slot=0, tempo=0, style=0, alpha_target=2)
    client = ToyClient(engine.spec, script(HOSTS, STEPS, {1: germinate}))
    engine.reset(client, 0)
    for t in range(1, STEPS + 1):
        if t == 4 and loss is not None and breaks:
            p = engine.executor.population
            of = p.host_kind.template.parameters.unpack(p.host.params[BROKEN])
            (bias,) = (value for value in of.values() if value.shape == (tiny.CLASSES,))
            bias += 100.0
        engine.step(client)
    engine.kept_network()
    state = engine.executor.population.state_dict()
    return reports, {name: x.reshape(HOSTS, -1) for name, x in state.items() if x.shape[:1] in ((HOSTS,), (3 * HOSTS,))}


@cache
def without_fault(executor, loss):
    usual = {"bad_row": 0.0, "instances": OneRowMore(bad=False)} if loss is None else {"loss": loss}
    return run(executor, **usual, breaks=False)


FAULTS = {
    "a gradient of nan": {"loss": gradient_of(NAN)},
    "a loss of inf": {"loss": loss_of(INF)},
    **{f"an image of {value}": {"bad_row": value} for value in (NAN, 1e30)},
}


@pytest.mark.parametrize("executor", ["streamed", "native"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_what_goes_wrong_for_one_host_changes_no_bit_of_the_others(fault, executor):
    by_data = "bad_row" in fault
    reports, found = run(executor, **fault, instances=OneRowMore(bad=True) if by_data else None)
    wanted_reports, wanted = without_fault(executor, fault.get("loss"))
    panics = torch.tensor([report.panic_reason.tolist() for report in reports])
    rolled_back = panics.any(dim=0).tolist()
    assert rolled_back in ([False, True, False], [False, fault.get("bad_row") != 1e30, False])  # it may be normalized
    assert found.keys() == wanted.keys()
    for host in (0, 2):
        for name in found:
            assert tiny.bit_equal(found[name][host], wanted[name][host]), (name, host)
        for a, b in zip(reports, wanted_reports, strict=True):
            assert (a.val_loss[host], a.train_loss[host]) == (b.val_loss[host], b.train_loss[host])
