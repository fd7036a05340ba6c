"""The reward kernel compiled for the CPU.

What `torch.compile` does around a call (guards, and layers that restore aliases, gradients and modes, of which the
kernel has none) takes about as long as the generated loop. Here the same compiler builds the same graph; a call checks
the form of every argument and enters the graph directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from esper.simic.compilation import CompiledStep, Run, entered
from esper.simic.rewards.compiled_rewards import RewardOutput, compute_reward_batched

_MASK = "has_seed_mask"

Argument = Tensor | str | int | None


@dataclass(frozen=True)
class CpuGraph:
    """One compiled graph, and the arguments it was compiled for.

    Attributes:
        names: names of the arguments, in the order of the call.
        forms: (shape, dtype) of each tensor; the value itself of what is not a tensor: None, and the static choices.
        mask: place of `has_seed_mask` among the tensors.
        run: from the tensors in that order to the fields of `RewardOutput`.
    """

    names: tuple[str, ...]
    forms: tuple[Any, ...]
    mask: int
    run: Run

    def admitted(self, given: Mapping[str, Any]) -> list[Tensor] | None:
        """The tensors of a call, or None where anything differs from what the graph was compiled for.

        Compared are names, static choices, shapes, dtypes, layout and device; never a value.
        """
        if tuple(given) != self.names:
            return None
        tensors = []
        for value, form in zip(given.values(), self.forms, strict=True):
            if value.__class__ is Tensor:
                if form.__class__ is not tuple or value.shape != form[0] or value.dtype is not form[1]:
                    return None
                if not value.is_contiguous() or not value.is_cpu:
                    return None
                tensors.append(value)
            elif isinstance(value, Tensor) or value != form:
                return None
        return tensors


class CpuKernel:
    """`compute_reward_batched` for the CPU, compiled in the first call with arguments of a new form.

    It takes the same arguments, all by name, and gives the same answer, without gradients. A call whose arguments have
    another form than those of every graph so far compiles a graph of its own.

    Raises:
        ConfigError, ValueError, TypeError: as the eager kernel. RuntimeError: the compiler failed.
    """

    compiled: ClassVar[int] = 0
    """Graphs that this process has compiled for the CPU."""

    def __init__(self) -> None:
        self._graphs: list[CpuGraph] = []

    def __call__(self, **given: Argument) -> RewardOutput:
        """Pay one step. Masks pass as bytes: the compiler handles bool element by element, but bytes as vectors."""
        graph, tensors = self._found(given) or self._found_or_built(given)
        tensors[graph.mask] = tensors[graph.mask].view(torch.uint8)
        total, breakdown, info, escrow_next, drip_opened, flags = graph.run(tensors)
        return RewardOutput(total, breakdown, info, escrow_next, drip_opened, flags.view(torch.bool))

    def _found(self, given: Mapping[str, Any]) -> tuple[CpuGraph, list[Tensor]] | None:
        for graph in self._graphs:
            tensors = graph.admitted(given)
            if tensors is not None:
                return graph, tensors
        return None

    def _found_or_built(self, given: Mapping[str, Any]) -> tuple[CpuGraph, list[Tensor]]:
        """The graph for arguments in their plain form, compiled if there is none yet."""
        given = {name: _plain(name, value) for name, value in given.items()}
        found = self._found(given)
        if found is not None:
            return found
        names = [name for name, value in given.items() if isinstance(value, Tensor)]
        forms = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in given.values())
        graph = CpuGraph(tuple(given), forms, names.index(_MASK), _compiled(given))
        self._graphs.append(graph)
        CpuKernel.compiled += 1
        CompiledStep.graphs_built += 1
        return graph, [given[name] for name in names]


def _plain(name: str, value: Argument) -> Argument:
    """A step number as a tensor, and every tensor contiguous, so that neither of them makes another graph."""
    if isinstance(value, Tensor):
        if value.device.type != "cpu":
            raise ValueError(f"{name} is on {value.device}; this kernel was made for the CPU, see kernel_for().")
        return value.detach().as_subclass(Tensor).contiguous()
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
    """The graph for such arguments."""
    _check_mask(given[_MASK])
    own = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}  # one tensor given twice
    own[_MASK] = own[_MASK].view(torch.uint8)  # would be taken for one argument
    with torch.no_grad():
        exported = torch.export.export(_OnTensors(given), tuple(own.values()), strict=False).module(check_guards=False)
        return entered(exported, list(own.values()))


def _check_mask(mask: Tensor) -> None:
    """Reject a mask of another type here, since the kernel would take bytes."""
    if mask.dtype != torch.bool:
        raise TypeError(f"{_MASK} is {mask.dtype}; it must be torch.bool.")
