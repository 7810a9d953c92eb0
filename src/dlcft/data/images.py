"""Images: read from files, and brought to one layout, scale, size and normalisation."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from dlcft.data.decoding import BROKEN, decoding
from dlcft.network.inputs import Input

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_WHOLE = f"give a whole one ({', '.join(EXTENSIONS)})"
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of others Pillow starts programs for some
_CHANNELS = (1, 3, 4)  # grey, colour, colour with transparency
_MODES = {"bilinear": "bilinear", "bicubic": "bicubic", "nearest": "nearest-exact"}
_PIXELS = 20.0  # floats above this are taken for 0 to 255, not 0 to 1
_LUMINANCE = (0.299, 0.587, 0.114)  # as Pillow turns colour into grey (ITU-R 601-2)


@dataclass(frozen=True)
class Preprocess:
    """How images are prepared for a network; saved with the learner and applied again to predict.

    Images of uint8 become float in [0, 1]; then channels, size and normalisation change, each only if set.

    Args:
        size: height and width that images are brought to (with antialiasing).
        mean: subtracted from the values; one number, or one a channel; with `std`.
        std: the values are divided by it then.
        interpolation: "bilinear", "bicubic" or "nearest".
        channels: 1 (grey) or 3 (colour).
        layout: "first" (N × C × H × W), "last" (N × H × W × C), or "auto": last if only the last axis can be one of
            1, 3 or 4 channels.
        resize: how to come to `size`: "stretch" takes the whole image and may change its proportions, "crop" keeps
            them and takes the largest part around the middle.

    Raises:
        ValueError: when a field is not as described.

    Example:
        >>> preprocess = Preprocess(size=(4, 4), mean=(0.5,), std=(0.25,), channels=3)
        >>> preprocess(torch.full((2, 8, 8, 1), 255, dtype=torch.uint8))[0, :, 0, 0].tolist()
        [2.0, 2.0, 2.0]
        >>> Preprocess.from_dict(preprocess.to_dict()) == preprocess
        True
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str = "bilinear"
    channels: int | None = None
    layout: str = "auto"
    resize: str = "stretch"

    def __post_init__(self) -> None:
        """Check the fields before any data is there."""
        for name in ("size", "mean", "std"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, tuple) and all(type(v) in (int, float) for v in value))):
                raise ValueError(f"{name} is {value!r}; it must be a tuple of numbers or None.")
        if self.size is not None and (len(self.size) != 2 or any(type(v) is not int or v < 1 for v in self.size)):
            raise ValueError(f"size is {self.size!r}; it must be two positive integers, height and width.")
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            given = f"mean is {self.mean!r} and std is {self.std!r}"
            raise ValueError(f"{given}; give both, of the same length, or neither.")
        if self.std is not None and not (self.std and all(0 < v < float("inf") for v in self.std)):
            raise ValueError(f"std is {self.std!r}; it must be positive finite numbers.")
        if self.interpolation not in _MODES:
            raise ValueError(f"interpolation is {self.interpolation!r}; it must be one of {', '.join(_MODES)}.")
        if self.channels not in (None, 1, 3):
            raise ValueError(f"channels is {self.channels!r}; it must be 1, 3 or None.")
        if self.layout not in ("auto", "first", "last"):
            raise ValueError(f"layout is {self.layout!r}; it must be 'auto', 'first' or 'last'.")
        if self.resize not in ("stretch", "crop"):
            raise ValueError(f"resize is {self.resize!r}; it must be 'stretch' or 'crop'.")

    def __call__(self, x: Input) -> Input:
        """A batch of inputs with its images prepared; other tensors stay as they are."""
        if not isinstance(x, Tensor):
            return tree_map(lambda t: self._prepared(t) if _is_image(t) else t, x)  # type: ignore[no-any-return]
        expects = self.size is not None or self.mean is not None or self.channels is not None
        if _is_image(x) or (expects and x.dim() == 3 and x.is_floating_point()):
            return self._prepared(x)
        if expects or x.dim() == 4:
            raise ValueError(f"x is {_described(x)}; images are N × C × H × W or N × H × W × C, of uint8 or float.")
        return x

    def resized(self, x: Tensor) -> Tensor:
        """Images N × C × H × W as floats, with `channels` channels and of size `size`."""
        images = x.float() / 255 if x.dtype == torch.uint8 else x
        images = _with_channels(images, self.channels)
        if self.size is None or tuple(images.shape[2:]) == self.size:
            return images
        if self.resize == "crop":
            images = _middle(images, self.size)
        smooth = self.interpolation != "nearest"
        images = F.interpolate(images, self.size, mode=_MODES[self.interpolation], antialias=smooth)
        return images.clamp(0, 1) if x.dtype == torch.uint8 else images  # bicubic overshoots

    def normalised(self, x: Tensor) -> Tensor:
        """`(x − mean) / std` by channel."""
        if self.mean is None or self.std is None:
            return x
        if len(self.mean) not in (1, x.shape[1]):
            raise ValueError(f"images have {x.shape[1]} channels and mean has {len(self.mean)} numbers; give as many.")
        mean, std = (torch.tensor(v, dtype=x.dtype, device=x.device)[:, None, None] for v in (self.mean, self.std))
        return (x - mean) / std

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Preprocess:
        """The inverse of `to_dict`."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in values if name not in known]
        if unknown:
            raise ValueError(f"unknown preprocessing {unknown[0]!r}; known: {', '.join(known)}.")
        plain: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
        return cls(**plain)

    def _prepared(self, x: Tensor) -> Tensor:
        if x.dim() == 3 and x.shape[2] in _CHANNELS:
            raise ValueError(f"x is {_described(x)}, which looks like one image; give a batch of images, x[None].")
        images = x[:, None] if x.dim() == 3 else _channels_first(x, self.layout)
        if images.dtype in (torch.float16, torch.bfloat16):  # of which a CPU cannot change the size
            images = images.float()
        return self.normalised(self.resized(images))


class UnitImages(Preprocess):
    """As `Preprocess`, for images that are normalised later by a mean in [0, 1]: rejects floats up to 255."""

    def resized(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and x.numel() and x.max() > _PIXELS:
            raise ValueError(f"images are floats up to {float(x.max()):.4g}; give floats in [0, 1], or uint8.")
        return super().resized(x)


def read_image(path: str | Path, channels: int | None = None) -> Tensor:
    """An image file as uint8, C × H × W, turned upright; in colour, or grey if `channels` is 1."""
    if not Path(path).is_file():  # opening a pipe would wait for ever
        raise ValueError(f"cannot read the image file {path} (it is no regular file); {_WHOLE}.")
    return decode_image(path, f"the image file {path}", channels)


def decode_image(file: str | Path | BinaryIO, name: str, channels: int | None = None) -> Tensor:
    """As `read_image`, from a file that may be open; messages have its name."""
    from PIL import Image, ImageOps

    with decoding(name, _WHOLE):
        try:
            Image.init()
            image = Image.open(file, formats=[name for name in _FORMATS if name in Image.OPEN])
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from error
        with image:
            if image.width * image.height > most_pixels():
                size = f"{image.width} × {image.height} pixels are more than {most_pixels():,}"
                raise ValueError(f"{size}, the limit that the environment variable DLCFT_MOST_PIXELS sets")
            try:
                upright = ImageOps.exif_transpose(image)
            except BROKEN:  # the pixels may be whole where the EXIF block is not
                upright = image
            return image_tensor(upright, "L" if channels == 1 else "RGB")


def most_pixels() -> int:
    """How many pixels an image file may have: `$DLCFT_MOST_PIXELS`, or 100 million. A small file may unpack to more.

    Pillow has a limit of its own, 178 million.
    """
    text = os.environ.get("DLCFT_MOST_PIXELS") or "100_000_000"
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"DLCFT_MOST_PIXELS is {text!r}; a whole number is needed.") from error


def image_tensor(image: Image, mode: str | None = None) -> Tensor:
    """A Pillow image as uint8, C × H × W, in mode "L" or "RGB"; by default only grey stays grey, others become RGB."""
    if image.mode in ("I", "F"):
        raise ValueError(f"an image of mode {image.mode!r} has pixels of 32 bits; 8 or 16 are accepted")
    if image.mode.startswith("I;16"):
        from PIL.Image import fromarray

        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))  # Pillow would cut at 255 instead
    pixels = np.array(image.convert(mode or ("L" if image.mode in ("1", "L") else "RGB")))
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def is_pillow_image(value: Any) -> bool:
    """Whether it is a Pillow image; does not import Pillow."""
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _is_image(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return False
    return x.dim() in (3, 4) if x.dtype == torch.uint8 else x.dim() == 4 and x.is_floating_point()


def _channels_first(x: Tensor, layout: str) -> Tensor:
    _, first, middle, last = x.shape
    if layout == "auto":
        if first in _CHANNELS and last in _CHANNELS and first == middle != last:
            given = f"x is {_described(x)}, whose channels may be first or last"
            raise ValueError(f"{given}; say Preprocess(layout='first' or 'last').")
        layout = "last" if first not in _CHANNELS and last in _CHANNELS and middle > last else "first"
    return x.permute(0, 3, 1, 2).contiguous() if layout == "last" else x


def _middle(x: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest part around the middle of images with the proportions of a size."""
    have, (height, width) = x.shape[2:], size
    part = min(have[0], max(1, round(have[1] * height / width))), min(have[1], max(1, round(have[0] * width / height)))
    top, left = ((whole - kept) // 2 for whole, kept in zip(have, part, strict=True))
    return x[:, :, top : top + part[0], left : left + part[1]]


def _with_channels(x: Tensor, channels: int | None) -> Tensor:
    have = x.shape[1]
    if channels is None or have == channels:
        return x
    if have == 1:
        return x.expand(-1, channels, -1, -1)
    if have not in _CHANNELS:
        raise ValueError(f"images have {have} channels, of which {channels} cannot be made; 1, 3 or 4 are accepted.")
    colour = x[:, :3]  # the fourth is transparency
    if channels == 3:
        return colour
    return (colour * torch.tensor(_LUMINANCE, dtype=x.dtype, device=x.device)[:, None, None]).sum(1, keepdim=True)


def _described(x: Tensor) -> str:
    return f"a {str(x.dtype).removeprefix('torch.')} tensor of shape {tuple(x.shape)}"
