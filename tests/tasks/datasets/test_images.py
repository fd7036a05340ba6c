"""Augmentation, views and the digits."""

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.images import PLAIN, CropAndFlip, View, load_digit_views, load_digits, with_views

HOSTS = torch.tensor([4, 9])


def test_a_window_takes_the_rows_and_columns_it_is_moved_to_and_black_from_outside():
    # pixels 1 2 3 / 4 5 6 / 7 8 9; an offset equal to the padding leaves the image where it is
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 1, 3, 3)
    crop = CropAndFlip(padding=1)

    def moved(down: int, right: int, flipped: int) -> list[list[int]]:
        return crop(image, torch.tensor([[[down, right, flipped]]]))[0, 0, 0].tolist()

    assert moved(1, 1, 0) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert moved(0, 1, 0) == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert moved(2, 2, 0) == [[5, 6, 0], [8, 9, 0], [0, 0, 0]]
    assert moved(1, 1, 1) == [[3, 2, 1], [6, 5, 4], [9, 8, 7]]
    assert moved(1, 0, 1) == [[2, 1, 0], [5, 4, 0], [8, 7, 0]]


def test_all_channels_of_an_image_move_together_and_bytes_stay_bytes():
    images = torch.randint(256, (2, 5, 3, 8, 8), dtype=torch.uint8)
    crop = CropAndFlip(padding=2)
    drawn = crop.draw(1, HOSTS, episode=0, t=3, count=5)
    found = crop(images, drawn)
    assert found.dtype == torch.uint8
    for channel in range(3):
        assert torch.equal(found[:, :, channel : channel + 1], crop(images[:, :, channel : channel + 1], drawn))


def test_draws_depend_on_host_episode_and_step_but_not_on_the_other_hosts():
    crop = CropAndFlip()
    both = crop.draw(1, HOSTS, episode=0, t=1, count=20)
    assert torch.equal(both[1:], crop.draw(1, HOSTS[1:], episode=0, t=1, count=20))
    others = [crop.draw(1, HOSTS, 0, 2, 20), crop.draw(1, HOSTS, 1, 1, 20), crop.draw(2, HOSTS, 0, 1, 20), both.flip(0)]
    assert not any(torch.equal(both, other) for other in others)


# -- views -------------------------------------------------------------------------------------------------------------


def images(n: int = 5, size: int = 8) -> torch.Tensor:
    return torch.arange(float(n * 2 * size * size)).view(n, 2, size, size)


def tiles(x: torch.Tensor, size: int) -> set[tuple[float, ...]]:
    """All tiles of one image [C, H, W]."""
    split = x.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)
    return {tuple(tile.flatten().tolist()) for row in split for tile in row}


def test_a_view_moves_whole_tiles_within_their_region():
    x = images()
    moved = View(tile=2, region=4)(x, 0)
    assert not torch.equal(moved, x)
    for image, of in zip(moved, x, strict=True):
        for row in (0, 4):
            for column in (0, 4):
                region = (slice(None), slice(row, row + 4), slice(column, column + 4))
                assert tiles(image[region], 2) == tiles(of[region], 2)


def test_the_order_depends_on_the_run_seed_and_tiles_as_large_as_their_region_stay():
    assert not torch.equal(View(2, 4)(images(), 0), View(2, 4)(images(), 1))
    assert torch.equal(View(2, 4)(images(), 0), View(2, 4)(images(), 0))
    assert torch.equal(View(4, 4)(images(), 0), images())


def test_a_data_set_holds_its_views_one_after_another():
    split = Split(images(), torch.arange(5))
    found = with_views(
        Dataset(identity={"name": "x"}, train=split, val=split, test=split), (PLAIN, View(2, 4), PLAIN), 0
    )
    assert torch.equal(found.val.y, torch.arange(5).repeat(3))
    assert torch.equal(found.val.x[:5], images())
    assert torch.equal(found.val.x[10:], images())
    assert not torch.equal(found.val.x[5:10], images())
    assert not torch.equal(found.val.x[5:10], found.test.x[5:10])
    assert found.identity["views"] == ((1, 1), (2, 4), (1, 1))


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ConfigError, match="tiles of 3 and regions of 4"):
        View(3, 4)
    with pytest.raises(ConfigError, match="6x6 pixels are not made of regions of 4x4"):
        View(2, 4)(images(size=6), 0)


# -- digits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data() -> Dataset:
    return load_digits(None, run_seed=1)


def test_the_splits_have_their_announced_sizes_and_shapes(data):
    assert [len(data.split(name)) for name in ("train", "val", "test")] == [1_077, 360, 360]
    assert data.train.x.shape == (1_077, 1, 8, 8)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    assert (data.num_classes, data.class_names[3], len(data.class_names)) == (10, "3", 10)
    assert load_digit_views(None, run_seed=1).class_names == data.class_names


def test_pixels_have_mean_0_and_standard_deviation_1_and_no_example_is_in_two_splits(data):
    x = torch.cat([data.split(name).x for name in ("train", "val", "test")])
    assert abs(x.mean().item()) < 0.001
    assert abs(x.std().item() - 1.0) < 0.001
    # a black pixel is (0 - 0.3053) / 0.3760
    assert x.min().item() == pytest.approx(-0.81197, abs=1e-4)
    assert len(x.flatten(1).unique(dim=0)) == 1_797  # no example is in two splits
