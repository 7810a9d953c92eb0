"""A scikit-learn classifier: `fit` and `partial_fit` on tables, images or texts, in pipelines and grid searches.

It is no part of `import dlcft`, which does without scikit-learn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import Tags, check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from dlcft.data.images import Preprocess
from dlcft.data.labels import Label, label_name
from dlcft.data.sources import Tokenizer
from dlcft.learner.learner import Learner
from dlcft.methods.recipes import Recipe, named_recipe
from dlcft.update.calibration import probabilities


class Table(nn.Module):
    """The backbone of a table: its columns are the features, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = nn.Parameter(torch.empty(0, dtype=torch.float64))  # a network computes as its parameters are

    def forward(self, x: Tensor) -> Tensor:
        """The columns as they are."""
        return x


class ContinualClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A `Learner` with scikit-learn's interface.

    `partial_fit` learns one batch more, which may bring new classes, and keeps no data. With a closed-form method,
    which the default is, batch after batch gives what `fit` gives on all of them, to rounding.

    Args:
        backbone: None to classify tables by their columns; a module that maps a batch to feature vectors; or the name
            of one, see `dlcft.backbones.load_backbone`.
        method: the name of a method, or a `Recipe`; see `Learner`.
        settings: of the method, such as `{"depth_features": 500}`.
        weights: of a backbone that is named.
        preprocess: of images, for a backbone that is a module; one that is named has its own.
        tokenizer: turns a list of texts into the inputs of a backbone that is a module.
        random_state: the seed of everything random.
        device: "auto", "cpu", "cuda" or "mps".

    Attributes:
        classes_: the classes, sorted. `partial_fit` may add some.
        learner_: the `Learner`, to save, to ask and to forget with.
        n_features_in_: the number of columns, of tables alone.
        feature_names_in_: their names, where the table has names.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> x, y = load_iris(return_X_y=True)
        >>> classifier = ContinualClassifier().partial_fit(x[:100], y[:100])
        >>> classifier.classes_
        array([0, 1])
        >>> classifier.partial_fit(x[100:], y[100:]).classes_
        array([0, 1, 2])
        >>> classifier.score(x, y) > 0.97
        True
    """

    classes_: NDArray[Any]
    learner_: Learner

    def __init__(
        self,
        backbone: nn.Module | str | None = None,
        method: str | Recipe = "dlcft-exact",
        *,
        settings: Mapping[str, Any] | None = None,
        weights: str | None = None,
        preprocess: Preprocess | None = None,
        tokenizer: Tokenizer | None = None,
        random_state: Any = 0,
        device: str = "auto",
    ) -> None:
        self.backbone = backbone
        self.method = method
        self.settings = settings
        self.weights = weights
        self.preprocess = preprocess
        self.tokenizer = tokenizer
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any) -> ContinualClassifier:
        """Learn these samples alone; what was learned before is gone."""
        return self._learn(X, y, None, first=True)

    def partial_fit(self, X: Any, y: Any, classes: Any = None) -> ContinualClassifier:
        """Learn one batch more, as a task.

        Args:
            X: its inputs.
            y: its labels; new ones are new classes.
            classes: the classes that `y` may have, if that is known: another one is an error. Those without a sample
                are in `classes_`, with probability 0.
        """
        return self._learn(X, y, classes, first=not hasattr(self, "learner_"))

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of each input."""
        outputs = self._outputs(X)
        found: NDArray[Any] = self.classes_[self._places()[outputs.argmax(1).numpy()]]
        return found

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """The probability of each class, in the order of `classes_`."""
        outputs = self._outputs(X)
        given = np.zeros((len(outputs), len(self.classes_)))
        given[:, self._places()] = probabilities(outputs, self.learner_.temperature).numpy()
        return given

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "learner_")

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        if self.backbone is not None:
            tags.input_tags.three_d_array = tags.input_tags.string = True
        return tags

    def _learn(self, X: Any, y: Any, classes: Any, *, first: bool) -> ContinualClassifier:
        if y is None:
            raise ValueError("ContinualClassifier requires y to be passed, but the target y is None.")
        X = self._inputs(X, reset=first)
        y = _named(y)
        known = np.unique(y) if classes is None else np.unique(_named(classes))
        if unknown := set(y.tolist()) - set(known.tolist()):
            raise ValueError(f"y has the class {min(unknown)!r}, which is not among `classes`.")
        if not first:
            _check_kind(known, self.classes_)
            known = np.union1d(self.classes_, known)
        learner = self._learner() if first else self.learner_
        learner.learn((X, [_label(value) for value in y.tolist()]), progress=False)
        self.learner_, self.classes_ = learner, known
        return self

    def _learner(self) -> Learner:
        """A learner that has learned nothing."""
        seed = self.random_state
        if not isinstance(seed, int):
            seed = int(check_random_state(seed).randint(2**31))
        options: dict[str, Any] = {"seed": seed, "device": self.device, **(self.settings or {})}
        reading: dict[str, Any] = {"preprocess": self.preprocess, "tokenizer": self.tokenizer}
        backbone, method = self.backbone, self.method
        if isinstance(backbone, str):
            from dlcft.backbones import load_backbone

            if self.preprocess is not None or self.tokenizer is not None:
                raise ValueError(f"the backbone {backbone!r} reads as it was made to; give no preprocess or tokenizer.")
            found = load_backbone(backbone, weights=self.weights)
            learner = Learner(found.module, method, **options, preprocess=found.preprocess, tokenizer=found.tokenizer)
            learner.notes["backbone"] = found.rebuild  # so that the command line can open it, once saved
            return learner
        if self.weights is not None:
            raise ValueError(f"weights is {self.weights!r}; it is for a backbone that is given by its name.")
        if backbone is None:
            backbone = Table()
            recipe = named_recipe(method, {}) if isinstance(method, str) else method
            if recipe.settings.get("depth_features"):
                options = {"depth_features": 0, **options}  # a table has no depth
        return Learner(backbone, method, **options, **reading)

    def _inputs(self, X: Any, *, reset: bool) -> Any:
        """Tables are checked as scikit-learn checks them; other inputs go to the learner, which checks them itself."""
        if self.backbone is None:
            return validate_data(self, X, reset=reset, dtype=(np.float64, np.float32))
        if getattr(X, "ndim", None) == 2:  # an array, a data frame or a sparse matrix; whole numbers may be words
            return validate_data(self, X, reset=reset)
        return X.tolist() if getattr(X, "ndim", None) == 1 else X  # a column of texts or paths

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return self.learner_.outputs(self._inputs(X, reset=False))

    def _places(self) -> NDArray[np.intp]:
        """The place in `classes_` of each of the learner's outputs."""
        place = {_label(value): index for index, value in enumerate(self.classes_.tolist())}
        return np.array([place[name] for name in self.learner_.labels()])


def _named(y: Any) -> NDArray[Any]:
    """Labels as a vector; words in the Unicode form in which a learner knows them."""
    y = np.asarray(column_or_1d(y, warn=True))
    check_classification_targets(y)
    if y.dtype.kind in "OU":
        y = np.array([label_name(value) for value in y.tolist()], dtype=object if y.dtype.kind == "O" else None)
    return y  # type: ignore[no-any-return]


def _label(value: Any) -> Label:
    """A class as a learner knows it; it has no truth values."""
    return label_name(int(value) if isinstance(value, bool) else value)


def _check_kind(new: NDArray[Any], known: NDArray[Any]) -> None:
    """Refuse words among numbers: they cannot be sorted."""
    kinds = [{type(_label(value)) for value in classes.tolist()} for classes in (new, known)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"the classes are {new.tolist()[:3]} …, and known ones {known.tolist()[:3]} …; give one kind.")
