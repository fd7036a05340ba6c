"""A function of trees of tensors compiled by itself: which arguments it hands on, and what makes another graph."""

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.messages import Hidden
from esper.simic.compilation import CompiledStep, graphs_compiled

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # the compiler's own imports
]


def mixed(state: Hidden, x: torch.Tensor) -> tuple[Hidden, tuple[torch.Tensor, ...]]:
    """Half of the state changed, an answer given twice, views of one tensor, and one that repeats itself."""
    both = torch.stack((x + 1.0, x - 1.0))
    up, down = both.unbind(0)
    return Hidden(h=state.h, c=state.c * 2.0), (up, down, up, both.transpose(0, 2), x[:, :1].expand_as(x), x)


def test_what_is_handed_on_is_the_argument_itself_and_the_rest_is_computed():
    step, before = CompiledStep(mixed, name="the toy"), graphs_compiled()
    state = Hidden(h=torch.zeros(1, 2, 3), c=torch.ones(1, 2, 3))
    x = torch.arange(6.0).view(2, 3)
    for given in (x, x.t().contiguous().t(), x + 4.0):  # in another order in memory it is still the same graph
        after, answers = step(state, given)
        want_after, want = mixed(state, given)
        assert after.h is state.h
        assert answers[5] is given
        assert torch.equal(after.c, want_after.c)
        assert all(torch.equal(a, b) for a, b in zip(answers, want, strict=True))
        assert all(a.is_contiguous() for a in (after.c, *answers[:5]))
    assert graphs_compiled() == before + 1


def test_one_tensor_given_twice_is_two_arguments():
    step = CompiledStep(lambda a, b: (a + b, b), name="the toy")
    x, y = torch.ones(3), torch.full((3,), 2.0)
    assert step(x, x)[0].tolist() == [2.0, 2.0, 2.0]
    total, handed_on = step(x, y)
    assert total.tolist() == [3.0, 3.0, 3.0]
    assert handed_on is y


def test_another_form_of_arguments_is_a_graph_of_its_own_and_is_counted():
    step, before = CompiledStep(lambda a: a * 2.0, name="the toy"), graphs_compiled()
    for x in (torch.ones(3), torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3)):
        assert torch.equal(step(x), x * 2.0)
    assert graphs_compiled() == before + 3


def test_a_plain_number_would_be_recorded_for_good_and_is_refused():
    with pytest.raises(TypeError, match="plain number 3"):
        CompiledStep(lambda a, n: a * n, name="the toy")(torch.ones(2), 3)


def test_a_missing_compiler_is_a_mistake_of_configuration(tmp_path):
    import torch._inductor.config as inductor

    absent = {"cpp.cxx": (str(tmp_path / "no-such-compiler"),), "force_disable_caches": True}
    step = CompiledStep(lambda a: a + 1.0, name="the toy")
    with inductor.patch(absent), pytest.raises(ConfigError, match=r"the toy could not.*set compile = 'off'"):
        step(torch.ones(5))
