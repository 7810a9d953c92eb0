"""Every form in which data may be handed in, and a sentence for every form in which it may not."""

import collections

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, SubsetRandomSampler, TensorDataset, random_split

from dlcft.data.samples import Inputs, Samples
from tests.support.samples import ALL, SOME, Pairs, X, Y

SAME = {
    "tensors": lambda: (X, torch.tensor(Y)),
    "arrays": lambda: (X.numpy(), np.array(Y, dtype=np.int16)),
    "a list as pair": lambda: [X, Y],
    "float labels that are whole": lambda: (X, torch.tensor(Y, dtype=torch.float64)),
    "scalars of numpy and torch": lambda: (X, [np.int64(3), 7, torch.tensor(3), np.int8(-1), np.float32(7), 3]),
    "other byte order": lambda: (X.numpy().astype(">f4"), Y),
    "channels last": lambda: (X.permute(0, 2, 3, 1).numpy(), Y),
    "needs gradients": lambda: (X.clone().requires_grad_(), Y),
    "a list of tensors": lambda: (list(X), Y),
    "a list of lists": lambda: (X.tolist(), Y),
    "a list of pairs": lambda: [(x, y) for x, y in zip(X, Y, strict=True)],
    "a dict": lambda: {"x": X, "y": Y},
    "a dict of images": lambda: {"images": X.numpy(), "labels": np.array(Y)},
    "TensorDataset": lambda: TensorDataset(X, torch.tensor(Y)),
    "Dataset": lambda: Pairs(),
    "Dataset of arrays": lambda: Pairs(X.numpy(), np.array(Y)),
    "Dataset of dicts": lambda: DictPairs(),
    "Subset": lambda: Subset(Pairs(torch.cat([X, X]), [9] * 6 + Y), range(6, 12)),
    "ConcatDataset": lambda: ConcatDataset([Subset(Pairs(), [0, 1]), TensorDataset(X[2:], torch.tensor(Y[2:]))]),
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=4, shuffle=True, drop_last=True),
    "DataLoader of a list": lambda: DataLoader([(x, y) for x, y in zip(X, Y, strict=True)]),
    "DataLoader with a sampler of a subset": lambda: DataLoader(
        Pairs(torch.cat([X, X]), [9] * 6 + Y), sampler=SubsetRandomSampler(range(6, 12))
    ),
    "DataLoader with collate_fn": lambda: DataLoader(
        Pairs(X, [str(y) for y in Y]),
        collate_fn=lambda items: (torch.stack([x for x, _ in items]), [int(y) for _, y in items]),
    ),
}


class DictPairs(Pairs):
    def __getitem__(self, index):
        return {"image": self.x[index], "label": self.y[index]}


@pytest.mark.parametrize("form", SAME)
def test_every_form_gives_the_same_samples(form):
    samples = Samples(SAME[form]())
    assert len(samples) == 6
    assert samples.labels == Y
    assert {type(label) for label in samples.labels} == {int}
    fetched = samples.fetch(SOME)
    assert fetched.dtype == torch.float32
    assert not fetched.requires_grad
    assert torch.equal(fetched, X[SOME])
    assert torch.equal(samples.fetch(ALL), X)


def test_strings_as_labels():
    for names in (["b", "a"] * 3, np.array(["b", "a"] * 3), tuple(np.array(["b", "a"] * 3))):
        labels = Samples((X, names)).labels
        assert labels == ["b", "a"] * 3
        assert {type(label) for label in labels} == {str}


class Encoding(collections.UserDict):
    """What a tokeniser returns: a mapping that is no dict."""


def test_several_inputs():
    ids, mask = torch.arange(12).reshape(6, 2), torch.ones(6, 2, dtype=torch.bool)
    named = {"input_ids": ids, "attention_mask": mask.numpy()}
    forms = [
        (named, Y),
        (Encoding(named), Y),
        ({"input_ids": ids.tolist(), "attention_mask": mask}, Y),
        {**named, "labels": Y},
        Pairs([{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]),
        Pairs([{"input_ids": i, "attention_mask": m} for i, m in zip(ids.tolist(), mask, strict=True)]),
    ]
    for form in forms:
        samples = Samples(form)
        fetched = samples.fetch(SOME)
        assert samples.labels == Y
        assert fetched.keys() == named.keys()
        assert torch.equal(fetched["input_ids"], ids[SOME])
        assert torch.equal(fetched["attention_mask"], mask[SOME])
    for form in (
        ((X, ids), Y),
        Pairs(list(zip(X, ids, strict=True))),
        DataLoader(Pairs(list(zip(X, ids, strict=True)))),
    ):
        fetched = Samples(form).fetch(SOME)
        assert isinstance(fetched, tuple)
        assert torch.equal(fetched[0], X[SOME])
        assert torch.equal(fetched[1], ids[SOME])


def test_a_collate_function_may_pad():
    texts = Pairs([torch.arange(n + 1) for n in range(6)])

    def pad(items):
        ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return {"input_ids": ids, "labels": torch.tensor([y for _, y in items])}

    samples = Samples(DataLoader(texts, collate_fn=pad))
    assert samples.labels == Y
    assert samples.fetch(torch.tensor([0, 2]))["input_ids"].tolist() == [[0, 0, 0], [0, 1, 2]]
    inputs = Inputs(DataLoader(texts, collate_fn=pad))
    assert inputs.fetch(torch.tensor([1]))["input_ids"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("dataset", "reads"),
    [
        (Pairs(targets=Y), 2),
        (Pairs(targets=torch.tensor(Y)), 2),
        (Pairs(labels=np.array(Y)), 2),
        (Pairs(samples=[(f"{n}.png", y) for n, y in enumerate(Y)]), 2),
        (Pairs(targets=[0] * 6), 8),  # not those of its samples
        (Pairs(targets=["a", "b"]), 6),
        (Pairs(targets=Y, target_transform=lambda y: y), 6),
        (Pairs(), 6),
    ],
)
def test_labels_without_reading_inputs(dataset, reads):
    assert Samples(dataset).labels == Y
    assert dataset.read == reads
    dataset.read = 0
    part = random_split(dataset, [4, 2], generator=torch.Generator().manual_seed(0))[0]
    assert Samples(part).labels == [Y[index] for index in part.indices]
    assert dataset.read <= min(reads, 6)
