import gzip
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.tasks.datasets import fashion_mnist
from esper.tasks.datasets.fashion_mnist import FILES, SOURCE, read_idx


def touch_all(folder: Path, suffix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        (folder / (name + suffix)).touch()


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("folder", [".", "fashion-mnist", "FashionMNIST/raw"])
def test_the_files_are_found_in_every_usual_folder(tmp_path, folder, suffix):
    touch_all(tmp_path / folder, suffix)
    assert [path.name for path in SOURCE.find(tmp_path)] == [name + suffix for name in FILES]


def test_the_missing_file_is_named(tmp_path):
    touch_all(tmp_path / "fashion-mnist")
    gone = tmp_path / "fashion-mnist" / FILES[3]
    gone.unlink()
    with pytest.raises(DataError) as caught:
        SOURCE.find(tmp_path)
    assert str(gone) in str(caught.value)
    assert str(tmp_path / "fashion-mnist" / FILES[0]) not in str(caught.value)


def idx_bytes(array: np.ndarray, kind: int = 8) -> bytes:
    return bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_idx(path: Path, array: np.ndarray) -> None:
    path.write_bytes(idx_bytes(array))


def write_lookalike(folder: Path, num_train: int = 60_000) -> None:
    """Files of the official sizes; the first two pixels of an image are its number, the others are its label."""
    for names, count in ((FILES[:2], num_train), (FILES[2:], 10_000)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = np.broadcast_to(labels[:, None, None], (count, 28, 28)).copy()
        images[:, 0, 0], images[:, 0, 1] = np.arange(count) % 256, np.arange(count) // 256
        write_idx(folder / names[0], images)
        write_idx(folder / names[1], labels)


def test_bytes_become_normalized_floats_and_a_stratified_tenth_of_the_training_set_is_held_out(tmp_path):
    write_lookalike(tmp_path)
    data = fashion_mnist.load(tmp_path, run_seed=5)
    assert data.train.x.dtype == torch.uint8
    pixels = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    assert torch.equal(data.inputs(pixels), pixels.to(torch.float32).div_(255.0).sub_(0.2860).div_(0.3530))
    assert data.train.x.shape == (54_000, 1, 28, 28)
    assert data.val.y.bincount().tolist() == [600] * 10
    assert (data.class_names[7], len(set(data.class_names))) == ("Sneaker", 10)
    assert data.test.y.bincount().tolist() == [1_000] * 10
    assert data.val.x[:4, 0, 9, 9].tolist() == data.val.y[:4].tolist()
    numbers = torch.cat([split.x[:, 0, 0, :2] for split in (data.train, data.val)])
    assert len(numbers.unique(dim=0)) == 60_000
    assert data.identity["files"][0] == (FILES[0], 16 + 60_000 * 784)


@pytest.mark.skipif("ESPER_DATA" not in os.environ, reason="ESPER_DATA does not name a folder with the data sets")
def test_the_official_files_are_read():
    data = fashion_mnist.load(Path(os.environ["ESPER_DATA"]), run_seed=0)
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [54_000, 6_000, 10_000]
    x = data.inputs(data.train.x)
    assert abs(x.mean().item()) < 0.01
    assert abs(x.std().item() - 1.0) < 0.01


# -- idx files ---------------------------------------------------------------------------------------------------------

IMAGES = np.arange(2 * 3 * 260, dtype=np.uint8).reshape(2, 3, 260)  # a size with two bytes
GOOD = idx_bytes(IMAGES)
PACKED = gzip.compress(GOOD, mtime=0)  # it is part of the names of tests, which every process must give alike


@pytest.mark.parametrize(("name", "content"), [("images", GOOD), ("images.gz", PACKED)])
def test_a_plain_or_compressed_file_is_read_row_by_row(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert np.array_equal(read_idx(tmp_path / name, IMAGES.shape), IMAGES)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty", b"", r"found a file that begins with the bytes \(none\), expected an idx file of 2 x 3 x 260"),
        (
            "text",
            b"<html>not found</html>",
            "begins with the bytes 60 104 116 109, expected an idx file of 2 x 3 x 260",
        ),
        ("labels", idx_bytes(IMAGES[0, 0, :2]), "found an idx file of 2 values of type 8, expected"),
        (
            "floats",
            idx_bytes(IMAGES.astype(">f4"), kind=13),
            "of 2 x 3 x 260 values of type 13, expected .* unsigned bytes",
        ),
        ("turned", idx_bytes(IMAGES.reshape(3, 2, 260)), "3 x 2 x 260 .* this is another data set"),
        ("header", GOOD[:10], "begins with the bytes 0 0 8 3"),
        ("short", GOOD[:-1], "found 1559 values, expected .* the data are truncated"),
        ("long", GOOD + b"\0", "found 1561 values, expected .* the data are followed by other bytes"),
        ("plain.gz", GOOD, "expected a complete gzip file, found a damaged one"),
        ("cut.gz", PACKED[:-5], "expected a complete gzip file, found a damaged one"),
        ("flipped.gz", PACKED[:14] + b"\xff\xff" + PACKED[16:], "found a damaged one"),
        ("tail.gz", PACKED + b"more", "expected a complete gzip file, found a damaged one"),
    ],
)
def test_a_broken_file_is_named_with_what_was_found_and_expected(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        read_idx(path, IMAGES.shape)
    assert str(path) in str(caught.value)


def test_labels_outside_the_classes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fashion_mnist, "SIDE", 2)
    write_idx(tmp_path / "images", np.zeros((2, 2, 2), np.uint8))
    write_idx(tmp_path / "labels", np.array([10, 0], dtype=np.uint8))
    with pytest.raises(DataError, match=r"found the label 10, expected 0\.\.9"):
        fashion_mnist.read_labelled_images(tmp_path / "images", tmp_path / "labels", 2)
