"""Answers in Python: probabilities, batches, one image, labels one by one."""

import json
import math

import pytest
import torch
from PIL import Image

import dlcft as package
from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.data.images import Preprocess
from dlcft.update.calibration import fit_temperature
from dlcft.update.update import update
from tests.learner.test_learner import backbone, data, make
from tests.support.commands import dlcft
from tests.support.samples import pictures

SMALL = ["--backbone", "shipped", "--set", "depth_features=60"]


@pytest.fixture
def model(tmp_path):
    january = pictures(tmp_path / "january", ["red", "green"])
    holdout = pictures(tmp_path / "holdout", ["red", "green", "blue"], seed=9)
    done = dlcft("update", "--model", tmp_path / "model", "--data", january, "--holdout", holdout, *SMALL)
    assert done.returncode == 0, done.stderr
    return tmp_path / "model"


def test_probabilities_are_those_of_the_command_line(model, tmp_path):
    asked = pictures(tmp_path / "asked", ["red", "green"], seed=3)
    lines = dlcft("predict", asked, "--model", model, "--format", "json", "--top", "2").stdout.splitlines()
    learner = package.load(model)
    found = learner.predict_proba(asked)
    assert found.shape == (12, 2)
    torch.testing.assert_close(found.sum(1), torch.ones(12, dtype=torch.float64))
    for row, line in zip(found, lines, strict=True):
        given = {one["label"]: one["probability"] for one in json.loads(line)["answers"]}
        assert [given[label] for label in learner.labels()] == pytest.approx(row.tolist(), rel=1e-5)


def test_the_temperature_is_that_of_the_holdout(tmp_path):
    learner = make("dlcft-exact")
    learner.save(tmp_path / "model")
    holdout = data([0, 1], n=30, seed=9)
    usual = make("dlcft-exact")
    usual.learn(data([0, 1]))
    assert usual.temperature == usual.method.usual_temperature
    done = update(learner, data([0, 1]), holdout=holdout)
    assert learner.temperature == done.temperature == fit_temperature(learner.outputs(holdout[0]), holdout[1])
    loaded = Learner.load(tmp_path / "model", backbone())
    torch.testing.assert_close(loaded.predict_proba(holdout[0]), learner.predict_proba(holdout[0]))


def test_the_size_of_a_batch_is_the_callers(monkeypatch):
    learner = make("dlcft-exact")
    learner.learn(data([0, 1]))
    sizes, features = [], type(learner.model).features
    monkeypatch.setattr(type(learner.model), "features", lambda self, x: sizes.append(len(x)) or features(self, x))
    x, y = data([0, 1], n=10, seed=1)
    for ask in (learner.outputs, learner.predict, learner.predict_proba):
        ask(x, batch_size=4)
    learner.evaluate((x, y), batch_size=4)
    assert sizes == [4, 4, 2] * 4


def test_one_image():
    found = load_backbone("shipped")
    learner = Learner(found.module, preprocess=found.preprocess, depth_features=60)
    images = [Image.new("RGB", (40, 30), colour) for colour in ("red", "green", "red", "green")]
    learner.learn((images, ["a", "b", "a", "b"]))
    assert learner.predict(images[1]) == ["b"]
    assert learner.predict_proba(images[0]).shape == (1, 2)


def test_every_label_is_counted(model, tmp_path):
    holdout = tmp_path / "holdout"
    result = package.load(model).evaluate(holdout)
    assert result["per_label"] == {"blue": (0, 6), "green": (6, 6), "red": (6, 6)}
    assert (result["accuracy"], result["accuracy_known"]) == (pytest.approx(2 / 3), 1.0)
    told = json.loads(dlcft("evaluate", "--model", model, "--data", holdout, "--json").stdout)
    assert told["per_label"] == {"blue": [0, 6], "green": [6, 6], "red": [6, 6]}
    lines = dlcft("evaluate", "--model", model, "--data", holdout, "--batch-size", "5").stdout.splitlines()
    assert "6 samples, counted as errors, have labels that were never learned: 100.00% without these" in lines[0]
    assert lines[1:] == ["  blue   never learned, 6 samples", "  green  6 of 6, 100.0%", "  red    6 of 6, 100.0%"]
    only = package.load(model).evaluate(([tmp_path / "holdout" / "blue" / "0.png"], ["blue"]))
    assert math.isnan(only["accuracy_known"])


def test_a_model_of_the_command_line_in_one_call(model, tmp_path):
    learner = package.load(model)
    assert (learner.labels(), learner.preprocess.size) == (["green", "red"], (32, 32))
    learner.learn(pictures(tmp_path / "february", ["red", "blue"], seed=1))
    assert learner.save() == 2
    done = dlcft("predict", tmp_path / "holdout" / "blue", "--model", model)
    assert done.stdout.count("blue,") == 6
    assert package.load(model, version=1).labels() == ["green", "red"]
    with pytest.raises(ValueError, match="holds no model; dlcft update"):
        package.load(tmp_path / "nowhere")


def test_a_learner_that_was_saved_from_python(tmp_path):
    learner = make("dlcft-exact")
    learner.learn(data([0, 1]))
    learner.save(tmp_path / "own")
    with pytest.raises(ValueError, match="was saved from Python and does not say how its backbone is made"):
        package.load(tmp_path / "own")
    assert package.load(tmp_path / "own", backbone=backbone()).labels() == [0, 1]


@pytest.fixture
def moved(tmp_path, monkeypatch):
    """A model whose file of weights is somewhere else now, and a file of another network."""
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    for name in ("net", "other"):
        torch.manual_seed(len(name))
        made = load_backbone("resnet18-32", weights="random", width=4).module
        for tensor in made.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01 * len(name))
        save_file(made.state_dict(), tmp_path / f"{name}.safetensors")
    pictures(tmp_path / "january", ["red", "green"])
    first = ["--backbone", "resnet18-32", "--weights", "net.safetensors", "--set", "depth_features=60"]
    done = dlcft("update", "--model", "m", "--data", "january", *first)
    assert done.returncode == 0, done.stderr
    (tmp_path / "net.safetensors").rename(tmp_path / "moved.safetensors")
    return tmp_path


def test_weights_that_were_moved(moved):
    february = pictures(moved / "february", ["red", "green"], seed=1)
    for command in (["predict", "january"], ["evaluate", "--data", "january"], ["forget", "--data", "january"]):
        done = dlcft(*command, "--model", "m")
        assert done.returncode == 2
        assert "net.safetensors any more; say where they are, --weights FILE" in done.stderr
        done = dlcft(*command, "--model", "m", "--weights", "other.safetensors")
        assert done.returncode == 2
        assert "weights are not those that m was learned on" in done.stderr
        if command[0] != "forget":
            assert dlcft(*command, "--model", "m", "--weights", "moved.safetensors").returncode == 0
    assert package.load("m", weights="moved.safetensors").labels() == ["green", "red"]
    done = dlcft("update", "--model", "m", "--data", february, "--weights", "moved.safetensors")
    assert done.returncode == 0, done.stderr
    assert dlcft("predict", "january", "--model", "m").returncode == 0, "the new version knows the new place"
    assert package.load("m").preprocess == Preprocess.from_dict(package.load("m").preprocess.to_dict())


def test_a_bare_model_of_transformers_gives_its_pooled_output(tmp_path):
    """By a stand-in for the real one, which a slow test takes."""

    class PreTrainedModel(torch.nn.Module):
        def __init__(self, key):
            super().__init__()
            self.layer, self.key = torch.nn.Linear(4, 6), key

        def forward(self, x, return_dict=False):
            return {self.key: self.layer(x)}

    PreTrainedModel.__module__ = "transformers.modeling_utils"
    x = torch.randn(12, 4)
    learner = Learner(network := PreTrainedModel("pooler_output"), "ridge")
    learner.learn((x, ["a", "b"] * 6))
    torch.testing.assert_close(learner.model.features(x), network.layer(x))
    learner.save(tmp_path / "model")
    assert Learner.load(tmp_path / "model", network).predict(x) == learner.predict(x)
    with pytest.raises(ValueError, match="is a PreTrainedModel, which gives logits; a base model is needed"):
        Learner(PreTrainedModel("logits"), "ridge").learn((x, ["a", "b"] * 6))
