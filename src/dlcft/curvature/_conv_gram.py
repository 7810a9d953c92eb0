"""Input Gram of a 3x3 convolution without unfolding it.

The 81 blocks of Σ_s a aᵀ are, up to border pixels, autocorrelations of the image at 25 lags. A Fourier
transform gives all of them from one C x C product per frequency: (H+2)(W+2) C² multiplications per sample
in place of 81 HW C².
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.network.products import transposed_times

TAPS = 3
REACH = TAPS - 1  # largest distance between two pixels of one patch
LAGS = [(down, right) for down in range(-REACH, TAPS) for right in range(-REACH, TAPS)]


class SameConvolutionGram:
    """Running Σ_n w_n Σ_s a aᵀ of the 3x3 patches of zero-padded images, stride 1 and padding 1.

    With kernel taps t = (p, q) and t' = (p', q'), block (t, t') sums x[u] x[u + t' - t]ᵀ over the pixels u
    that tap t visits. Tap row 2 never visits image row 0 and tap row 0 never visits the last one, so

        block(t, t') = r(t' - t) - [row missed by p = p'] - [column missed by q = q'] + [the corner of both],

    with r the autocorrelation of the whole image: a missed row matters only at p = p', since at any other row
    distance its partner lies outside the image.

    With the transform X_f = r_f - i s_f of the image padded by the largest lag,
    M_f = Σ_n w_n (r(r + s)ᵀ + s(s - r)ᵀ) has the even part of the cross-spectrum as its symmetric and the odd
    part as its antisymmetric half, so B(d) = ½ mean_f (cos + sin)(ω_f d) M_f gives r(d) = B(d) + B(-d)ᵀ: two
    real products per frequency, not four.
    """

    def __init__(self, height: int, width: int, channels: int, like: Tensor) -> None:
        self.periods = height + REACH, width + REACH
        self.inner, self.outer = (matrix.to(like) for matrix in _transforms(height, width))
        # The transform of a real image at -f is the conjugate of that at f, so one of each pair is kept:
        # every column frequency in the first half of the rows, those not their own conjugate in the second.
        self.half = self.periods[0] // 2 + 1
        self.paired = slice(1, (self.periods[1] + 1) // 2)
        self.back = self._inverse().to(like)
        self.spectrum = like.new_zeros(self.back.shape[1], channels, channels)
        self.rows = like.new_zeros(2, TAPS, channels, channels)  # edge (last, first), distance
        self.columns = like.new_zeros(2, TAPS, channels, channels)
        self.corners = like.new_zeros(2, 2, channels, channels)

    def add(self, image: Tensor, weights: Tensor | None, chunk: int) -> None:
        """Add images (N, H, W, C) with weights (N,), transforming `chunk` of them at a time."""
        for start in range(0, len(image), chunk):
            part = slice(start, start + chunk)
            self._add_spectrum(image[part], None if weights is None else weights[part])
        for i, edge in enumerate((-1, 0)):
            _add_line(self.rows[i], image[:, edge], weights)
            _add_line(self.columns[i], image[:, :, edge], weights)
            for j, other in enumerate((-1, 0)):
                _add_product(self.corners[i, j], image[:, edge, other], _weighted(image[:, edge, other], weights))

    def result(self, out: Tensor, *, add: bool) -> None:
        """Write the Gram matrix (9C, 9C), its columns in the order of `weight.flatten(1)`, or add it to `out`."""
        channels = self.spectrum.shape[-1]
        blocks = (self.back @ self.spectrum.flatten(1)).view(len(LAGS), channels, channels)
        lags = {LAGS[i]: blocks[i] + blocks[-1 - i].T for i in range(len(LAGS) // 2, len(LAGS))}
        gram = out.unflatten(1, (channels, TAPS, TAPS)).unflatten(0, (channels, TAPS, TAPS))
        taps = [(p, q) for p in range(TAPS) for q in range(TAPS)]
        for first, (p, q) in enumerate(taps):
            for p_other, q_other in taps[first:]:
                down, right = p_other - p, q_other - q
                block = lags[(down, right)]
                row, column = down == 0 and p != 1, right == 0 and q != 1
                if row:
                    line = self.rows[p // 2]
                    block = block - (line[right] if right >= 0 else line[-right].T)
                if column:
                    block = block - self.columns[q // 2][down]
                if row and column:
                    block = block + self.corners[p // 2, q // 2]
                if (p_other, q_other) == (p, q):
                    block = symmetric(block)
                _put(gram[:, p, q, :, p_other, q_other], block, add)
                if (p_other, q_other) != (p, q):
                    _put(gram[:, p_other, q_other, :, p, q], block.T, add)

    def _add_spectrum(self, image: Tensor, weights: Tensor | None) -> None:
        samples, height, _, channels = image.shape
        across = torch.matmul(self.inner, image).view(samples, 2 * height, -1)
        both = torch.matmul(self.outer, across).view(samples, self.periods[0], 2, -1, channels)
        pieces = both[:, : self.half], both[:, self.half :, :, self.paired]
        left = torch.cat([piece.permute(1, 3, 2, 0, 4).flatten(0, 1) for piece in pieces])
        right = torch.empty_like(left)
        torch.add(left[:, 0], left[:, 1], out=right[:, 0])
        torch.sub(left[:, 1], left[:, 0], out=right[:, 1])
        if weights is not None:
            right *= weights[:, None]
        self.spectrum.baddbmm_(left.flatten(1, 2).mT, right.flatten(1, 2))

    def _inverse(self) -> Tensor:
        """Return the matrix (lags, frequencies) that turns the stacked M_f into B(d)."""
        height, width = self.periods
        down, right = torch.tensor(LAGS).T
        vertical, horizontal = torch.arange(height), torch.arange(width // 2 + 1)
        angle = _angles(vertical, down, height)[:, None] + _angles(horizontal, right, width)[None]
        own_conjugate = (2 * vertical % height == 0)[:, None] & (2 * horizontal % width == 0)[None]
        weight = 2.0 - own_conjugate.double()[..., None]
        terms = weight * (angle.cos() + angle.sin()) / (2 * height * width)
        kept = [terms[: self.half].flatten(0, 1), terms[self.half :, self.paired].flatten(0, 1)]
        return torch.cat(kept).T


def symmetric(matrix: Tensor) -> Tensor:
    """The mean of a matrix and its transpose, which differ by rounding; a file keeps half of it."""
    return (matrix + matrix.mT).div_(2)


def _put(place: Tensor, block: Tensor, add: bool) -> None:
    if add:
        place += block
    else:
        place.copy_(block)


def _weighted(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows if weights is None else rows * weights.view(-1, *[1] * (rows.dim() - 1))


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    channels = total.shape[-1]
    total += transposed_times(*(rows.reshape(-1, channels).contiguous() for rows in (left, right)))


def _add_line(total: Tensor, line: Tensor, weights: Tensor | None) -> None:
    """Add Σ_n w_n Σ_v x[v] x[v + d]ᵀ of lines (N, L, C) to total[d], as one product with all of the shifted lines."""
    channels = line.shape[-1]
    shifted = F.pad(_weighted(line, weights), (0, 0, 0, REACH)).unfold(1, TAPS, 1).mT.reshape(-1, TAPS * channels)
    products = transposed_times(line.reshape(-1, channels).contiguous(), shifted)
    total += products.unflatten(1, (TAPS, channels)).movedim(1, 0)


def _transforms(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the matrices of the Fourier transform along the width (2Q, W), then along the height (2P, 2H).

    The second one interleaves cosine and sine parts, so that no transpose stands between the two.
    """
    period = width + REACH
    angle = _angles(torch.arange(period // 2 + 1), torch.arange(width), period)
    inner = torch.cat([angle.cos(), angle.sin()])
    period = height + REACH
    angle = _angles(torch.arange(period), torch.arange(height), period)
    cosine, sine = angle.cos(), angle.sin()
    rows = [torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)]
    outer = torch.stack(rows, 1).reshape(2 * period, 2 * height)
    return inner, outer


def _angles(frequency: Tensor, position: Tensor, period: int) -> Tensor:
    return (2 * math.pi / period) * torch.outer(frequency.double(), position.double())
