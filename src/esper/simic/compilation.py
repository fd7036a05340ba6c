"""Eager or compiled: what the setting `compile` means, and how a function of tensors is compiled.

    "off"    eager, on every device
    "on"     compiled by `torch.compile`, on every device; on the CPU that takes 10 to 30 seconds for each graph
    "auto"   "on" on CUDA, "off" on the CPU

Both forms give the same answer. Which functions there are is listed in `runs/kernels.py`; `graphs_compiled`
tells whether one of them was compiled again after the warm-up.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.pytree import Form, flatten, unflatten

CompileChoice = Literal["auto", "off", "on"]

_KEY = attrgetter("shape", "dtype", "device")

Run = Callable[[list[Tensor]], Sequence[Tensor]]


def is_compiled(choice: CompileChoice, device: torch.device) -> bool:
    """Whether this choice means compiled functions on this device."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def graphs_compiled() -> int:
    """Graphs that this process has compiled so far; after a warm-up the number must not grow."""
    return CompiledStep.graphs_built


def explained(what: str, error: Exception) -> ConfigError:
    """What a failed compilation means to the user; `what` names the function."""
    first_line = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{what} could not be compiled ({type(error).__name__}: {first_line}); set compile = 'off', or "
        "install what is missing (on the CPU a C++ compiler such as g++)."
    )


def entered(recorded: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
    """The graph compiled for inputs of these shapes and dtypes.

    The guards of `torch.compile` are left out: whoever calls the result has compared shapes, dtypes and devices, and
    checking a hundred arguments again takes as long as a small graph.

    Raises:
        RuntimeError, ImportError: the compiler failed.
    """
    options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    run = torch.compile(recorded.forward, fullgraph=True, dynamic=False, options=options)
    run(*inputs)
    return lambda tensors: run(*tensors)


@dataclass(frozen=True)
class _Graph:
    """One compiled graph and the form of its answer.

    `passed[i]` is the argument that is handed on as tensor i of the answer, None where the graph computes it.
    """

    run: Run
    passed: tuple[int | None, ...]
    answer: Form

    def __call__(self, weights: Iterable[Tensor], given: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """The answer for these tensors."""
        computed = iter(self.run([*weights, *(x.contiguous() for x in given)]))
        return unflatten(self.answer, [next(computed) if i is None else given[i] for i in self.passed])


@final
class CompiledStep:
    """A function of trees of tensors without gradients, compiled in the first call with arguments of a new form.

    Its operators are recorded as they are executed, and the graph is compiled. Read as Python code, a comparison of a
    tensor with a member of an enumeration would be taken for a plain value, and cached tables would be made anew in
    every call. The weights of a module are arguments, so training in place is seen; other tensors that the function
    reaches must stay the same.

    Answers may share memory with each other, so nobody may write into them.

    Raises:
        TypeError: an argument is a plain number. ConfigError: the compiler failed.
    """

    graphs_built: ClassVar[int] = 0
    """Graphs that this process has compiled."""

    def __init__(self, function: Callable[..., Any], *, name: str) -> None:
        self._function, self._name = function, name
        self._module = function if isinstance(function, nn.Module) else nn.Module()
        self._weights = {name: weight.detach() for name, weight in self._module.named_parameters()}
        self._graphs: dict[Hashable, _Graph] = {}

    @property
    def num_graphs(self) -> int:
        """Forms of arguments that were compiled so far."""
        return len(self._graphs)

    @torch.no_grad()
    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 -- those of the function
        """As the function."""
        given, form = flatten(args)
        key = (form, tuple(map(_KEY, given)))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._compiled(given, form)
            CompiledStep.graphs_built += 1
        return graph(self._weights.values(), given)

    def _compiled(self, given: Sequence[Tensor], form: Form) -> _Graph:
        from torch.fx.experimental.proxy_tensor import make_fx  # imported late: it takes seconds

        answers: list[tuple[tuple[int | None, ...], Form]] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            weights, arguments = dict(zip(self._weights, tensors, strict=False)), tensors[len(self._weights) :]
            outputs, answer = flatten(self._applied(weights, unflatten(form, arguments)))
            places = {id(x): i for i, x in enumerate(arguments)}
            passed = tuple(places.get(id(x)) for x in outputs)
            answers.append((passed, answer))
            return [x.contiguous() for x, i in zip(outputs, passed, strict=True) if i is None]

        def own() -> list[Tensor]:  # one tensor given twice would be taken for one argument
            return [x.detach().clone(memory_format=torch.contiguous_format) for x in (*self._weights.values(), *given)]

        self._function(*unflatten(form, list(given)))  # makes the tables that are kept, which become constants
        recorded = make_fx(on_tensors)(*own())
        try:
            run = entered(recorded, own())
        except (RuntimeError, ImportError) as error:  # what every part of the compiler raises
            raise explained(self._name, error) from error
        return _Graph(run, *answers[0])

    def _applied(self, weights: Mapping[str, Tensor], arguments: tuple[Any, ...]) -> Any:  # noqa: ANN401
        if self._function is self._module:
            return torch.func.functional_call(self._module, dict(weights), arguments)
        return self._function(*arguments)
