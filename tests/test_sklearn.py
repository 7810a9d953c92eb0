"""`ContinualClassifier` as scikit-learn's own checks, pipelines and searches meet it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, load_iris
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from torch import nn

from dlcft import Learner
from dlcft.data.images import Preprocess
from dlcft.sklearn import ContinualClassifier, Table
from tests.support.commands import dlcft
from tests.support.samples import pictures

X, Y = load_iris(return_X_y=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")  # scikit-learn's own, of NaN
@parametrize_with_checks([ContinualClassifier(), ContinualClassifier(method="slda")])  # none is expected to fail
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def test_there_are_checks_of_partial_fit():
    names = {getattr(check, "func", check).__name__ for _, check in estimator_checks_generator(ContinualClassifier())}
    assert {"check_estimators_partial_fit_n_features", "check_classifiers_train", "check_estimators_pickle"} <= names


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(len(X))), cuts=st.sets(st.integers(1, len(X) - 1), max_size=4))
def test_batch_after_batch_is_all_at_once(order, cuts):
    whole, parts = ContinualClassifier().fit(X, Y), ContinualClassifier()
    for some in np.split(np.array(order), sorted(cuts)):
        parts.partial_fit(X[some], Y[some])
    assert np.array_equal(parts.classes_, whole.classes_)
    weights = [one.learner_.model.head("main").weight[np.argsort(one.learner_.labels())] for one in (whole, parts)]
    assert weights[0].dtype == torch.float64
    torch.testing.assert_close(*weights, rtol=1e-8, atol=1e-8)
    # a learner gives its outputs in float32
    np.testing.assert_allclose(parts.predict_proba(X), whole.predict_proba(X), rtol=0, atol=1e-5)


def test_fit_begins_anew_and_gives_the_same():
    first = ContinualClassifier().fit(X, Y)
    again = ContinualClassifier().fit(X[:100], Y[:100]).partial_fit(X, Y).fit(X, Y)
    assert np.array_equal(first.predict_proba(X), again.predict_proba(X))
    assert again.learner_.tasks == 1


def test_classes_are_sorted_whatever_came_first():
    words = np.array(["setosa", "versicolor", "virginica"])[Y]
    classifier = ContinualClassifier()
    for label in ("virginica", "setosa", "versicolor"):
        classifier.partial_fit(X[words == label], words[words == label])
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert classifier.learner_.labels() == ["virginica", "setosa", "versicolor"]
    assert classifier.score(X, words) > 0.97
    given = classifier.predict_proba(X)
    assert np.array_equal(classifier.classes_[given.argmax(1)], classifier.predict(X))
    np.testing.assert_allclose(given.sum(1), 1)


def test_classes_that_are_told_before_they_come():
    classifier = ContinualClassifier().partial_fit(X[:100], Y[:100], classes=[2, 1, 0, -5])
    assert classifier.classes_.tolist() == [-5, 0, 1, 2]
    given = classifier.predict_proba(X)
    assert not given[:, [0, 3]].any()
    assert set(classifier.predict(X)) == {0, 1}
    classifier.partial_fit(X[100:], Y[100:])
    assert classifier.classes_.tolist() == [-5, 0, 1, 2]
    assert classifier.score(X, Y) > 0.97
    with pytest.raises(ValueError, match="y has the class 2, which is not among `classes`"):
        classifier.partial_fit(X, Y, classes=[0, 1])


WORDS = np.array(["a", "b", "c"], dtype=object)


@pytest.mark.parametrize("labels", [Y > 0, Y.astype(float), WORDS[Y], np.where(Y > 0, "e\u0301", "e")])
def test_other_kinds_of_labels(labels):
    classifier = ContinualClassifier().fit(X, labels)
    answers = classifier.predict(X)
    assert answers.dtype == classifier.classes_.dtype
    if labels.dtype.kind == "U":
        assert set(classifier.classes_) == {"e", "\u00e9"}
        return
    assert np.mean(answers == labels) > 0.97


def test_words_among_numbers_are_refused():
    classifier = ContinualClassifier().fit(X, Y)
    before = classifier.predict_proba(X)
    with pytest.raises(ValueError, match="known ones \\[0, 1, 2\\]"):
        classifier.partial_fit(X, ["a"] * len(X))
    assert np.array_equal(classifier.predict_proba(X), before)


def test_in_a_pipeline_and_a_search():
    x, y = load_digits(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), ContinualClassifier(method="ranpac"))
    grid = {"continualclassifier__settings": [{"random_features": 10}, {"random_features": 200}]}
    found = GridSearchCV(pipeline, grid, cv=3).fit(x[:600], y[:600])
    assert found.best_params_ == {"continualclassifier__settings": {"random_features": 200}}
    assert found.score(x[600:], y[600:]) > 0.85
    both = GridSearchCV(ContinualClassifier(), {"method": ["ncm", "slda"]}, cv=3).fit(X, Y)
    assert both.best_params_ == {"method": "slda"}


def test_a_clone_has_the_parameters_and_nothing_learned():
    classifier = ContinualClassifier(nn.Linear(4, 6), "ridge", settings={"ridge": 1.0}, random_state=3).fit(X, Y)
    other = clone(classifier)
    assert not hasattr(other, "learner_")
    assert other.get_params()["settings"] == {"ridge": 1.0}
    assert other.backbone is not classifier.backbone
    assert np.array_equal(other.fit(X, Y).predict(X), classifier.predict(X))


@pytest.mark.slow  # pandas comes with the extra integrations
def test_names_of_columns():
    table = pytest.importorskip("pandas").DataFrame(X, columns=["a", "b", "c", "d"])
    for backbone in (None, nn.Linear(4, 6)):
        classifier = ContinualClassifier(backbone).fit(table, Y)
        assert classifier.feature_names_in_.tolist() == ["a", "b", "c", "d"]
        assert classifier.n_features_in_ == 4
        with pytest.raises(ValueError, match="feature names should match"):
            classifier.predict(table[["b", "a", "c", "d"]])


def test_saved_without_pickle(tmp_path):
    classifier = ContinualClassifier().fit(X, Y)
    classifier.learner_.save(tmp_path)
    assert Learner.load(tmp_path, Table()).predict(X) == classifier.predict(X).tolist()


def test_calibrated_and_forgotten():
    calibrated = CalibratedClassifierCV(ContinualClassifier(), cv=3).fit(X, Y)
    assert calibrated.score(X, Y) > 0.95
    classifier = ContinualClassifier().fit(X, Y)
    classifier.learner_.forget((X[:30], Y[:30]))
    never = ContinualClassifier().fit(X[30:], Y[30:])
    np.testing.assert_allclose(classifier.predict_proba(X), never.predict_proba(X), rtol=0, atol=1e-5)


def test_images_by_a_backbone(tmp_path):
    draw = np.random.default_rng(0)
    level = np.array([40, 128, 220])
    y = np.arange(30) % 3
    x = np.clip(draw.normal(level[y][:, None, None, None], 20, (30, 32, 32, 3)), 0, 255).astype(np.uint8)
    classifier = ContinualClassifier("shipped", settings={"depth_features": 60})
    assert cross_val_score(classifier, x, y, cv=3).min() > 0.8
    for label in (2, 0, 1):
        classifier.partial_fit(x[y == label], y[y == label])
    assert classifier.classes_.tolist() == [0, 1, 2]
    assert classifier.score(x, y) == 1
    assert not hasattr(classifier, "n_features_in_")
    classifier.learner_.save(tmp_path / "model")  # and the command line goes on with it
    np.savez(tmp_path / "data.npz", x=x, y=y)
    done = dlcft("evaluate", "--model", tmp_path / "model", "--data", tmp_path / "data.npz")
    assert "accuracy 100.00%" in done.stdout, done.stderr


def test_files_of_images(tmp_path):
    folder = pictures(tmp_path, ["red", "green"])
    paths = sorted(folder.glob("*/*.png"))
    labels = [path.parent.name for path in paths]
    classifier = ContinualClassifier("shipped", settings={"depth_features": 60}).fit(paths, labels)
    assert classifier.score([str(path) for path in paths], labels) == 1
    assert classifier.classes_.tolist() == ["green", "red"]


def test_texts_by_a_tokenizer():
    def tokenizer(texts):
        return torch.tensor([[ord(letter) % 50 for letter in text[:4].ljust(4)] for text in texts])

    backbone = nn.Sequential(nn.Embedding(50, 8), nn.Flatten())
    texts, y = ["good", "fine", "best", "sad!", "evil", "grim"], [1, 1, 1, 0, 0, 0]
    classifier = ContinualClassifier(backbone, "ridge", tokenizer=tokenizer).fit(texts, y)
    assert classifier.predict(np.array(texts)).tolist() == y


def test_a_learner_of_the_same_parameters_learns_the_same():
    backbone = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    classifier = ContinualClassifier(backbone, "dlcft", settings={"epochs": 2}, random_state=7).fit(X, Y)
    learner = Learner(backbone, "dlcft", epochs=2, seed=7)
    learner.learn((X, Y), progress=False)
    assert classifier.predict(X).tolist() == learner.predict(X)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backbone": "shipped", "preprocess": Preprocess()}, "give no preprocess or tokenizer"),
        ({"backbone": nn.Linear(4, 2), "weights": "x.pth"}, "for a backbone that is given by its name"),
        ({"method": "dlfct"}, "did you mean 'dlcft'"),
        ({"settings": {"epochs": 3}}, "epochs"),
    ],
)
def test_wrong_parameters_are_told_by_fit(options, words):
    with pytest.raises(ValueError, match=words):
        ContinualClassifier(**options).fit(X, Y)
