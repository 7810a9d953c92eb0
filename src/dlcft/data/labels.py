"""Labels: the user's names of classes, each with a fixed index."""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger("dlcft")
Label = int | str


def counted(labels: Sequence[Label], hits: Iterable[float]) -> dict[Label, tuple[int, int]]:
    """For each label, sorted by its name, how many of its samples are hits, and how many it has."""
    found: dict[Label, tuple[int, int]] = {}
    for label, hit in zip(labels, hits, strict=True):
        right, total = found.get(label, (0, 0))
        found[label] = right + int(hit), total + 1
    return {label: found[label] for label in sorted(found, key=str)}


class Labels:
    """Label names in a fixed order: the index of a label never changes, new ones are appended."""

    def __init__(self, names: Sequence[Label] = ()) -> None:
        self.names = list(names)
        self._index = {name: index for index, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)

    def unknown(self, labels: Sequence[Label]) -> list[Label]:
        """The labels without an index, sorted."""
        return sorted({label for label in labels if label not in self._index})

    def append(self, names: Sequence[Label]) -> Labels:
        """These labels with new ones appended."""
        return Labels(_one_kind([*self.names, *names]))

    def indices(self, labels: Sequence[Label]) -> Tensor:
        """The index of each label."""
        return torch.tensor([self._index[label] for label in labels], dtype=torch.long)


def label_names(labels: Any) -> list[Label]:
    """Labels as plain integers or plain strings, not both.

    Strings are brought to Unicode's composed form (NFC), so that one word in two spellings is one label; a log line
    tells when that changed something.
    """
    if isinstance(labels, str | bytes | Mapping) or not isinstance(labels, Iterable):
        raise TypeError(f"labels are a {type(labels).__name__}; a list, vector or array of them is needed.")
    if isinstance(labels, Tensor | np.ndarray):
        if labels.ndim != 1:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}; one label a sample is needed (of one-hot rows, y.argmax(1))."
            )
        labels = labels.tolist()
    given = list(labels)
    names = _one_kind([label_name(label) for label in given])
    other = {name for label, name in zip(given, names, strict=True) if isinstance(name, str) and name != str(label)}
    if other:
        log.warning("%d labels are read in Unicode's composed form (NFC), such as %r", len(other), min(other))
    return names


def label_name(value: Any) -> Label:
    """One label as a plain integer or string, in Unicode's composed form; see `label_names`."""
    if isinstance(value, Tensor | np.generic | np.ndarray):
        if value.ndim:
            raise ValueError(f"a label has shape {tuple(value.shape)}; an integer or a string is needed.")
        value = value.item()
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError(f"a label is {value}; an integer or a string is needed.")
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError(f"a label is {value!r} of type {type(value).__name__}; an integer or a string is needed.")
    if isinstance(value, int):
        return int(value)
    try:
        value.encode()  # the name of a folder may be of any bytes
    except UnicodeEncodeError as error:
        raise ValueError(f"a label is {value!r}, which UTF-8 cannot hold; rename it.") from error
    if any(unicodedata.category(character) == "Cc" for character in value):
        raise ValueError(f"a label is {value!r}, which has control characters; rename it.")
    return unicodedata.normalize("NFC", value)


def _one_kind(names: list[Label]) -> list[Label]:
    examples = {type(name): name for name in names}
    if not examples.keys() <= {int, str}:
        raise ValueError(f"labels are of the types {[kind.__name__ for kind in examples]}; integers or strings are.")
    if len(examples) > 1:
        both = f"labels are integers ({examples[int]!r}) and strings ({examples[str]!r})"
        raise ValueError(f"{both}; give one kind in everything that is learned (folders and .csv files have strings).")
    return names
