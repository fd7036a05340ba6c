"""Random networks compute in compiled C++ what they compute in PyTorch, and a network of a user's has its bits."""

import ctypes
import faulthandler

import pytest
import torch

from esper.tolaria.executors.native import compare
from fuzz_native import Options, both, differs, reduced, refusal, survey
from random_networks import EDITS, ELEMENTWISE, SHAPES, Plan, RefusedError, Step, check, draw


def surveyed(count, seed, look=differs):
    found = []
    report = survey(Options(seed=seed, count=count, workers=2), found.append, look)
    assert len(found) == len(report.found) == count
    assert not report.findings, "\n\n".join(f"{f.k}: {f.status}: {f.words}\n{f.plan}" for f in report.findings)
    assert len(report.of("ran")) >= 0.6 * count
    return report


@pytest.mark.slow
def test_random_networks_compute_what_they_compute_in_pytorch():
    surveyed(16, 0)


@pytest.mark.slow
def test_many_random_networks_train_as_streamed_ones():
    surveyed(30, 1, both)


FOUND = {
    "y = x + self.b; self.b.add_(1); return y": "edits a parameter or buffer",
    "x + self.b.mul_(0.5)": "edits a parameter or buffer",
    "with torch.no_grad(): self.p.mul_(0.5); return x * self.p": "edits a parameter or buffer",
    "y = x * 2; with torch.no_grad(): y.mul_(2); return y": "an edit without gradient of what has one",
    "with torch.no_grad(): y = x * 2; y.chunk(2, 1)[0].add_(1); return y + x": "is seen through another one",
    "torch.cat([x, x[:, 4:]], 1)": "a tensor without numbers",
    "y = F.dropout(x, 0.5, False); y += 1; return x * 2": "is seen through another one",
    'torch.einsum("bcd,dx->bcx", x, self.q)': "the sum",
    "x * self.p.detach() + self.p": None,
    "x * self.p + self.p.detach()": None,
}
"""What was once computed otherwise, and why it has no rule now."""


def alone(body):
    """A network of one function."""
    tensors = "p=(4, 3), q=(1, 2), b=(4, 3)"
    return Plan((4, 3), 0, 7, (Step("nn.Linear(3, 3)", (0,)), Step(f"Fn({'x: ' + body!r}, {tensors})", (1,))))


@pytest.mark.parametrize(("body", "reason"), FOUND.items())
def test_what_was_found_is_right_or_refused(body, reason):
    if reason is None:
        assert differs(alone(body)) is None
    else:
        assert reason in refusal(alone(body))


@pytest.mark.slow
def test_every_function_of_the_grammar_is_right_or_refused():
    wrong = {}
    for body in [*ELEMENTWISE, *SHAPES, *EDITS]:
        plan = alone(body)
        try:
            check(plan)
        except RefusedError:
            continue
        if refusal(plan) is None and (words := differs(plan)):
            wrong[body] = words
    assert not wrong


def test_a_network_is_drawn_again_from_its_seed():
    assert draw(5, 3) == draw(5, 3) != draw(6, 3)


PLAN = Plan((4,), 0, 7, (Step("nn.Linear(4, 3)", (0,)), Step("nn.ReLU()", (1,)), Step("nn.Linear(3, 2)", (2,))))


def test_a_difference_is_found_and_reduced(monkeypatch):
    assert differs(PLAN) is None
    right = compare.by_instructions

    def wrong(graph, *given, **how):
        found = right(graph, *given, **how)
        relu = any(node.target is torch.ops.aten.relu.default for node in graph.nodes)
        return found.__class__(found.outputs + 1e-6 * relu, found.input_grads, found.weight_grads, found.buffers)

    monkeypatch.setattr("fuzz_native.by_instructions", wrong)
    assert "the outputs is off by 1.0e-06" in differs(PLAN)
    smaller, words = reduced(PLAN, "difference", differs)
    assert [step.code for step in smaller.steps] == ["nn.ReLU()"]
    assert "the outputs" in words


def test_a_crash_is_attributed_to_its_network():
    def crash(plan):
        if plan.seed == draw(0, 1).seed:
            faulthandler.disable()
            ctypes.string_at(0)

    report = survey(Options(count=3), look=crash)
    assert [f.status == "crash" for f in report.found] == [False, True, False]
    assert "SIGSEGV" in report.found[1].words
