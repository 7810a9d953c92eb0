"""Random changes of image batches (N × C × H × W), drawn for each sample from a generator, on the batch's device."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Transform = Callable[[Tensor, torch.Generator], Tensor]

_TRIES = 10  # windows drawn for a resized crop before one is cut to fit, as torchvision does


def random_window(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """A `size` × `size` window of each image, every position equally likely."""
    if not 1 <= size <= min(x.shape[2:]):
        raise ValueError(f"cannot take a window of {size} pixels from images of {tuple(x.shape[2:])}.")
    return _windows(x, size, size, generator)


def random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad each side with `padding` zeros and crop to the old size; crop before normalising, so that zero is black."""
    return _windows(F.pad(x, (padding,) * 4), x.shape[2], x.shape[3], generator)


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half."""
    flipped = _uniform((len(x),), x, generator) < 0.5
    return torch.where(flipped[:, None, None, None], x.flip(-1), x)


def random_resized_crop(
    x: Tensor, size: int, scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """A random window of each image, resized to `size` × `size`, bilinear with antialiasing.

    Args:
        x: images.
        size: height and width of the result.
        scale: least and largest share of the area.
        ratio: least and largest width / height; uniform in its logarithm.
        generator: the source of randomness.
    """
    if size < 1:
        raise ValueError(f"cannot resize images to {size} pixels; at least 1 is needed.")
    top, left, height, width = _boxes(x, scale, ratio, generator)
    images = x if x.is_floating_point() else x.float()
    down = _resizing(top, height, x.shape[2], size).to(images.dtype)
    across = _resizing(left, width, x.shape[3], size).to(images.dtype)
    resized = down[:, None] @ images @ across[:, None].mT
    if x.is_floating_point():
        return resized
    return resized.round().clamp(0, 255).to(x.dtype)


_STEPS: dict[str, Callable[[str], Transform]] = {  # a pattern, and the step for the number in it
    r"flip()": lambda _: random_flip,
    r"crop(\d+)": lambda padding: lambda x, generator: random_crop(x, int(padding), generator),
    r"window(\d+)": lambda size: lambda x, generator: random_window(x, int(size), generator),
    r"resized-crop(\d*)": lambda size: (
        lambda x, generator: random_resized_crop(x, int(size or x.shape[2]), (0.08, 1.0), (3 / 4, 4 / 3), generator)
    ),
}
_ACCEPTED = "none, or joined by +: crop<padding>, flip, window<size>, resized-crop or resized-crop<size>"


@dataclass(frozen=True)
class Augmentation:
    """Augmentation by name: `none`, or steps joined by `+`, for example `crop4+flip` (the paper's for CIFAR-100).

    `crop4` pads by 4 zeros and crops; `flip` mirrors; `window224` takes a window (MIT-67); `resized-crop` takes one of
    area 0.08 to 1 and ratio 3/4 to 4/3 and resizes it to the old size, `resized-crop224` to 224 × 224.

    Raises:
        ValueError: when a step is unknown.

    Example:
        >>> augment = Augmentation("crop4+flip")
        >>> augment(torch.zeros(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    name: str = "none"

    def __post_init__(self) -> None:
        """Check the name before any data is there."""
        self._steps()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The changed images; x itself stays as it is."""
        for step in self._steps():
            if x.dim() != 4:
                raise ValueError(f"x has shape {tuple(x.shape)}; a batch of images (N × C × H × W) is needed.")
            x = step(x, generator)
        return x

    def _steps(self) -> list[Transform]:
        steps = []
        for word in [] if self.name == "none" else self.name.split("+"):
            found = [make(match[1]) for pattern, make in _STEPS.items() if (match := re.fullmatch(pattern, word))]
            if not found:
                raise ValueError(f"unknown augmentation {word!r} in {self.name!r}; accepted: {_ACCEPTED}.")
            steps += found
        return steps


def _uniform(shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in [0, 1), in float64 so that `⌊u·m⌋` is below m, on the device of x."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(x.device)


def _windows(x: Tensor, height: int, width: int, generator: torch.Generator) -> Tensor:
    positions = x.unfold(2, height, 1).unfold(3, width, 1)  # a view: N × C × tops × lefts × height × width
    uniform = _uniform((2, len(x)), x, generator)
    top, left = (uniform[0] * positions.shape[2]).long(), (uniform[1] * positions.shape[3]).long()
    return positions[torch.arange(len(x), device=x.device), :, top, left]


def _boxes(
    x: Tensor, scale: tuple[float, float], ratio: tuple[float, float], generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, height and width in pixels: the first try that fits, else the last cut to fit."""
    rows, columns = x.shape[2:]
    uniform = _uniform((2 * _TRIES + 2, len(x)), x, generator)
    area = rows * columns * (scale[0] + (scale[1] - scale[0]) * uniform[:_TRIES])
    logs = math.log(ratio[0]), math.log(ratio[1])
    aspect = (logs[0] + (logs[1] - logs[0]) * uniform[_TRIES:-2]).exp()
    heights, widths = (area / aspect).sqrt().round().long(), (area * aspect).sqrt().round().long()
    fits = (heights <= rows) & (widths <= columns) & (heights > 0) & (widths > 0)
    fits[-1] = True
    first = fits.int().argmax(0, keepdim=True)
    height = heights.gather(0, first)[0].clamp(1, rows)
    width = widths.gather(0, first)[0].clamp(1, columns)
    top = (uniform[-2] * (rows - height + 1)).long()
    left = (uniform[-1] * (columns - width + 1)).long()
    return top, left, height, width


def _resizing(start: Tensor, length: Tensor, pixels: int, size: int) -> Tensor:
    """Matrices (N × size × pixels) that resize pixels `start … start + length − 1`: a triangle around each centre."""
    step = (length.double() / size)[:, None, None]
    centre = start[:, None, None] + step * (torch.arange(size, device=start.device)[:, None] + 0.5)
    pixel = torch.arange(pixels, device=start.device)
    triangle = (1 - (pixel + 0.5 - centre).abs() / step.clamp(min=1)).clamp(min=0)
    inside = (pixel >= start[:, None]) & (pixel < (start + length)[:, None])
    triangle = triangle * inside[:, None, :]
    return triangle / triangle.sum(2, keepdim=True)
