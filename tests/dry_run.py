"""A run on the device "meta", whose tensors have shapes but no values: what waits for a value fails by itself.

engine, client = on_meta(engine, client)      copies of objects built on the CPU, all tensors of which are on "meta"
with OneDevice():                             refuses an operation on tensors of two devices
    engine.step(client)                       a read beside `host_read` fails; `host_read` gives zeros
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from esper.tolaria.runtime import reads_so_far

META = torch.device("meta")


def on_meta(*objects: Any) -> Any:
    """Deep copies of these objects on "meta"; what they share, the copies share."""
    file = io.BytesIO()
    _ToMeta(file).dump(objects)
    return pickle.loads(file.getvalue())


class OneDevice(TorchDispatchMode):
    """Raises AssertionError where tensors of two devices meet, except in an explicit copy."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        devices = {x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        assert len(devices) < 2 or func is torch.ops.aten.copy_.default, f"{func} on {' and '.join(sorted(devices))}"
        return func(*args, **(kwargs or {}))


class CountedReads:
    """`with CountedReads() as reads: ...`, then `reads.number` calls of `host_read` and `start_read` were made."""

    def __enter__(self) -> "CountedReads":
        self._before = reads_so_far()
        return self

    def __exit__(self, *error: object) -> None:
        self.number = reads_so_far() - self._before


class _ToMeta(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            kind = nn.Parameter if isinstance(obj, nn.Parameter) else Tensor
            return _empty, (kind, tuple(obj.shape), obj.dtype, obj.is_leaf and obj.requires_grad)
        if isinstance(obj, torch.device):
            return torch.device, ("meta",)
        return super().reducer_override(obj)


def _empty(kind: type[Tensor], shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype, device=META)
    return nn.Parameter(tensor, requires_grad) if kind is nn.Parameter else tensor.requires_grad_(requires_grad)
