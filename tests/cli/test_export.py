"""`dlcft export`, and the lines that it prints: they run where dlcft is not."""

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dlcft import Learner
from dlcft.cli.export import lines
from dlcft.learner.export import export
from tests.support.commands import dlcft
from tests.support.samples import pictures

pytest.importorskip("onnxruntime", reason="pip install 'dlcft[export]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    data = pictures(folder / "data", ["red", "green"])
    holdout = ["--holdout", pictures(folder / "holdout", ["red", "green"], seed=1)]
    done = dlcft("update", "--model", folder / "m", "--data", data, *holdout, "--set", "depth_features=30")
    assert done.returncode == 0, done.stderr
    draw = np.random.default_rng(0)
    (folder / "new").mkdir()
    for number, mode in enumerate(("RGB", "RGB", "L", "RGBA")):
        pixels = np.kron(draw.integers(0, 256, (5, 7, 4)), np.ones((14, 9, 1))).astype(np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / "new" / f"{number}.png")
    return folder


def without_dlcft(program, arguments, also):
    """The lines in a process that can import neither dlcft nor another module."""
    program = f"import sys\nsys.modules['dlcft'] = sys.modules[{also!r}] = None\n{program}"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("suffix", "also"), [("onnx", "torch"), ("pt2", "onnxruntime")])
def test_ten_lines_run_it_without_dlcft(suffix, also, folder):
    done = dlcft("export", "--model", "m", "--out", folder / f"scenes.{suffix}", cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr
    assert done.stdout.count("\n") == 10
    images = sorted((folder / "new").iterdir())
    found = without_dlcft(done.stdout, images, also)
    told = dlcft("predict", folder / "new", "--model", folder / "m").stdout
    for (name, label, probability), row in zip(found, csv.DictReader(io.StringIO(told)), strict=True):
        assert (name, label) == (row["input"], row["label"])
        assert float(probability) == pytest.approx(float(row["probability"]), abs=0.02)  # Pillow rounds to 8 bits


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_lines_for_vectors(suffix, tmp_path):
    learner = Learner(nn.Sequential(nn.Linear(4, 6), nn.Tanh()), "ridge")
    x = torch.randn(6, 4)
    learner.learn((x, ["a", "b"] * 3))
    done = export(learner, tmp_path / f"m.{suffix}", example=x)
    np.save(tmp_path / "x.npy", x.numpy())
    found = without_dlcft(lines(done.path, done.facts), [tmp_path / "x.npy"], "PIL")
    assert [label for _, label, _ in found] == learner.predict(x)


def test_facts_as_json(folder):
    told = json.loads(dlcft("export", "--model", folder / "m", "--out", folder / "again.onnx", "--json").stdout)
    assert (told["labels"], told["calibrated"]) == (["green", "red"], True)
    assert told["bytes"] == (folder / "again.onnx").stat().st_size
    assert told["difference"] < 1e-4


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("scenes.pt", "with a name in .onnx or .pt2"),
        ("nowhere/scenes.onnx", "a folder that exists"),
        ("m/scenes.onnx", "in the directory of the model"),
    ],
)
def test_mistakes(out, words, folder):
    done = dlcft("export", "--model", "m", "--out", out, cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert words in done.stderr


def test_no_model(tmp_path):
    done = dlcft("export", "--model", tmp_path / "m", "--out", tmp_path / "m.onnx")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])


def test_a_package_that_is_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    done = dlcft("export", "--model", folder / "m", "--out", folder / "missing.onnx")
    assert (done.returncode, "pip install 'dlcft[export]'" in done.stderr) == (2, True)
    assert not (folder / "missing.onnx").exists()
