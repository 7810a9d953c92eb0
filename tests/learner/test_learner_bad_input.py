"""What is refused is named in one sentence, and the learner is, to the bit, as it was."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from dlcft import Learner
from dlcft.methods.recipes import RECIPES
from tests.learner.test_learner import backbone, data, make
from tests.learner.test_state import digest

X, Y = data([0, 1, 2])


class Broken(Dataset):
    """Reads well until its fifth sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise OSError("read of closed file")
        return X[index], int(Y[index])


class Growing(Dataset):
    """Its images change size."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1, 4 + index // 4, 4), int(Y[index])


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield X[0], 0


def with_value(value):
    x = X.clone()
    x[17, 0, 1, 2] = value
    return x


NAMES = ["cat", "dog", "owl"] * 8

BAD = {
    "a number": (lambda a: a.learn(42), TypeError, "data is a int; give a pair"),
    "nothing": (lambda a: a.learn(None), TypeError, "data is a NoneType"),
    "inputs alone": (lambda a: a.learn(X), TypeError, "data is a Tensor"),
    "a triple": (lambda a: a.learn((X, Y, Y)), TypeError, "data is a tuple"),
    "an empty task": (lambda a: a.learn((X[:0], Y[:0])), ValueError, "the data set is empty"),
    "an empty list": (lambda a: a.learn([]), TypeError, "data is a list"),
    "an empty data set": (lambda a: a.learn(TensorDataset(X[:0], Y[:0])), ValueError, "the data set is empty"),
    "fewer labels": (lambda a: a.learn((X, Y[:5])), ValueError, r"there are 24 inputs and 5 labels"),
    "more labels": (lambda a: a.learn((X[:5], Y)), ValueError, r"there are 5 inputs and 24 labels"),
    "a generator": (
        lambda a: a.evaluate((x, y) for x, y in zip(X, Y, strict=True)),
        TypeError,
        "generator, which can be read only once",
    ),
    "an iterator": (lambda a: a.evaluate(iter([(X, Y)])), TypeError, "list_iterator"),
    "an endless data set": (lambda a: a.evaluate(Endless()), TypeError, "Endless without an index"),
    "an endless loader": (lambda a: a.evaluate(DataLoader(Endless())), TypeError, "Endless without an index"),
    "a loader without batches": (
        lambda a: a.learn(DataLoader(TensorDataset(X, Y), batch_size=None)),
        ValueError,
        "batch_size=None",
    ),
    "NaN pixels": (lambda a: a.learn((with_value(float("nan")), Y)), ValueError, "sample 17 holds nan"),
    "infinite pixels": (lambda a: a.learn((with_value(float("inf")), Y)), ValueError, "sample 17 holds inf"),
    "negative infinity": (lambda a: a.learn((with_value(-float("inf")), Y)), ValueError, "sample 17 holds -inf"),
    "NaN in numpy": (lambda a: a.learn((with_value(float("nan")).numpy(), Y)), ValueError, "sample 17 holds nan"),
    "labels of mixed types": (
        lambda a: a.learn((X, ["cat", 3] * 12)),
        ValueError,
        "labels are integers .* and strings",
    ),
    "fractions": (lambda a: a.learn((X, Y + 0.5)), ValueError, "a label is 0.5"),
    "NaN labels": (lambda a: a.learn((X, [float("nan")] * 24)), ValueError, "a label is nan"),
    "one-hot labels": (lambda a: a.learn((X, torch.eye(24))), ValueError, r"labels have shape \(24, 24\)"),
    "boolean labels": (lambda a: a.learn((X, Y > 0)), TypeError, "a label is .* of type bool"),
    "no labels": (lambda a: a.learn((X, [None] * 24)), TypeError, "a label is None"),
    "bytes": (lambda a: a.learn((X, [b"cat"] * 24)), TypeError, "a label is b'cat'"),
    "a string of labels": (lambda a: a.learn((X, "catdog")), TypeError, "labels are a str"),
    "one label": (lambda a: a.learn((X, 3)), TypeError, "labels are a int"),
    "names after numbers": (lambda a: a.learn((X, NAMES)), ValueError, "labels are integers .* and strings"),
    "other channels": (lambda a: a.learn((X.expand(-1, 3, -1, -1), Y)), ValueError, "cannot take a batch .*3, 4, 4"),
    "other sizes": (lambda a: a.learn((torch.ones(24, 1, 6, 6), Y)), ValueError, "cannot take a batch .*1, 6, 6"),
    "sizes that change": (lambda a: a.learn(Growing()), ValueError, r"shape \(1, 5, 4\)"),
    "vectors for images": (lambda a: a.learn((torch.ones(24, 16), Y)), ValueError, "cannot take a batch"),
    "one image": (lambda a: a.learn((X[0], Y[:1])), ValueError, "looks like one image|cannot take a batch|expected 4D"),
    "integers for images": (lambda a: a.learn((X.long(), Y)), ValueError, "int64 tensor"),
    "complex numbers": (lambda a: a.learn((X.numpy().astype(np.complex64), Y)), ValueError, "complex64"),
    "objects": (lambda a: a.learn((np.array([{}] * 24), Y)), ValueError, "object"),
    "sparse inputs": (lambda a: a.learn((torch.eye(24).to_sparse(), Y)), ValueError, "sparse"),
    "a closed file": (lambda a: a.learn(Broken()), OSError, "closed file"),
    "a path that is not there": (lambda a: a.learn("no/such/folder"), ValueError, "there is no file or folder"),
    "a head in class-il": (lambda a: a.learn((X, Y), head="a"), ValueError, "head= is for 'task-il', not 'class-il'"),
    "jointly in class-il": (lambda a: a.learn_jointly({"a": (X, Y)}), ValueError, "learn_jointly is for 'task-il'"),
    "predicting for an unknown head": (
        lambda a: a.predict(X, head="b"),
        ValueError,
        "head is 'b'; learned so far: main",
    ),
    "predicting nothing": (lambda a: a.predict(X[:0]), ValueError, "the data set is empty"),
    "predicting a word": (lambda a: a.predict("cat"), ValueError, "there is no file or folder"),
    "predicting NaN": (lambda a: a.predict(with_value(float("nan"))), ValueError, "sample 17 holds nan"),
    "predicting other channels": (lambda a: a.predict(torch.ones(4, 5, 4, 4)), ValueError, "cannot take a batch"),
    "evaluating without labels": (lambda a: a.evaluate(X), TypeError, "data is a Tensor"),
    "evaluating nothing": (lambda a: a.evaluate((X[:0], Y[:0])), ValueError, "the data set is empty"),
    "saving nowhere": (lambda a: a.save(), ValueError, "directory is not given"),
    "saving into a file": (lambda a: a.save(__file__), OSError, "cannot be written"),
    "keeping no version": (lambda a: a.save("unused", keep=0), ValueError, "keep is 0"),
    "Ctrl-C": (lambda a: a.learn(Pressed()), KeyboardInterrupt, None),
    "an unknown setting": (lambda a: Learner(backbone(), "none", epoch=3), ValueError, r"did you mean 'epochs'\?"),
    "an unknown method": (lambda a: Learner(backbone(), "dlfct"), ValueError, r"did you mean 'dlcft'\?"),
    "another device": (lambda a: Learner(backbone(), device="tpu"), ValueError, "device is 'tpu'"),
    "a backbone by name": (lambda a: Learner("resnet18"), TypeError, "the backbone is a str"),
    "a backbone that gives images": (
        lambda a: Learner(nn.Conv2d(1, 2, 3)).learn((X, Y)),
        ValueError,
        "batch × features",
    ),
    "a backbone that gives a tuple": (lambda a: Learner(Two()).learn((X, Y)), ValueError, "it gave a tuple"),
    "a backbone that changes width": (
        lambda a: Learner(Width(), "ridge").learn((torch.ones(24, 1, 4, 5), Y)),
        ValueError,
        "batch × ",
    ),
}


class Pressed(Dataset):
    """Somebody presses Ctrl-C while it is read."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        if index == 20:
            raise KeyboardInterrupt
        return X[index], int(Y[index])


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x.flatten(1), x


class Width(nn.Module):
    """As many features as samples."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x.flatten(1)[:, : len(x)]


LEARNERS = {}


def learned(name):
    if name not in LEARNERS:
        LEARNERS[name] = make(name)
        LEARNERS[name].learn((X, Y))
        LEARNERS[name].learn((X[:9], Y[:9]))
        LEARNERS[name].predict(X)
    return LEARNERS[name]


def test_there_are_many():
    assert len(BAD) >= 50


@pytest.mark.parametrize("name", ["dlcft", "dlcft-exact", "derpp"])
@pytest.mark.parametrize("case", BAD)
def test_refused_and_unchanged(case, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    learner, (action, error, message) = learned(name), BAD[case]
    before, outputs = digest(learner), learner.outputs(X)
    with pytest.raises(error, match=message) as caught:
        action(learner)
    text = str(caught.value)
    assert "\n" not in text
    assert digest(learner) == before
    assert torch.equal(learner.outputs(X), outputs)
    assert not list(tmp_path.iterdir())


def test_a_learning_rate_that_diverges():
    learner = make("dlcft", lr=1e30)
    before = digest(learner)
    with pytest.raises(FloatingPointError, match=r"diverged .* lr=1e\+30.*as it was before"):
        learner.learn((X, Y))
    assert digest(learner) == before


@pytest.mark.parametrize("name", RECIPES)
def test_little_data_is_enough(name):
    """One sample; one class; a class with one sample."""
    learner = make(name)
    learner.learn((X[:1], Y[:1]))
    learner.learn((X[Y == 1], Y[Y == 1]))
    learner.learn((torch.cat([X[Y == 0], X[Y == 2][:1]]), [0] * 8 + [7]))
    assert learner.labels() == [0, 1, 7]
    assert torch.isfinite(learner.outputs(X)).all()
