"""How a layer's rows are cut out of its input and output gradient."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Geometry:
    """A linear layer is a one-tap convolution over tokens."""

    groups: int
    channels: int  # input channels per group
    outputs: int  # output channels per group
    bias: bool
    kernel: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    padding: tuple[tuple[int, int], ...] = ((0, 0),)
    padding_mode: str = "constant"
    linear: bool = True

    @property
    def taps(self) -> int:
        return prod(self.kernel)

    @property
    def inputs(self) -> int:
        """Columns of a patch, without the bias."""
        return self.taps * self.channels

    @property
    def columns(self) -> int:
        return self.inputs + int(self.bias)

    def positions(self, x: Tensor) -> tuple[int, ...]:
        """Output positions of a channels-last input (N, *spatial, C)."""
        return tuple(
            (size + sum(pad) - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                x.shape[1:-1], self.padding, self.dilation, self.kernel, self.stride, strict=True
            )
        )


def geometry(layer: nn.Module) -> Geometry:
    """Return the geometry of a layer, or raise ValueError if it has no rows."""
    if isinstance(layer, nn.Linear):
        return Geometry(1, layer.in_features, layer.out_features, layer.bias is not None)
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        accepted = "Linear, Conv1d, Conv2d and Conv3d"
        raise ValueError(f"no per-sample rows for a layer of type {type(layer).__name__}; accepted are {accepted}")
    kernel, dilation = tuple(layer.kernel_size), tuple(layer.dilation)
    if layer.padding == "same":
        reaches = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        padding = tuple((reach // 2, reach - reach // 2) for reach in reaches)
    elif layer.padding == "valid":
        padding = tuple((0, 0) for _ in kernel)
    else:
        padding = tuple((int(pad), int(pad)) for pad in layer.padding)
    return Geometry(
        groups=layer.groups,
        channels=layer.in_channels // layer.groups,
        outputs=layer.out_channels // layer.groups,
        bias=layer.bias is not None,
        kernel=kernel,
        stride=tuple(layer.stride),
        dilation=dilation,
        padding=padding,
        padding_mode="constant" if layer.padding_mode == "zeros" else layer.padding_mode,
        linear=False,
    )


def channels_last(shape: Geometry, x: Tensor) -> Tensor:
    """Return an input or output gradient as (N, *spatial, C); tokens of a linear layer are one such axis."""
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if shape.linear:
        return x.reshape(x.shape[0], prod(x.shape[1:-1]), x.shape[-1])
    return x.movedim(1, -1)


def pad(shape: Geometry, x: Tensor) -> Tensor:
    """Pad a channels-last input as the layer does."""
    amounts = [amount for pair in reversed(shape.padding) for amount in pair]
    if not any(amounts):
        return x
    if shape.padding_mode == "constant":
        return F.pad(x, [0, 0, *amounts])
    return F.pad(x.movedim(-1, 1), amounts, mode=shape.padding_mode).movedim(1, -1)


def windows(shape: Geometry, padded: Tensor, first: int = 0) -> Tensor:
    """View a padded (N, *spatial, C) as (N, *positions, *kernel, C), sliding over axes from `first` on."""
    for axis in range(first, len(shape.kernel)):
        reach = shape.dilation[axis] * (shape.kernel[axis] - 1) + 1
        padded = padded.unfold(axis + 1, reach, shape.stride[axis])[..., :: shape.dilation[axis]]
    return padded.movedim(len(shape.kernel) + 1, -1)


def patch_rows(shape: Geometry, x: Tensor, bias: bool = True) -> Tensor:
    """Return rows (groups, n, S, K) with columns in (tap, channel) order, then the bias if there is one."""
    bias = bias and shape.bias
    source: Tensor = windows(shape, pad(shape, x)).unflatten(-1, (shape.groups, shape.channels)).movedim(-2, 0)
    positions = shape.positions(x)
    if shape.taps == 1 and not bias:
        return source.reshape(shape.groups, len(x), prod(positions), shape.channels)
    rows = x.new_empty(shape.groups, len(x), *positions, shape.inputs + int(bias))
    rows[..., : shape.inputs].unflatten(-1, (*shape.kernel, shape.channels)).copy_(source)
    if bias:
        rows[..., -1] = 1
    return rows.flatten(2, -2)


def gradient_rows(shape: Geometry, gradient: Tensor) -> Tensor:
    """Return the rows (groups, n, S, O) of a channels-last output gradient."""
    rows = gradient.reshape(len(gradient), prod(gradient.shape[1:-1]), shape.groups, shape.outputs)
    return rows.movedim(2, 0)


def weight_order(shape: Geometry, matrix: Tensor) -> Tensor:
    """Return the matrix (..., K) with its columns moved from (tap, channel) to (channel, tap) order."""
    if shape.taps == 1 or shape.channels == 1:
        return matrix
    result = torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device)
    source = matrix[..., : shape.inputs].unflatten(-1, (shape.taps, shape.channels))
    result[..., : shape.inputs].unflatten(-1, (shape.channels, shape.taps)).copy_(source.mT)
    result[..., shape.inputs :] = matrix[..., shape.inputs :]
    return result


def symmetric_weight_order(shape: Geometry, matrix: Tensor, result: Tensor) -> Tensor:
    """Fill `result` with the matrix (groups, K, K), its rows and columns moved to (channel, tap) order."""
    if shape.taps == 1 or shape.channels == 1:
        return result.copy_(matrix)
    size, by_tap, by_channel = shape.inputs, (shape.taps, shape.channels), (shape.channels, shape.taps)
    inner = result[:, :size, :size].unflatten(2, by_channel).unflatten(1, by_channel)
    inner.copy_(matrix[:, :size, :size].unflatten(2, by_tap).unflatten(1, by_tap).permute(0, 2, 1, 4, 3))
    result[:, :, size:] = weight_order(shape, matrix[:, :, size:].mT).mT
    result[:, size:, :size] = weight_order(shape, matrix[:, size:])[..., :size]
    return result


def tap_order(shape: Geometry, matrix: Tensor) -> Tensor:
    """Return the matrix (groups, K, K) with its rows moved from (channel, tap) to (tap, channel) order."""
    taps = matrix[:, : shape.inputs].unflatten(1, (shape.channels, shape.taps)).transpose(1, 2).flatten(1, 2)
    return torch.cat([taps, matrix[:, shape.inputs :]], 1)
