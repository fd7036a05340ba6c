"""The idx file format of MNIST and its relatives, plain or gzip-compressed.

bytes 0-1   0, 0
byte  2     type of the values; 8 = unsigned byte, the only one used here
byte  3     number of axes
then        one big-endian 32-bit size per axis, then the values, row-major
"""

import gzip
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from esper.leyline.errors import DataError

Bytes = npt.NDArray[np.uint8]

_UNSIGNED_BYTE = 8
_TYPE_NAMES = {8: "unsigned byte", 9: "signed byte", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}
_AGAIN = "fetch the file again"


def read_idx(path: Path, num_axes: int) -> Bytes:
    """The array in an idx file of unsigned bytes.

    Args:
        path: the file; a name that ends in .gz is decompressed.
        num_axes: 1 for labels, 3 for images.

    Raises:
        DataError: the file is missing, or is not a complete idx file with that many axes and nothing behind it.
    """
    content = _read(path)
    sizes, start = _header(path, content, num_axes)
    expected, found = int(np.prod(sizes, dtype=object)), len(content) - start
    if found != expected:
        state = "truncated" if found < expected else "followed by other bytes"
        raise DataError(
            f"{path}: {found} values after the header, but it announces {' x '.join(map(str, sizes))} = {expected}; "
            f"the data are {state}, {_AGAIN}."
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes)


def read_labelled_images(
    images_path: Path, labels_path: Path, *, count: int, height: int, width: int, num_classes: int
) -> tuple[Bytes, Bytes]:
    """Images [count, height, width] and their labels [count], both unsigned bytes.

    Raises:
        DataError: a file is broken, the files do not belong together, or they are not the announced data set.
    """
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} images but {labels_path} holds {len(labels)} labels; "
            "they must be equally many, use two files of the same split."
        )
    if images.shape != (count, height, width):
        found = " x ".join(map(str, images.shape))
        raise DataError(
            f"{images_path}: found images of {found}, expected {count} x {height} x {width}; "
            "this is another data set, name the folder of the right one."
        )
    highest = int(labels.max())
    if highest >= num_classes:
        raise DataError(
            f"{labels_path}: found the label {highest}, expected 0..{num_classes - 1}; this is another data set or the "
            f"file is damaged, {_AGAIN}."
        )
    return images, labels


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise DataError(f"{path}: there is no such file; put it there or name another folder.")
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: expected a complete gzip file, found a damaged one ({error}); {_AGAIN}.") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}); check its permissions.") from error


def _header(path: Path, content: bytes, num_axes: int) -> tuple[tuple[int, ...], int]:
    """Sizes of the axes and where the values start."""
    start = 4 + 4 * num_axes
    expected = f"expected the magic number 0 0 {_UNSIGNED_BYTE} {num_axes} of an idx file"
    if len(content) < 4:
        raise DataError(f"{path}: found {len(content)} bytes, {expected}; the data are truncated, {_AGAIN}.")
    if content[:2] != b"\0\0" or content[3] != num_axes:
        found = " ".join(map(str, content[:4]))
        raise DataError(f"{path}: found {found}, {expected}; this is another file, {_AGAIN}.")
    if content[2] != _UNSIGNED_BYTE:
        kind = _TYPE_NAMES.get(content[2], f"unknown type {content[2]}")
        raise DataError(f"{path}: found values of {kind}, expected unsigned byte; use the original file.")
    if len(content) < start:
        raise DataError(f"{path}: found a header of {len(content)} bytes, expected {start}; truncated, {_AGAIN}.")
    sizes = np.frombuffer(content, dtype=">u4", count=num_axes, offset=4)
    return tuple(int(size) for size in sizes), start
