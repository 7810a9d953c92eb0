"""Fixed features of a frozen network, for closed-form learners: random features, and a sketch of its tangent space.

For the frozen network g and a direction u in its feature space, the gradient of `u·g(x)` with respect to a layer's
weights is `D(x) = Σ_s g_s a_sᵀ` (rows as in `estimators.grams`). A linearised network with a ψ of its own for every
class is linear in these; it is restricted to a random subspace by `S D(x) R` with fixed S (o × O) and R (K × k).
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dlcft.curvature.grams import Layer
from dlcft.curvature.rows import backward, find_layers, per_sample_gradients, recording, trainable_layer, without_rows
from dlcft.network.inputs import Input, call, reference
from dlcft.network.linearize import Frozen, Selection, choose_output, select
from dlcft.network.prepare import fold_batchnorm

log = logging.getLogger("dlcft")

MEMORY = 1 << 29  # bytes that the activations of one forward and backward pass may take
FIRST_SAMPLES = 8
MOST_SAMPLES = 64  # at once on a CPU: with more, activations leave its cache


def kronecker_sketch(layer: Layer, xs: Sequence[Tensor], gs: Sequence[Tensor], left: Tensor, right: Tensor) -> Tensor:
    """Return `Σ_q S_q D_q R_q` of each sample, q over the layer's groups, without ever forming D.

    `R` is applied to the input as a convolution, `S` to the output gradient position by position.

    Args:
        layer: a linear or convolutional layer.
        xs: its input at each use.
        gs: the gradient at its output at each use.
        left: S, (groups, o, O).
        right: R, (groups, K, k), rows in the order of `weight.flatten(1)`, then one for the bias if it has one.

    Returns:
        (samples, o, k).
    """
    groups, _, columns = right.shape
    kernel = right[:, : layer.weight[0].numel()].mT.reshape(groups * columns, *layer.weight.shape[1:])
    shift = None if layer.bias is None else right[:, -1].reshape(-1)
    total: Tensor | None = None
    for x, g in zip(xs, gs, strict=True):
        if isinstance(layer, nn.Linear):
            a, g = F.linear(x, kernel, shift), g
        else:
            # `_conv_forward` is the layer's own: stride, dilation, groups and every padding mode are as in its forward
            a, g = layer._conv_forward(x, kernel, shift).movedim(1, -1), g.movedim(1, -1)
        a = a.reshape(len(a), -1, groups, columns)
        b = torch.einsum("nsgi,goi->nsgo", g.reshape(len(g), -1, groups, left.shape[2]), left)
        sketch = (a.flatten(1, 2).mT @ b.flatten(1, 2)).mT  # as Rᵀ Dᵀ Sᵀ: up to three times faster than S D R
        total = sketch if total is None else total + sketch
    assert total is not None
    return total


class FrozenFeatures(Frozen):
    """The features z of a frozen backbone, or ranpac's `relu(P z)` with a fixed random P.

    Args:
        backbone: gives z. It is copied.
        width: the length of z.
        random: how many random features; 0 for z itself.
        seed: of P.
    """

    weight: Tensor | None

    def __init__(self, backbone: nn.Module, width: int, *, random: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.base = copy.deepcopy(backbone).eval().requires_grad_(False)
        weight = _random(random, width, generator=torch.Generator().manual_seed(seed)).to(reference(self.base))
        self.register_buffer("weight", weight if random else None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features, samples × features."""
        z: Tensor = self.base(*args, **kwargs)
        return z if self.weight is None else torch.relu(z @ self.weight.T)


class FlipAveraged(nn.Module):
    """The mean of the features of images and of their mirror images; other inputs as they are.

    Args:
        features: of a batch.
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


class TangentFeatures(Frozen):
    """`φ(x) = [z; relu(P z); vec(S_l D_l(x) R_l) for every layer l and direction u]` of a frozen network.

    One forward and one backward pass per direction; no gradient of a weight is ever formed. The network is copied, its
    BatchNorm folded. A layer without room for its share of the sketch leaves the rest to the others.

    Args:
        backbone: any module that maps a batch to feature vectors z, as for `Linearized`.
        directions: u, one or several rows as long as z; they must not depend on data that is learned from, or the
            order of the data would matter.
        features: how many tangent features there may be in all.
        random: how many random features of z there are beside them.
        train: which parameters' tangents are taken, see `Linearized`. By default the weights (and biases) of all
            linear and convolutional layers, attention's projections among them; of norms, embeddings and other bare
            parameters only those that are named.
        share: of these layers, without `train`, the last so many; the backward pass ends where they begin.
        seed: of P, S and R.

    Raises:
        ValueError: when a direction has another length than z, the share is none, or the budget is smaller than one
            feature a layer.
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
        self.base = fold_batchnorm(backbone).eval().requires_grad_(False)
        self.channels_last = _may_be_channels_last(self.base)
        if self.channels_last:
            self.base.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        parameters = dict(self.base.named_parameters())
        attention = _attention_weights(self.base)
        matrices = {f"{name}.weight" for name, module in self.base.named_modules() if isinstance(module, Layer)}
        last = _from_last(parameters, attention | matrices, share) if train is None else train
        self.trainable = select(parameters, last)
        found = find_layers(self.base, self.trainable, max_factor=1 << 20)
        self.layers = {name: layer for name, layer in found.items() if f"{name}.weight" not in attention}
        self._folded: list[str] | None = None
        covered = {f"{name}.{kind}" for name in self.layers for kind in ("weight", "bias")}
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
        """S and R of every layer and direction."""
        shapes: dict[str, tuple[int, int, int]] = {}  # groups, outputs and columns of the layer's matrix
        for name in self.layers:
            layer = self._geometry(name)
            groups = 1 if isinstance(layer, nn.Linear) else layer.groups
            shapes[name] = groups, len(layer.weight) // groups, layer.weight[0].numel() + (layer.bias is not None)
        for name in self.others:
            p = parameters[name]
            shapes[name] = (1, len(p), p[0].numel()) if p.dim() > 1 else (1, 1, p.numel())
        sizes = share_budget(features, [(outputs, columns) for _, outputs, columns in shapes.values()])
        self.length = len(self.directions) * sum(o * k for o, k in sizes)
        for (name, (groups, outputs, columns)), (o, k) in zip(shapes.items(), sizes, strict=True):
            for index in range(len(self.directions)):
                left = _random(groups, o, outputs, generator=generator) / math.sqrt(outputs)
                right = _random(groups, columns, k, generator=generator) / math.sqrt(columns)
                self.register_buffer(f"left {index} {_flat(name)}", left.to(like))
                self.register_buffer(f"right {index} {_flat(name)}", right.to(like))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features φ, samples × features."""
        x: Input = kwargs if kwargs else args[0] if len(args) == 1 else args
        # The first few samples tell how much memory one needs. Nothing is kept of that: sizes, and with them the last
        # bits of the features, must not depend on what was computed before.
        samples = _samples(x)
        few = _part(x, slice(0, FIRST_SAMPLES))
        try:
            first, size = self._features(few)
        except ValueError:
            if not self.channels_last:
                raise
            first, size = self._without_channels_last(few)
        parts = [first]
        for start in range(FIRST_SAMPLES, samples, size):
            parts.append(self._features(_part(x, slice(start, start + size)))[0])
        return torch.cat(parts)

    def _without_channels_last(self, x: Input) -> tuple[Tensor, int]:
        """A network may count on the usual layout, as `view` does; if that is not it, all is as it was."""
        self.base.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        try:
            found = self._features(x)
        except ValueError:
            self.base.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            raise
        self.channels_last = False
        return found

    def _features(self, x: Input) -> tuple[Tensor, int]:
        """Features, and how many samples there may be at once."""
        with torch.inference_mode(False), torch.enable_grad():
            with recording(self.base, self.base, self.trainable, self.layers) as calls:
                z = choose_output(call(self.base, x), None)
            if z.dim() != 2 or z.shape[1] != self.directions.shape[1]:
                wanted = f"batch × {self.directions.shape[1]}, as long as the directions"
                raise ValueError(f"the backbone gave features of shape {tuple(z.shape)}; {wanted}, is needed.")
            uses = [(name, a, edge) for name in self.layers for a, edge in calls[name]]
            folded = self._without_rows(x, calls)
            rows: list[list[tuple[str, Tensor, Tensor | None]]] = []
            for index, direction in enumerate(self.directions):
                cotangent = direction.expand_as(z)
                last = index == len(self.directions) - 1
                found = backward(z, [edge for _, _, edge in uses], cotangent, retain=not last)
                rows.append([(name, a, g) for (name, a, _), g in zip(uses, found, strict=True)])
        each = self._one_by_one(x, len(z), folded)
        blocks = [z.detach()]
        if self.weight is not None:
            blocks.append(torch.relu(z.detach() @ self.weight.T))
        for index in range(len(self.directions)):
            blocks += self._sketches(index, rows[index], len(z), {name: each[name] for name in folded})
        for index in range(len(self.directions)):
            blocks += [self._sketch_of(name, index, each[name][index]) for name in self.others]
        # their activations, and as much again for the gradients
        floats = 2 * sum(a.numel() for _, a, _ in uses) // len(z) + self.length
        size = max(1, MEMORY // (8 * floats))
        return torch.cat(blocks, 1), min(size, MOST_SAMPLES) if z.device.type == "cpu" else size

    def _without_rows(self, x: Input, calls: Mapping[str, Sequence[Any]]) -> list[str]:
        """The layers that are given tokens or windows in place of samples; that depends on the network alone."""
        if self._folded is None:
            found = without_rows(self.base, self.trainable, self.layers, x, self.base)
            self._folded = sorted(name for name in found if calls[name])
        return self._folded

    def _one_by_one(self, x: Input, samples: int, folded: list[str]) -> dict[str, Tensor]:
        """The gradients D of what has no rows by sample, (directions, samples, groups, O, K), sample by sample.

        That is bare parameters, and layers that are given tokens or windows in place of samples.
        """
        pairs = {
            name: [f"{name}.weight", *([f"{name}.bias"] if self._geometry(name).bias is not None else [])]
            for name in folded
        }
        names = [*self.others, *(parameter for pair in pairs.values() for parameter in pair)]
        if not names:
            return {}
        cotangents = self.directions[:, None].expand(-1, samples, -1)
        found = per_sample_gradients(self.base, x, names, cotangents)
        each: dict[str, Tensor] = {}
        for name in [*self.others, *folded]:
            left, _ = self._pair(name, 0)
            parts = [
                found[p].reshape(*cotangents.shape[:2], left.shape[0], left.shape[2], -1)
                for p in pairs.get(name, [name])
            ]
            each[name] = torch.cat(parts, -1)
        return each

    @torch.no_grad()
    def _sketches(
        self,
        index: int,
        rows: Sequence[tuple[str, Tensor, Tensor | None]],
        samples: int,
        folded: Mapping[str, Tensor],
    ) -> list[Tensor]:
        """Of every layer for one direction; zero where the direction does not depend on the layer."""
        blocks = []
        for name in self.layers:
            uses = [(a, g) for used, a, g in rows if used == name and g is not None]
            left, right = self._pair(name, index)
            if name in folded:
                blocks.append(self._sketch_of(name, index, folded[name][index]))
            elif uses:
                xs, gs = zip(*uses, strict=True)
                blocks.append(kronecker_sketch(self._geometry(name), xs, gs, left, right).flatten(1))
            else:
                log.info("%s has no part in direction %d: its tangent features are zero", name, index)
                blocks.append(left.new_zeros(samples, left.shape[1] * right.shape[2]))
        return blocks

    def _sketch_of(self, name: str, index: int, gradient: Tensor) -> Tensor:
        """Of gradients D that are there, (samples, groups, O, K)."""
        left, right = self._pair(name, index)
        return (left @ gradient @ right).sum(1).flatten(1)

    def _geometry(self, name: str) -> Layer:
        return trainable_layer(self.layers[name], f"{name}.bias" in self.trainable)

    def _pair(self, name: str, index: int) -> tuple[Tensor, Tensor]:
        return self.get_buffer(f"left {index} {_flat(name)}"), self.get_buffer(f"right {index} {_flat(name)}")


def share_budget(features: int, shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """How many rows o and columns k each matrix (O, K) is sketched to, o·k summing to at most `features`.

    Every matrix gets the same share, with o about twice k where there is room.

    Raises:
        ValueError: when there is less than one feature a matrix.
    """
    if not shapes:
        raise ValueError("there is no linear or convolutional layer to take tangent features of; train= names others.")
    if features < len(shapes):
        raise ValueError(
            f"features is {features}; at least one for each of {len(shapes)} layers and direction is needed."
        )
    sizes: dict[int, tuple[int, int]] = {}
    # the smallest first: what they have no room for goes to the larger ones
    for done, index in enumerate(sorted(range(len(shapes)), key=lambda i: shapes[i][0] * shapes[i][1])):
        outputs, columns = shapes[index]
        share = (features - sum(o * k for o, k in sizes.values())) // (len(shapes) - done)
        rows = min(outputs, max(1, round(math.sqrt(2 * share)), -(-share // columns)))
        sizes[index] = rows, min(columns, max(1, share // rows))
    return [sizes[index] for index in range(len(shapes))]


def _from_last(names: Iterable[str], matrices: Collection[str], share: float) -> list[str]:
    """The names from the first one of the last share of the matrices on."""
    if not 0 < share <= 1:
        raise ValueError(f"share is {share}; it must lie above 0, and at most at 1.")
    names = list(names)
    places = [place for place, name in enumerate(names) if name in matrices]
    return names[places[-math.ceil(share * len(places))] :] if places else names


def _attention_weights(network: nn.Module) -> set[str]:
    """The projections of `nn.MultiheadAttention`, which it never calls as modules."""
    names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    owners = [name for name, module in network.named_modules() if isinstance(module, nn.MultiheadAttention)]
    return {f"{owner}.{name}".lstrip(".") for owner in owners for name in names}


def _may_be_channels_last(network: nn.Module) -> bool:
    """Whether channels_last pays and is safe.

    Torch's backward pass of a strided 1×1 convolution with fewer than 8 input channels writes past its memory there.
    """
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    unsafe = [c for c in convolutions if c.kernel_size == (1, 1) and c.stride != (1, 1) and c.weight.shape[1] < 8]
    return bool(convolutions) and not unsafe


def _random(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _flat(name: str) -> str:
    """A name for a buffer, which may have no dot."""
    return name.replace(".", "/")


def _samples(x: Input) -> int:
    return len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)))


def _part(x: Input, part: slice) -> Input:
    return tree_map(lambda t: t[part] if isinstance(t, Tensor) else t, x)  # type: ignore[no-any-return]
