"""CIFAR-10, CIFAR-100 and ImageNet32: pickled rows of 3 × 32 × 32 bytes."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlcft.bench.datasets.image_set import Absent, Array, Parts, first_with
from dlcft.bench.datasets.unpickle import read_pickle

_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Cifar:
    """Reads the official Python files, in their folder or in the archive they come in."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str  # the file of class names
    key: str  # of a label, in the singular

    def __call__(self, path: Path) -> Parts:
        wanted = (*self.train, self.test, self.meta)
        for folder in (path / self.folder, path):
            if all((folder / name).is_file() for name in wanted):
                return self._parts({name: _read(folder / name) for name in wanted}, folder)
        for archive in (path / self.archive, path):
            if archive.is_file() and archive.name == self.archive:
                return self._parts(_read_archive(archive, self.folder, wanted), archive)
        folder = path / self.folder if (path / self.folder).is_dir() else path
        missing = [name for name in wanted if not (folder / name).is_file()]
        raise Absent(self.folder if len(missing) == len(wanted) else f"{self.folder}/{missing[0]}")

    def _parts(self, files: dict[str, dict[str, Any]], place: Path) -> Parts:
        classes = files[self.meta].get(f"{self.key}_names")
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise ValueError(f"{place}/{self.meta} has no {self.key}_names; the official file has them.")
        train, test = (
            _joined(_images(files.pop(n), place / n, f"{self.key}s", range(len(classes))) for n in names)
            for names in (self.train, (self.test,))
        )
        return Parts(*train, *test, tuple(classes))


def imagenet32(path: Path) -> Parts:
    """ImageNet32: train_data_batch_1 … 10 and val_data, whose labels are 1 … 1000."""
    names, labels = [*(f"train_data_batch_{number}" for number in range(1, 11)), "val_data"], range(1, 1001)
    places = (path, path / "Imagenet32_train", path / "Imagenet32_val")
    files = [first_with(name, *places) / name for name in names]
    train, test = (
        _joined(_images(_read(file), file, "labels", labels) for file in some) for some in (files[:-1], files[-1:])
    )
    return Parts(*train, *test, tuple(map(str, labels)))


def _images(content: dict[str, Any], name: Path, key: str, labels: range) -> tuple[Array, Array]:
    """Images (N × 3 × 32 × 32) and labels, counted from 0, of one file."""
    rows, found = content.get("data"), content.get(key)
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != 3072:
        raise ValueError(f"{name} has no data of N × 3072 bytes; the official file has.")
    found = found.tolist() if isinstance(found, np.ndarray) else found
    if not isinstance(found, list) or len(found) != len(rows) or any(type(y) is not int for y in found):
        raise ValueError(f"{name} has no {key}, one integer for each of its {len(rows)} images.")
    wrong = [y for y in found if y not in labels]
    if wrong:
        raise ValueError(f"{name} has the label {wrong[0]}; labels are {labels[0]} to {labels[-1]}.")
    return rows.reshape(-1, *_SHAPE), np.array(found, dtype=np.int64) - labels.start


def _joined(parts: Iterable[tuple[Array, Array]]) -> tuple[Tensor, Tensor]:
    """Images and labels of several files as two tensors; each file's memory is given back as it is copied."""
    images, labels = (list(kind) for kind in zip(*parts, strict=True))
    x = torch.empty((sum(map(len, images)), *images[0].shape[1:]), dtype=torch.uint8)
    y, end = torch.from_numpy(np.concatenate(labels)), len(x)
    while images:
        rows = images.pop()
        x.numpy()[end - len(rows) : end] = rows
        end -= len(rows)
    return x, y


def _read(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return read_pickle(file, str(path))


def _read_archive(archive: Path, folder: str, wanted: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """In one pass, because going back in a compressed file means to start anew."""
    found = {}
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                file = tar.extractfile(member) if path.parent.name == folder and path.name in wanted else None
                if file is not None:
                    found[path.name] = read_pickle(file, f"{member.name} in {archive}")
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        raise ValueError(f"cannot read {archive} ({error}); give the whole official file.") from error
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{archive} has no {folder}/{missing[0]}; the official file has.")
    return found
