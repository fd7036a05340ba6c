import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.images import PLAIN, View, with_views


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


def test_images_and_regions_have_orders_of_their_own():
    same = torch.arange(64.0).view(1, 1, 8, 8).expand(200, -1, -1, -1)
    moved = View(tile=2, region=4)(same, 0)
    first = {tuple(image[0, :4, :4].flatten().tolist()) for image in moved}
    assert len(first) == 24  # 4! orders of four tiles
    assert any(not torch.equal(image[0, :4, :4] - image[0, 0, 0], image[0, :4, 4:] - image[0, 0, 4]) for image in moved)


def test_the_order_depends_on_the_run_seed():
    assert not torch.equal(View(2, 4)(images(), 0), View(2, 4)(images(), 1))
    assert torch.equal(View(2, 4)(images(), 0), View(2, 4)(images(), 0))


def test_tiles_as_large_as_their_region_stay():
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
