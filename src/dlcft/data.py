"""What a user hands in, brought to one form: samples that can be counted and fetched by index."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset, default_collate

from dlcft.classifier import Input

Label = Hashable


class Samples:
    """Inputs and labels by name, fetched in batches.

    Args:
        data: a pair `(x, y)` of tensors or arrays (x may be a tuple or dict of them), or a map-style `Dataset` of
            such pairs.

    Raises:
        TypeError: when it is something else.
        ValueError: when it is empty, or inputs and labels do not fit.
    """

    def __init__(self, data: Any) -> None:
        self._x: Input | None = None
        self._dataset: Dataset[Any] | None = None
        if isinstance(data, tuple | list) and len(data) == 2:
            self._x = tree_map(_tensor, data[0])
            labels = data[1]
            self.labels = labels.tolist() if isinstance(labels, Tensor | np.ndarray) else list(labels)
            sizes = {len(leaf) for leaf in tree_leaves(self._x)}
            if sizes != {len(self.labels)}:
                raise ValueError(f"there are {sorted(sizes)} inputs and {len(self.labels)} labels.")
        elif isinstance(data, Dataset) and not isinstance(data, IterableDataset):
            self._dataset = data
            self.labels = [_label(data[index][1]) for index in range(len(data))]  # type: ignore[arg-type]
        else:
            raise TypeError(
                f"data is a {type(data).__name__}; give a pair (x, y) of tensors or arrays, or a map-style Dataset."
            )
        if not self.labels:
            raise ValueError("the data set is empty; at least one sample is needed.")

    def __len__(self) -> int:
        return len(self.labels)

    def fetch(self, indices: Tensor) -> Input:
        """The inputs at these positions."""
        if self._x is not None:
            return tree_map(lambda t: t[indices], self._x)  # type: ignore[no-any-return]
        assert self._dataset is not None
        collated: Input = default_collate([self._dataset[int(index)][0] for index in indices])
        return collated


class Batches:
    """Samples with label indices, batch by batch, in order and as often as asked for."""

    def __init__(self, samples: Samples, y: Tensor, size: int, device: torch.device) -> None:
        self.samples, self.y, self.size, self.device = samples, y, size, device

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for indices in torch.arange(len(self.samples)).split(self.size):
            yield to_device(self.samples.fetch(indices), self.device), self.y[indices].to(self.device)


class Labels:
    """Label names with a fixed index each: never renumbered, only appended to."""

    def __init__(self, names: Sequence[Label] = ()) -> None:
        self.names = list(names)
        self._index = {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def unknown(self, labels: Sequence[Label]) -> list[Label]:
        """Those that have no index yet, in order of appearance (sorted where they can be)."""
        new = list(dict.fromkeys(label for label in labels if label not in self._index))
        if all(isinstance(n, int) for n in new) or all(isinstance(n, str) for n in new):
            new.sort(key=lambda name: name)  # type: ignore[arg-type, return-value]
        return new

    def append(self, names: Sequence[Label]) -> Labels:
        """With new names behind the old ones."""
        return Labels([*self.names, *names])

    def indices(self, labels: Sequence[Label]) -> Tensor:
        """The index of each label."""
        return torch.tensor([self._index[label] for label in labels], dtype=torch.long)


def to_device(x: Input, device: torch.device) -> Input:
    """Every tensor of a batch on a device."""
    return tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, x)  # type: ignore[no-any-return]


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    raise TypeError(f"inputs hold a {type(value).__name__}; tensors or numpy arrays are needed.")


def _label(value: Any) -> Label:
    return value.item() if isinstance(value, Tensor | np.generic) else value
