"""Fixed features of a frozen network, for closed-form learners: random features, and a sketch of its tangent space.

For the frozen network g and a direction u in its feature space, the gradient of `u·g(x)` with respect to a layer's
weights is `D(x) = Σ_s g_s a_sᵀ` (rows as in `curvature.grams`). A linearised network with one ψ per class is linear in
these gradients. The sketch `S D(x) R`, with fixed random S (o × O) and R (K × k), restricts it to a random subspace.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dlcft.closed_form.chunks import MOST_SAMPLES, Chunked
from dlcft.curvature._geometry import geometry
from dlcft.curvature.grams import Layer
from dlcft.curvature.rows import (
    Calls,
    backward,
    find_layers,
    parameter_names,
    per_sample_gradients,
    recording,
    without_rows,
)
from dlcft.network.inputs import TOGETHER, AnyLayout, Input, call, reference, use_channels_last
from dlcft.network.linearize import Selection, choose_output, select
from dlcft.network.prepare import drop_caches, fold_batchnorm

log = logging.getLogger("dlcft")

MEMORY = 1 << 29  # bytes that the activations of one forward and backward pass may take
FIRST_SAMPLES = 8


def frozen_copy(backbone: nn.Module) -> nn.Module:
    """A copy for features: BatchNorm folded, in evaluation mode."""
    base = fold_batchnorm(backbone).eval().requires_grad_(False)
    drop_caches(base)
    use_channels_last(base)
    return base


def kronecker_sketch(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """`Σ_q S_q D_q R_q` (samples, o, k), q over the layer's groups, without ever forming D.

    `R` (groups, K, k) is applied to the input as a convolution, `S` (groups, o, O) to the output gradient position by
    position. The rows of R have the order of `weight.flatten(1)`; a bias adds a last row.
    """
    groups, _, columns = right.shape
    kernel = right[:, : layer.weight[0].numel()].mT.reshape(groups * columns, *layer.weight.shape[1:])
    shift = None if layer.bias is None else right[:, -1].reshape(-1)
    sketches = []
    for x, g in zip(xs, gs, strict=True):
        if isinstance(layer, nn.Linear):
            a = F.linear(x, kernel, shift)
        else:
            # `_conv_forward` has the layer's own stride, dilation, groups and padding mode
            a, g = layer._conv_forward(x, kernel, shift).movedim(1, -1), g.movedim(1, -1)
        a = a.reshape(len(a), -1, groups, columns)
        b = torch.einsum("nsgi,goi->nsgo", g.reshape(len(g), -1, groups, left.shape[2]), left)
        # as Rᵀ Dᵀ Sᵀ: up to three times faster than S D R
        sketches.append((a.flatten(1, 2).mT @ b.flatten(1, 2)).mT)
    return functools.reduce(torch.add, sketches)


class FrozenFeatures(Chunked):
    """The features z of a frozen backbone, or ranpac's `relu(P z)` with a fixed random P, or random Fourier features.

    Those are `√(2/D) cos(W z/‖z‖ + p)` with fixed random W and p. Their products are, on average, the Gaussian kernel
    `exp(−½‖z/‖z‖ − z'/‖z'‖‖²/bandwidth²)`: z has unit length, so that one bandwidth suits networks of any scale.

    Args:
        backbone: the network that computes z. It is copied.
        width: the length of z.
        random: the number of random features, D; 0 for z itself.
        bandwidth: of random Fourier features; None for `relu(P z)`.
        seed: the seed of P, W and p.
        bfloat16: see `Chunked`.

    References:
        Rahimi and Recht, Random features for large-scale kernel machines, 2007.
        Momeni et al., Continual learning using a kernel-based method over foundation models (KLDA, 2024),
            https://arxiv.org/abs/2412.15571
    """

    weight: Tensor | None
    phase: Tensor | None

    def __init__(
        self,
        backbone: nn.Module,
        width: int,
        *,
        random: int = 0,
        bandwidth: float | None = None,
        seed: int = 0,
        bfloat16: bool = False,
    ) -> None:
        super().__init__()
        self.base, self.in_bfloat16 = copy.deepcopy(backbone).eval().requires_grad_(False), bfloat16
        generator, like = torch.Generator().manual_seed(seed), reference(self.base)
        weight = _random(random, width, generator=generator)
        phase = 2 * math.pi * torch.rand(random, generator=generator, dtype=torch.float64)
        self.register_buffer("weight", (weight / (bandwidth or 1.0)).to(like) if random else None)
        self.register_buffer("phase", phase.to(like) if random and bandwidth is not None else None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features, samples × features."""
        x: Input = kwargs if kwargs else args[0] if len(args) == 1 else args
        like = reference(self.base)
        with self.precision(like, network=True):
            z = self.in_chunks(lambda part: choose_output(call(self.base, part), None), x)
        z = z.to(like.dtype) if self.in_bfloat16 else z
        if self.weight is None:
            return z
        if self.phase is None:
            return torch.relu(z @ self.weight.T)
        return math.sqrt(2 / len(self.phase)) * torch.cos(F.normalize(z) @ self.weight.T + self.phase)


class FlipAveraged(nn.Module):
    """The mean of the features of an image and of its mirror image; other inputs are not mirrored.

    Args:
        features: the module that computes the features of a batch.
    """

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features, samples × features."""
        found: Tensor = self.features(*args, **kwargs)
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or args[0].dim() != 4:
            return found
        mirrored: Tensor = self.features(args[0].flip(-1))
        return (found + mirrored) / 2


class Joined(nn.Module):
    """The features of two modules side by side.

    Args:
        first: a module that computes features of a batch.
        second: another one.
        skipped: how many features of the second are left out, from the first one on.
    """

    def __init__(self, first: nn.Module, second: nn.Module, skipped: int) -> None:
        super().__init__()
        self.first, self.second, self.skipped = first, second, skipped

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features, samples × features."""
        return torch.cat([self.first(*args, **kwargs), self.second(*args, **kwargs)[:, self.skipped :]], 1)


class TangentFeatures(Chunked):
    """`φ(x) = [z; relu(P z); vec(S_l D_l(x) R_l) for every layer l and direction u]` of a frozen network.

    It takes one forward pass, and one backward pass per direction. No gradient of a weight is formed. The network is
    copied and its BatchNorm folded. A layer smaller than its share of the sketch leaves the rest to the others.

    Args:
        backbone: any module that maps a batch to feature vectors z, as for `Linearized`.
        directions: the rows u, each as long as z. They must not depend on the data that is learned, or its order would
            matter.
        features: the largest number of tangent features.
        random: the number of random features `relu(P z)`.
        train: the parameters whose tangents are taken, see `Linearized`. By default the weights and biases of all
            linear and convolutional layers, with attention's projections. Norms, embeddings and other parameters are
            included only if they are named.
        share: without `train`, the share of these layers that is taken, from the last one backwards. The backward pass
            ends where they begin.
        seed: the seed of P, S and R.

    Raises:
        ValueError: when a direction and z differ in length, `share` is not in (0, 1], or `features` is less than the
            number of layers times that of directions.
    """

    directions: Tensor
    weight: Tensor | None

    def __init__(
        self,
        backbone: nn.Module,
        directions: Tensor,
        *,
        features: int = 5120,
        random: int = 0,
        train: Selection = None,
        share: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.base = frozen_copy(backbone)
        parameters = dict(self.base.named_parameters())
        attention = _attention_weights(self.base)
        matrices = {f"{name}.weight" for name, module in self.base.named_modules() if isinstance(module, Layer)}
        train_last = _from_last(parameters, attention | matrices, share) if train is None else train
        self.trainable = select(parameters, train_last)
        found = find_layers(self.base, self.trainable, max_factor=1 << 20)
        self.layers = {name: layer for name, layer in found.items() if f"{name}.weight" not in attention}
        self._folded: list[str] | None = None
        covered = {p for name, layer in self.layers.items() for p in parameter_names(name, layer)}
        wanted = attention | matrices if train is None else set(parameters)
        self.others = [name for name in self.trainable if name in wanted - covered]
        like = reference(self.base)
        generator = torch.Generator().manual_seed(seed)
        if directions.dim() != 2 or not len(directions):
            raise ValueError(f"directions have shape {tuple(directions.shape)}; (how many × length of z) is needed.")
        self.register_buffer("directions", directions.detach().to(like))
        width = directions.shape[1]
        self.register_buffer("weight", _random(random, width, generator=generator).to(like) if random else None)
        self._draw_sketches(parameters, features // len(directions), generator, like)

    def _draw_sketches(
        self, parameters: Mapping[str, Tensor], features: int, generator: torch.Generator, like: Tensor
    ) -> None:
        """Draw S and R of every layer and direction."""
        shapes: dict[str, tuple[int, int, int]] = {}  # groups, outputs and columns of the layer's matrix
        for name, layer in self.layers.items():
            shape = geometry(layer)
            shapes[name] = shape.groups, shape.outputs, shape.columns
        for name in self.others:
            p = parameters[name]
            shapes[name] = (1, len(p), p[0].numel()) if p.dim() > 1 else (1, 1, p.numel())
        sizes = share_budget(features, [(outputs, columns) for _, outputs, columns in shapes.values()])
        self.length = len(self.directions) * sum(o * k for o, k in sizes)
        for (name, (groups, outputs, columns)), (o, k) in zip(shapes.items(), sizes, strict=True):
            flat = name.replace(".", "/")
            for index in range(len(self.directions)):
                left = _random(groups, o, outputs, generator=generator) / math.sqrt(outputs)
                right = _random(groups, columns, k, generator=generator) / math.sqrt(columns)
                self.register_buffer(f"left {index} {flat}", left.to(like))
                self.register_buffer(f"right {index} {flat}", right.to(like))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features φ, samples × features."""
        x: Input = kwargs if kwargs else args[0] if len(args) == 1 else args
        # The first few samples tell how many fit into memory. That is measured at every call: chunk sizes, and with
        # them the last bits of the features, must not depend on earlier calls.
        with AnyLayout():
            if self.at_once:
                return self._features(x, slice(None))[0]
            first, size = self._features(x, slice(0, FIRST_SAMPLES))
            samples = len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)))
            starts = range(FIRST_SAMPLES, samples, size)
            return torch.cat([first, *(self._features(x, slice(start, start + size))[0] for start in starts)])

    def _features(self, batch: Input, part: slice) -> tuple[Tensor, int]:
        """Features of a part of the batch, and the number of samples that fit into memory."""
        x = tree_map_only(Tensor, lambda t: t[part], batch)
        with torch.inference_mode(False), torch.enable_grad():
            with recording(self.base, self.trainable, self.layers) as calls:
                z = choose_output(call(self.base, x), None)
            if z.dim() != 2 or z.shape[1] != self.directions.shape[1]:
                wanted = f"batch × {self.directions.shape[1]}, as long as the directions"
                raise ValueError(f"the backbone gave features of shape {tuple(z.shape)}; {wanted}, is needed.")
            each = self._one_by_one(x, len(z), calls)
            blocks = [z.detach()]
            if self.weight is not None:
                blocks.append(torch.relu(z.detach() @ self.weight.T))
            for index, direction in enumerate(self.directions):
                grads = backward(z, calls, direction.expand_as(z), retain=index < len(self.directions) - 1)
                for name, uses in calls.items():
                    if name in each:
                        blocks.append(self._sketch_of(name, index, each[name][index]))
                    else:
                        rows = [(a, g) for (a, _), g in zip(uses, grads[name], strict=True) if g is not None]
                        blocks.append(self._sketch(name, index, rows, len(z)))
        for index in range(len(self.directions)):
            blocks += [self._sketch_of(name, index, each[name][index]) for name in self.others]
        # activations, and as much again for their gradients
        floats = 2 * sum(a.numel() for uses in calls.values() for a, _ in uses) // len(z) + self.length
        size = MEMORY // (8 * floats)
        size = max(1, size - size % TOGETHER if size > TOGETHER else size)
        return torch.cat(blocks, 1), min(size, MOST_SAMPLES) if z.device.type == "cpu" else size

    def _one_by_one(self, x: Input, samples: int, calls: Calls) -> dict[str, Tensor]:
        """The gradients D, (directions, samples, groups, O, K), of all parameters without rows by sample.

        Those are parameters of no layer, and of layers that get tokens or windows in place of samples.
        """
        if self._folded is None:  # the network alone decides that
            found = without_rows(self.base, self.trainable, self.layers, x, self.base)
            self._folded = sorted(name for name in found if calls[name])
        parts = {name: parameter_names(name, self.layers[name]) for name in self._folded}
        parts |= {name: (name,) for name in self.others}
        if not parts:
            return {}
        cotangents = self.directions[:, None].expand(-1, samples, -1)
        gradients = per_sample_gradients(self.base, x, [p for names in parts.values() for p in names], cotangents)
        each: dict[str, Tensor] = {}
        for name, names in parts.items():
            left, _ = self._pair(name, 0)
            shape = (*cotangents.shape[:2], left.shape[0], left.shape[2], -1)
            each[name] = torch.cat([gradients[p].reshape(shape) for p in names], -1)
        return each

    @torch.no_grad()
    def _sketch(self, name: str, index: int, rows: list[tuple[Tensor, Tensor]], samples: int) -> Tensor:
        """The sketch of a layer for one direction; zero where the direction does not depend on the layer."""
        left, right = self._pair(name, index)
        if rows:
            xs, gs = zip(*rows, strict=True)
            return kronecker_sketch(self.layers[name], xs, gs, left, right).flatten(1)
        log.info("%s has no part in direction %d: its tangent features are zero", name, index)
        return left.new_zeros(samples, left.shape[1] * right.shape[2])

    def _sketch_of(self, name: str, index: int, gradient: Tensor) -> Tensor:
        """The sketch of given gradients D, (samples, groups, O, K)."""
        left, right = self._pair(name, index)
        return (left @ gradient @ right).sum(1).flatten(1)

    def _pair(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        flat = name.replace(".", "/")  # a buffer's name has no dots
        return self.get_buffer(f"left {index} {flat}"), self.get_buffer(f"right {index} {flat}")


def share_budget(features: int, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The numbers of rows o and columns k of each matrix's sketch; all o·k sum to at most `features`.

    Every matrix (O, K) gets the same share, with o about twice k where there is room.
    """
    if not shapes:
        raise ValueError("there is no linear or convolutional layer to take tangent features of; train= names others.")
    if features < len(shapes):
        raise ValueError(
            f"features is {features}; at least one for each of {len(shapes)} layers and direction is needed."
        )
    sizes: dict[int, tuple[int, int]] = {}
    # smallest first: the larger ones get the features that the small ones have no room for
    for done, index in enumerate(sorted(range(len(shapes)), key=lambda i: shapes[i][0] * shapes[i][1])):
        outputs, columns = shapes[index]
        share = (features - sum(o * k for o, k in sizes.values())) // (len(shapes) - done)
        rows = min(outputs, max(1, round(math.sqrt(2 * share)), -(-share // columns)))
        sizes[index] = rows, min(columns, max(1, share // rows))
    return [sizes[index] for index in range(len(shapes))]


def _from_last(names: Iterable[str], matrices: Collection[str], share: float) -> list[str]:
    """All names from the first matrix of the last `share` of the matrices on."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; it must lie above 0, and at most at 1.")
    names = list(names)
    places = [place for place, name in enumerate(names) if name in matrices]
    return names[places[-math.ceil(share * len(places))] :] if places else names


def _attention_weights(network: nn.Module) -> set[str]:
    """The projections of `nn.MultiheadAttention`, which does not call them as modules."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    owners = [name for name, module in network.named_modules() if isinstance(module, nn.MultiheadAttention)]
    return {f"{owner}.{name}".lstrip(".") for owner in owners for name in names}


def _random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
