"""Sums over samples and positions from which curvature factors are made.

For sample n, group q and position s, a layer has the row `a` (its input patch in the order of
`weight.flatten(1)`, then 1 if it has a bias; K columns in all) and the row `g` (the gradient at its output; O
columns). Its per-sample gradient is D_n = Σ_s g_s a_sᵀ (O x K) per group.

Every function takes a linear or convolutional `layer` and one tensor for each use of it in a forward pass: `xs`, its
inputs (N, ..., in_features) or (N, C, *spatial), and `gs`, the gradients at its outputs. S is the number of positions
of all uses together, and D_n sums over uses. Weights are (N, groups), or None for ones.

Results are plain sums over the samples, so results of several batches may be added. `InputGram` and `GradientGrams`
add batches in an inner layout and convert the sum once, which is cheaper. Half precision is computed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor, nn

from dlcft.curvature._conv_gram import REACH, SameConvolutionGram
from dlcft.curvature._geometry import (
    Geometry,
    channels_last,
    geometry,
    gradient_rows,
    pad,
    patch_rows,
    symmetric_weight_order,
    tap_order,
    weight_order,
    windows,
)

Layer = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

# Most numbers in temporaries at once: larger chunks cost page faults, smaller ones make short products.
CHUNK_FLOATS = 1 << 23
# Most numbers in the spectral Gram of an image; larger images, or more channels, are unfolded instead.
SPECTRUM_FLOATS = 1 << 25
# A symmetric product computes its upper triangle in about this many block rows, of a multiple of this width.
SYMMETRIC_BLOCKS = 8
SYMMETRIC_WIDTH = 288


class InputGram:
    """Running Σ_n w_n Σ_s a aᵀ of one layer over batches, the sum behind the K-FAC factor A."""

    def __init__(self, layer: Layer) -> None:
        self.shape = geometry(layer)
        self.spectral: dict[tuple[int, ...], SameConvolutionGram] = {}  # by image shape
        self.unfolded: Tensor | None = None  # (tap, channel) order, upper triangle
        self.sums: Tensor | None = None  # Σ_n w_n Σ_s a, in (tap, channel) order
        self.count: Tensor | None = None  # Σ_n w_n S

    def add(self, xs: Sequence[Tensor], weights: Tensor | None = None) -> None:
        for x in xs:
            image = channels_last(self.shape, x)
            weights = None if weights is None else weights.to(image)
            if _has_spectral_gram(self.shape, image):
                self._add_spectral(image, weights)
            else:
                self._add_unfolded(image, weights)
            if self.shape.bias:
                self._add_sums(image, weights)

    def result(self) -> Tensor:
        """Return the Gram matrices (groups, K, K) of all batches added."""
        grams = [gram.result()[None] for gram in self.spectral.values()]
        if self.unfolded is not None:
            grams.append(symmetric_weight_order(self.shape, _mirrored(self.unfolded.clone())))
        gram = functools.reduce(Tensor.add_, grams)
        if self.sums is None or self.count is None:
            return gram
        bordered = gram.new_empty(len(gram), self.shape.columns, self.shape.columns)
        bordered[:, :-1, :-1] = gram
        bordered[:, :-1, -1] = bordered[:, -1, :-1] = weight_order(self.shape, self.sums)
        bordered[:, -1, -1] = self.count
        return bordered

    def _add_spectral(self, image: Tensor, weights: Tensor | None) -> None:
        size = (image.shape[1], image.shape[2], image.shape[3])
        if size not in self.spectral:
            self.spectral[size] = SameConvolutionGram(*size, like=image)
        chunk = max(1, CHUNK_FLOATS // (2 * prod(size)))
        self.spectral[size].add(image, None if weights is None else weights[:, 0], chunk)

    def _add_unfolded(self, image: Tensor, weights: Tensor | None) -> None:
        shape = self.shape
        if self.unfolded is None:
            self.unfolded = image.new_zeros(shape.groups, shape.inputs, shape.inputs)
        for part in _chunks(len(image), shape.groups * shape.inputs * prod(shape.positions(image))):
            rows = patch_rows(shape, image[part], bias=False)
            weighted = rows if weights is None else rows * weights[part].T[:, :, None, None]
            _add_symmetric(self.unfolded, rows.flatten(1, 2), weighted.flatten(1, 2))

    def _add_sums(self, image: Tensor, weights: Tensor | None) -> None:
        # Patches are linear in the image, so the patches of the summed image give the sum of all patches.
        if weights is None:
            weights = image.new_ones(len(image), self.shape.groups)
        per_channel = weights.repeat_interleave(self.shape.channels, 1)
        summed = torch.einsum("n...c,nc->...c", image, per_channel)[None]
        sums = patch_rows(self.shape, summed, bias=False).sum((1, 2))
        count = weights.sum(0) * prod(self.shape.positions(image))
        self.sums = sums if self.sums is None else self.sums + sums
        self.count = count if self.count is None else self.count + count


def output_gram(layer: Layer, gs: Sequence[Tensor], weights: Tensor | None = None) -> Tensor:
    """Return Σ_n w_n (1/S) Σ_s g gᵀ, the sum behind the K-FAC factor G, (groups, O, O)."""
    shape = geometry(layer)
    gradients = [channels_last(shape, g) for g in gs]
    total = gradients[0].new_zeros(shape.groups, shape.outputs, shape.outputs)
    for gradient in gradients:
        for part in _chunks(len(gradient), gradient[:1].numel()):
            rows = gradient_rows(shape, gradient[part])
            weighted = rows if weights is None else rows * weights[part].to(rows).T[:, :, None, None]
            _add_symmetric(total, rows.flatten(1, 2), weighted.flatten(1, 2))
    return _mirrored(total).div_(sum(prod(gradient.shape[1:-1]) for gradient in gradients))


def input_traces(layer: Layer, xs: Sequence[Tensor]) -> Tensor:
    """Return tr Λ_n = Σ_s ‖a‖² per sample, (N, groups)."""
    shape = geometry(layer)
    traces = []
    for x in xs:
        image = channels_last(shape, x)
        visited = windows(shape, pad(shape, _row_squares(shape.groups, image)))
        traces.append(visited.flatten(1, -2).sum(1) + int(shape.bias) * prod(shape.positions(image)))
    return torch.stack(traces).sum(0)


def output_traces(layer: Layer, gs: Sequence[Tensor]) -> Tensor:
    """Return tr Γ_n = (1/S) Σ_s ‖g‖² per sample, (N, groups)."""
    shape = geometry(layer)
    squares = [_row_squares(shape.groups, channels_last(shape, g)).flatten(1, -2) for g in gs]
    return torch.cat(squares, 1).mean(1)


class GradientGrams:
    """Running Φ = Σ_n D_nᵀ D_n, Ψ = Σ_n D_n D_nᵀ and δ = Σ_n ‖D_n‖² of one layer: its block's partial traces.

    D_n has rank at most S, so with the rows A_n (S x K) and G_n (S x O) one may also contract over positions:
    Φ = Σ_n A_nᵀ (G_n G_nᵀ) A_n and Ψ = Σ_n G_nᵀ (A_n A_nᵀ) G_n. The cheaper way is taken.
    """

    def __init__(self, layer: Layer) -> None:
        self.shape = geometry(layer)
        self.phi: Tensor | None = None  # (tap, channel) order, upper triangle
        self.psi: Tensor | None = None

    def add(self, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> None:
        shape = self.shape
        images, gradients, positions = _pairs(shape, xs, gs)
        columns, outputs = shape.columns, shape.outputs
        if self.phi is None or self.psi is None:
            self.phi = images[0].new_zeros(shape.groups, columns, columns)
            self.psi = images[0].new_zeros(shape.groups, outputs, outputs)
        by_gradient = outputs * columns * (positions + columns / 2 + outputs)
        by_position = positions * (columns**2 / 2 + outputs**2 + 2 * positions * (columns + outputs))
        if by_gradient < by_position:
            for part in _chunks(len(images[0]), shape.groups * columns * (outputs + positions // shape.kernel[0])):
                d = _sample_gradients(shape, images, gradients, part)
                _add_symmetric(self.phi, d.flatten(1, 2), d.flatten(1, 2))
                self.psi += (d @ d.mT).sum(1)
        else:
            for part in _chunks(len(images[0]), shape.groups * 2 * positions * columns):
                a = _join([patch_rows(shape, x[part]) for x in images])
                g = _join([gradient_rows(shape, x[part]) for x in gradients])
                _add_symmetric(self.phi, a.flatten(1, 2), _mix(g @ g.mT, a).flatten(1, 2))
                self.psi.baddbmm_(g.flatten(1, 2).mT, _mix(a @ a.mT, g).flatten(1, 2))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Φ (groups, K, K), Ψ (groups, O, O) and δ (groups,) of all batches added."""
        assert self.phi is not None
        assert self.psi is not None
        phi = symmetric_weight_order(self.shape, _mirrored(self.phi.clone()))
        return phi, self.psi.clone(), self.psi.diagonal(dim1=-2, dim2=-1).sum(-1)


def per_sample_gradients(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
    """Return D_n = Σ_s g_s a_sᵀ for every sample, (N, groups, O, K)."""
    shape = geometry(layer)
    images, gradients, _ = _pairs(shape, xs, gs)
    return weight_order(shape, _sample_gradients(shape, images, gradients, slice(None))).transpose(0, 1)


def squared_gradient(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
    """Return Σ_n D_n ∘ D_n, the sum behind the diagonal Fisher, (groups, O, K)."""
    shape = geometry(layer)
    images, gradients, positions = _pairs(shape, xs, gs)
    total = images[0].new_zeros(shape.groups, shape.outputs, shape.columns)
    for part in _chunks(len(images[0]), shape.groups * shape.columns * (shape.outputs + positions)):
        if positions == 1:
            a, g = patch_rows(shape, images[0][part]), gradient_rows(shape, gradients[0][part])
            total += g[:, :, 0].square().mT @ a[:, :, 0].square()
        else:
            total += _sample_gradients(shape, images, gradients, part).square_().sum(1)
    return weight_order(shape, total)


def gradient_norms(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
    """Return ‖D_n‖² per sample and group, (N, groups): from D_n, or as ⟨G_n G_nᵀ, A_n A_nᵀ⟩, whichever is cheaper."""
    shape = geometry(layer)
    images, gradients, positions = _pairs(shape, xs, gs)
    by_gradient, by_position = shape.outputs * shape.columns, positions * (shape.outputs + shape.columns)
    floats = shape.groups * shape.columns * (shape.outputs + positions)
    found = []
    for part in _chunks(len(images[0]), floats):
        if by_gradient < by_position:
            found.append(_sample_gradients(shape, images, gradients, part).square_().sum((2, 3)))
        else:
            a = _join([patch_rows(shape, x[part]) for x in images])
            g = _join([gradient_rows(shape, x[part]) for x in gradients])
            found.append(((g @ g.mT) * (a @ a.mT)).sum((2, 3)))
    return torch.cat(found, 1).mT


def rotated_squares(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Return Σ_n (Uᵀ D_n V) ∘ (Uᵀ D_n V), the sum behind the EK-FAC eigenvalues, (groups, O, K).

    `left` is the rotation U (groups, O, O) of the outputs, `right` the rotation V (groups, K, K) of the columns of `a`.
    """
    shape = geometry(layer)
    images, gradients, positions = _pairs(shape, xs, gs)
    total = images[0].new_zeros(shape.groups, shape.outputs, shape.columns)
    left, right = left.to(total), tap_order(shape, right.to(total))
    for part in _chunks(len(images[0]), 2 * shape.groups * shape.columns * (shape.outputs + positions)):
        if positions < shape.outputs:
            a = _join([patch_rows(shape, x[part]) for x in images])
            g = _join([gradient_rows(shape, x[part]) for x in gradients]) @ left[:, None]
            d = g.mT @ (a.flatten(1, 2) @ right).view_as(a)
        else:
            d = _sample_gradients(shape, images, gradients, part)
            d = left[:, None].mT @ (d.flatten(1, 2) @ right).view_as(d)
        total += d.square_().sum(1)
    return total


def _pairs(shape: Geometry, xs: Sequence[Tensor], gs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], int]:
    """Return inputs and gradients in channels-last form and the total number of positions."""
    if len(xs) != len(gs) or not xs:
        raise ValueError(f"one output gradient per input is needed; received {len(gs)} for {len(xs)} inputs")
    images, gradients = [channels_last(shape, x) for x in xs], [channels_last(shape, g) for g in gs]
    for x, g in zip(images, gradients, strict=True):
        expected = (len(x), *shape.positions(x), shape.groups * shape.outputs)
        if g.shape != expected:
            raise ValueError(f"output gradient has channels-last shape {tuple(g.shape)}; the input implies {expected}")
    return images, gradients, sum(prod(g.shape[1:-1]) for g in gradients)


def _chunks(samples: int, floats_per_sample: int) -> Iterator[slice]:
    size = max(1, CHUNK_FLOATS // max(1, floats_per_sample))
    return (slice(start, start + size) for start in range(0, samples, size))


def _join(rows: list[Tensor]) -> Tensor:
    """Concatenate the positions of all uses, without a copy if there is one use."""
    return rows[0] if len(rows) == 1 else torch.cat(rows, 2)


def _row_squares(groups: int, rows: Tensor) -> Tensor:
    """Return Σ_c x² per group of channels, (N, *spatial, groups)."""
    parts = [rows[part] for part in _chunks(len(rows), rows[:1].numel())]
    return torch.cat([part.unflatten(-1, (groups, -1)).square().sum(-1) for part in parts])


def _sample_gradients(shape: Geometry, images: Sequence[Tensor], gradients: Sequence[Tensor], part: slice) -> Tensor:
    """Return D_n (groups, n, O, K) of a slice of the samples, with columns in (tap, channel) order.

    Only the trailing spatial axes are unfolded: the rows of a first-axis tap are then a slice of that.
    """
    each = []
    for x, gradient in zip(images, gradients, strict=True):
        g = gradient_rows(shape, gradient[part])
        height = shape.positions(x)[0]
        slab = windows(shape, pad(shape, x[part]), first=1)
        slab = slab.unflatten(-1, (shape.groups, shape.channels)).movedim(-2, 0).contiguous()
        blocks = []
        for tap in range(shape.kernel[0]):
            start = tap * shape.dilation[0]
            visited = slab[:, :, start : start + shape.stride[0] * (height - 1) + 1 : shape.stride[0]]
            blocks.append(g.mT @ visited.reshape(*g.shape[:3], shape.inputs // shape.kernel[0]))
        if shape.bias:
            blocks.append(g.sum(2).unsqueeze(-1))
        each.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1))
    return functools.reduce(Tensor.add_, each)


def _mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Return weights @ rows over positions; with one position that is a scaling."""
    return weights * rows if rows.shape[2] == 1 else weights @ rows


def _add_symmetric(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, known to be symmetric, to the upper block triangle of `total` (groups, K, K)."""
    if total.shape[0] > 1:
        total.baddbmm_(left.mT, right)
        return
    for block in _block_rows(total.shape[-1]):
        upper = slice(block.start, None)
        total[0, block, upper].addmm_(left[0, :, block].T, right[0, :, upper])


def _block_rows(size: int) -> list[slice]:
    # Widths that are not a multiple of the product's inner tile cost up to a quarter of its speed.
    width = SYMMETRIC_WIDTH * max(1, round(size / SYMMETRIC_WIDTH / SYMMETRIC_BLOCKS))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _mirrored(total: Tensor) -> Tensor:
    """Fill the block rows below the diagonal from those above it, in place."""
    if total.shape[0] == 1:
        for block in _block_rows(total.shape[-1]):
            total[0, block.stop :, block] = total[0, block, block.stop :].T
    return total


def _has_spectral_gram(shape: Geometry, image: Tensor) -> bool:
    same = shape.kernel == (3, 3) and shape.stride == (1, 1) and shape.dilation == (1, 1)
    zeros = shape.padding == ((1, 1), (1, 1)) and shape.padding_mode == "constant"
    if not (same and zeros and shape.groups == 1):
        return False
    return (image.shape[1] + REACH) * (image.shape[2] + REACH) * shape.channels**2 // 2 <= SPECTRUM_FLOATS
