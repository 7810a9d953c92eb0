"""Image files that would hang, crash or fill the memory are refused in one sentence with their name."""

import os
import struct

import pytest
from PIL import Image, ImageOps

from dlcft.data.images import read_image


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ValueError, match=r"pipe\.png \(it is no regular file\)"):
        read_image(tmp_path / "pipe.png")


def test_too_many_pixels(tmp_path, monkeypatch):
    Image.new("L", (60, 50)).save(tmp_path / "large.png")
    assert read_image(tmp_path / "large.png").shape == (3, 50, 60)
    monkeypatch.setenv("DLCFT_MOST_PIXELS", "2000")
    with pytest.raises(ValueError, match=r"large\.png \(60 × 50 pixels are more than 2,000, the limit that .*PIXELS"):
        read_image(tmp_path / "large.png")
    monkeypatch.setenv("DLCFT_MOST_PIXELS", "many")
    with pytest.raises(ValueError, match="DLCFT_MOST_PIXELS is 'many'; a whole number is needed"):
        read_image(tmp_path / "large.png")


def test_a_limit_of_pillow_is_told_too(tmp_path, monkeypatch):
    Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    monkeypatch.setenv("DLCFT_MOST_PIXELS", "1_000_000_000")
    with pytest.raises(ValueError, match=r"cannot read the image file .*bomb\.png \(Image size"):
        read_image(tmp_path / "bomb.png")


@pytest.mark.parametrize("error", [struct.error("unpack requires a buffer"), KeyError("0x112"), IndexError("tag")])
def test_odd_exif_does_not_cost_the_pixels(tmp_path, monkeypatch, error):
    def broken(image):
        raise error

    Image.new("RGB", (4, 4)).save(tmp_path / "photo.jpg")
    monkeypatch.setattr(ImageOps, "exif_transpose", broken)
    assert read_image(tmp_path / "photo.jpg").shape == (3, 4, 4)


def test_formats_for_which_pillow_starts_a_program(tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 24\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match=r"a\.png \(cannot identify image file"):
        read_image(tmp_path / "a.png")
