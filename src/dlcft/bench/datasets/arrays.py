"""Arrays of pixels in files: MNIST's idx files, and numpy's .npz."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dlcft.bench.datasets.download import Absent
from dlcft.bench.datasets.image_set import Parts

_CHANNELS = (1, 3)
_KEYS = ("x_train", "y_train", "x_test", "y_test")


@dataclass(frozen=True)
class Idx:
    """Finds and reads MNIST's four files, compressed or not; `-` and `.` are both in use before `idx`."""

    classes: tuple[str, ...]

    def __call__(self, path: Path) -> Callable[[], Parts]:
        """A function that reads what was found.

        Raises:
            Absent: when one is not there.
        """
        names = [
            (f"{part}-{kind}", axes) for part in ("train", "t10k") for kind, axes in (("images", 3), ("labels", 1))
        ]
        files = [(_idx_file(path, name, axes), axes) for name, axes in names]

        def read() -> Parts:
            x_train, y_train, x_test, y_test = (torch.from_numpy(_read_idx(file, axes)) for file, axes in files)
            return Parts(x_train[:, None], y_train.long(), x_test[:, None], y_test.long(), self.classes)

        return read


def npz(path: Path) -> Callable[[], Parts]:
    """Finds and reads an .npz file with x_train, y_train, x_test, y_test and, if it has them, names as `classes`.

    Images are uint8, N × H × W, N × H × W × C or N × C × H × W; labels are integers from 0, or strings.

    Raises:
        Absent: when there is no such file, nor just one in the folder.
    """
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if len(files) != 1 or files[0].suffix.lower() != ".npz" or not files[0].is_file():
        raise Absent("an .npz file")
    return lambda: _read_npz(files[0])


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of uint8 images, in [0, 1]."""
    values = torch.arange(256, dtype=torch.float64) / 255
    found = []
    for channel in range(x.shape[1]):
        share = torch.bincount(x[:, channel].flatten(), minlength=256) / x[:, channel].numel()
        mean = float((share * values).sum())
        found.append((round(mean, 4), round(math.sqrt(float((share * (values - mean) ** 2).sum())), 4)))
    mean_and_std = [tuple(kind) for kind in zip(*found, strict=True)]
    return mean_and_std[0], tuple(value or 1.0 for value in mean_and_std[1])  # a constant channel


def _idx_file(folder: Path, name: str, axes: int) -> Path:
    for separator in "-.":
        for ending in ("", ".gz"):
            file = folder / f"{name}{separator}idx{axes}-ubyte{ending}"
            if file.is_file():
                return file
    raise Absent(f"{name}-idx{axes}-ubyte.gz")


def _read_idx(path: Path, axes: int) -> np.ndarray[Any, Any]:
    content = path.read_bytes()
    try:
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        start = 4 + 4 * axes
        if content[:4] != bytes([0, 0, 8, axes]):
            raise ValueError(f"it begins with {content[:4].hex() or 'nothing'}")
        shape = struct.unpack(f">{axes}I", content[4:start])
        if len(content) - start != math.prod(shape):
            raise ValueError(f"it has {len(content) - start} bytes for the shape {shape}")
    except (OSError, EOFError, ValueError, zlib.error, struct.error) as error:
        raise ValueError(f"cannot read {path} ({error}); a whole idx file of {axes} axes is needed.") from error
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape)


def _read_npz(path: Path) -> Parts:
    try:
        with path.open("rb") as file:  # np.load leaves a broken file open
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
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"cannot read {path} ({error}); give what np.savez wrote of {', '.join(_KEYS)} (and classes)."
        ) from error


def _images(x: np.ndarray[Any, Any]) -> Tensor:
    """N × C × H × W."""
    if x.dtype == np.uint8 and x.ndim == 3:
        return torch.from_numpy(x)[:, None]
    if x.dtype != np.uint8 or x.ndim != 4 or (x.shape[1] in _CHANNELS) == (x.shape[3] in _CHANNELS):
        raise ValueError(f"its images are {x.dtype} of shape {x.shape}, not uint8 with 1 or 3 channels first or last")
    return torch.from_numpy(x if x.shape[1] in _CHANNELS else np.ascontiguousarray(x.transpose(0, 3, 1, 2)))


def _labels(
    train: np.ndarray[Any, Any], test: np.ndarray[Any, Any], names: np.ndarray[Any, Any] | None
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    kinds = {y.dtype.kind for y in (train, test)}
    if any(y.ndim != 1 or not len(y) for y in (train, test)) or not (kinds <= {"i", "u"} or kinds == {"U"}):
        raise ValueError(f"its labels are {train.dtype} of shape {train.shape}, not a vector of integers or strings")
    if kinds == {"U"}:
        known = np.unique(train) if names is None else names.astype(str)
        index = {str(name): position for position, name in enumerate(known.tolist())}
        unknown = sorted({*train.tolist(), *test.tolist()} - set(index))
        if unknown:
            raise ValueError(f"the label {unknown[0]!r} is none of its classes")
        train, test = (np.array([index[name] for name in y.tolist()]) for y in (train, test))
        return torch.from_numpy(train).long(), torch.from_numpy(test).long(), tuple(index)
    y_train, y_test = (torch.from_numpy(y.astype(np.int64)) for y in (train, test))
    if names is not None:
        return y_train, y_test, tuple(str(name) for name in names.tolist())
    return y_train, y_test, tuple(str(label) for label in range(int(y_train.max()) + 1))
