"""Images brought to a size: stretched, or cropped around the middle."""

import numpy as np
import pytest
import torch
from PIL import Image

import dlcft as package
from dlcft.data.images import Preprocess
from tests.support.commands import dlcft


def wide():
    """Black, with a white square in the middle that is as high as the image."""
    image = torch.zeros(1, 3, 16, 64, dtype=torch.uint8)
    image[..., 24:40] = 255
    return image


def test_a_crop_keeps_proportions_and_takes_the_middle():
    for image in (wide(), wide().mT):
        assert torch.equal(Preprocess((8, 8), resize="crop")(image), torch.ones(1, 3, 8, 8))
        assert Preprocess((8, 8))(image).mean() < 0.3


@pytest.mark.parametrize("size", [(8, 8), (5, 9), (224, 7)])
@pytest.mark.parametrize("shape", [(16, 64), (1, 300), (31, 2), (9, 9)])
def test_any_shape_comes_to_any_size(size, shape):
    found = Preprocess(size, resize="crop")(torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8))
    assert found.shape == (2, 3, *size)
    assert found.isfinite().all()


def test_of_the_same_proportions_both_are_the_same():
    image = torch.randint(0, 256, (2, 3, 20, 30), dtype=torch.uint8)
    assert torch.equal(Preprocess((10, 15), resize="crop")(image), Preprocess((10, 15))(image))


def test_a_long_strip_takes_no_more_memory_than_itself():
    assert Preprocess((224, 224), resize="crop")(torch.zeros(1, 3, 1, 1_000_000)).shape == (1, 3, 224, 224)


def test_it_is_saved_and_earlier_files_are_stretched():
    assert Preprocess.from_dict(Preprocess((8, 8), resize="crop").to_dict()).resize == "crop"
    assert Preprocess.from_dict({"size": [8, 8]}).resize == "stretch"
    with pytest.raises(ValueError, match="resize is 'pad'; it must be 'stretch' or 'crop'"):
        Preprocess((8, 8), resize="pad")


def photos(folder, seed=0):
    draw = np.random.default_rng(seed)
    for label, level in (("dark", 40), ("light", 200)):
        (folder / label).mkdir(parents=True)
        for number in range(4):
            pixels = np.clip(draw.normal(level, 20, (20, 60, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder


def test_at_the_command_line(tmp_path):
    model, small = tmp_path / "model", ["--backbone", "shipped", "--set", "depth_features=60"]
    january, february = photos(tmp_path / "january"), photos(tmp_path / "february", seed=1)
    done = dlcft("update", "--model", model, "--data", january, "--resize", "crop", *small)
    assert done.returncode == 0, done.stderr
    assert package.load(model).preprocess.resize == "crop"
    assert package.load(model).predict(january) == ["dark"] * 4 + ["light"] * 4
    done = dlcft("update", "--model", model, "--data", february, "--resize", "stretch")
    assert done.returncode == 2
    assert "--resize is for the first update" in done.stderr
    assert dlcft("update", "--model", model, "--data", february, "--resize", "crop").returncode == 0
    (tmp_path / "own_network.py").write_text("import torch\ndef make():\n    return torch.nn.Flatten()\n")
    own = ["--backbone", "own_network:make", "--resize", "crop"]
    done = dlcft("update", "--model", "m", "--data", february, *own, cwd=tmp_path)
    assert "--resize is crop, and the backbone 'own_network:make' takes inputs of any size" in done.stderr


def test_a_new_model_without_a_backbone_says_how_small_its_network_is(tmp_path):
    january = photos(tmp_path / "january")
    small = ["--set", "depth_features=60"]
    said = "no --backbone is given, so m is made on 'shipped', a small network for images of 32 × 32 pixels"
    assert said in dlcft("update", "--model", "m", "--data", january, *small, "--dry-run", cwd=tmp_path).stderr
    assert said in dlcft("update", "--model", "m", "--data", january, *small, cwd=tmp_path).stderr
    february = photos(tmp_path / "february", seed=1)
    for model in (["m"], ["n", "--backbone", "shipped", *small]):
        done = dlcft("update", "--data", february, "--model", *model, cwd=tmp_path)
        assert (done.returncode, "--backbone is given" in done.stderr) == (0, False)


def test_a_missing_image_of_a_table_is_told_with_its_line(tmp_path):
    (tmp_path / "table.csv").write_text('path,label\njanuary/dark/0.png,dark\n\n"not here.png",light\n')
    photos(tmp_path / "january")
    done = dlcft("update", "--model", "m", "--data", "table.csv", "--backbone", "shipped", cwd=tmp_path)
    assert done.returncode == 2
    assert "line 4 of table.csv names 'not here.png', which is not there; give the path of an image" in done.stderr
