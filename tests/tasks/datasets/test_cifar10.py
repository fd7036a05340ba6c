"""Files in the form of the official ones: 20 images each instead of 10,000."""

import hashlib
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from esper.leyline.errors import DataError
from esper.tasks.datasets import cifar10
from esper.tasks.datasets.cifar10 import OFFICIAL

COUNT = 20
LABELS = [i % 10 for i in range(COUNT)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "NUM_PER_FILE", COUNT)
    monkeypatch.setattr(cifar10, "NUM_VAL", 10)


def pixels(number: int) -> np.ndarray:
    """Image i of file `number`: `number` is first in red, i last in blue, 200 in row 1, column 2 of green, else 7."""
    rows = np.full((COUNT, 3072), 7, dtype=np.uint8)
    rows[:, 1024 + 32 + 2] = 200
    rows[:, 0], rows[:, 3071] = number, np.arange(COUNT)
    return rows


def batch(number: int, **changes: object) -> dict[bytes, object]:
    fields = {"batch_label": b"a batch", "labels": LABELS, "data": pixels(number), "filenames": [], **changes}
    return {name.encode(): value for name, value in fields.items()}


def write(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(OFFICIAL):
        (folder / name).write_bytes(pickle.dumps(batch(number), protocol=4))
    return folder


def by_python_2(number: int) -> bytes:
    """A batch as Python 2 and numpy 1 pickled the official files: strings of bytes, and an array by its state."""

    def short(text: bytes) -> bytes:
        return b"U" + bytes([len(text)]) + text

    values = pixels(number).tobytes()
    dtype = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNNJ\xff\xff\xff\xff"
    dtype += b"J\xff\xff\xff\xffK\x00tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + short(b"b") + b"\x87R"
    array += b"(K\x01K\x14M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<I", len(values)) + values + b"tb"
    labels = b"](" + b"".join(b"K" + bytes([label]) for label in LABELS) + b"e"
    return b"\x80\x02}(" + short(b"labels") + labels + short(b"data") + array + b"u."


def test_images_are_bytes_split_by_class_with_the_test_file_as_test_set(tmp_path):
    data = cifar10.load(write(tmp_path), run_seed=3)
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [90, 10, 20]
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.shape == (90, 3, 32, 32)
    assert data.val.y.bincount().tolist() == [1] * 10
    assert data.test.x[:, 0, 0, 0].tolist() == [5] * COUNT
    assert data.test.x[:, 2, 31, 31].tolist() == list(range(COUNT))
    assert (data.test.x == 200).nonzero().tolist() == [[i, 1, 1, 2] for i in range(COUNT)]
    assert data.test.y.tolist() == LABELS
    both = torch.cat([data.train.x, data.val.x])
    places = {(file, image) for file, image in zip(both[:, 0, 0, 0].tolist(), both[:, 2, 31, 31].tolist(), strict=True)}
    assert places == {(file, image) for file in range(5) for image in range(COUNT)}
    assert torch.equal(data.train.y, data.train.x[:, 2, 31, 31] % 10)
    assert (data.class_names[3], data.class_names[5], len(data.class_names)) == ("cat", "dog", 10)


def test_files_of_python_2_are_read_as_those_of_python_3(tmp_path):
    here, there = write(tmp_path / "here"), write(tmp_path / "there")
    for number, name in enumerate(OFFICIAL):
        (there / name).write_bytes(by_python_2(number))
    new, old = cifar10.load(here, 0), cifar10.load(there, 0)
    for name in ("train", "val", "test"):
        assert torch.equal(new.split(name).x, old.split(name).x)
        assert torch.equal(new.split(name).y, old.split(name).y)


def test_a_copy_says_what_it_is(tmp_path, monkeypatch):
    write(tmp_path)
    assert cifar10.load(tmp_path, 0).identity["copy"] == "modified copy"
    (tmp_path / "label.txt").write_text("JPEG q75\nmade by hand\n")
    labelled = cifar10.load(tmp_path, 0).identity
    assert labelled["copy"] == "JPEG q75"
    for name in OFFICIAL:
        md5 = hashlib.md5((tmp_path / name).read_bytes(), usedforsecurity=False).hexdigest()
        monkeypatch.setitem(OFFICIAL, name, md5)
    assert cifar10.load(tmp_path, 0).identity["copy"] == "official"
    (tmp_path / "data_batch_2").write_bytes(pickle.dumps(batch(1, labels=LABELS[::-1]), protocol=4))
    changed = cifar10.load(tmp_path, 0).identity
    assert changed["copy"] == "JPEG q75"
    assert changed["files"] != labelled["files"]


CALLS = [(os.system, "touch run"), (eval, "open('run', 'w')"), (np.fromfile, "run")]


@pytest.mark.parametrize(("function", "argument"), CALLS, ids=["system", "eval", "fromfile"])
def test_a_pickle_that_calls_a_function_is_refused_before_it_runs(tmp_path, monkeypatch, function, argument):
    class Trap:
        def __reduce__(self):
            return function, (argument,)

    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(batch(2, filenames=[Trap()]), protocol=4))
    with pytest.raises(DataError, match=rf"data_batch_3: the pickle names the global \S+\.{function.__name__}, "):
        cifar10.load(tmp_path, 0)
    assert not (tmp_path / "run").exists()


def test_a_file_cut_anywhere_is_refused(tmp_path):
    write(tmp_path)
    whole = (tmp_path / "test_batch").read_bytes()
    for length in (0, 1, 2, 12, 100, len(whole) // 2, len(whole) - 2, len(whole) - 1):
        (tmp_path / "test_batch").write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"test_batch: found {length} bytes that are not a complete pickle"):
            cifar10.load(tmp_path, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>not found</html>", "found 22 bytes that are not a complete pickle"),
        (pickle.dumps([1, 2], protocol=4), "found a pickled list, expected a dict"),
        (pickle.dumps({b"fine_labels": []}, protocol=4), "found the fields fine_labels, expected data and labels"),
        (pickle.dumps(batch(0, labels=LABELS[:-1]), protocol=4), "labels holds 19 values, expected a list of 20"),
        (pickle.dumps(batch(0, labels=b"no"), protocol=4), "labels holds bytes, expected a list of 20"),
        (pickle.dumps(batch(0, labels=[*LABELS[:-1], 10]), protocol=4), r"labels\[19\] is 10, expected 0\.\.9"),
        (pickle.dumps(batch(0, labels=[-1, *LABELS[1:]]), protocol=4), r"labels\[0\] is -1, expected 0\.\.9"),
        (pickle.dumps(batch(0, labels=[0.5, *LABELS[1:]]), protocol=4), r"labels\[0\] is 0\.5, expected 0\.\.9"),
        (
            pickle.dumps(batch(0, data=pixels(0)[:, :784]), protocol=4),
            r"data is uint8 \(20, 784\), expected an array of uint8 \(20, 3072\)",
        ),
        (pickle.dumps(batch(0, data=pixels(0)[:7]), protocol=4), r"data is uint8 \(7, 3072\), expected"),
        (
            pickle.dumps(batch(0, data=pixels(0) / 255), protocol=4),
            r"data is float64 \(20, 3072\), expected an array of uint8",
        ),
        (pickle.dumps(batch(0, data=[1, 2]), protocol=4), "data is a list, expected an array"),
        (by_python_2(0).replace(b"K\x14M\x00\x0c\x86", b"K\x15M\x00\x0c\x86"), "bytes that are not a complete pickle"),
    ],
    ids=range(13),
)
def test_a_file_with_other_content_is_named_with_what_was_found_and_expected(tmp_path, content, said):
    write(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_2: .*{said}"):
        cifar10.load(tmp_path, 0)
