"""A capture backend for the CPU that remembers what a CUDA graph would: operators and memory, and nothing of Python.

    capture  the function runs once; each operator is written down with the very tensors it was given
    replay   the operators run again on those tensors, and their results are copied to where they first were

So a number that was baked in stays what it was, memory that was exchanged is not seen, and a read of the device is an
error, all as on a GPU. Capture executes nothing: what it wrote into memory that was there before is put back.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.tolaria.runtime import HostReadCounter

T = TypeVar("T")


def tensors_in(tree: object) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


class _Writer(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.name in ("aten::lift_fresh", "aten::lift_fresh_copy"):
            raise RuntimeError("a tensor is made from plain numbers, a copy from the host, which cannot be captured")
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.keep(value)
        self.keep([value for name, value in kwargs.items() if name == "out"])
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, tensors_in(out)))
        return out

    def keep(self, written: object) -> None:
        for x in tensors_in(written):
            whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
            self.before.setdefault(whole.data_ptr(), (whole, whole.clone()))


class TapeBackend:
    """`esper.tolaria.capture.CaptureBackend` for tests; counts what it was asked for."""

    def __init__(self) -> None:
        self.warmed_up = self.captured = self.replayed = 0

    def warm_up(self, run: Callable[[], T]) -> T:
        self.warmed_up += 1
        return run()

    def capture(self, run: Callable[[], T]) -> tuple[Callable[[], None], T]:
        self.captured += 1
        writer = _Writer()
        with HostReadCounter() as reads, writer:
            answer = run()
        if reads.unintended:
            raise RuntimeError(f"the device is read during capture: {reads.by_site}")
        for memory, content in writer.before.values():
            memory.copy_(content)

        @torch.no_grad()
        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, first in writer.calls:
                for place, x in zip(first, tensors_in(func(*args, **kwargs)), strict=True):
                    if place.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
                        place.copy_(x)

        return replay, answer
