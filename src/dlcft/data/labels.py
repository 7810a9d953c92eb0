"""Labels: names that a user gave, each with a fixed index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Label = int | str


class Labels:
    """Label names with a fixed index each: never renumbered, only appended to."""

    def __init__(self, names: Sequence[Label] = ()) -> None:
        self.names = list(names)
        self._index = {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def unknown(self, labels: Sequence[Label]) -> list[Label]:
        """Those that have no index yet, sorted."""
        return sorted({label for label in labels if label not in self._index})

    def append(self, names: Sequence[Label]) -> Labels:
        """With new names behind the old ones.

        Raises:
            ValueError: when integers and strings would be mixed.
        """
        return Labels(_one_kind([*self.names, *names]))

    def indices(self, labels: Sequence[Label]) -> Tensor:
        """The index of each label."""
        return torch.tensor([self._index[label] for label in labels], dtype=torch.long)


def label_names(labels: Any) -> list[Label]:
    """Labels as plain integers or plain strings.

    Raises:
        TypeError: when they are neither.
        ValueError: when they are no vector, not whole numbers, or of both kinds.
    """
    if isinstance(labels, str | bytes | Mapping) or not isinstance(labels, Iterable):
        raise TypeError(f"labels are a {type(labels).__name__}; a list, vector or array of them is needed.")
    if isinstance(labels, Tensor | np.ndarray):
        if labels.ndim != 1:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}; one label a sample is needed (of one-hot rows, y.argmax(1))."
            )
        labels = labels.tolist()
    return _one_kind([label_name(label) for label in labels])


def label_name(value: Any) -> Label:
    """One label as a plain integer or string; see `label_names`."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim:
        raise ValueError(f"a label has shape {tuple(value.shape)}; an integer or a string is needed.")
    if isinstance(value, Tensor | np.generic | np.ndarray):
        value = value.item()
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"a label is {value}; an integer or a string is needed.")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"a label is {value!r} of type {type(value).__name__}; an integer or a string is needed.")
    if isinstance(value, str) and not _is_text(value):
        raise ValueError(f"a label is {value!r}, which UTF-8 cannot hold; rename it.")
    return int(value) if isinstance(value, int) else str(value)


def _is_text(value: str) -> bool:
    """Whether it can be written in UTF-8: a folder's name may be of any bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _one_kind(names: list[Label]) -> list[Label]:
    examples = {type(name): name for name in names}
    if len(examples) > 1:
        raise ValueError(f"labels are integers ({examples[int]!r}) and strings ({examples[str]!r}); give one kind.")
    return names
