"""Comparing methods: the same answers as learning, one pass of the network, and what it tells of costs."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.closed_form.sums import RidgeSums
from dlcft.comparison import compare as module
from dlcft.comparison.clock import Clock
from dlcft.comparison.compare import CLOSED_FORM, Comparison, compare
from dlcft.comparison.folds import chosen, split
from dlcft.comparison.picture import picture
from dlcft.store.files import stored_bytes
from tests.support.digits import turned

SMALL = {"random_features": 60, "tangent_features": 60, "depth_features": 60}


class Counting(nn.Module):
    """A small network that counts the samples that it has seen."""

    seen = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.ReLU(), nn.Flatten())

    def forward(self, x):
        type(self).seen += len(x)
        return self.layers(x)[:, :20]


def small(name, settings):
    """A recipe with few features, so that it is quick."""
    from dlcft.methods.recipes import RECIPES

    recipe = RECIPES[name]
    fewer = {key: value for key, value in SMALL.items() if recipe.settings.get(key)}
    fewer |= {"epochs": 2} if "epochs" in recipe.settings else {}
    return recipe.with_settings(fewer | settings)


@pytest.fixture
def digits(monkeypatch):
    monkeypatch.setattr(module, "named_recipe", small)
    x, y = turned(0)
    return x[:400], [f"digit {label}" for label in y[:400].tolist()]


def test_every_fold_is_as_a_learner_of_the_others_answers(digits):
    """Sums over features that were computed once give the accuracy of learning the other folds."""
    x, y = digits
    backbone, places = Counting(), chosen(digits[1], 200)
    found = compare(backbone, digits, samples=200, folds=4)
    assert not found.left_out
    assert {row.method for row in found.rows} == set(CLOSED_FORM)
    labels = [y[place] for place in places.tolist()]
    folds = split(labels, 4)
    for row in found.rows:
        expected, sizes = [], []
        for fold in range(4):
            held = folds == fold
            learner = Learner(backbone, small(row.method, {}))
            known, test = ((x[places[part]], [labels[i] for i in part.nonzero().flatten()]) for part in (~held, held))
            learner.learn(known)
            expected.append(learner.evaluate(test)["accuracy"])
            sizes.append(int(held.sum()))
        assert row.by_fold == pytest.approx(expected, abs=1e-9), row.method
        assert row.accuracy == pytest.approx(np.average(expected, weights=sizes))
        assert (row.tested, row.can) == (200, ["forget", "merge"])
        assert row.bytes == pytest.approx(stored_bytes(learner.state()[0]), abs=200)
        assert row.features == learner.model.feature_count


def test_the_network_sees_every_sample_once_for_each_kind_of_features(digits):
    """Eight methods and three kinds: its own features, from which random ones are made; its tangents; its depth."""
    Counting.seen = 0
    compare(Counting(), digits, ["ncm", "slda", "ridge", "ranpac", "klda"], samples=200)
    own = Counting.seen
    assert 200 <= own < 300  # and a look at a few
    Counting.seen = 0
    compare(Counting(), digits, samples=200)
    assert Counting.seen < 3 * own + 100


def test_methods_that_share_sums_choose_their_ridge_once(digits, monkeypatch):
    chose, choose = [], RidgeSums.choose_ridge
    monkeypatch.setattr(RidgeSums, "choose_ridge", lambda *args, **kwargs: chose.append(1) or choose(*args, **kwargs))
    compare(Counting(), digits, ["depth", "dlcft-exact"], samples=100, folds=3)
    assert len(chose) == 3


def test_trained_methods_learn_all_folds_but_one(digits):
    told = []
    found = compare(Counting(), digits, ["ridge", "none", "dlcft"], samples=120, report=told.append)
    none = found.row("none")
    assert (none.tested, len(none.by_fold), none.can, none.closed_form) == (24, 1, [], False)
    assert none.seconds > found.row("ridge").seconds
    assert none.bytes > 0
    folds = split([digits[1][place] for place in chosen(digits[1], 120).tolist()], 5)
    ridge = found.row("ridge")
    assert none.difference == pytest.approx(none.accuracy - ridge.by_fold[0])
    assert int((folds == 0).sum()) == none.tested
    shares = [stage.share for stage in told]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert shares[-1] == pytest.approx(1)
    assert all(stage.seconds_left >= 0 for stage in told)


def test_labels_with_few_samples(digits):
    x, y = digits
    few = [label if label != "digit 3" else f"one of {index}" for index, label in enumerate(y)]
    wanted = [index for index, label in enumerate(few) if label.startswith("one of")][3:]
    keep = [index for index in range(len(y)) if index not in wanted]
    found = compare(Counting(), (x[keep], [few[index] for index in keep]), ["ncm", "dlcft-exact"], samples=150)
    assert len(found.untested) == 3
    assert found.rows[0].tested == found.samples - 3
    assert found.classes == 12
    two = [index for label in ("digit 0", "digit 1") for index in [i for i, one in enumerate(y) if one == label][:2]]
    found = compare(Counting(), (x[two], [y[index] for index in two]), ["ncm"])
    assert (found.folds, found.samples, found.learned) == (2, 4, 2)


def test_uneven_labels_are_told(digits):
    x, y = digits
    places = {name: [i for i, label in enumerate(y) if label == name] for name in set(y)}
    kept = [i for name, own in places.items() for i in (own if name < "digit 2" else own[:4])]
    found = compare(Counting(), (x[kept], [y[index] for index in kept]), ["ncm", "ridge"])
    assert found.uneven
    ridge = found.row("ridge")
    assert ridge.balanced != pytest.approx(ridge.accuracy)
    assert not compare(Counting(), digits, ["ncm"]).uneven


def test_what_cannot_be_tested_is_left_out_with_its_reason():
    x, y = torch.randn(40, 5), ["a", "b"] * 20
    found = compare(nn.Identity(), (x, y), ["ridge", "dlcft-exact"])
    assert list(found.left_out) == ["dlcft-exact"]
    assert "no convolution or linear layer" in found.left_out["dlcft-exact"]
    with pytest.raises(ValueError, match="no method can be tested: the network has no"):
        compare(nn.Identity(), (x, y), ["dlcft-exact"])
    with pytest.raises(ValueError, match="holds nan"):
        compare(nn.Identity(), (x.clone().fill_(torch.nan), y), ["ridge"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"methods": ["rigde"]}, "ridge"),
        ({"methods": []}, "one are the least"),
        ({"samples": 1}, "samples is 1"),
        ({"folds": 1}, "folds 1"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        compare(nn.Identity(), (torch.randn(8, 3), ["a", "b"] * 4), **options)


def test_a_clock_corrects_its_guess(monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr("dlcft.comparison.clock.time.perf_counter", lambda: now[0])
    clock = Clock({"first": 10.0, "second": 30.0}, told.append)
    now[0] = 20.0  # twice as long as was guessed
    clock.tell("first", 1.0)
    clock.tell("second", 0.5)
    assert [(stage.share, stage.seconds_left) for stage in told] == [(0, 40), (0.25, 60), (0.625, 12)]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_picture_names_every_method(digits, kind):
    found = compare(Counting(), digits, ["ncm", "ridge", "slda", "none"], samples=60)
    drawn = picture(found, kind)
    if kind == "png":
        assert drawn[:4] == b"\x89PNG"
    else:
        text = drawn.decode()
        assert all(f">{row.method}</text>" in text for row in found.rows)
        assert f"Recommended: {found.recommended}" in text
    alike = Comparison(**vars(found) | {"rows": found.rows[:1], "recommended": found.rows[0].method})
    assert picture(alike, kind)


@pytest.mark.slow
def test_real_images():
    """On images of CIFAR-10 the answers are those of a learner, and features of all depths are ahead."""
    data = Path(os.environ.get("DLCFT_TEST_DATA", "nowhere")) / "data" / "cifar10-part.npz"
    if not data.exists():
        pytest.skip(f"needs {data}; set DLCFT_TEST_DATA to the folder that has data/cifar10-part.npz")
    raw, shipped = np.load(data), load_backbone("shipped")
    x, y = raw["x_train"][:3000], raw["y_train"][:3000].astype(int).tolist()
    found = compare(
        shipped.module, (x, y), ["ncm", "ridge", "dlcft-exact"], samples=1000, preprocess=shipped.preprocess
    )
    exact = found.row("dlcft-exact")
    assert found.recommended == "dlcft-exact"
    assert found.row("ridge").difference < -2 * found.row("ridge").difference_error
    places = chosen(y, 1000)
    labels = [y[place] for place in places.tolist()]
    held = split(labels, 5) == 0
    learner = Learner(shipped.module, preprocess=shipped.preprocess)
    known, test = ((x[places[part]], [labels[i] for i in part.nonzero().flatten()]) for part in (~held, held))
    learner.learn(known)
    assert exact.by_fold[0] == pytest.approx(learner.evaluate(test)["accuracy"], abs=0.006)
    assert exact.bytes == pytest.approx(stored_bytes(learner.state()[0]), rel=1e-3)
    assert 0.5e9 < exact.peak < 4e9
