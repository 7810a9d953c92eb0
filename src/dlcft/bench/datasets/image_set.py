"""A data set that was found: images, labels, class names, and the preprocessing that a network expects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dlcft.data.images import Preprocess, read_image


class ImageFiles(Dataset[Tensor]):
    """Image files, each decoded to uint8 (3 × H × W) when it is asked for.

    With `size`, images are stretched to that height and width while decoding; with `crop`, a smaller window of that
    height and width is then kept from the centre.
    """

    def __init__(
        self, paths: Sequence[Path], *, size: tuple[int, int] | None = None, crop: tuple[int, int] | None = None
    ) -> None:
        self.paths, self.size, self.crop = list(paths), size, crop

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Tensor:
        image = read_image(self.paths[index], 3)
        if self.size is not None:
            resized = Preprocess(size=self.size).resized(image[None])[0]
            image = (255 * resized).round().to(torch.uint8)
        for axis, length in enumerate(self.crop or (), start=1):
            image = image.narrow(axis, round((image.shape[axis] - length) / 2), length)
        return image.contiguous()

    def decoded(self) -> Tensor:
        """All of them in memory, N × 3 × H × W; they must be of one size."""
        first = self[0]
        images = first.new_empty((len(self), *first.shape))
        for index, path in enumerate(self.paths):
            image = self[index]
            if image.shape != first.shape:
                raise ValueError(
                    f"{path} has shape {tuple(image.shape)} and {self.paths[0]} has {tuple(first.shape)}; "
                    "one size is needed to hold them as one tensor."
                )
            images[index] = image
        return images


Pixels = Tensor | ImageFiles
Array = np.ndarray[Any, Any]


class Parts(NamedTuple):
    """The content of a data set's files."""

    x_train: Pixels
    y_train: Tensor
    x_test: Pixels
    y_test: Tensor
    classes: tuple[str, ...]


class Absent(FileNotFoundError):
    """A data set is not where it was looked for; the text is the file that is missing."""


Read = Callable[[Path], Parts]
"""Reads a data set in a folder or file; raises `Absent`, before anything is read, if it is not there."""


def first_with(name: str, *folders: Path) -> Path:
    """The first of some folders that has this file or folder; `Absent` if none has."""
    for folder in folders:
        if (folder / name).exists():
            return folder
    raise Absent(name)


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set of labelled images; empty parts, other numbers of labels, or labels without a class are refused."""

    name: str  # in the catalogue
    x_train: Pixels  # uint8, N × C × H × W, or files that are decoded when needed
    y_train: Tensor  # positions in `classes`
    x_test: Pixels
    y_test: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess
    augment: str = "none"  # the usual one in training, as `Augmentation` takes it

    def __post_init__(self) -> None:
        for part, x, y in (("training", self.x_train, self.y_train), ("test", self.x_test, self.y_test)):
            if len(x) != len(y) or not len(y):
                raise ValueError(
                    f"{self.name} has {len(x)} {part} images and {len(y)} labels; as many are needed, and at least one."
                )
            if not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
                raise ValueError(
                    f"{self.name} has {part} labels from {int(y.min())} to {int(y.max())} and {len(self.classes)} "
                    "classes; labels count from 0."
                )

    def train(self) -> tuple[Tensor | list[Path], Tensor]:
        """The training part, as `Learner.learn` takes it."""
        return _pixels(self.x_train), self.y_train

    def test(self) -> tuple[Tensor | list[Path], Tensor]:
        """The test part, as `Learner.evaluate` takes it."""
        return _pixels(self.x_test), self.y_test

    def decoded(self, size: tuple[int, int] | None = None) -> ImageSet:
        """The same with every image in memory; files of any size are stretched to `size`, if one is given."""
        train, test = (
            x if isinstance(x, Tensor) else ImageFiles(x.paths, size=x.size or size, crop=x.crop).decoded()
            for x in (self.x_train, self.x_test)
        )
        return replace(self, x_train=train, x_test=test)


def moments(batches: Iterable[Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, of batches of images in [0, 1]; 1 for a constant channel."""
    count, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for batch in batches:
        x = batch.double()
        count += x.numel() // x.shape[1]
        total, squares = total + x.sum((0, 2, 3)), squares + x.square().sum((0, 2, 3))
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return tuple(round(v, 4) for v in mean.tolist()), tuple(round(v, 4) or 1.0 for v in std.tolist())


def _pixels(x: Pixels) -> Tensor | list[Path]:
    """Files that need no window are read by the learner, when they are needed."""
    if isinstance(x, Tensor):
        return x
    return x.paths if x.size is None else x.decoded()
