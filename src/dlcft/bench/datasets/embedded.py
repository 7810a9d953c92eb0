"""The images that need no download: handwritten digits, which scikit-learn carries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.backbones import MEAN, STD
from dlcft.bench.datasets.image_set import Parts


@dataclass(frozen=True, eq=False)
class Images:
    """Training and test images (N×3×H×W, normalised) with their labels."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


def digits(rotation: float = 0.0, test_share: float = 1 / 3, seed: int = 0) -> Images:
    """1,797 real handwritten digits, brought to 32×32 and three channels, turned by `rotation` degrees."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float()[:, None] / 16
    x = rotated(F.interpolate(x, size=32, mode="bilinear", align_corners=False), rotation)
    x = (x.expand(-1, 3, -1, -1) - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1)
    y = torch.from_numpy(raw.target).long()
    train, test = _split(len(y), test_share, seed)
    return Images(x[train], y[train], x[test], y[test])


def digits_parts() -> Parts:
    """The same images, split alike: 32×32, grey, uint8."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.from_numpy(raw.images).float()[:, None] * 255 / 16
    x = F.interpolate(x, size=32, mode="bilinear", align_corners=False).round().to(torch.uint8)
    y = torch.from_numpy(raw.target).long()
    train, test = _split(len(y), 1 / 3, 0)
    return Parts(x[train], y[train], x[test], y[test], tuple("0123456789"))


def _split(count: int, test_share: float, seed: int) -> tuple[Tensor, Tensor]:
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    tests = round(test_share * count)
    return order[tests:], order[:tests]


def rotated(x: Tensor, degrees: float) -> Tensor:
    """Images turned about their centre, black where nothing was."""
    angle = torch.tensor(degrees).deg2rad()
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)
