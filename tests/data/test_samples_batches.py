"""Inputs, batches, labels and fingerprints."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dlcft.data.images import Preprocess
from dlcft.data.labels import Labels
from dlcft.data.samples import Batches, Inputs, Samples, to_device
from tests.support.samples import ALL, CPU, SOME, Alone, Pairs, X, Y, write_images


def test_inputs_of_data_sets_with_and_without_labels():
    for form in (X, X.numpy(), list(X), Alone(), Pairs(), DataLoader(Alone()), DataLoader(Pairs()), (X,)):
        inputs = Inputs(form)
        fetched = inputs.fetch(SOME)
        assert len(inputs) == 6
        assert torch.equal(fetched[0] if isinstance(fetched, tuple) else fetched, X[SOME])
    two = Inputs(Alone(list(zip(X, X, strict=True)))).fetch(SOME)
    assert isinstance(two, tuple)
    assert torch.equal(two[1], X[SOME])


def test_batches_and_devices():
    samples = Samples((X.numpy().astype(np.float64), Y))
    batches = Batches(samples, torch.arange(6), 4, CPU, dtype=torch.float32)
    for _ in range(2):
        seen = list(batches)
        assert [len(y) for _, y in seen] == [4, 2]
        assert torch.equal(torch.cat([x for x, _ in seen]), X)
    assert next(iter(Batches(samples, torch.arange(6), 4, CPU)))[0].dtype == torch.float64
    moved = to_device({"ids": torch.arange(3), "x": torch.ones(3)}, CPU, dtype=torch.float64)
    assert (moved["ids"].dtype, moved["x"].dtype) == (torch.int64, torch.float64)


def test_labels_keep_their_index():
    labels = Labels().append(Labels().unknown([7, 3, 7]))
    assert labels.names == [3, 7]
    labels = labels.append(labels.unknown([7, -1, 3]))
    assert labels.names == [3, 7, -1]
    assert labels.indices([-1, 3]).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"labels are integers \(-1\) and strings \('cat'\); give one kind"):
        labels.append(["cat"])


def test_fingerprint(tmp_path):
    folder = write_images(tmp_path)
    for make in (lambda: (X, Y), lambda: Pairs(), lambda: folder, lambda: ({"a": X.bfloat16(), "b": ALL}, Y)):
        assert Samples(make()).fingerprint() == Samples(make()).fingerprint()
    plain = Samples((X, Y)).fingerprint()
    changed = X.clone()
    changed[3, 0, 0, 0] += 1
    others = [(changed, Y), (X, [*Y[:-1], 4]), (X[:5], Y[:5]), (X.double(), Y), (X.flip(0), Y), (X.flatten(1), Y)]
    assert len({plain, *(Samples(other).fingerprint() for other in others)}) == 7
    assert Samples((X.numpy(), np.array(Y))).fingerprint() == plain
    assert Samples((X, Y), preprocess=Preprocess(size=(2, 2))).fingerprint() == plain
    before = Samples(folder).fingerprint()
    Image.fromarray(np.zeros((8, 5, 3), dtype=np.uint8)).save(folder / "cat" / "0.png")
    assert Samples(folder).fingerprint() != before
    large = torch.zeros(10_000, 2)
    assert Samples((large, [0] * 10_000)).fingerprint() == Samples((large.clone(), [0] * 10_000)).fingerprint()


class Augmented(Pairs):
    def __getitem__(self, index):
        return self.x[index] + torch.rand(()).round(), self.y[index]


def test_random_augmentation_does_not_change_the_fingerprint():
    torch.manual_seed(0)
    wide = Augmented(X.repeat(8, 1, 1, 1), Y * 8)
    prints = {Samples(wide).fingerprint() for _ in range(5)}
    assert len(prints) == 1
    assert Samples(Augmented(X.repeat(8, 1, 1, 1), [0] * 48)).fingerprint() not in prints


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found(value):
    x = X.clone()
    x[4, 1, 2, 3] = value
    for form in ((x, Y), (x.numpy(), Y), Pairs(x), DataLoader(Pairs(x))):
        samples = Samples(form)
        assert torch.equal(samples.fetch(ALL[:4]), X[:4])
        with pytest.raises(ValueError, match=f"^sample 4 holds {value}; finite numbers are needed"):
            samples.fetch(SOME.flip(0))
        with pytest.raises(ValueError, match="sample 4 holds"):
            list(Batches(samples, ALL, 2, CPU))
    with pytest.raises(ValueError, match="sample 1 holds nan"):
        Inputs({"x": X, "age": torch.tensor([0, torch.nan, 0, 0, 0, 0])}).fetch(ALL)
    mask = torch.full((6, 2), -torch.inf)
    assert torch.equal(Inputs({"x": X, "mask": mask}).fetch(ALL)["mask"], mask)


def test_the_fingerprint_is_computed_once(tmp_path):
    pairs = Pairs()
    samples = Samples(pairs)
    first, read = samples.fingerprint(), pairs.read
    assert (samples.fingerprint(), pairs.read) == (first, read)
    some = samples.part(SOME)
    assert some.fingerprint() == Samples((X[SOME], [Y[index] for index in SOME])).fingerprint() != first
    assert some.part(ALL[:3]).fingerprint() == some.fingerprint()
