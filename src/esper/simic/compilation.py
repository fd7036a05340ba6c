"""The setting `compile`, and how a function of tensors is compiled.

    "off"    eager, on every device
    "on"     compiled by `torch.compile`, on every device; on the CPU that takes 10 to 30 seconds for each graph
    "auto"   "on" on CUDA in a run of at least 10,000 control steps, else "off"

    function      what it is                               compiled in
    observe       losses judged, measurements to state     `engine_of` in `runs/assembly/`
    policy_step   a decision of all hosts                  `policy_form`
    execute       ops, tick and feedback of all hosts      `engine_of`
    reward        in all modes but `objective`             `compiled_reward`
    end_step      tally, snapshots, outputs of a step      `engine_of`

Functions are compiled before the first step; `graphs_compiled` counts recompilations.
"""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, Literal, final

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.structure import Form, flatten, unflatten

CompileChoice = Literal["auto", "off", "on"]

_KEY = attrgetter("shape", "dtype", "device")

Run = Callable[[list[Tensor]], Sequence[Tensor]]


_WORTH_IT = 10_000
"""Steps after which compiling pays on a GPU: it took 45 s on an H100, and saved 7.5 ms of the 19 ms of a step."""


def is_compiled(choice: CompileChoice, device: torch.device, steps: int) -> bool:
    """Whether this choice means compiled functions on this device, in a run of so many control steps."""
    return choice == "on" or (choice == "auto" and device.type == "cuda" and steps >= _WORTH_IT)


def graphs_compiled() -> int:
    """Graphs that this process has compiled; constant after the warm-up."""
    return CompiledStep.graphs_built


def explained(what: str, error: Exception) -> ConfigError:
    """The ConfigError for a failed compilation of `what`."""
    first, second, *_ = [*str(error).splitlines(), "", ""]
    reason = f"{first} {second}" if first.endswith("raised:") else first  # the name of the compiler, then its error
    return ConfigError(
        f"{what} could not be compiled ({type(error).__name__}: {reason}); set compile = 'off', or "
        "install what is missing (on the CPU a C++ compiler such as g++)."
    )


def compiled(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Run:
    """The graph compiled for the shapes and dtypes of `inputs`; raises RuntimeError, ImportError if that fails.

    Without the guards of `torch.compile`: `CompiledStep` has compared shapes, dtypes and devices, and a second check of
    a hundred arguments takes as long as a small graph.
    """
    options: dict[str, Any] = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        "loop_ordering_after_fusion": False,  # fails on a GPU before PyTorch 2.13 where parts of a `cat` are fused
    }
    run = torch.compile(graph.forward, fullgraph=True, dynamic=False, options=options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # it would be another computation
        run(*inputs)
    return lambda tensors: run(*tensors)


@dataclass(frozen=True)
class _Graph:
    """One compiled graph and the structure of its result.

    `passed[i]` is the index of the argument that is tensor i of the result, None where the graph computes it.
    """

    run: Run
    passed: tuple[int | None, ...]
    result: Form

    def __call__(self, weights: Iterable[Tensor], given: Sequence[Tensor]) -> Any:  # noqa: ANN401
        """The result for these tensors."""
        computed = iter(self.run([*weights, *(x.contiguous() for x in given)]))
        return unflatten(self.result, [next(computed) if i is None else given[i] for i in self.passed])


@final
class CompiledStep:
    """A function of trees of tensors without gradients, compiled in the first call with arguments of a new form.

    `make_fx` traces its operators, because Dynamo treats a comparison of a tensor with an enum member as a constant and
    rebuilds cached tables in every call. The weights of a module are arguments of the graph, so in-place training takes
    effect; other tensors that the function uses become constants. Results may share memory and are read-only.

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

        results: list[tuple[tuple[int | None, ...], Form]] = []

        def on_tensors(*tensors: Tensor) -> list[Tensor]:
            weights, arguments = dict(zip(self._weights, tensors, strict=False)), tensors[len(self._weights) :]
            given_again = unflatten(form, arguments)
            if self._function is self._module:
                returned = torch.func.functional_call(self._module, weights, given_again)
            else:
                returned = self._function(*given_again)
            outputs, result = flatten(returned)
            places = {id(x): i for i, x in enumerate(arguments)}
            passed = tuple(places.get(id(x)) for x in outputs)
            results.append((passed, result))
            return [x.contiguous() for x, i in zip(outputs, passed, strict=True) if i is None]

        def own() -> list[Tensor]:  # make_fx would merge a tensor given twice into one argument
            return [x.detach().clone(memory_format=torch.contiguous_format) for x in (*self._weights.values(), *given)]

        self._function(*unflatten(form, list(given)))  # fills the cached tables, which become constants
        graph = make_fx(on_tensors)(*own())
        try:
            run = compiled(graph, own())
        except (RuntimeError, ImportError) as error:  # the errors of the compiler
            raise explained(self._name, error) from error
        return _Graph(run, *results[0])
