"""Eager or compiled: what the setting `compile` means, and how PyTorch compiles a function of tensors.

    "off"      eager, on every device
    "on"       compiled by PyTorch, on every device; on the CPU that takes 10 to 30 seconds for each graph
    "native"   recorded once and carried out by C++, on the CPU (`simic/lanes`); made in a second
    "auto"     "on" on CUDA; on the CPU "native" where there is a C++ compiler, else "off"

All forms give the same answer. Which functions there are is listed in `simic/training/kernels.py`; `graphs_compiled`
tells whether one of them was compiled again after the warm-up.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.tree import Form, flatten, unflatten

if TYPE_CHECKING:
    from torch._inductor.output_code import OutputCode

CompileChoice = Literal["auto", "off", "on", "native"]

OPTIONS: Mapping[str, Any] = {"size_asserts": False}  # every call has checked the sizes already
_NARROW: Mapping[str, Any] = {"cpp.simdlen": 1}

_KEY = attrgetter("shape", "dtype", "device")

Run = Callable[[list[Tensor]], Sequence[Tensor]]


def is_compiled(choice: CompileChoice, device: torch.device) -> bool:
    """Whether this choice means functions compiled by PyTorch on this device."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def graphs_compiled() -> int:
    """Graphs that this process has compiled or recorded so far; after a warm-up the number must not grow."""
    from torch._dynamo.utils import counters  # imported late: it takes a second, which an eager run need not wait for

    return CompiledStep.graphs_built + int(counters["stats"]["unique_graphs"])


def explained(what: str, error: Exception) -> ConfigError:
    """What a failed compilation means to the user; `what` names the function."""
    first_line = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{what} could not be compiled ({type(error).__name__}: {first_line}); set compile = 'off', or "
        "install what is missing (on the CPU a C++ compiler such as g++)."
    )


def entered(recorded: torch.fx.GraphModule, inputs: Sequence[Tensor], options: Mapping[str, Any] = OPTIONS) -> Run:
    """A graph compiled for inputs of these forms, without what `torch.compile` does around each call.

    The compiler keeps what it has made on the disk, so that the next process has it in a fraction of the time. For that
    it asks for shapes that are known to be fixed, and what it keeps at a higher level must not answer first, for that
    would not be the graph alone.

    Raises:
        RuntimeError, ImportError: the compiler failed.
    """
    from torch._functorch import config as functorch  # imported late: all of this takes seconds
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    found: list[OutputCode] = []

    def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any], **settings: object) -> "OutputCode":
        found.append(compile_fx_inner(graph, inputs, **settings))  # type: ignore[arg-type]
        return found[-1]

    shapes = FakeTensorMode(shape_env=ShapeEnv())
    examples = [shapes.from_tensor(x, static_shapes=True) for x in inputs]
    with tracing(TracingContext(shapes)), functorch.patch(enable_autograd_cache=False):
        compile_fx(recorded, examples, inner_compile=keep, config_patches=dict(options))
    (run,) = found
    return run


@dataclass(frozen=True)
class _Graph:
    """One compiled graph: the constants it begins with, and the form of its answer.

    `passed[i]` is the argument that is handed on as tensor i of the answer, None where the graph computes it.
    """

    run: Run
    constants: tuple[Tensor, ...]
    passed: tuple[int | None, ...]
    answer: Form

    def __call__(self, weights: Iterable[Tensor], given: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """The answer for these tensors."""
        computed = iter(self.run([*self.constants, *weights, *(x.contiguous() for x in given)]))
        return unflatten(self.answer, [next(computed) if i is None else given[i] for i in self.passed])


@final
class CompiledStep:
    """A function of trees of tensors without gradients, compiled in the first call with arguments of a new form.

    Its operators are recorded as they are executed, and the graph is entered directly. `torch.compile` would read the
    Python code instead: it takes a comparison of a tensor with a member of an enumeration for a plain value, makes the
    cached tables anew in every call, and before each call checks everything it has seen. The weights of a module are
    arguments, so training in place is seen; other tensors that the function reaches must stay the same.

    `narrow`: the last axes are short. Vectors along them would be cut off and filled up for every few numbers, so the
    compiler of PyTorch is told to leave vectors to the C++ compiler (CPU only).

    Answers may share memory with each other, so nobody may write into them.

    Raises:
        TypeError: an argument is a plain number. ConfigError: the compiler failed.
    """

    graphs_built: ClassVar[int] = 0
    """Graphs that this process has made without `torch.compile`: recorded ones, and those of the reward on the CPU."""

    def __init__(self, function: Callable[..., Any], *, name: str, narrow: bool = False) -> None:
        self._function, self._name, self._options = function, name, {**OPTIONS, **(_NARROW if narrow else {})}
        self._module = function if isinstance(function, nn.Module) else nn.Module()
        self._weights = {name: weight.detach() for name, weight in self._module.named_parameters()}
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def num_graphs(self) -> int:
        """Forms of arguments that were compiled so far."""
        return len(self._graphs)

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function."""
        given, form = flatten(args)
        key = (form, tuple(map(_KEY, given)))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._compiled(given, form)
            CompiledStep.graphs_built += 1
        return graph(self._weights.values(), given)

    @torch.no_grad()
    def _compiled(self, given: Sequence[Tensor], form: Form) -> _Graph:
        from torch.fx.experimental.proxy_tensor import make_fx

        answers: list[tuple[tuple[int | None, ...], Form]] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            weights, arguments = dict(zip(self._weights, tensors, strict=False)), tensors[len(self._weights) :]
            outputs, answer = flatten(self._applied(weights, unflatten(form, arguments)))
            places = {id(x): i for i, x in enumerate(arguments)}
            passed = tuple(places.get(id(x)) for x in outputs)
            answers.append((passed, answer))
            # copies, which the compiler leaves out again: a graph that is entered directly must not answer with views
            fresh = [x for x, i in zip(outputs, passed, strict=True) if i is None]
            return [x.clone(memory_format=torch.contiguous_format) for x in fresh]

        def own() -> list[Tensor]:  # one tensor given twice would be taken for one argument
            return [x.detach().clone(memory_format=torch.contiguous_format) for x in (*self._weights.values(), *given)]

        self._function(*unflatten(form, list(given)))  # makes the tables that are kept, which become constants
        recorded = make_fx(on_tensors)(*own())
        try:
            run = entered(recorded, own(), self._options)
        except (RuntimeError, ImportError) as error:  # what every part of the compiler raises
            raise explained(self._name, error) from error
        constants = tuple(x.detach() for _, x in recorded.named_buffers())
        return _Graph(run, constants, *answers[0])

    def _applied(self, weights: dict[str, Tensor], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
        if self._function is self._module:
            return torch.func.functional_call(self._module, weights, arguments)
        return self._function(*arguments)
