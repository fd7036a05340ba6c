import pytest
import torch

from esper.tasks.datasets import Dataset
from esper.tasks.datasets.images import load_digit_views, load_digits


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_digits(None, run_seed=1)


def test_the_splits_have_their_announced_sizes_and_shapes(data):
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [1_077, 360, 360]
    assert data.train.x.shape == (1_077, 1, 8, 8)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    assert data.num_classes == 10


def test_the_classes_have_names(data):
    assert (data.class_names[3], len(data.class_names)) == ("3", 10)
    assert load_digit_views(None, run_seed=1).class_names == data.class_names


def test_every_class_has_its_share_of_every_split(data):
    counts = torch.stack([data.split(name).y.bincount(minlength=10) for name in ("train", "val", "test")])
    share = counts / counts.sum(dim=0)
    assert (share[1:] - 0.2).abs().max() < 0.01


def test_pixels_are_normalized_to_mean_0_and_standard_deviation_1(data):
    x = torch.cat([data.split(name).x for name in ("train", "val", "test")])
    assert abs(x.mean().item()) < 0.001
    assert abs(x.std().item() - 1.0) < 0.001
    # a black pixel is (0 - 0.3053) / 0.3760
    assert x.min().item() == pytest.approx(-0.81197, abs=1e-4)


def test_no_example_is_in_two_splits(data):
    rows = torch.cat([data.split(name).x.flatten(1) for name in ("train", "val", "test")])
    assert len(rows.unique(dim=0)) == 1_797


def test_the_identity_names_all_that_decides_the_content(data):
    other = load_digits(None, run_seed=2)
    assert data.identity == load_digits(None, run_seed=1).identity
    assert data.identity != other.identity
    assert not torch.equal(data.val.x, other.val.x)
    assert data.identity["sizes"] == (1_077, 360, 360)


def test_moving_to_the_device_where_the_data_are_copies_nothing(data):
    assert data.to(torch.device("cpu")).train.x.data_ptr() == data.train.x.data_ptr()
