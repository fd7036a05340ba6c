"""A function of trees of tensors, recorded once for each form of arguments and carried out for all hosts by C++."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from esper.leyline.record import is_record
from esper.leyline.tree import Form, flatten, unflatten
from esper.simic.compilation import CompiledStep
from esper.simic.lanes.layouts import Layout, Output, loads, store
from esper.simic.lanes.recorder import HOSTS, Recorder, RecordingError
from esper.simic.lanes.recording import Recording
from esper.simic.lanes.rules import RULES


@final
class RecordedStep:
    """A function of hosts without gradients, as C++ carries it out; it is recorded in the first call of a new form.

    Its operators must be ones of `rules.py`, and no number of a host may depend on another host. The axis of hosts of a
    tensor is the one called N where a record declares the tensor, and the first elsewhere. The weights of a module are
    read where they lie, so training in place is seen; other tensors that the function reaches are constants.

    Shapes and types of an answer are those of the function, and numbers equal up to rounding; it may lie in memory in
    another order. Nobody may write into an answer: parts of it share memory with each other and with the arguments.

    Raises:
        TypeError: an argument is a plain number. RecordingError: no rule is written for what the function does.
        ConfigError: there is no C++ compiler. IndexError: as the function.
    """

    def __init__(self, function: Callable[..., Any], *, name: str) -> None:
        self._function, self._name = function, name
        self._module = function if isinstance(function, nn.Module) else nn.Module()
        self._weights = {name: weight.detach() for name, weight in self._module.named_parameters()}
        self._recordings: dict[Form, list[Recording]] = {}

    @property
    def num_graphs(self) -> int:
        """Forms of arguments that were recorded so far."""
        return sum(map(len, self._recordings.values()))

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function."""
        return self._answer((), args)

    def write(self, places: Any, *args: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function, but the first tensors of the answer are written to those of the tree `places`, in its order.

        These may share no memory with the arguments.
        """
        return self._answer(flatten(places)[0], args)

    def _answer(self, places: Sequence[Tensor], args: Sequence[Any]) -> Any:  # noqa: ANN401
        given, form = flatten(args)
        weights, recordings = tuple(self._weights.values()), self._recordings.setdefault(form, [])
        for recording in recordings:
            answer = recording(weights, given, places)
            if answer is not None:
                return answer
        try:
            recordings.append(self._recorded(args, given, form, places))
        except RecordingError as error:
            raise RecordingError(f"{self._name} cannot be recorded: {error}; set compile = 'off'.") from error
        CompiledStep.graphs_built += 1
        return recordings[-1](weights, given, places)

    @torch.no_grad()
    def _recorded(
        self, args: Sequence[Any], given: Sequence[Tensor], form: Form, places: Sequence[Tensor]
    ) -> Recording:
        axes = list(host_axes(args))
        (hosts,) = {x.shape[axis] for x, axis in zip(given, axes, strict=True) if axis is not None}
        shared = {name: _resized(x, None, HOSTS) for name, x in self._weights.items()}

        def of(hosts: int) -> list[Tensor]:
            return [_resized(x, axis, hosts) for x, axis in zip(given, axes, strict=True)]

        others, _ = self._applied(form, shared, of(HOSTS + 1))  # and tables are made, which become constants
        recorder = Recorder(RULES)
        weights = {name: recorder.argument(x, None) for name, x in shared.items()}
        tensors = [recorder.argument(x, axis) for x, axis in zip(of(HOSTS), axes, strict=True)]
        with recorder:
            outputs, answer = self._applied(form, weights, tensors)
        inputs = [Layout(tuple(x.shape), x.dtype, None) for x in self._weights.values()]
        inputs += [Layout(tuple(x.shape), x.dtype, axis) for x, axis in zip(given, axes, strict=True)]
        arguments, instructions = {id(x): i for i, x in enumerate(tensors)}, recorder.draft.instructions
        made: list[Output] = []
        for x, other in zip(outputs, others, strict=True):
            layout, passed = _layout_of(x, other, hosts), arguments.get(id(x))
            if len(made) < len(places):
                layout, passed = _told(layout, places[len(made)]), None
            if passed is None:
                instructions.append(store(recorder, len(inputs) + len(made), x, layout))
            made.append(Output(layout, passed, is_place=len(made) < len(places)))
        instructions[:0] = loads(recorder, inputs)
        return Recording(recorder.draft.encoded(), inputs, made, answer, hosts)

    def _applied(self, form: Form, weights: Mapping[str, Tensor], given: Sequence[Tensor]) -> tuple[list[Tensor], Form]:
        arguments = unflatten(form, given)
        if self._function is self._module:
            return flatten(torch.func.functional_call(self._module, dict(weights), arguments))
        return flatten(self._function(*arguments))


def host_axes(value: object, declared: object = None) -> Iterator[int | None]:
    """For each tensor of a tree, in the order of `flatten`, its axis of hosts, None where all hosts share it."""
    if isinstance(value, Tensor):
        names = getattr(declared, "dim_str", "N" if value.dim() else "").split()
        yield names.index("N") if "N" in names else None
    elif is_record(value):
        for field in dataclasses.fields(value):  # type: ignore[arg-type]
            yield from host_axes(getattr(value, field.name), field.type)
    elif isinstance(value, dict):
        yield from host_axes(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from host_axes(part)


def _resized(like: Tensor, axis: int | None, hosts: int) -> Tensor:
    """The first host as often as asked for; what all hosts share as it is. Always a copy, contiguous."""
    if axis is not None:
        like = like.narrow(axis, 0, 1).expand([hosts if i == axis else -1 for i in range(like.dim())])
    return like.clone(memory_format=torch.contiguous_format)


def _layout_of(x: Tensor, other: Tensor, hosts: int) -> Layout:
    """The layout of an answer; its axis of hosts is the one in which the answers for two numbers of hosts differ."""
    sizes = list(zip(x.shape, other.shape, strict=True))
    differing = [i for i, pair in enumerate(sizes) if pair == (HOSTS, HOSTS + 1)]
    if len(differing) != 1 and x.shape != other.shape:
        raise RecordingError(f"an answer has the shape {tuple(x.shape)} for two hosts, {tuple(other.shape)} for three")
    axis = differing[0] if differing else None
    return Layout(tuple(hosts if i == axis else size for i, size in enumerate(x.shape)), x.dtype, axis)


def _told(layout: Layout, place: Tensor) -> Layout:
    """The layout of an answer that is written to `place`."""
    found, expected = (tuple(place.shape), place.dtype), (layout.shape, layout.dtype)
    if found != expected:
        raise RecordingError(f"an answer of {expected} is to be written to a tensor of {found}")
    return replace(layout, told=place.stride())
