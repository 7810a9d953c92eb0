"""Augmentation against brute force, one image at a time."""

import pytest
import torch
import torch.nn.functional as F

from dlcft.data import augment
from dlcft.data.augment import Augmentation, random_crop, random_flip, random_resized_crop, random_window


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(n=16, height=6, width=5, dtype=torch.uint8):
    return torch.randint(1, 256, (n, 3, height, width), generator=seeded(9)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_every_crop_is_a_window_of_the_padded_image(dtype):
    x = images(dtype=dtype)
    before = x.clone()
    crops = random_crop(x, 2, seeded())
    assert torch.equal(x, before)
    assert crops.dtype == dtype
    assert crops.shape == x.shape
    padded = F.pad(x, (2, 2, 2, 2))
    places = []
    for image, crop in zip(padded, crops, strict=True):
        found = [(i, j) for i in range(5) for j in range(5) if torch.equal(image[:, i : i + 6, j : j + 5], crop)]
        assert len(found) == 1
        places += found
    assert len(set(places)) > 5, "each sample has its own offset"


def test_offsets_are_uniform():
    x = torch.arange(1, 10).view(1, 1, 3, 3).expand(9000, -1, -1, -1)
    corners = random_window(x, 1, seeded()).flatten().bincount(minlength=10)[1:]
    assert ((corners - 1000.0) ** 2 / 1000).sum() < 30  # 8 degrees of freedom: probability 2e-4
    flips = random_flip(x, seeded())[:, 0, 0, 0] == 3
    assert abs(flips.float().mean() - 0.5) < 0.02


def test_flip():
    x = images()
    flipped = random_flip(x, seeded())
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, x, strict=True)]
    assert all(m or torch.equal(a, b) for m, a, b in zip(mirrored, flipped, x, strict=True))
    assert 0 < sum(mirrored) < len(x)


@pytest.mark.parametrize("size", [4, 20])
def test_resized_crop_equals_interpolation_of_the_window(size):
    x = images(height=12, width=9, dtype=torch.float64)
    got = random_resized_crop(x, size, (0.1, 1.0), (0.7, 1.4), seeded(1))
    boxes = augment._boxes(x, (0.1, 1.0), (0.7, 1.4), seeded(1))
    for image, crop, top, left, height, width in zip(x, got, *(b.tolist() for b in boxes), strict=True):
        window = image[None, :, top : top + height, left : left + width]
        assert window.shape[2:] == (height, width)
        expected = F.interpolate(window, (size, size), mode="bilinear", antialias=True)[0]
        assert (crop - expected).abs().max() < 1e-9 * 255
    assert len(set(boxes[2].tolist())) > 3


def test_resized_crop_respects_its_ranges_and_dtype():
    x = images(2000, 32, 32)
    _, _, height, width = augment._boxes(x, (0.25, 0.5), (0.8, 1.25), seeded())
    share, aspect = height * width / 1024, width / height
    assert 0.23 < share.min() < 0.27
    assert 0.48 < share.max() < 0.53
    assert 0.7 < aspect.min() < 0.85
    assert 1.2 < aspect.max() < 1.4
    whole = random_resized_crop(x[:2], 32, (1.0, 1.0), (1.0, 1.0), seeded())
    assert whole.dtype == torch.uint8
    assert torch.equal(whole, x[:2])


@pytest.mark.parametrize("name", ["crop2+flip", "window3", "resized-crop", "resized-crop8+flip"])
def test_names_are_reproducible_and_leave_the_input(name):
    x = images(height=6, width=6)
    before = x.clone()
    augmentation = Augmentation(name)
    assert torch.equal(augmentation(x, seeded(5)), augmentation(x, seeded(5)))
    assert not torch.equal(augmentation(x, seeded(5)), augmentation(x, seeded(6)))
    assert torch.equal(x, before)


def test_names_mean_their_steps():
    x = images()
    generator = seeded()
    expected = random_flip(random_crop(x, 4, generator), generator)
    assert torch.equal(Augmentation("crop4+flip")(x, seeded()), expected)
    assert torch.equal(Augmentation()(x, seeded()), x)


@pytest.mark.parametrize("name", ["crop", "flip4", "blur", "crop4+", "none+flip", "crop-4"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ValueError, match=r"accepted: none, .*crop<padding>, flip, window<size>, resized-crop"):
        Augmentation(name)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"x has shape \(3, 6, 5\)"):
        Augmentation("crop2")(images()[0], seeded())
    with pytest.raises(ValueError, match=r"window of 6 pixels from images of \(6, 5\)"):
        random_window(images(), 6, seeded())
    with pytest.raises(ValueError, match="to 0 pixels"):
        Augmentation("resized-crop0")(images(), seeded())
