"""Samples that are read once, in order: iterators and iterable data sets, which may be larger than a disk."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from dlcft.data.datasets import Rows, is_table_stream, split_sample
from dlcft.data.images import Preprocess
from dlcft.data.labels import Label
from dlcft.data.samples import Samples, to_device
from dlcft.data.sources import Tokenizer
from dlcft.network import workers
from dlcft.network.inputs import Input


def is_stream(data: Any) -> bool:
    """Whether it can be read only once, or only in order."""
    if isinstance(data, DataLoader):
        data = data.dataset
    return isinstance(data, Iterator | IterableDataset) or is_table_stream(data)


class Stream:
    """The samples of an iterator of (input, label) pairs or dicts, or of an iterable data set.

    With several workers each takes every n-th sample, or of Hugging Face's `IterableDataset` its part of the files;
    with `shares` each has a stream of its own.

    Args:
        data: see `is_stream`. Of a `DataLoader` only the data set is used.
        preprocess: see `Samples`.
        tokenizer: see `Samples`.
        shares: whether other workers have other samples.

    Attributes:
        read: how many samples this worker has taken.
    """

    def __init__(self, data: Any, *, preprocess: Preprocess | None, tokenizer: Tokenizer | None, shares: bool) -> None:
        if isinstance(data, DataLoader):
            data = data.dataset
        self._options: dict[str, Any] = {"preprocess": preprocess, "tokenizer": tokenizer}
        self._pairs = _pairs(data, text=tokenizer is not None, shares=shares)
        self._ahead: deque[tuple[Any, Any]] = deque()
        self.read = 0

    def first(self, number: int) -> Samples:
        """The next samples, which stay in the stream."""
        self._ahead.extend(itertools.islice(self._pairs, max(0, number - len(self._ahead))))
        return self._samples(list(itertools.islice(self._ahead, number)))

    def take(self, number: int) -> Samples:
        """The next samples: fewer, or none, at the end."""
        samples = self._samples(list(self._taken(number)))
        self.read += len(samples)
        return samples

    def skip(self, number: int) -> int:
        """Pass over the next samples, and tell how many there were."""
        passed = sum(1 for _ in self._taken(number))
        self.read += passed
        return passed

    def ended(self) -> bool:
        """Whether nothing is left."""
        self._ahead.extend(itertools.islice(self._pairs, 0 if self._ahead else 1))
        return not self._ahead

    def _taken(self, number: int) -> Iterator[tuple[Any, Any]]:
        for _ in range(min(number, len(self._ahead))):
            number -= 1
            yield self._ahead.popleft()
        yield from itertools.islice(self._pairs, number)

    def _samples(self, pairs: list[tuple[Any, Any]]) -> Samples:
        if not pairs:
            return Samples.none()
        inputs, labels = [x for x, _ in pairs], [y for _, y in pairs]
        try:
            return Samples((inputs, labels), **self._options)
        except (TypeError, ValueError) as error:
            some = f"samples {self.read} to {self.read + len(pairs) - 1}"
            raise type(error)(f"in {some} of the stream: {error}") from error


class StreamBatches:
    """The batches of a stream, in parts; each part is read once.

    Args:
        stream: the samples.
        size: samples a batch.
        device: where batches go.
        dtype: of floats, if they are to be changed.

    Attributes:
        total: how many samples all workers have read.
    """

    def __init__(self, stream: Stream, size: int, device: torch.device, dtype: torch.dtype | None) -> None:
        self.stream, self.size, self.device, self.dtype = stream, size, device, dtype
        self.total = 0

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        return iter(StreamPart(self, sys.maxsize))

    def parts(self, samples: int) -> Iterator[StreamPart]:
        """Parts of so many samples a worker, until the streams of all workers have ended."""
        while True:
            with workers.together():
                ended = self.stream.ended()
            if all(workers.gathered(ended)):
                return
            part = StreamPart(self, samples)
            yield part
            self.total += sum(workers.gathered(part.samples))


class StreamPart:
    """Batches of a stream that were not read yet; their label indices count the part's own labels.

    Attributes:
        labels: those that were read, in the order of their indices.
        samples: how many were read.
    """

    def __init__(self, batches: StreamBatches, most: int) -> None:
        self._batches, self._most = batches, most
        self.labels: dict[Label, int] = {}
        self.samples = 0
        self.told: Callable[[int], None] | None = None  # how many samples were given

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        batches, stream = self._batches, self._batches.stream
        while self.samples < self._most:
            before = stream.read
            samples = stream.take(min(batches.size, self._most - self.samples))
            if not len(samples):
                return
            try:
                x = to_device(samples.fetch(torch.arange(len(samples))), batches.device, dtype=batches.dtype)
            except (TypeError, ValueError) as error:
                some = f"samples {before} to {before + len(samples) - 1}"
                raise type(error)(f"in {some} of the stream: {error}") from error
            self.samples += len(samples)
            y = [self.labels.setdefault(label, len(self.labels)) for label in samples.labels]
            yield x, torch.tensor(y, device=batches.device)
            if self.told is not None:
                self.told(len(samples))

    def skip(self) -> None:
        """Pass over the samples of this part."""
        self.samples = self._batches.stream.skip(self._most)


def _pairs(data: Any, *, text: bool, shares: bool) -> Iterator[tuple[Any, Any]]:
    """This worker's (input, label) pairs."""
    alone = shares or workers.count() == 1
    if is_table_stream(data):
        if not alone:
            from datasets.distributed import split_dataset_by_node

            data = split_dataset_by_node(data, rank=workers.place(), world_size=workers.count())
        rows = Rows(data, text=text)
        return (rows.pair(row) for row in data)
    mine = iter(data) if alone else itertools.islice(data, workers.place(), None, workers.count())
    return (split_sample(item) for item in mine)
