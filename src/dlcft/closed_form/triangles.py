"""Symmetric matrices as their upper triangles: half the bytes on disk, and not a bit is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

SMALLEST = 128  # rows: a smaller matrix is not worth a piece a row
_BLOCK = 512  # rows that are compared or mirrored together


def is_symmetric(tensor: Tensor) -> bool:
    """Whether a matrix, or every one of a stack, is large and equals its transpose bit by bit.

    >>> is_symmetric(torch.eye(SMALLEST)), is_symmetric(torch.eye(SMALLEST).cumsum(0))
    (True, False)
    """
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}.get(tensor.dtype)
    square = tensor.dim() >= 2 and tensor.shape[-1] == tensor.shape[-2] >= SMALLEST
    if integers is None or not square or not tensor.numel():
        return False
    bits = tensor.detach().resolve_neg().view(integers)  # as floats, 0 would equal −0, and NaN not itself
    return all(
        torch.equal(bits[..., start : start + _BLOCK, start:], bits[..., start:, start : start + _BLOCK].mT)
        for start in range(0, bits.shape[-1], _BLOCK)
    )


def rows(tensor: Tensor) -> Iterator[Tensor]:
    """The upper triangle row by row, from the diagonal on: views, each of adjacent numbers."""
    for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
        for start in range(len(matrix)):
            yield matrix[start, start:]


def packed_shape(shape: torch.Size | list[int]) -> list[int]:
    """The shape of the triangles of matrices of this shape."""
    *stack, _, side = shape
    return [*stack, side * (side + 1) // 2]


def whole_shape(packed: list[int]) -> list[int]:
    """The inverse of `packed_shape`.

    Raises:
        ValueError: when no matrix has a triangle of so many numbers.
    """
    *stack, count = packed
    side = (math.isqrt(8 * count + 1) - 1) // 2
    if packed_shape([*stack, side, side]) != packed:
        raise ValueError(f"{count} numbers are not the triangle of a matrix.")
    return [*stack, side, side]


def mirror(tensor: Tensor) -> None:
    """Fill the lower triangle from the upper one, in place."""
    for start in range(0, tensor.shape[-1], _BLOCK):
        stop = start + _BLOCK
        tensor[..., stop:, start:stop] = tensor[..., start:stop, stop:].mT
        block = tensor[..., start:stop, start:stop]
        upper = torch.ones(block.shape[-2:], dtype=torch.bool, device=block.device).triu()
        block.copy_(block.where(upper, block.mT))
