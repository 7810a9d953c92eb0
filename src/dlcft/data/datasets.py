"""Data sets and loaders of torch, torchvision and Hugging Face: where their inputs and labels are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, default_collate
from torch.utils.data.sampler import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from dlcft.data.images import Preprocess
from dlcft.data.labels import label_name, label_names
from dlcft.data.sources import Items, Source, Tokenizer

_LABEL_KEYS = ("label", "labels", "target", "targets", "y")
_INPUT_KEYS = (
    "data",
    "image",
    "images",
    "img",
    "input",
    "inputs",
    "text",
    "x",
)  # a single input of such a name is passed without it
_PASS = 64  # samples collated at a time when labels are collected


class Rows:
    """A `Dataset` or `IterableDataset` of Hugging Face, as (input, label) pairs; labels are the names in its features.

    The input is the column of images; with a tokenizer that of texts; or else all other columns, as a dict.

    Args:
        table: the data set.
        text: whether inputs are texts.
        labelled: whether it must have labels.

    Raises:
        ValueError: when it has no label column, or several.
    """

    def __init__(self, table: Any, *, text: bool, labelled: bool = True) -> None:
        self.table = table
        features = table.features
        if features is None:  # of a stream: a first row tells
            features = dict.fromkeys(next(iter(table)))
        kinds = {name: type(kind).__name__ for name, kind in features.items()}
        named = [name for name in kinds if name in _LABEL_KEYS]
        candidates = named or [name for name in kinds if kinds[name] == "ClassLabel"]
        if len(candidates) > 1 or (labelled and not candidates):
            found = f"the columns {', '.join(kinds)}"
            raise ValueError(f"a data set has {found}; rename one to label (rename_column), and remove other labels.")
        self.label = candidates[0] if candidates else None
        self.names: list[str] | None = getattr(features[self.label], "names", None) if self.label else None
        others = [name for name in kinds if name != self.label]
        images = [name for name in others if kinds[name] == "Image"]
        texts = [name for name in others if getattr(features[name], "dtype", None) == "string"]
        chosen = [name for name in texts if name == "text"] or texts if text else images
        known = [name for name in others if name in _INPUT_KEYS]
        alone = chosen if chosen else known if len(others) == 1 else []
        if len(alone) > 1:
            raise ValueError(f"a data set has the columns {', '.join(alone)}; keep one of them (select_columns).")
        self.inputs = alone[0] if alone else None
        if not others:
            raise ValueError(f"a data set has the column {self.label} alone; inputs are needed.")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.pair(self.table[index])

    def pair(self, row: Mapping[str, Any]) -> tuple[Any, Any]:
        """The input and the label of a row."""
        rest = {name: value for name, value in row.items() if name != self.label}
        label = None if self.label is None else self._name(row[self.label])
        return rest if self.inputs is None else rest[self.inputs], label

    @property
    def targets(self) -> list[Any]:
        """The label of each row."""
        return [self._name(value) for value in self.table[self.label]]

    def _name(self, value: Any) -> Any:
        number = None if self.names is None else label_name(value)
        if self.names is None or isinstance(number, str):
            return value
        if number is None or not 0 <= number < len(self.names):
            raise ValueError(f"a row has the label {number}; 0 to {len(self.names) - 1} are named. Remove it.")
        return self.names[number]


def is_table(data: Any) -> bool:
    """Whether it is a `Dataset` of Hugging Face; does not import that."""
    return type(data).__module__ == "datasets.arrow_dataset" and hasattr(data, "features")


def is_table_stream(data: Any) -> bool:
    """Whether it is an `IterableDataset` of Hugging Face."""
    return type(data).__module__ == "datasets.iterable_dataset" and hasattr(data, "features")


def is_pair(item: Any) -> bool:
    """Whether it is an (input, label) pair of one sample, not a batch of inputs with their labels."""
    if not isinstance(item, tuple) or len(item) != 2:
        return False
    label = item[1]
    return isinstance(label, int | float | str | np.generic) or (isinstance(label, Tensor) and label.dim() == 0)


def split_sample(item: Any) -> tuple[Any, Any]:
    """The input and the label of a sample, or of a batch."""
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    if isinstance(item, Mapping):
        keys = [key for key in item if key in _LABEL_KEYS]
        rest = {key: value for key, value in item.items() if key not in _LABEL_KEYS}
        if len(keys) == 1 and rest:
            alone = next(iter(rest))
            return rest[alone] if len(rest) == 1 and alone in _INPUT_KEYS else rest, item[keys[0]]
        raise ValueError(f"a dict has the keys {list(item)}; inputs and one of {', '.join(_LABEL_KEYS)} are needed.")
    length = f" of {len(item)}" if isinstance(item, tuple | list) else ""
    raise TypeError(f"a sample is a {type(item).__name__}{length}; pairs (input, label) are needed.")


def unlabelled(item: Any) -> tuple[Any, Any]:
    """As `split`, with None for a label that is not there."""
    if isinstance(item, tuple) and len(item) == 2 and item[1] is None:  # of `Rows`
        return item
    labelled = any(key in _LABEL_KEYS for key in item) if isinstance(item, Mapping) else is_pair(item)
    return split_sample(item) if labelled else (item, None)


def dataset_of(data: Any) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """The data set of a data set or loader, and the loader's collate function unless it is the default."""
    dataset, collate = (data.dataset, data.collate_fn) if isinstance(data, DataLoader) else (data, default_collate)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(
            f"data is a {type(dataset).__name__} without an index or a length; give a map-style Dataset, or read it "
            "into tensors (x, y), a list of (input, label) pairs or an .npz file."
        )
    if isinstance(data, DataLoader):
        dataset = _drawn(data)
    return dataset, None if collate is default_collate else collate


def _drawn(loader: DataLoader[Any]) -> Any:
    """The data set of a loader that draws every sample once."""
    dataset, sampler, by_batch = loader.dataset, loader.sampler, loader.batch_sampler
    if by_batch is None:
        raise ValueError("the DataLoader has batch_size=None and makes no batches; give its dataset.")
    if isinstance(sampler, SubsetRandomSampler):
        return Subset(dataset, list(sampler.indices))
    once = isinstance(sampler, SequentialSampler) or (isinstance(sampler, RandomSampler) and not sampler.replacement)
    if type(by_batch) is not BatchSampler or not once or len(sampler) != len(dataset):  # type: ignore[arg-type]
        kind = type(sampler if type(by_batch) is BatchSampler else by_batch).__name__
        raise ValueError(f"the DataLoader draws by a {kind}; give its dataset, or a Subset of it.")
    return dataset


def dataset_source(
    dataset: Any,
    collate: Callable[[list[Any]], Any] | None,
    preprocess: Preprocess,
    tokenizer: Tokenizer | None,
    parted: Callable[[Any], tuple[Any, Any]],
) -> Source:
    """The inputs of a data set; `parted` gives the input and the label of an item."""
    if collate is None:
        return Items(lambda index: parted(dataset[index])[0], len(dataset), preprocess, tokenizer=tokenizer)
    return Items(dataset.__getitem__, len(dataset), preprocess, collate=lambda items: parted(collate(items))[0])


def dataset_labels(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> list[Any]:
    """The labels of a data set; names where it has a list of `classes`, as those of torchvision have.

    The number of a class may be another one next month, when a folder has come to the others; its name is not.
    """
    return _named(dataset, _raw_labels(dataset, collate))


def _named(dataset: Any, labels: list[Any]) -> list[Any]:
    if isinstance(dataset, Subset):
        return _named(dataset.dataset, labels)
    if isinstance(dataset, ConcatDataset):
        ends = [0, *dataset.cumulative_sizes]
        parts = zip(dataset.datasets, itertools.pairwise(ends), strict=True)
        return [label for part, (start, end) in parts for label in _named(part, labels[start:end])]
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return labels
    plain = [label_name(label) for label in labels]
    if len(set(names)) < len(names) or not all(isinstance(label, int) and 0 <= label < len(names) for label in plain):
        return labels
    return [names[int(label)] for label in plain]


def _raw_labels(dataset: Any, collate: Callable[[list[Any]], Any] | None) -> list[Any]:
    """The listed labels if they agree with the first and last sample, else those that are read one by one."""
    if collate is not None:
        parts = [range(len(dataset))[start : start + _PASS] for start in range(0, len(dataset), _PASS)]
        return [label for part in parts for label in label_names(split_sample(collate([dataset[i] for i in part]))[1])]
    listed = _listed_labels(dataset)
    if listed:
        ends = sorted({0, len(dataset) - 1})
        if [label_name(listed[i]) for i in ends] == [label_name(split_sample(dataset[i])[1]) for i in ends]:
            return listed
    return [split_sample(dataset[index])[1] for index in range(len(dataset))]


def _listed_labels(dataset: Any) -> list[Any] | None:
    """The labels that a data set lists, found without reading its inputs; None if it lists none."""
    if isinstance(dataset, Subset):
        listed = _listed_labels(dataset.dataset)
        return None if listed is None else [listed[int(index)] for index in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [_listed_labels(part) for part in dataset.datasets]
        return None if any(part is None for part in parts) else [label for part in parts for label in part or ()]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return list(label_names(dataset.tensors[1]))
    if getattr(dataset, "target_transform", None) is not None:
        return None
    for listed in (getattr(dataset, name, None) for name in ("targets", "labels")):
        if isinstance(listed, Tensor | np.ndarray | list | tuple) and len(listed) == len(dataset) > 0:
            return list(listed)
    listed = getattr(dataset, "samples", None)
    if isinstance(listed, list) and len(listed) == len(dataset) > 0 and all(is_pair(sample) for sample in listed):
        return [label for _, label in listed]
    return None
