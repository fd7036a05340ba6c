import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from esper.leyline.errors import DataError
from esper.tasks.datasets.idx import read_idx, read_labelled_images


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
LABELS = np.array([7, 9], dtype=np.uint8)


def test_a_plain_file_is_read_row_by_row(tmp_path):
    assert np.array_equal(read_idx(write(tmp_path / "images", idx_bytes(IMAGES)), 3), IMAGES)


def test_a_compressed_file_is_read_as_the_plain_one(tmp_path):
    path = write(tmp_path / "images.gz", gzip.compress(idx_bytes(IMAGES)))
    assert np.array_equal(read_idx(path, 3), IMAGES)


def test_sizes_are_big_endian(tmp_path):
    path = write(tmp_path / "labels", bytes([0, 0, 8, 1, 0, 0, 1, 2]) + bytes(258))
    assert read_idx(path, 1).shape == (258,)


GOOD = idx_bytes(IMAGES)
PACKED = gzip.compress(GOOD, mtime=0)  # it is part of the names of tests, which every process must give alike


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty", b"", "found 0 bytes, expected the magic number 0 0 8 3"),
        ("text", b"<html>not found</html>", "found 60 104 116 109, expected the magic number 0 0 8 3"),
        ("labels", idx_bytes(LABELS), "found 0 0 8 1, expected the magic number 0 0 8 3"),
        ("floats", idx_bytes(IMAGES.astype(">f4"), kind=13), "found values of float32, expected unsigned byte"),
        ("strange", idx_bytes(IMAGES, kind=77), "found values of unknown type 77"),
        ("header", GOOD[:10], "found a header of 10 bytes, expected 16"),
        ("short", GOOD[:-1], "23 values after the header, but it announces 2 x 3 x 4 = 24; the data are truncated"),
        ("long", GOOD + b"\0", "25 values after the header, .* = 24; the data are followed by other bytes"),
        ("huge", bytes([0, 0, 8, 3]) + b"\xff" * 12, "0 values after the header, but it announces 4294967295"),
        ("plain.gz", GOOD, "expected a complete gzip file, found a damaged one"),
        ("cut.gz", PACKED[:-5], "expected a complete gzip file, found a damaged one"),
        ("flipped.gz", PACKED[:14] + b"\xff\xff" + PACKED[16:], "found a damaged one"),
        ("tail.gz", PACKED + b"more", "expected a complete gzip file, found a damaged one"),
    ],
)
def test_a_broken_file_is_named_with_what_was_found_and_expected(tmp_path, name, content, complaint):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=complaint) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_in_its_place_are_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(DataError, match="there is no such file"):
            read_idx(path, 1)


def read_pair(folder: Path, images: np.ndarray, labels: np.ndarray, count: int = 2):
    return read_labelled_images(
        write(folder / "images", idx_bytes(images)), write(folder / "labels", idx_bytes(labels)),
        count=count, height=3, width=4, num_classes=10,
    )  # fmt: skip


def test_images_come_with_their_labels(tmp_path):
    images, labels = read_pair(tmp_path, IMAGES, LABELS)
    assert (images.shape, labels.tolist()) == ((2, 3, 4), [7, 9])


def test_different_numbers_of_images_and_labels_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds 2 images but .*labels holds 1 labels"):
        read_pair(tmp_path, IMAGES, LABELS[:1])


def test_labels_outside_the_classes_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"found the label 10, expected 0\.\.9"):
        read_pair(tmp_path, IMAGES, np.array([10, 0], dtype=np.uint8))


@pytest.mark.parametrize("images", [IMAGES[:0], IMAGES.reshape(2, 4, 3)])
def test_another_data_set_under_the_same_names_is_refused(tmp_path, images):
    with pytest.raises(DataError, match="expected 2 x 3 x 4; this is another data set"):
        read_pair(tmp_path, images, LABELS[: len(images)])
