"""Capture and replay on the CPU, with a tape in the place of CUDA graphs."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.messages import Hidden
from esper.tolaria import capture as module
from esper.tolaria.capture import CaptureBackend, Captured, Programs, capture, capture_backend_for
from tape import TapeBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def captured(function) -> tuple[Captured, TapeBackend]:
    tape = TapeBackend()
    return Captured(function, tape, name="toy"), tape


def recurrent(x: Tensor, hidden: Hidden, *, scale: Tensor | None = None) -> tuple[Tensor, Hidden]:
    h = hidden.h + x
    return h.sum() if scale is None else h.sum() * scale, Hidden(h=h, c=hidden.c - h)


def test_the_tape_satisfies_the_protocol():
    assert isinstance(TapeBackend(), CaptureBackend)


def test_every_call_gives_the_answer_of_the_function():
    replayed, tape = captured(recurrent)
    mine = its = Hidden(h=torch.zeros(2, 3, 4), c=torch.zeros(2, 3, 4))
    for step in range(5):
        x = torch.arange(24.0).view(2, 3, 4) * step
        scale = torch.tensor(float(step))
        got, mine = replayed(x, mine, scale=scale)
        want, its = recurrent(x, its, scale=scale)
        assert torch.equal(got, want)
        assert torch.equal(mine.h, its.h)
        assert torch.equal(mine.c, its.c)
    assert (tape.warmed_up, tape.captured, tape.replayed) == (1, 1, 4)
    assert replayed.num_captures == 1


def test_an_answer_that_is_kept_does_not_change_with_the_next_call():
    replayed, _ = captured(lambda x: x * 2)
    kept = [replayed(torch.tensor([float(i)])) for i in range(4)]
    assert torch.cat(kept).tolist() == [0, 2, 4, 6]


def test_arguments_are_copied_and_stay_as_they_are():
    def add(x: Tensor) -> Tensor:
        return x.add_(1)

    replayed, _ = captured(add)
    replayed(torch.zeros(2))
    x = torch.zeros(2)
    assert replayed(x).tolist() == replayed(x).tolist() == [1, 1]
    assert x.tolist() == [0, 0]


def test_memory_that_is_not_an_argument_is_read_and_written_in_place_once_per_call():
    weight, steps = torch.ones(2), torch.zeros(())

    def step(x: Tensor) -> Tensor:
        weight.add_(x)
        steps.add_(1)
        return weight * 10

    replayed, _ = captured(step)
    answers = [replayed(torch.full((2,), float(i)))[0].item() for i in range(1, 5)]
    assert answers == [20, 40, 70, 110]
    assert weight.tolist() == [11, 11]
    assert steps.item() == 4
    weight.zero_()
    assert replayed(torch.ones(2)).tolist() == [10, 10]


def test_gradients_inside_the_function_are_replayed():
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    grad = torch.zeros(2)

    def backward(x: Tensor) -> Tensor:
        loss = (weight * x).pow(2).sum()
        grad.copy_(torch.autograd.grad(loss, weight)[0])
        return loss.detach()

    replayed, _ = captured(backward)
    for i in range(1, 5):
        assert replayed(torch.full((2,), float(i))).item() == 5.0 * i * i
        assert grad.tolist() == [2.0 * i * i, 4.0 * i * i]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(3)}, {"x": torch.zeros(2, dtype=torch.int64)}, {"x": torch.zeros(2, 1)},
        {"x": torch.zeros(2), "negate": True}, {"y": torch.zeros(2)},
    ],
    ids=str,
)  # fmt: skip
def test_each_form_of_arguments_has_a_graph_of_its_own(other):
    def double(x: Tensor | None = None, y: Tensor | None = None, negate: bool = False) -> Tensor:
        given = x if x is not None else y
        return given * -2 if negate else given * 2

    replayed, tape = captured(double)
    for given in [{"x": torch.ones(2)}, other] * 3:
        assert torch.equal(replayed(**given), double(**given))
    assert replayed.num_captures == tape.captured == 2
    assert tape.warmed_up == 2


def test_numbers_in_tensors_make_no_new_graph():
    replayed, tape = captured(lambda t, x: x * t)
    for t in range(1, 40):
        assert replayed(torch.tensor(t), torch.ones(2))[0].item() == t
    assert tape.captured == 1


def test_a_plain_number_is_refused_instead_of_baked_in():
    replayed, _ = captured(lambda t, x: x * t)
    with pytest.raises(TypeError, match="plain number 3"):
        replayed(3, torch.ones(2))


def test_what_cannot_be_captured_names_the_way_out():
    replayed, _ = captured(lambda x: x * 2 if bool(x.sum() > 0) else x)
    assert replayed(torch.ones(1)).item() == 2
    with pytest.raises(ConfigError, match=r"toy could not be captured \(RuntimeError: the device is read.*'off'"):
        replayed(torch.ones(1))


def test_examples_capture_a_pure_function_before_it_is_used():
    tape = TapeBackend()
    ready = capture(lambda x: x + 1, torch.zeros(2), recorder=tape, name="toy")
    assert (tape.warmed_up, tape.captured) == (1, 1)
    assert ready(torch.ones(2)).tolist() == [2, 2]
    assert (tape.warmed_up, tape.captured) == (1, 1)


@dataclass
class Toy:
    """A program with one number in it."""

    memory: Tensor

    def tensors(self) -> list[Tensor]:
        return [self.memory]


def test_a_structure_that_comes_again_gets_its_program_with_the_new_numbers():
    programs: Programs[Toy] = Programs()
    first = Toy(torch.tensor([1.0]))
    assert programs.cached("a", first) is first
    again = programs.cached("a", Toy(torch.tensor([5.0])))
    assert again is first
    assert first.memory.item() == 5
    other = Toy(torch.tensor([2.0]))
    assert programs.cached("b", other) is other
    assert first.memory.item() == 5


def test_the_structure_that_was_longest_ago_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(module, "MAX_PROGRAMS", 2)
    programs: Programs[Toy] = Programs()
    a, b, c = (Toy(torch.zeros(1)) for _ in range(3))
    for key, toy in (("a", a), ("b", b)):
        programs.cached(key, toy)
    programs.cached("a", Toy(torch.ones(1)))
    programs.cached("c", c)
    assert programs.cached("a", Toy(torch.zeros(1))) is a
    fresh = Toy(torch.zeros(1))
    assert programs.cached("b", fresh) is fresh


def test_programs_of_one_structure_have_the_same_shapes():
    programs: Programs[Toy] = Programs()
    programs.cached("a", Toy(torch.zeros(2)))
    with pytest.raises(AssertionError, match="equal shapes"):
        programs.cached("a", Toy(torch.zeros(3)))


def test_only_a_cuda_device_captures_and_only_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(module, "CudaGraphs", lambda device: TapeBackend())
    assert capture_backend_for("off", CPU) is None
    assert capture_backend_for("off", CUDA) is None
    assert capture_backend_for("on", CUDA) is not None
    with pytest.raises(ConfigError, match=r"capture is 'on', but the run is on cpu.*leave capture out"):
        capture_backend_for("on", CPU)
