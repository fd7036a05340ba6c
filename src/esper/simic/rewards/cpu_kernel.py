"""The reward kernel compiled for the CPU.

The generated loop takes about as long as what `torch.compile` does around a call (guards, and layers that restore
aliases, gradients and modes, of which the kernel has none). Here the same compiler builds the same graph, and a call
checks form and device of every argument and enters the graph directly.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.simic.rewards.compiled_rewards import RewardOutput, compute_reward_batched

_OPTIONS: dict[str, Any] = {"size_asserts": False}  # every call has checked the sizes already
_MASK = "has_seed_mask"

Form = tuple[torch.Size, torch.dtype]
Run = Callable[[list[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class CpuGraph:
    """One compiled graph, and the arguments it was compiled for.

    Attributes:
        names: names of the arguments, in the order of the call.
        forms: shape and dtype of each tensor; the value itself of what is not a tensor (None, and the static choices).
        mask: place of `has_seed_mask` among the tensors.
        run: from the tensors in that order to the fields of `RewardOutput`.
    """

    names: tuple[str, ...]
    forms: tuple[Any, ...]
    mask: int
    run: Run

    def takes(self, given: Mapping[str, Any]) -> bool:
        """Whether the graph was compiled for such arguments: names, shapes, dtypes, layout, device, static choices."""
        if tuple(given) != self.names:
            return False
        for value, form in zip(given.values(), self.forms, strict=True):
            if not isinstance(form, tuple):
                if isinstance(value, Tensor) or value != form:
                    return False
            elif (
                not isinstance(value, Tensor)
                or value.shape != form[0]
                or value.dtype is not form[1]
                or not value.is_contiguous()
                or not value.is_cpu
            ):
                return False
        return True


class CpuKernel:
    """`compute_reward_batched` for the CPU, compiled in the first call with arguments of a new form.

    It takes the same arguments, by name, and gives the same answer; what has no graph yet is never given to another.

    Raises:
        ConfigError, ValueError, TypeError: as the eager kernel. RuntimeError: the compiler failed.
    """

    compiled = 0
    """Graphs that this process has compiled for the CPU."""

    def __init__(self) -> None:
        self._graphs: list[CpuGraph] = []

    def __call__(self, **given: Any) -> RewardOutput:
        """Pay one step."""
        for graph in self._graphs:
            if graph.takes(given):
                return _paid(graph, given)
        given = {name: _plain(name, value) for name, value in given.items()}
        graph = next((graph for graph in self._graphs if graph.takes(given)), None) or self._build(given)
        return _paid(graph, given)

    def _build(self, given: Mapping[str, Any]) -> CpuGraph:
        """Compile for such arguments, and remember the graph."""
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        forms = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in given.values())
        mask = [name for name, value in given.items() if isinstance(value, Tensor)].index(_MASK)
        graph = CpuGraph(tuple(given), forms, mask, _compiled(given))
        self._graphs.insert(0, graph)
        CpuKernel.compiled += 1
        return graph


def _paid(graph: CpuGraph, given: Mapping[str, Any]) -> RewardOutput:
    """Masks pass as bytes: the compiler reads and writes bool element by element, but bytes as vectors."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    tensors[graph.mask] = tensors[graph.mask].view(torch.uint8)
    *columns, flags = graph.run(tensors)
    return RewardOutput(*columns, flags.view(torch.bool))


def _plain(name: str, value: Any) -> Any:
    """A step number as a tensor, and every tensor contiguous, so that neither of them makes another graph."""
    if isinstance(value, Tensor):
        return value.contiguous()
    return torch.tensor(value) if name in ("epoch", "max_epochs") else value


class _OnTensors(torch.nn.Module):
    """The kernel as a function of its tensors alone."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__()
        self.given = dict(given)
        self.names = [name for name, value in given.items() if isinstance(value, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Pay one step."""
        return tuple(compute_reward_batched(**self.given | dict(zip(self.names, tensors, strict=True))))


def _compiled(given: Mapping[str, Any]) -> Run:
    """The graph of such arguments. Each must be a tensor of its own: the compiler would drop one that comes twice."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # imported late: it takes seconds

    found: list[Run] = []

    def keep(*args: Any, **settings: Any) -> Any:
        found.append(compile_fx_inner(*args, **settings))
        return found[-1]

    tensors = tuple(
        value.view(torch.uint8) if name == _MASK else value for name, value in given.items() if isinstance(value, Tensor)
    )
    with torch.no_grad():
        exported = torch.export.export(_OnTensors(given), tensors, strict=False).module(check_guards=False)
        compile_fx(exported, list(tensors), inner_compile=keep, config_patches=_OPTIONS)
    (run,) = found
    return run
