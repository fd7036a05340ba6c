"""A recorded function for arguments of one form: checks them, makes the answer, and has C++ write it."""

import math
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from esper.leyline.tree import Form, unflatten
from esper.simic.lanes.layouts import Layout, Output
from esper.simic.lanes.machine import control_machine
from esper.simic.lanes.program import Program


@final
class Recording:
    """Carries out a program.

    Args:
        program: what the function does to one host.
        inputs: what its arguments must be; where only the order in memory differs, they are copied.
        outputs: the tensors of the answer.
        answer: the form of the answer.
        hosts: N.
    """

    def __init__(
        self, program: Program, inputs: Sequence[Layout], outputs: Sequence[Output], answer: Form, hosts: int
    ) -> None:
        self._machine, self._program, self._hosts = control_machine(), program, hosts
        self._arena = program.arena()
        self._inputs = [(x.shape, x.dtype, x.strides() if i in program.tensors else None) for i, x in enumerate(inputs)]
        self._read = np.array([i for i in range(len(inputs)) if i in program.tensors], dtype=np.int64)
        self._written = slice(len(inputs), len(inputs) + len(outputs))
        self._answers, self._answer = _Answers(outputs), answer
        self._places = [x.layout for x in outputs if x.is_place]

    def __call__(self, weights: Sequence[Tensor], given: Sequence[Tensor], places: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """The answer for these tensors, the first of it in `places`; None where it was recorded for other ones."""
        if len(places) != len(self._places):
            return None
        for x, layout in zip(places, self._places, strict=True):
            if x.shape != layout.shape or x.dtype is not layout.dtype or x.stride() != layout.told:
                return None
        inputs = []
        for x, (shape, dtype, strides) in zip((*weights, *given), self._inputs, strict=True):
            if x.shape != shape or x.dtype is not dtype:
                return None
            if strides is not None:
                inputs.append(x if x.stride() == strides else _laid_out(x, strides))
        answers, written = self._answers.fresh(given, places)
        memory = np.zeros(self._written.stop, dtype=np.int64)
        memory[self._read] = [*map(Tensor.data_ptr, inputs)]
        memory[self._written] = written
        self._machine.run(self._program.words, self._arena, memory, self._hosts)
        return unflatten(self._answer, answers)


def _laid_out(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


class _Answers:
    """Makes the tensors of an answer; those of one layout are parts of one, which takes a third of the time."""

    def __init__(self, outputs: Sequence[Output]) -> None:
        self._passed = [(i, x.passed) for i, x in enumerate(outputs) if x.passed is not None]
        alike: dict[Layout, list[int]] = {}
        for i, x in enumerate(outputs):
            if x.passed is None and not x.is_place:
                alike.setdefault(x.layout, []).append(i)
        self._wholes = [
            ((len(same), *x.shape), (math.prod(x.shape), *x.strides()), x.dtype, same) for x, same in alike.items()
        ]
        self._whole, self._offset = np.zeros(len(outputs), dtype=np.int64), np.zeros(len(outputs), dtype=np.int64)
        for number, (layout, same) in enumerate(alike.items()):
            self._whole[same] = number
            self._offset[same] = math.prod(layout.shape) * layout.dtype.itemsize * np.arange(len(same))

    def fresh(self, given: Sequence[Tensor], places: Sequence[Tensor]) -> tuple[list[Tensor], np.ndarray]:
        """The answer before it is written, and the address of each of its tensors that will be."""
        answers: list[Any] = [*places, *[None] * (len(self._whole) - len(places))]
        for i, argument in self._passed:
            answers[i] = given[argument]
        begin = []
        for shape, strides, dtype, same in self._wholes:
            whole = torch.empty_strided(shape, strides, dtype=dtype)
            begin.append(whole.data_ptr())
            for i, part in zip(same, whole.unbind(), strict=True):
                answers[i] = part
        addresses: np.ndarray = np.array([*begin, 0], dtype=np.int64)[self._whole] + self._offset
        addresses[: len(places)] = [*map(Tensor.data_ptr, places)]
        return answers, addresses
