"""Pickles of plain values and arrays of bytes, read without running anything that they name.

A pickle may call any function by its name. Here the few names by which numpy stores an array stand for a class that
records its arguments, and every other name is refused. numpy itself is never called with what a file says.
"""

import io
import pickle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esper.leyline.errors import DataError

_ARRAY_NAMES = {
    ("numpy.core.multiarray", "_reconstruct"),  # numpy 1
    ("numpy._core.multiarray", "_reconstruct"),  # numpy 2
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
}
_BYTE = ("u1", b"u1", "|u1", b"|u1")


class _Recorded:
    """What a pickle calls instead of numpy: keeps arguments and state."""

    state: object = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        self.state = state


class _RefusedError(Exception):
    """The name of a global that a pickle may not use."""


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_Recorded]:
        """A fresh class for a name by which numpy stores an array; others are refused."""
        if (module, name) not in _ARRAY_NAMES:
            raise _RefusedError(f"{module}.{name}")
        return type(name, (_Recorded,), {})


def read_pickle(path: Path, content: bytes) -> dict[object, object]:
    """The dictionary in a pickle of plain values; an array in it is to be read with `array_of`.

    Raises:
        DataError: the pickle is damaged, names a global that is not needed for arrays, or holds no dictionary.
    """
    try:
        found = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()  # Python 2 wrote the official files
    except _RefusedError as error:
        raise DataError(
            f"{path}: the pickle names the global {error}, expected plain values and numpy arrays only; it could run "
            "code and was not read, use the official file."
        ) from None
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(
            f"{path}: found {len(content)} bytes that are no complete pickle ({type(error).__name__}: {error}); fetch "
            "the file again."
        ) from error
    if not isinstance(found, dict):
        raise DataError(f"{path}: found a pickled {type(found).__name__}, expected a dict; this is another file.")
    return found


def array_of(path: Path, field: str, recorded: object) -> npt.NDArray[np.uint8]:
    """The array of bytes that a field of a pickle describes, writable.

    Raises:
        DataError: it is no complete array of unsigned bytes.
    """
    match getattr(recorded, "state", None):
        case (_, tuple(shape), _Recorded(arguments=(kind, *_)), in_columns, bytes(values)):
            if kind not in _BYTE:
                raise DataError(f"{path}: {field} holds values of type {kind!r}, expected unsigned bytes (u1).")
            if all(type(n) is int and n >= 0 for n in shape) and np.prod(shape, dtype=object) == len(values):
                found = np.frombuffer(bytearray(values), dtype=np.uint8)
                return np.ascontiguousarray(found.reshape(shape, order="F" if in_columns else "C"))
            raise DataError(f"{path}: {field} is announced as {shape} but holds {len(values)} bytes; fetch it again.")
    raise DataError(f"{path}: {field} is a {type(recorded).__name__}, expected a numpy array; use the official file.")
