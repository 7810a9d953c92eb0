"""What a data set is once it was found: images, labels, class names, and how a network wants to see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dlcft.data.images import Preprocess, read_image


class ImageFiles(Dataset[Tensor]):
    """Image files, each decoded to uint8 (3 × H × W) when it is asked for.

    Args:
        paths: the files.
        size: height and width to stretch to while decoding; None keeps the file's own.
        crop: height and width of the window to keep from the centre then; None keeps all.
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
        return image if self.crop is None else _centre(image, self.crop, self.paths[index])

    def at(self, indices: Tensor) -> ImageFiles:
        """The files at these positions."""
        return ImageFiles([self.paths[index] for index in indices.tolist()], size=self.size, crop=self.crop)

    def decoded(self) -> Tensor:
        """All of them in memory, N × 3 × H × W.

        Raises:
            ValueError: when a file is broken, or files differ in size.
        """
        first = self[0]
        images = first.new_empty((len(self), *first.shape))
        for index in range(len(self)):
            image = self[index]
            if image.shape != first.shape:
                raise ValueError(
                    f"{self.paths[index]} has shape {tuple(image.shape)} and {self.paths[0]} has {tuple(first.shape)}; "
                    "one size is needed to hold them as one tensor."
                )
            images[index] = image
        return images


Pixels = Tensor | ImageFiles


class Labelled(Dataset[tuple[Tensor, int]]):
    """Image files with their labels, as `Learner` takes them; labels are listed without reading a file."""

    def __init__(self, files: ImageFiles, labels: Tensor) -> None:
        self.files, self.targets = files, labels.tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.files[index], self.targets[index]


class Parts(NamedTuple):
    """What a reader finds in files."""

    x_train: Pixels
    y_train: Tensor
    x_test: Pixels
    y_test: Tensor
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """A data set of labelled images.

    Args:
        name: what `load` knows it by.
        x_train: uint8, N × C × H × W, or files that are decoded when needed.
        y_train: positions in `classes`.
        x_test: as `x_train`.
        y_test: as `y_train`.
        classes: names.
        preprocess: size, mean, standard deviation and channels.
        augment: the usual one in training, as `dlcft.augment.Augmentation` takes it.

    Raises:
        ValueError: when a part is empty, images and labels differ in number, or a label has no class.
    """

    name: str
    x_train: Pixels
    y_train: Tensor
    x_test: Pixels
    y_test: Tensor
    classes: tuple[str, ...]
    preprocess: Preprocess
    augment: str = "none"

    def __post_init__(self) -> None:
        """Refuse parts that do not fit before anything is learned from them."""
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

    def train(self, indices: Tensor | None = None) -> tuple[Tensor, Tensor] | Labelled:
        """The training part, or some of it, as `Learner.learn` takes it."""
        return _pair(self.x_train, self.y_train, indices)

    def test(self, indices: Tensor | None = None) -> tuple[Tensor, Tensor] | Labelled:
        """The test part, or some of it, as `Learner.evaluate` takes it."""
        return _pair(self.x_test, self.y_test, indices)

    def decoded(self, size: tuple[int, int] | None = None) -> ImageSet:
        """The same with every image in memory; files of any size are stretched to `size`, if one is given."""
        train, test = (_decoded(x, size) for x in (self.x_train, self.x_test))
        return replace(self, x_train=train, x_test=test)


def _decoded(x: Pixels, size: tuple[int, int] | None) -> Tensor:
    if isinstance(x, Tensor):
        return x
    return (ImageFiles(x.paths, size=size) if x.size is None and x.crop is None else x).decoded()


def _pair(x: Pixels, y: Tensor, indices: Tensor | None) -> tuple[Tensor, Tensor] | Labelled:
    if isinstance(x, Tensor):
        return (x, y) if indices is None else (x[indices], y[indices])
    return Labelled(x, y) if indices is None else Labelled(x.at(indices), y[indices])


def _centre(image: Tensor, crop: tuple[int, int], path: Path) -> Tensor:
    spare = [have - want for have, want in zip(image.shape[1:], crop, strict=True)]
    if min(spare) < 0:
        raise ValueError(f"{path} has {tuple(image.shape[1:])} pixels; at least {crop} are needed to crop it.")
    top, left = (round(pixels / 2) for pixels in spare)
    return image[:, top : top + crop[0], left : left + crop[1]].contiguous()
