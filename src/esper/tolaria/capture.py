"""A function of tensors, recorded once as a CUDA graph and then replayed without Python.

    call 1 of a form    the function itself, on a stream of its own: warm-up
    call 2              recorded on static inputs, which executes nothing; then replayed
    later calls         arguments --copy--> static inputs --replay--> static outputs --copy--> answer

A *form* is everything about the arguments but the numbers in them: structure, shapes, types, devices. Each form has its
own recording. What the function reaches in other ways (weights, working copies) stays where it is: it is read, and may
be written, in place by every replay, so its memory must not be exchanged. Every call executes the function exactly
once, so it may change such memory; what it remembers from call to call in Python is lost. State that is handed from
step to step is an argument and an answer, and the answer is a copy: the next replay does not touch it.

None of this has been proven on a GPU, so a run asks for it with `experimental = true`; `tests/gpu` is what has to pass
there. How recording and replaying are done is behind `CaptureBackend`, so that everything else is tested on the CPU.
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
MOST_PROGRAMS = 4
"""Structures whose programs are kept."""

T = TypeVar("T")
P = TypeVar("P", bound="Program")


@runtime_checkable
class CaptureBackend(Protocol):
    """How a function without arguments is recorded."""

    def warm(self, run: Callable[[], T]) -> T:
        """Run it as it is, such that whatever is set up lazily is set up before `record`."""
        ...

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Run it without executing it on the device; returns the replay, and the answer that every replay fills."""
        ...


@final
class CudaRecorder:
    """CUDA graphs, each in memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def warm(self, run: Callable[[], T]) -> T:
        """On the side stream, between the work before it and the work after it."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            answer = run()
        current.wait_stream(self._side)
        return answer

    def record(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Recorded on the side stream; nothing waits, unlike in `torch.cuda.graph`, which empties all caches before."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                answer = run()
            finally:
                graph.capture_end()
        return graph.replay, answer


@dataclass(frozen=True)
class _Recording:
    """One form of a function: where its arguments are put, how it is replayed, where its answers are found."""

    inputs: list[Tensor]
    replay: Callable[[], None]
    outputs: list[Tensor]
    answer: Form


@final
class Captured:
    """`function` with the same arguments and the same answer, replayed.

    Raises:
        TypeError: an argument is a plain number.
        ConfigError: the function cannot be recorded.
    """

    def __init__(self, function: Callable[..., Any], recorder: CaptureBackend, *, name: str) -> None:
        self.function, self.name = function, name
        self._recorder = recorder
        self._warmed: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}

    @property
    def num_captures(self) -> int:
        """Forms recorded so far; after a warm-up the number must not grow."""
        return len(self._recordings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function."""
        given, form = flatten((args, kwargs))
        key = (form, tuple((x.shape, x.dtype, x.device) for x in given))
        if key not in self._warmed:
            self._warmed.add(key)
            return self._recorder.warm(lambda: self.function(*args, **kwargs))
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._recordings[key] = self._recorded(given, form)
        elif given:
            torch._foreach_copy_(recording.inputs, given)
        recording.replay()
        return unflatten(recording.answer, [x.clone() for x in recording.outputs])

    def _recorded(self, given: Sequence[Tensor], form: Form) -> _Recording:
        inputs = [x.detach().clone() for x in given]
        args, kwargs = unflatten(form, inputs)
        try:
            replay, answer = self._recorder.record(lambda: self.function(*args, **kwargs))
        except RuntimeError as error:  # whatever the device does not allow while it records
            first_line = (str(error).splitlines() or [""])[0]
            raise ConfigError(
                f"{self.name} could not be recorded ({type(error).__name__}: {first_line}); set capture = 'off'."
            ) from error
        outputs, answer_form = flatten(answer)
        return _Recording(inputs, replay, [x.detach() for x in outputs], answer_form)


def capture(function: Callable[..., Any], *examples: Any, recorder: CaptureBackend, name: str) -> Captured:  # noqa: ANN401
    """`function` recorded for arguments of the form of `examples`, with which it is called; so it must be pure."""
    captured = Captured(function, recorder, name=name)
    captured(*examples)
    captured(*examples)
    return captured


@runtime_checkable
class Program(Protocol):
    """Functions together with the memory they work on, set up for one structure."""

    def tensors(self) -> Sequence[Tensor]:
        """What differs between two programs of equal structure, in a fixed order."""
        ...


@final
class Programs(Generic[P]):
    """The programs of the structures seen last, so that recordings outlive a pass over the data.

    A structure is what decides which operations run on which shapes: whose seeds are alive, of which kind. Of two
    programs of equal structure the older one stays, and receives the numbers of the newer one.
    """

    def __init__(self) -> None:
        self._programs: OrderedDict[Hashable, P] = OrderedDict()

    def settled(self, structure: Hashable, fresh: P) -> P:
        """The program to use for this structure; `fresh` is one that was just set up for it."""
        kept = self._programs.get(structure)
        if kept is None:
            while len(self._programs) >= MOST_PROGRAMS:
                self._programs.popitem(last=False)
            kept = self._programs[structure] = fresh
            return kept
        self._programs.move_to_end(structure)
        into, numbers = kept.tensors(), fresh.tensors()
        assert [x.shape for x in into] == [x.shape for x in numbers], "equal structures have tensors of equal shapes"
        with torch.no_grad():
            torch._foreach_copy_(list(into), list(numbers))
        return kept


def capture_backend_for(choice: CaptureChoice, device: torch.device) -> CaptureBackend | None:
    """How functions are recorded on this device; None where they are run eagerly.

    Raises:
        ConfigError: "on" on a device without CUDA graphs.
    """
    if choice == "off":
        return None
    if device.type != "cuda":
        raise ConfigError(
            f"capture is 'on', but the run is on {device}, and only CUDA devices can record and replay; leave capture "
            "out, or run on a CUDA device."
        )
    return CudaRecorder(device)
