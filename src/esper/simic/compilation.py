"""Eager or compiled: what the setting `compile` means, and how a function of tensors is compiled.

    "off"    eager, on every device
    "on"     compiled, on every device; on the CPU that needs a C++ compiler
    "auto"   compiled on CUDA; eager on the CPU, where each graph takes 10 to 30 seconds to compile

Both forms give the same answer. Which functions there are is listed in `simic/training/kernels.py`; `graphs_compiled`
tells whether one of them was compiled again after the warm-up.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, final

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.tree import Form, flatten, unflatten

if TYPE_CHECKING:
    from torch._inductor.output_code import OutputCode

CompileChoice = Literal["auto", "off", "on"]
R = TypeVar("R")

_OPTIONS: dict[str, Any] = {"size_asserts": False}  # every call has checked the sizes already
_DTYPES = {"bool": torch.bool, "int64": torch.int64}

Run = Callable[[list[Tensor]], Sequence[Tensor]]


def is_compiled(choice: CompileChoice, device: torch.device) -> bool:
    """Whether this choice means compiled functions on this device."""
    return choice == "on" or (choice == "auto" and device.type == "cuda")


def graphs_compiled() -> int:
    """Graphs that this process has compiled so far; after a warm-up the number must not grow."""
    from torch._dynamo.utils import counters  # imported late: it takes a second, which an eager run need not wait for

    return CompiledStep.graphs_built + int(counters["stats"]["unique_graphs"])


def explained(what: str, error: Exception) -> ConfigError:
    """What a failed compilation means to the user; `what` names the function."""
    first_line = (str(error).splitlines() or [""])[0]
    return ConfigError(
        f"{what} could not be compiled ({type(error).__name__}: {first_line}); set compile = 'off', or "
        "install what is missing (on the CPU a C++ compiler such as g++)."
    )


def blank(kind: type[R], sizes: Mapping[str, int], device: torch.device) -> R:
    """A record of zeros; shapes and dtypes are those of its annotations, with the axes in `sizes`."""
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        annotation: Any = field.type
        shape = [sizes[axis] if axis in sizes else int(axis) for axis in annotation.dim_str.split()]
        dtype = next((d for name, d in _DTYPES.items() if name in annotation.dtypes), torch.float32)
        values[field.name] = torch.zeros(shape, dtype=dtype, device=device)
    return kind(**values)


@dataclass(frozen=True)
class _Graph:
    """One compiled graph: the constants it begins with, and the form of its answer."""

    run: Run
    constants: tuple[Tensor, ...]
    answer: Form


@final
class CompiledStep:
    """A module without gradients, compiled in the first call with arguments of a new form.

    Its operators are recorded as they are executed, and the graph is entered directly. `torch.compile` would read the
    Python code instead: it takes a comparison of a tensor with a member of an enumeration for a plain value, makes the
    cached tables anew in every call, and before each call checks everything it has seen. Weights are arguments, so
    training in place is seen; other tensors of the module must stay the same.

    Raises:
        TypeError: an argument is a plain number. RuntimeError, ImportError: the compiler failed.
    """

    graphs_built: ClassVar[int] = 0
    """Graphs that this process has compiled without `torch.compile`, those of the reward on the CPU among them."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = {name: weight.detach() for name, weight in module.named_parameters()}
        self._graphs: dict[Hashable, _Graph] = {}

    def __call__(self, *args: Any) -> Any:  # noqa: ANN401 -- those of the module
        """As the module."""
        given, form = flatten(args)
        key = (form, tuple((x.shape, x.dtype, x.device) for x in given))
        graph = self._graphs.get(key)
        if graph is None:
            graph = self._graphs[key] = self._compiled(given, form)
            CompiledStep.graphs_built += 1
        tensors = [*graph.constants, *self._weights.values(), *(x.contiguous() for x in given)]
        return unflatten(graph.answer, graph.run(tensors))

    @torch.no_grad()
    def _compiled(self, given: Sequence[Tensor], form: Form) -> _Graph:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # imported late: it takes seconds
        from torch.fx.experimental.proxy_tensor import make_fx

        found: list[OutputCode] = []
        answers: list[Form] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            weights = dict(zip(self._weights, tensors, strict=False))
            arguments = unflatten(form, tensors[len(weights) :])
            outputs, answer = flatten(torch.func.functional_call(self._module, weights, arguments))
            answers.append(answer)
            return outputs

        def keep(graph: torch.fx.GraphModule, inputs: Sequence[Any], **settings: object) -> "OutputCode":
            found.append(compile_fx_inner(graph, inputs, **settings))  # type: ignore[arg-type]
            return found[-1]

        def own() -> list[Tensor]:  # one tensor given twice would be taken for one argument
            return [x.detach().clone(memory_format=torch.contiguous_format) for x in (*self._weights.values(), *given)]

        self._module(*unflatten(form, list(given)))  # makes the tables that are kept, which become constants
        recorded = make_fx(on_tensors)(*own())
        compile_fx(recorded, own(), inner_compile=keep, config_patches=_OPTIONS)
        (run,) = found
        constants = tuple(x.detach() for _, x in recorded.named_buffers())
        return _Graph(run, constants, answers[0])
