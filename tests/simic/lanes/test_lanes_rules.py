"""Rules of operators: what C++ answers is what PyTorch answers, for every number, host and kind."""

import math

import pytest
import torch
from lane_toys import COMBINED, CURVES, FUNCTIONS, floats, integers, truths
from torch import Tensor, nn

from esper.leyline.tree import flatten
from esper.simic.lanes import step as module
from esper.simic.lanes.program import OPERATIONS
from esper.simic.lanes.recorder import Recorder
from esper.simic.lanes.rules import RULES
from esper.simic.lanes.step import RecordedStep

HOSTS = (1, 5, 16, 64, 65, 131)


def given(n: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return floats(n, 3, dtype), integers(n, 3, 1), truths(n, 3, 2), integers(n, 3, 3, 0, 4)


def assert_same(got: object, want: object, **close: float) -> None:
    (tensors, form), (expected, expected_form) = flatten(got), flatten(want)
    assert form == expected_form
    for a, b in zip(tensors, expected, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, equal_nan=True, **(close or {"rtol": 0.0, "atol": 0.0}))


@pytest.mark.parametrize("n", HOSTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_that_of_pytorch_to_the_bit(name, n):
    function, arguments = FUNCTIONS[name], given(n)
    step = RecordedStep(function, name=name)
    assert_same(step(*arguments), function(*arguments))


@pytest.mark.parametrize(
    "name", ["arithmetic", "comparisons", "what is no number", "choices", "extremes of many", "gathered"]
)
def test_a_function_of_doubles_is_that_of_pytorch_to_the_bit(name):
    function, arguments = FUNCTIONS[name], given(70, torch.float64)
    if name == "gathered":
        function = lambda x, i, m, k: (x.gather(1, k.clamp(max=2)), torch.cat((x, x, x, x), 1).gather(1, k * 3))  # noqa: E731
    assert_same(RecordedStep(function, name=name)(*arguments), function(*arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", CURVES)
def test_a_curve_is_right_to_a_few_units_in_the_last_place(name, dtype):
    curve, x = CURVES[name], floats(200, 40, dtype)
    got, unit = RecordedStep(curve, name=name)(x), torch.finfo(dtype).eps
    # denormal answers of exp may be 0, and so may what is made of them
    torch.testing.assert_close(
        got, curve(x), rtol=4 * unit, atol=1e-37 if dtype == torch.float32 else 1e-300, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_exponentials_and_logarithms_over_their_whole_range(dtype):
    limits = torch.finfo(dtype)
    x = torch.linspace(math.log(limits.tiny) + 2.0, math.log(limits.max) - 1e-3, 4096, dtype=dtype)[:, None]
    for curve, numbers in ((torch.exp, x), (torch.log, torch.exp(x)), (torch.log1p, torch.exp(x) - 0.5)):
        numbers = torch.cat((numbers, torch.tensor([[limits.max], [limits.tiny], [1.0], [0.0], [-1.0]], dtype=dtype)))
        got = RecordedStep(curve, name="curve")(numbers)
        torch.testing.assert_close(got, curve(numbers), rtol=4 * limits.eps, atol=4 * limits.eps, equal_nan=True)


def test_what_a_processor_may_round_once_or_twice():
    arguments = given(70)
    assert_same(RecordedStep(COMBINED, name="combined")(*arguments), COMBINED(*arguments), rtol=1e-6, atol=1e-30)


class Layers(nn.Module):
    """All that a policy network is made of."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.utils.skip_init(nn.Linear, 7, 21).to(dtype)
        self.norm = nn.LayerNorm(21).to(dtype)
        self.last = nn.Parameter(torch.zeros(5, 21, dtype=dtype))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.norm(self.first(x)).relu()
        return y, torch.addmm(h, y, self.last.t()), self.last @ y.t()


@pytest.mark.parametrize("n", HOSTS)
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 2e-5), (torch.float64, 1e-12)], ids=["float32", "float64"]
)
def test_layers_read_their_weights_where_they_lie(n, dtype, close):
    module = Layers(dtype)
    step = RecordedStep(module, name="layers")
    x, h = (torch.randn(n, size, generator=torch.Generator().manual_seed(size)).to(dtype) for size in (7, 5))
    with torch.no_grad():
        assert_same(step(x, h), module(x, h), rtol=close, atol=close)
        module.last.mul_(-2.0)
        module.norm.bias.add_(1.0)
        assert_same(step(x, h), module(x, h), rtol=close, atol=close)
    assert step.num_graphs == 1


def test_a_host_has_the_bits_that_it_has_alone_wherever_it_stands():
    module = Layers(torch.float32)
    step = RecordedStep(module, name="layers")
    x, h = (torch.randn(131, size, generator=torch.Generator().manual_seed(size)) for size in (7, 5))
    order = torch.randperm(131, generator=torch.Generator().manual_seed(1))
    whole, shuffled = step(x, h), step(x[order], h[order])
    for host in (0, 15, 16, 63, 64, 130):
        alone = step(x[host : host + 1], h[host : host + 1])
        for axis, a, b in zip((0, 0, 1), whole, alone, strict=True):
            assert torch.equal(a.narrow(axis, host, 1), b)
    for axis, a, b in zip((0, 0, 1), whole, shuffled, strict=True):
        assert torch.equal(a.index_select(axis, order), b)


def test_every_operation_and_every_rule_is_used_by_a_toy():
    """What nobody tries here is not known to be right."""
    tried: set[str] = set()
    recorders: list[Recorder] = []

    def watching(rules):
        def noted(name, rule):
            return lambda *args, **kwargs: (tried.add(name), rule(*args, **kwargs))[1]

        made = Recorder({name: noted(name, rule) for name, rule in rules.items()})
        recorders.append(made)
        return made

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(module, "Recorder", watching)
        for function in (*FUNCTIONS.values(), COMBINED):
            RecordedStep(function, name="toy")(*given(5))
            RecordedStep(lambda x, i, m, k, f=function: f(x.double().float(), i, m, k), name="toy")(*given(5))
        for dtype in (torch.float32, torch.float64):
            for curve in CURVES.values():
                RecordedStep(curve, name="toy")(floats(5, 3, dtype))
            RecordedStep(Layers(dtype), name="toy")(torch.zeros(5, 7, dtype=dtype), torch.zeros(5, 5, dtype=dtype))
        RecordedStep(lambda x, t: x * t, name="toy")(torch.ones(5), torch.ones(()))
    used = {instruction.name for recorder in recorders for instruction in recorder.draft.instructions}
    assert RULES.keys() - tried == set()
    kinds = {name.rsplit("_", 1)[0] for name in OPERATIONS if not name.startswith("TO_")}
    assert kinds - {name.rsplit("_", 1)[0] for name in used} == set()
