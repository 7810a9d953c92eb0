"""Arrays of pixels: MNIST's idx files, numpy's .npz, and the digits that scikit-learn carries."""

from __future__ import annotations

import gzip
import itertools
import math
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.bench.datasets.image_set import Absent, Array, Parts
from dlcft.data.decoding import decoding

_CHANNELS = (1, 3)
_KEYS = ("x_train", "y_train", "x_test", "y_test")


def digits() -> Parts:
    """1,797 real handwritten digits, resized to 32×32, grey, uint8; a third of them to test."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float()[:, None] * 255 / 16
    x = F.interpolate(x, size=32, mode="bilinear", align_corners=False).round().to(torch.uint8)
    y = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    test, train = order[: round(len(y) / 3)], order[round(len(y) / 3) :]
    return Parts(x[train], y[train], x[test], y[test], tuple("0123456789"))


@dataclass(frozen=True)
class Idx:
    """Reads MNIST's four files, compressed or not; `-` and `.` are both in use before `idx`."""

    classes: tuple[str, ...]

    def __call__(self, path: Path) -> Parts:
        kinds = (("train-images", 3), ("train-labels", 1), ("t10k-images", 3), ("t10k-labels", 1))
        files = [(_idx_file(path, name, axes), axes) for name, axes in kinds]
        x_train, y_train, x_test, y_test = (torch.from_numpy(_read_idx(file, axes)) for file, axes in files)
        return Parts(x_train[:, None], y_train.long(), x_test[:, None], y_test.long(), self.classes)


def _idx_file(folder: Path, name: str, axes: int) -> Path:
    for separator, ending in itertools.product("-.", ("", ".gz")):
        file = folder / f"{name}{separator}idx{axes}-ubyte{ending}"
        if file.is_file():
            return file
    raise Absent(f"{name}-idx{axes}-ubyte.gz")


def _read_idx(path: Path, axes: int) -> Array:
    with decoding(path, f"a whole idx file of {axes} axes is needed"):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        start = 4 + 4 * axes
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"it begins with {content[:4].hex() or 'nothing'}")
        shape = struct.unpack(f">{axes}I", content[4:start])
        if len(content) - start != math.prod(shape):
            raise ValueError(f"it has {len(content) - start} bytes for the shape {shape}")
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


def npz(path: Path) -> Parts:
    """An .npz file, or the only one in a folder, with x_train, y_train, x_test, y_test and maybe names as `classes`.

    Images are uint8, N × H × W, N × H × W × C or N × C × H × W; labels are integers from 0, or strings.
    """
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if len(files) != 1 or files[0].suffix.lower() != ".npz" or not files[0].is_file():
        raise Absent("an .npz file")
    with (
        decoding(files[0], f"give a file of np.savez with {', '.join(_KEYS)} (and classes)"),
        files[0].open("rb") as file,  # np.load leaves a broken file open
    ):
        if not zipfile.is_zipfile(file):
            raise ValueError("it is no zip file")
        with np.load(file, allow_pickle=False) as archive:
            missing = [key for key in _KEYS if key not in archive]
            if missing:
                raise ValueError(f"it has {', '.join(archive) or 'nothing'} and no {missing[0]}")
            x_train, y_train, x_test, y_test = (archive[key] for key in _KEYS)
            names = archive.get("classes")
        y_train, y_test, classes = _labels(y_train, y_test, names)
        return Parts(_images(x_train), y_train, _images(x_test), y_test, classes)


def _images(x: Array) -> Tensor:
    """N × C × H × W."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return torch.from_numpy(x)[:, None]
    if x.dtype != np.uint8 or x.ndim != 4 or (x.shape[1] in _CHANNELS) == (x.shape[3] in _CHANNELS):
        raise ValueError(f"its images are {x.dtype} of shape {x.shape}, not uint8 with 1 or 3 channels first or last")
    return torch.from_numpy(x if x.shape[1] in _CHANNELS else np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def _labels(train: Array, test: Array, names: Array | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    kinds = {y.dtype.kind for y in (train, test)}
    if any(y.ndim != 1 or not len(y) for y in (train, test)) or not (kinds <= {"i", "u"} or kinds == {"U"}):
        raise ValueError(f"its labels are {train.dtype} of shape {train.shape}, not a vector of integers or strings")
    if kinds == {"U"}:
        names = np.unique(train) if names is None else names.astype(str)
        index = {str(name): position for position, name in enumerate(names)}
        unknown = sorted({*train.tolist(), *test.tolist()} - set(index))
        if unknown:
            raise ValueError(f"the label {unknown[0]!r} is none of its classes")
        train, test = (np.array([index[name] for name in y.tolist()]) for y in (train, test))
    elif names is None:
        names = np.arange(int(train.max()) + 1)
    y_train, y_test = (torch.from_numpy(y.astype(np.int64)) for y in (train, test))
    return y_train, y_test, tuple(map(str, names.tolist()))
