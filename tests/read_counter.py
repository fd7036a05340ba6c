"""Finds every place where Python waits for the contents of a tensor.

While a counter is active, the methods that wait are wrapped, and a dispatch mode finds operators that wait without one
of these methods (a boolean index, `x[t]` with a scalar tensor `t`). Calls are counted, not stalls, so the result is the
same on CPU and CUDA. What `tolaria/runtime.py` reads is intended, and it counts that itself.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from sys import _getframe
from types import FrameType
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import esper
from esper.tolaria.runtime import reads_so_far

_PACKAGE = Path(esper.__file__).resolve().parent
_BORDER = _PACKAGE / "tolaria" / "runtime.py"
_LIBRARIES = str(Path(torch.__file__).parents[1])

_SHAPED_BY_DATA = (
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"),
    *("equal", "allclose", "is_nonzero"),
)
_WATCHED: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (Tensor, ("item", "tolist", "cpu", "numpy", "to", "__array__", "__repr__", "__format__")),
    (Tensor, ("__bool__", "__int__", "__float__", "__complex__", "__index__")),
    (Tensor, tuple(name for name in _SHAPED_BY_DATA if hasattr(Tensor, name))),
    (torch, _SHAPED_BY_DATA),
    (torch.cuda, ("synchronize",)),
)
_WAITING_OPERATORS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "masked_select", "equal", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"),
    )
)
_INDEXING_OPERATORS = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})


@dataclass(frozen=True)
class HostRead:
    """One read outside `host_read`: the method or operator, and its call site, e.g. `esper/leyline/random.py:139`."""

    call: str
    site: str


@final
class HostReadCounter:
    """Counts the reads made while it is active, e.g. `with HostReadCounter() as reads: engine.step(client)`.

    Attributes:
        intended: calls of `host_read` or `start_read`, those of workers included.
        unintended: every other read, in order. Its site is the first frame inside the package, or else the nearest
            frame outside installed libraries.

    Counters may be nested; each counts all reads inside it. Leaving the last one restores the wrapped methods.
    """

    def __init__(self) -> None:
        self._reads = 0  # of the process at the start; after the end, those in between
        self.unintended: list[HostRead] = []
        self._mode = _OperatorWatch(self.unintended)

    @property
    def intended(self) -> int:
        return reads_so_far() - self._reads if self in _active else self._reads

    @property
    def by_site(self) -> Counter[str]:
        """Number of unintended reads of each call site."""
        return Counter(read.site for read in self.unintended)

    def __enter__(self) -> "HostReadCounter":
        assert self not in _active, "this counter is counting already; nest another one"
        if not _active:
            _wrap_methods()
        self._reads = reads_so_far()
        _active.append(self)
        self._mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads = self.intended
        _active.remove(self)
        if not _active:
            _unwrap_methods()


class _Silence(threading.local):
    """Nesting depth of wrapped methods: what they call is counted already."""

    depth = 0


_silence = _Silence()
_active: list[HostReadCounter] = []
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def _silence_inside() -> Iterator[None]:
    """Reads inside are not counted."""
    _silence.depth += 1
    try:
        yield
    finally:
        _silence.depth -= 1


@final
class _OperatorWatch(TorchDispatchMode):
    """Finds operators that wait for the device without a watched method."""

    def __init__(self, found: list[HostRead]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _silence.depth == 0 and _operator_waits(func._schema.name, args, kwargs) and (site := _call_site()):
            self.found.append(HostRead(func._schema.name, site))
        return func(*args, **kwargs)


def _operator_waits(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _INDEXING_OPERATORS:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None
    if name == "aten::_to_copy":
        target = torch.device(kwargs.get("device") or args[0].device)
        return _leaves_device(args[0].device, target) and not kwargs.get("non_blocking")
    if name == "aten::copy_":
        non_blocking = kwargs.get("non_blocking", len(args) > 2 and args[2])
        return _leaves_device(args[1].device, args[0].device) and not non_blocking
    return name in _WAITING_OPERATORS


def _wrap_methods() -> None:
    for owner, names in _WATCHED:
        for name in names:
            _originals.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, _wrapped(getattr(owner, name), name))


def _unwrap_methods() -> None:
    while _originals:
        owner, name, own = _originals.pop()
        if own is None:  # inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _wrapped(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if name == "to" and not _asks_for_host(*args, **kwargs):
            return original(*args, **kwargs)
        if _silence.depth == 0 and (site := _call_site()):
            read = HostRead(name, site)
            for counter in _active:
                counter.unintended.append(read)
        with _silence_inside():
            return original(*args, **kwargs)

    return call


def _asks_for_host(tensor: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether `.to(...)` waits for a copy on the host.

    The literal "cpu" counts as a transfer even if the tensor is on the CPU already. A `torch.device` counts only if the
    tensor is elsewhere, because it is usually the device of the run.
    """
    if kwargs.get("non_blocking"):
        return False
    target = kwargs.get("device", args[0] if args else None)
    if isinstance(target, str):
        return target == "cpu"
    target = target.device if isinstance(target, Tensor) else target
    return isinstance(target, torch.device) and _leaves_device(tensor.device, target)


def _leaves_device(source: torch.device, target: torch.device) -> bool:
    return target.type == "cpu" and source.type != "cpu"


def _call_site() -> str:
    """Where a read was made; "" for one of the border between device and host."""
    nearest = ""
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == str(_BORDER):
            return ""
        if file.startswith(f"{_PACKAGE}/"):
            return f"{Path(file).relative_to(_PACKAGE.parent).as_posix()}:{frame.f_lineno}"
        if not nearest and file != __file__ and not file.startswith((_LIBRARIES, "<")):
            nearest = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return nearest
