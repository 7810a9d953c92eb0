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

from dlcft.curvature._conv_gram import REACH, SameConvolutionGram, symmetric
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
from dlcft.network.products import by_onednn, times_transposed, transposed_times, weight_gradient

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
        shape = self.shape
        like = next((gram.spectrum for gram in self.spectral.values()), self.unfolded)
        assert like is not None
        result = like.new_empty(shape.groups, shape.columns, shape.columns)
        inner = result[:, : shape.inputs, : shape.inputs]
        if self.unfolded is not None:
            symmetric_weight_order(shape, _mirrored(self.unfolded), inner)
        for index, gram in enumerate(self.spectral.values()):
            gram.result(inner[0], add=index > 0 or self.unfolded is not None)
        if self.sums is not None and self.count is not None:
            result[:, :-1, -1] = result[:, -1, :-1] = weight_order(shape, self.sums)
            result[:, -1, -1] = self.count
        return result

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
            rows = patch_rows(shape, image[part], bias=False).flatten(1, 2)
            weighted = rows
            if weights is not None:
                weighted = rows * weights[part].T.repeat_interleave(rows.shape[1] // len(image[part]), 1)[..., None]
            _add_symmetric(self.unfolded, rows, weighted)

    def _add_sums(self, image: Tensor, weights: Tensor | None) -> None:
        # Patches are linear in the image, so the patches of the summed image give the sum of all patches.
        if weights is None:
            summed, whole = image.sum(0), image.new_full((self.shape.groups,), len(image))
        else:
            by_group = image.unflatten(-1, (self.shape.groups, -1))
            each = [torch.tensordot(weights[:, q], by_group[..., q, :], 1) for q in range(self.shape.groups)]
            summed, whole = torch.cat(each, -1), weights.sum(0)
        sums = patch_rows(self.shape, summed[None], bias=False).sum((1, 2))
        count = whole * prod(self.shape.positions(image))
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
            _add_product(total, rows.flatten(1, 2), weighted.flatten(1, 2))
    return symmetric(total).div_(sum(prod(gradient.shape[1:-1]) for gradient in gradients))


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
                rows = d.flatten(1, 2)
                _add_symmetric(self.phi, rows, rows)
                self.psi += (d @ d.mT).sum(1)
        else:
            for part in _chunks(len(images[0]), shape.groups * 2 * positions * columns):
                a = _join([patch_rows(shape, x[part]) for x in images])
                g = _join([gradient_rows(shape, x[part]) for x in gradients])
                _add_symmetric(self.phi, a.flatten(1, 2), _mix(g @ g.mT, a).flatten(1, 2))
                _add_product(self.psi, g.flatten(1, 2), _mix(a @ a.mT, g).flatten(1, 2))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return Φ (groups, K, K), Ψ (groups, O, O) and δ (groups,) of all batches added."""
        assert self.phi is not None
        assert self.psi is not None
        phi = symmetric_weight_order(self.shape, _mirrored(self.phi), torch.empty_like(self.phi))
        return phi, symmetric(self.psi), self.psi.diagonal(dim1=-2, dim2=-1).sum(-1)


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
        elif positions < shape.outputs:
            a = _join([patch_rows(shape, x[part]) for x in images])
            _add_squares(total, _join([gradient_rows(shape, g[part]) for g in gradients]), a)
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
            _add_squares(total, g, _times(a.flatten(1, 2), right).view_as(a))
        else:
            d = _sample_gradients(shape, images, gradients, part)
            d = left[:, None].mT @ _times(d.flatten(1, 2), right).view_as(d)
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
        if _suits_grouped_convolution(shape, x, gradient):
            each.append(_gradients_by_convolution(shape, x[part], gradient[part]))
            continue
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


def _suits_grouped_convolution(shape: Geometry, x: Tensor, gradient: Tensor) -> bool:
    """Whether a convolution with one group per sample gives D_n faster than a product for each: in large images."""
    one = not shape.linear and shape.groups == 1 and shape.taps > 1
    return one and prod(gradient.shape[1:-1]) >= shape.outputs and by_onednn(x, gradient)


def _gradients_by_convolution(shape: Geometry, x: Tensor, gradient: Tensor) -> Tensor:
    """Return D_n (1, n, O, K), columns in (tap, channel) order, as one weight gradient of a grouped convolution."""
    image, g = (t.movedim(-1, 1).flatten(0, 1)[None] for t in (pad(shape, x), gradient))
    none = (0,) * len(shape.kernel)
    d = weight_gradient(g, image, shape.kernel, shape.stride, none, shape.dilation, len(x))
    found = x.new_empty(1, len(x), shape.outputs, shape.columns)
    by_tap = found[..., : shape.inputs].unflatten(-1, (shape.taps, shape.channels))
    by_tap.copy_(d.view(1, len(x), shape.outputs, shape.channels, shape.taps).mT)
    if shape.bias:
        found[0, ..., -1] = gradient.flatten(1, -2).sum(1)
    return found


def _add_squares(total: Tensor, g: Tensor, a: Tensor) -> None:
    """Add Σ_n (g_nᵀ a_n) ∘ (g_nᵀ a_n) of rows (groups, n, S, O) and (groups, n, S, K) to `total` (groups, O, K)."""
    if len(total) > 1 or not by_onednn(g, a):
        total += (g.mT @ a).square_().sum(1)
        return
    for each_g, each_a in zip(g[0], a[0], strict=True):  # one by one, they stay in the cache
        d = transposed_times(each_g, each_a)
        total[0].addcmul_(d, d)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Return rows @ matrix, (groups, R, K)."""
    return times_transposed(rows[0], matrix[0].T)[None] if len(rows) == 1 else rows @ matrix


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, of rows (groups, R, ·), to `total`."""
    if len(total) == 1 and by_onednn(left, right):
        total[0] += transposed_times(left[0], right[0])
    else:
        total.baddbmm_(left.mT, right)


def _add_symmetric(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add leftᵀ right, known to be symmetric, to the upper block triangle of `total` (groups, K, K)."""
    if len(total) > 1:
        total.baddbmm_(left.mT, right)
        return
    fused = by_onednn(left, right)
    if fused:  # rows of the transposed copies are contiguous, as oneDNN needs them
        left_columns = left[0].T.contiguous()
        right_columns = left_columns if right is left else right[0].T.contiguous()
    for block in _block_rows(total.shape[-1]):
        upper = slice(block.start, None)
        if fused:
            total[0, block, upper] += times_transposed(left_columns[block], right_columns[upper])
        else:
            total[0, block, upper].addmm_(left[0, :, block].T, right[0, :, upper])


def _block_rows(size: int) -> list[slice]:
    # Widths that are not a multiple of the product's inner tile cost up to a quarter of its speed.
    width = SYMMETRIC_WIDTH * max(1, round(size / SYMMETRIC_WIDTH / SYMMETRIC_BLOCKS))
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _mirrored(total: Tensor) -> Tensor:
    """Fill the block rows below the diagonal from those above it, in place."""
    if len(total) > 1:
        return total.copy_(symmetric(total))
    for block in _block_rows(total.shape[-1]):
        total[0, block.stop :, block] = total[0, block, block.stop :].T
        total[0, block, block] = symmetric(total[0, block, block])
    return total


def _has_spectral_gram(shape: Geometry, image: Tensor) -> bool:
    same = shape.kernel == (3, 3) and shape.stride == (1, 1) and shape.dilation == (1, 1)
    zeros = shape.padding == ((1, 1), (1, 1)) and shape.padding_mode == "constant"
    if not (same and zeros and shape.groups == 1):
        return False
    return (image.shape[1] + REACH) * (image.shape[2] + REACH) * shape.channels**2 // 2 <= SPECTRUM_FLOATS
