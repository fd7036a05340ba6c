import torch

from esper.tasks.datasets.images import CropAndFlip

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


def test_draws_cover_all_windows_evenly_and_flip_half_of_the_images():
    drawn = CropAndFlip(padding=1).draw(7, HOSTS, episode=2, t=1, count=9_000)
    assert drawn.shape == (2, 9_000, 3)
    # 18,000 draws of 3 places: 6,000 each, standard deviation 63; of 2: 9,000 each, standard deviation 67
    assert all(abs(n - 6_000) < 300 for axis in (0, 1) for n in drawn[..., axis].flatten().bincount(minlength=3))
    assert all(abs(n - 9_000) < 300 for n in drawn[..., 2].flatten().bincount(minlength=2))


def test_draws_depend_on_host_episode_and_step_but_not_on_the_other_hosts():
    crop = CropAndFlip()
    both = crop.draw(1, HOSTS, episode=0, t=1, count=20)
    assert torch.equal(both[1:], crop.draw(1, HOSTS[1:], episode=0, t=1, count=20))
    others = [crop.draw(1, HOSTS, 0, 2, 20), crop.draw(1, HOSTS, 1, 1, 20), crop.draw(2, HOSTS, 0, 1, 20), both.flip(0)]
    assert not any(torch.equal(both, other) for other in others)
