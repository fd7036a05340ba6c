"""CUDA graph capture of functions of tensors (experimental).

    call 1 with some shapes    the function itself, on a side stream: warm-up
    call 2                     captured on static inputs, which executes nothing; then replayed
    later calls                arguments --copy--> static inputs --replay--> static outputs --copy--> results

There is one graph for each structure, shape, dtype and device of the arguments. Memory that the function reaches in
other ways (weights, working memory) is read and written in place by every replay, so it must not be reallocated. Each
call executes the function exactly once on the device; Python side effects happen only in the first two calls.

`CaptureBackend` separates this from CUDA, so that all but the backend is tested on the CPU; `tests/gpu` has to pass on
a GPU before capture is more than an experiment.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, final, runtime_checkable

import torch
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.pytree import Form, flatten, unflatten

CaptureChoice = Literal["off", "on"]
MAX_PROGRAMS = 4
"""Structures whose programs are cached."""

T = TypeVar("T")
P = TypeVar("P", bound="Program")


@runtime_checkable
class CaptureBackend(Protocol):
    """How a function without arguments is captured."""

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run it eagerly, so that lazy initialization is done before `capture`."""
        ...

    def capture(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Capture it without executing it; returns the replay, and the result whose tensors every replay fills."""
        ...


@final
class CudaGraphs:
    """CUDA graphs, each with a memory pool of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], T]) -> T:
        """On the side stream, ordered between the work before it and the work after it."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            result = run()
        current.wait_stream(self._side)
        return result

    def capture(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """On the side stream; unlike `torch.cuda.graph` it neither synchronizes nor empties the caches."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                result = run()
            finally:
                graph.capture_end()
        return graph.replay, result


@dataclass(frozen=True)
class _Graph:
    inputs: list[Tensor]
    replay: Callable[[], None]
    outputs: list[Tensor]
    result: Form


@final
class Captured:
    """`function` with the same arguments and results, replayed.

    Raises:
        TypeError: an argument is a plain number, which would be baked into the graph.
        ConfigError: the function cannot be captured.
    """

    def __init__(self, function: Callable[..., Any], backend: CaptureBackend, *, name: str) -> None:
        self.function, self.name = function, name
        self._backend = backend
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def num_captures(self) -> int:
        """Graphs captured so far; after a warm-up the number must not grow."""
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function."""
        given, form = flatten((args, kwargs))
        key = (form, tuple((x.shape, x.dtype, x.device) for x in given))
        if key not in self._warm:
            self._warm.add(key)
            return self._backend.warm_up(lambda: self.function(*args, **kwargs))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._capture(given, form)
        elif given:
            torch._foreach_copy_(graph.inputs, given)
        graph.replay()
        return unflatten(graph.result, [x.clone() for x in graph.outputs])

    def _capture(self, given: Sequence[Tensor], form: Form) -> _Graph:
        inputs = [x.detach().clone() for x in given]
        args, kwargs = unflatten(form, inputs)
        try:
            replay, result = self._backend.capture(lambda: self.function(*args, **kwargs))
        except RuntimeError as error:  # an operation that CUDA does not allow during capture
            first_line = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{self.name} could not be captured ({type(error).__name__}: {first_line}); set capture = 'off'."
            ) from error
        outputs, result_form = flatten(result)
        return _Graph(inputs, replay, [x.detach() for x in outputs], result_form)


def capture(function: Callable[..., Any], *examples: Any, recorder: CaptureBackend, name: str) -> Captured:  # noqa: ANN401
    """The pure `function`, already captured for arguments like `examples`."""
    captured = Captured(function, recorder, name=name)
    captured(*examples)
    captured(*examples)
    return captured


@runtime_checkable
class Program(Protocol):
    """Functions together with the memory they work on, set up for one structure."""

    def tensors(self) -> Sequence[Tensor]:
        """The tensors in which two programs of equal structure differ, in a fixed order."""
        ...


@final
class Programs(Generic[P]):
    """A cache of programs by structure (which seeds of which kind are alive), so that graphs outlive an epoch."""

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, P] = OrderedDict()

    def cached(self, structure: Hashable, fresh: P) -> P:
        """The cached program of this structure with the numbers of `fresh`; `fresh` itself if there is none."""
        program = self._programs.get(structure)
        if program is None:
            while len(self._programs) >= MAX_PROGRAMS:
                self._programs.popitem(last=False)
            self._programs[structure] = fresh
            return fresh
        self._programs.move_to_end(structure)
        into, numbers = program.tensors(), fresh.tensors()
        assert [x.shape for x in into] == [x.shape for x in numbers], "equal structures have tensors of equal shapes"
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(numbers))
        return program


def capture_backend_for(choice: CaptureChoice, device: torch.device) -> CaptureBackend | None:
    """The backend for this device; None where functions run eagerly.

    Raises:
        ConfigError: "on" on a device without CUDA graphs.
    """
    if choice == "off":
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"capture is 'on', but the run is on {device}, and CUDA graphs need a CUDA device; leave capture out, or "
            "run on a CUDA device."
        )
    return CudaGraphs(device)
