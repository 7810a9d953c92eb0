"""The user's data in one form: inputs and labels with a length, fetched by index."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from dlcft.data.datasets import (
    Rows,
    dataset_labels,
    dataset_of,
    dataset_source,
    is_pair,
    is_table,
    split_sample,
    unlabelled,
)
from dlcft.data.files import read_labelled
from dlcft.data.images import Preprocess
from dlcft.data.labels import label_names
from dlcft.data.sources import ACCEPTED_X, Items, Part, Source, Tokenizer, fingerprint, make_source
from dlcft.network import workers
from dlcft.network.inputs import TOGETHER, Input

_READ = 1 << 25  # bytes of inputs that a bounded batch may have
_PASS = 64  # samples that are hashed at a time


class Inputs:
    """Inputs without labels, fetched in batches.

    Args:
        x: a tensor or array (also memory-mapped), or a tuple or dict of them; a list with one array, Pillow image or
            image file a sample; the path of a folder of images, an image, a .csv (column `path`), .npz or .npy file;
            or a `Dataset` or `DataLoader` of inputs or of (input, label) pairs.
        preprocess: prepares images; by default uint8 becomes float in [0, 1].
        tokenizer: turns a list of texts into a tensor or a dict of tensors; with it strings are texts, and a .csv has a
            column `text`.

    Raises:
        TypeError: when x is something else.
        ValueError: when x is empty, or its parts differ in length.

    Example:
        >>> inputs = Inputs(torch.full((2, 8, 8, 3), 255, dtype=torch.uint8))
        >>> inputs.fetch(torch.tensor([1])).shape
        torch.Size([1, 3, 8, 8])
    """

    def __init__(self, x: Any, *, preprocess: Preprocess | None = None, tokenizer: Tokenizer | None = None) -> None:
        preprocess = preprocess or Preprocess()
        if is_table(x):
            x = Rows(x, text=tokenizer is not None, labelled=False)
        if isinstance(x, Dataset | DataLoader | Rows):
            dataset, collate = dataset_of(x)
            self._source: Source = dataset_source(dataset, collate, preprocess, tokenizer, unlabelled)
        elif isinstance(x, Iterator):
            raise TypeError(f"x is a {type(x).__name__}, which can be read only once; give a list, {ACCEPTED_X}.")
        else:
            self._source = make_source(x, preprocess, tokenizer)
        if not len(self):
            raise ValueError("the data set is empty; at least one sample is needed.")

    def __len__(self) -> int:
        return len(self._source)

    def name(self, index: int) -> str:
        """The name of an input in a table: its file, its text, or its number."""
        return self._source.name(index)

    def fetch(self, indices: Tensor) -> Input:
        """The inputs at these positions.

        Raises:
            ValueError: when one cannot be read, has another shape, or holds a number that is not finite.
        """
        x = self._source.fetch(indices)
        for part in tree_leaves(x):
            if not part.is_floating_point():
                continue
            # where there are several inputs, one may be a mask of −inf
            broken = ~part.isfinite() if isinstance(x, Tensor) else part.isnan()
            if broken.any():
                position = int(broken.reshape(len(part), -1).any(1).nonzero()[0])
                value = float(part[position][broken[position]].flatten()[0])
                name = self._source.describe(int(indices[position]))
                raise ValueError(f"{name} holds {value}; finite numbers are needed.")
        return x


class Samples(Inputs):
    """Inputs with labels, fetched in batches.

    Args:
        data: a pair `(x, y)` with x as in `Inputs`; a dict with such a pair, or with labels among several inputs; a
            list of (input, label) pairs; a map-style `Dataset` or `DataLoader` of such pairs (or dicts); the path of a
            folder with one folder of images a class, of a .csv file with columns `path` and `label`, or of an .npz
            file with x and y (images and labels, data and targets). Labels are integers or strings; those of
            folders and .csv files are strings. Of a `DataLoader`, only the data set and `collate_fn` are used.
        preprocess: prepares images; by default uint8 becomes float in [0, 1].
        tokenizer: see `Inputs`.

    Raises:
        TypeError: when the data is something else.
        ValueError: when the data is empty, or inputs and labels differ in number.

    Example:
        >>> samples = Samples((torch.zeros(2, 5), ["cat", "dog"]))
        >>> len(samples), samples.labels
        (2, ['cat', 'dog'])
    """

    def __init__(self, data: Any, *, preprocess: Preprocess | None = None, tokenizer: Tokenizer | None = None) -> None:
        self._source, labels = _labelled(data, preprocess or Preprocess(), tokenizer)
        self.labels = label_names(labels)
        self._fingerprint: str | None = None
        if len(self._source) != len(self.labels):
            raise ValueError(f"there are {len(self._source)} inputs and {len(self.labels)} labels; give one for each.")
        if not self.labels:
            raise ValueError("the data set is empty; at least one sample is needed.")

    @classmethod
    def none(cls) -> Samples:
        """No samples: the share of a worker for which there are none."""
        nothing = cls((torch.zeros(1, 1), [0]))
        return nothing.part(torch.arange(0))

    def part(self, indices: Tensor) -> Samples:
        """The samples at these positions, which may repeat."""
        some = copy.copy(self)
        some._source, some.labels = Part(self._source, indices), [self.labels[index] for index in indices.tolist()]
        some._fingerprint = None
        return some

    def fingerprint(self) -> str:
        """A short hash of labels and inputs (see `sources.fingerprint`), to recognise the same data; computed once."""
        if self._fingerprint is None:
            text = json.dumps(self.labels) + fingerprint(self._source)
            self._fingerprint = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return self._fingerprint

    def hashes(self) -> Tensor:
        """A hash of each prepared input, to recognise single samples in whatever form they are given."""
        found = []
        for indices in torch.arange(len(self)).split(_PASS):
            leaves = tree_leaves(self.fetch(indices))
            for row in range(len(indices)):
                content = b"".join(
                    leaf[row].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for leaf in leaves
                )
                found.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True))
        return torch.tensor(found)


class Batches:
    """Samples and their label indices, batch by batch, in order; may be iterated repeatedly.

    Args:
        samples: the inputs.
        y: a label index for each.
        size: samples a batch.
        device: where batches go.
        dtype: of floats, if they are to be changed.
        own: whether other workers have other samples; otherwise all have the same, and each reads every n-th batch.
        span: the positions that are read; all by default.
        bounded: whether batches of large inputs are smaller than `size`, so that reading them takes little memory.
    """

    def __init__(
        self,
        samples: Inputs,
        y: Tensor,
        size: int,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        own: bool = False,
        span: range | None = None,
        bounded: bool = False,
    ) -> None:
        self.samples, self.y, self.size, self.device, self.dtype, self.own = samples, y, size, device, dtype, own
        self.span = range(len(y)) if span is None else span
        self.bounded = bounded and len(y) > TOGETHER
        self.told: Callable[[int], None] | None = None  # how many samples `of_worker` has given

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for indices in self._indices():
            yield self._read(indices)

    def of_worker(self) -> Iterator[tuple[Input, Tensor]]:
        """The batches that are this worker's to read."""
        parts = self._indices()
        for indices in parts if self.own else workers.share(parts):
            yield self._read(indices)
            if self.told is not None:
                self.told(len(indices))

    def with_gaps(self) -> Iterator[tuple[Input | None, Tensor]]:
        """All batches, without their inputs where another worker reads them; all are read if some worker has none."""
        parts, number = self._indices(), workers.count()
        for place, indices in enumerate(parts):
            if len(parts) < number or place % number == workers.place():
                yield self._read(indices)
            else:
                yield None, self.y[indices].to(self.device)

    def parts(self, samples: int) -> Iterator[Batches]:
        """The same batches in parts of about so many samples a worker, as many parts on every worker."""
        with workers.together():
            self._fit()
        length = max(1, samples // self.size) * self.size * (1 if self.own else workers.count())
        number = max(workers.gathered(-(-len(self.y) // length)))
        for start in range(0, number * length, length):
            span = range(min(start, len(self.y)), min(start + length, len(self.y)))
            kind: dict[str, Any] = {"dtype": self.dtype, "own": self.own, "span": span}
            yield Batches(self.samples, self.y, self.size, self.device, **kind)

    def _indices(self) -> tuple[Tensor, ...]:
        self._fit()
        return torch.arange(self.span.start, self.span.stop).split(self.size) if len(self.span) else ()

    def _fit(self) -> None:
        """Make bounded batches small enough, by a look at the first input."""
        if self.bounded:
            one = sum(leaf.nbytes for leaf in tree_leaves(self.samples.fetch(torch.tensor([0]))))
            fitting = _READ // max(1, one)
            self.size = min(self.size, max(TOGETHER, fitting - fitting % TOGETHER))
            self.bounded = False

    def _read(self, indices: Tensor) -> tuple[Input, Tensor]:
        x = to_device(self.samples.fetch(indices), self.device, dtype=self.dtype)
        return x, self.y[indices].to(self.device)


def to_device(x: Input, device: torch.device, *, dtype: torch.dtype | None = None) -> Input:
    """A batch on a device, with its floats in `dtype` if that is given."""

    def moved(part: Any) -> Any:
        if not isinstance(part, Tensor):
            return part
        return part.to(device, dtype if part.is_floating_point() else None)

    return tree_map(moved, x)  # type: ignore[no-any-return]


def _labelled(data: Any, preprocess: Preprocess, tokenizer: Tokenizer | None) -> tuple[Source, Any]:
    """The inputs and the raw labels."""
    if isinstance(data, str | Path):
        data = read_labelled(data, text=tokenizer is not None)
    elif isinstance(data, Mapping) and data and all(is_table(part) for part in data.values()):
        raise ValueError(f"data has the parts {', '.join(data)}; give one of them, data[{next(iter(data))!r}].")
    elif isinstance(data, Mapping):
        data = split_sample(data)
    elif isinstance(data, list) and len(data) and all(is_pair(item) for item in data):
        items = Items(lambda index: data[index][0], len(data), preprocess, tokenizer=tokenizer)
        return items, [label for _, label in data]
    if isinstance(data, tuple | list) and len(data) == 2:
        return make_source(data[0], preprocess, tokenizer), data[1]
    if is_table(data):
        data = Rows(data, text=tokenizer is not None)
    if isinstance(data, Dataset | DataLoader | Rows):
        dataset, collate = dataset_of(data)
        if collate is None and isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            return make_source(dataset.tensors[0], preprocess), dataset.tensors[1]
        return dataset_source(dataset, collate, preprocess, tokenizer, split_sample), dataset_labels(dataset, collate)
    once = ", which can be read only once" if isinstance(data, Iterator) else ""
    raise TypeError(
        f"data is a {type(data).__name__}{once}; give a pair (x, y) of tensors or arrays, a list of (input, label) "
        "tuples, a map-style Dataset or DataLoader, or the path of an image folder, .tar shards, a .csv or .npz file."
    )
