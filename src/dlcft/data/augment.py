"""Random changes of image batches (N×C×H×W), on their device, each sample its own, reproducible by a generator."""

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
    """A `size` × `size` window of each image, every position equally likely.

    Raises:
        ValueError: when x is not a batch of images at least as large.
    """
    _check_images(x)
    if not 1 <= size <= min(x.shape[2:]):
        raise ValueError(f"cannot take a window of {size} pixels from images of {tuple(x.shape[2:])}.")
    return _windows(x, size, size, generator)


def random_crop(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """Pad with `padding` zeros on each side (zeros of the values given: crop before normalising), crop to the old size.

    Raises:
        ValueError: when x is not a batch of images or the padding negative.
    """
    _check_images(x)
    if padding < 0:
        raise ValueError(f"padding is {padding}; it must not be negative.")
    return _windows(F.pad(x, (padding,) * 4), x.shape[2], x.shape[3], generator)


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Mirror each image left to right with probability one half.

    Raises:
        ValueError: when x is not a batch of images.
    """
    _check_images(x)
    flipped = _uniform((len(x),), x, generator) < 0.5
    return torch.where(flipped[:, None, None, None], x.flip(-1), x)


def random_resized_crop(
    x: Tensor,
    size: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    generator: torch.Generator,
) -> Tensor:
    """A window of random area and aspect ratio of each image, resized to `size` × `size`, bilinear with antialiasing.

    Args:
        x: images.
        size: of the result.
        scale: least and largest share of the area.
        ratio: least and largest width / height; uniform in its logarithm.
        generator: where draws come from.

    Raises:
        ValueError: when x is not a batch of images, the size not positive or a range not one of positive numbers.
    """
    _check_images(x)
    if size < 1 or not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise ValueError(
            f"size {size}, scale {scale}, ratio {ratio}: size must be at least 1, scale two rising numbers in (0, 1], "
            "ratio two rising positive numbers."
        )
    top, left, height, width = _boxes(x, scale, ratio, generator)
    images = x if x.is_floating_point() else x.float()
    down = _resizing(top, height, x.shape[2], size).to(images.dtype)
    across = _resizing(left, width, x.shape[3], size).to(images.dtype)
    resized = down[:, None] @ images @ across[:, None].mT
    if x.is_floating_point():
        return resized
    return resized.round().clamp(0, 255).to(x.dtype)


def compose(*transforms: Transform) -> Transform:
    """One after another, from left to right."""

    def composed(x: Tensor, generator: torch.Generator) -> Tensor:
        for transform in transforms:
            x = transform(x, generator)
        return x

    return composed


def _flip(number: int | None) -> Transform | None:
    return random_flip if number is None else None


def _crop(number: int | None) -> Transform | None:
    return None if number is None else lambda x, generator: random_crop(x, number, generator)


def _window(number: int | None) -> Transform | None:
    return None if number is None else lambda x, generator: random_window(x, number, generator)


def _resized_crop(number: int | None) -> Transform:
    return lambda x, generator: random_resized_crop(x, number or x.shape[2], (0.08, 1.0), (3 / 4, 4 / 3), generator)


STEPS: dict[str, Callable[[int | None], Transform | None]] = {
    "crop": _crop,
    "flip": _flip,
    "window": _window,
    "resized-crop": _resized_crop,
}
_ACCEPTED = "none, or joined by +: crop<padding>, flip, window<size>, resized-crop or resized-crop<size>"


@dataclass(frozen=True)
class Augmentation:
    """Augmentation by name: `none`, or steps joined by `+`, for example `crop4+flip` (the paper's for CIFAR-100).

    `crop4` pads by 4 zeros and crops, `flip` mirrors, `window224` takes a window (MIT-67), `resized-crop` (of area
    0.08 to 1 and ratio 3/4 to 4/3) keeps the size or, `resized-crop224`, changes it.

    Raises:
        ValueError: when a step is unknown.

    Example:
        >>> augment = Augmentation("crop4+flip")
        >>> augment(torch.zeros(2, 3, 32, 32), torch.Generator().manual_seed(0)).shape
        torch.Size([2, 3, 32, 32])
    """

    name: str = "none"

    def __post_init__(self) -> None:
        """Refuse unknown names before any data is there."""
        self._steps()

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A changed copy of x."""
        return compose(*self._steps())(x, generator)

    def _steps(self) -> list[Transform]:
        steps = []
        for word in [] if self.name == "none" else self.name.split("+"):
            match = re.fullmatch(r"([a-z-]+)(\d*)", word)
            make = STEPS.get(match[1]) if match else None
            step = make(int(match[2]) if match[2] else None) if make and match else None
            if step is None:
                raise ValueError(f"unknown augmentation {word!r} in {self.name!r}; accepted: {_ACCEPTED}.")
            steps.append(step)
        return steps


def _check_images(x: Tensor) -> None:
    if x.dim() != 4:
        raise ValueError(f"x has shape {tuple(x.shape)}; a batch of images (N × C × H × W) is needed.")


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
