"""Fixed features of all depths of a frozen network, from its forward pass alone.

An activation a (positions × channels) is the input of a convolution or linear layer. Its features are the mean over the
positions, `m = E_s[a_s]`; at a quarter, half and three quarters of the depth also the covariance of its channels,
`E_s[a_s a_sᵀ] − m mᵀ`, and, of images, the means over the fields of a 4×4 grid. Where one of these is longer than its
share of the budget, fixed random matrices P, S and R make it shorter: `m P`, `S (E_s[a_s a_sᵀ] − m mᵀ) R`, and P for
every field of the grid.

References:
    Lin, RoyChowdhury and Maji, Bilinear CNN models for fine-grained visual recognition, arXiv 1504.07889.
    Gao, Beijbom, Zhang and Darrell, Compact bilinear pooling, arXiv 1511.06062.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves, tree_map_only

from dlcft.closed_form.chunks import Chunked
from dlcft.closed_form.features import frozen_copy
from dlcft.curvature.grams import Layer
from dlcft.network.inputs import AnyLayout, Input, call, in_half, reference
from dlcft.network.linearize import choose_output

log = logging.getLogger("dlcft")

GRID = 4  # fields of the grid in each direction
_SAME = 1e-3  # largest relative difference of a sample's mean in batches of two sizes


@dataclass(frozen=True)
class Activation:
    """An activation inside the network, and how many features it gives.

    Attributes:
        layer: the name of the module that it goes into; of recurrent layers, also the one that it comes from.
        output: whether it is that module's output.
        channels: how many.
        layout: "image": (samples, channels, height, width), large enough for a grid; "channels": (…, channels,
            positions); "rows": (…, positions, channels); "time": (positions, samples, channels).
        several: whether it has more than one position.
        means, pairs, fields: numbers of features: of the mean, of the covariance, and of each field of the grid. Pairs
            are rows × columns of the sketch; (0, 0) for the whole upper triangle.
    """

    layer: str
    output: bool
    channels: int
    layout: str
    several: bool
    means: int = 0
    pairs: tuple[int, int] | None = None
    fields: int = 0

    @property
    def length(self) -> int:
        """The number of its features."""
        return self.means + _pair_count(self) + GRID**2 * self.fields

    def rows(self, a: Tensor, samples: int) -> Tensor:
        """As (samples, positions, channels)."""
        if self.layout in ("image", "channels"):
            a = a.flatten(2).mT
        elif self.layout == "time":
            a = a.transpose(0, 1)
        return a.reshape(samples, -1, self.channels)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Activation:
        """The inverse of `to_json`.

        Raises:
            ValueError: when a field is none that `to_json` gives.
        """
        pairs = content["pairs"]
        found = cls(**{**content, "pairs": None if pairs is None else tuple(pairs)})
        counts = [found.channels, found.means, found.fields, *(found.pairs or (0, 0))]
        kinds = type(found.layer), type(found.output), type(found.several)
        wrong = kinds != (str, bool, bool) or found.layout not in ("image", "channels", "rows", "time")
        if wrong or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(f"{dict(content)!r:.100} is no activation inside a network.")
        return found


class DepthFeatures(Chunked):
    """`φ(x) = [z; means, covariances and grids of activations of all depths]` of a frozen network.

    It takes one forward pass. The network is copied and its BatchNorm folded.

    Args:
        backbone: any module that maps a batch to feature vectors z.
        activations: see `find_activations`; they depend on the network and the shape of its inputs alone.
        seed: the seed of all random matrices.
        bfloat16: see `Chunked`.
    """

    def __init__(
        self, backbone: nn.Module, activations: Sequence[Activation], *, seed: int = 0, bfloat16: bool = False
    ) -> None:
        super().__init__()
        self.base, self.in_bfloat16 = frozen_copy(backbone), bfloat16
        self.activations = list(activations)
        self.length = sum(activation.length for activation in activations)
        generator = torch.Generator().manual_seed(seed)
        like = reference(self.base)
        # the square of an activation may be more than half precision holds
        self.dtype = torch.float32 if in_half(like) else like.dtype

        def draw(name: str, rows: int, columns: int) -> None:
            matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64) / math.sqrt(rows)
            self.register_buffer(name, matrix.to(like.device, self.dtype))

        for index, one in enumerate(self.activations):
            if 0 < one.means < one.channels:
                draw(f"mean {index}", one.channels, one.means)
            if one.pairs and one.pairs != (0, 0):
                draw(f"left {index}", one.channels, one.pairs[0])
                draw(f"right {index}", one.channels, one.pairs[1])
            if 0 < one.fields < one.channels:
                draw(f"field {index}", one.channels, one.fields)

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Features φ, samples × features."""
        x: Input = kwargs if kwargs else args[0] if len(args) == 1 else args
        return self.in_chunks(self._features, x)

    def _features(self, x: Input) -> Tensor:
        samples = len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)))
        mask = x.get("attention_mask") if isinstance(x, Mapping) else None
        found: list[list[tuple[int, Tensor]]] = [[] for _ in self.activations]
        places = {(one.layer, one.output): index for index, one in enumerate(self.activations)}

        def note(layer: str, output: bool, a: Tensor, own_mask: Tensor | None) -> None:
            index = places.get((layer, output))
            if index is not None:
                a = a.to(self.dtype)
                rows = self.activations[index].rows(a, samples)
                with self.precision(a, network=False):
                    moments = self._moments(index, a, rows, _weights(rows, mask, own_mask))
                found[index].append((rows.shape[1], moments))

        watched = watching(self.base, {one.layer for one in self.activations}, note)
        with AnyLayout(), self.precision(reference(self.base), network=True), watched:
            z = choose_output(call(self.base, x), None)
        blocks = [z.to(self.dtype)]
        for one, uses in zip(self.activations, found, strict=True):
            if not uses:
                raise ValueError(f"{one.layer} was not called for this batch, as it was for the first one.")
            total = sum(positions for positions, _ in uses)
            blocks.append(sum((positions / total) * features for positions, features in uses))  # type: ignore[arg-type]
        return torch.cat(blocks, 1)

    def _moments(self, index: int, a: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
        """The features of one activation: mean, covariance, grid."""
        one = self.activations[index]
        # other runtimes have no views: there a transposed activation would be one more copy of it
        channels_first = self.at_once and one.layout in ("image", "channels") and a.shape[0] == rows.shape[0]
        if channels_first and weights is None:
            mean = a.flatten(2).mean(2)
        else:
            mean = rows.mean(1) if weights is None else torch.einsum("ns,nsc->nc", weights, rows)
        blocks = [mean @ self._matrix(f"mean {index}") if 0 < one.means < one.channels else mean[:, : one.means]]
        if one.pairs:
            first = a.flatten(2) if channels_first and weights is None else None
            blocks.append(self._covariance(index, rows, mean, weights, first))
        if one.fields:
            grid = F.adaptive_avg_pool2d(a, GRID).flatten(2).mT
            blocks.append((grid @ self._matrix(f"field {index}") if one.fields < one.channels else grid).flatten(1))
        return torch.cat(blocks, 1)

    def _covariance(
        self, index: int, rows: Tensor, mean: Tensor, weights: Tensor | None, first: Tensor | None
    ) -> Tensor:
        """Of rows, or of the same with `first` the channels and then the positions."""
        one = self.activations[index]
        weighted = rows / rows.shape[1] if weights is None else rows * weights[..., None]
        if one.pairs == (0, 0):
            whole = weighted.mT @ rows - mean[:, :, None] * mean[:, None]
            i, j = torch.triu_indices(one.channels, one.channels, device=rows.device)
            return whole[:, i, j]
        left, right = self._matrix(f"left {index}"), self._matrix(f"right {index}")
        if first is not None:
            products = (left.T @ first / first.shape[2]) @ (right.T @ first).mT
        else:
            products = (weighted @ left).mT @ (rows @ right)
        return (products - (mean @ left)[:, :, None] * (mean @ right)[:, None]).flatten(1)

    def _matrix(self, name: str) -> Tensor:
        return self.get_buffer(name)


@torch.no_grad()
def find_activations(backbone: nn.Module, x: Input, features: int) -> list[Activation]:
    """The activations of a network in the order of its forward pass, with a budget of features shared out among them.

    Left out, with a log line: activations whose rows cannot be assigned to samples.

    Args:
        backbone: the network.
        x: some samples. Their values do not matter, but they should differ, and their shape matters.
        features: the largest number of features.

    Raises:
        ValueError: when the network has no layer to look at.
    """
    base = frozen_copy(backbone)
    three = _three(x)
    with AnyLayout():
        small, large = (_seen(base, tree_map_only(Tensor, lambda t, n=n: t[:n], three)) for n in (2, 3))
    found = {key: _activation(base, key, small, large) for key in large}
    for (layer, _), one in found.items():
        if one is None:
            log.info("%s: its rows cannot be assigned to samples; it gives no features", layer)
    activations = [one for one in found.values() if one is not None]
    if not activations:
        raise ValueError(
            "the network has no convolution or linear layer that gets one row or more for each sample; with "
            "depth_features=0 its own features alone are learned."
        )
    return share_out(features, activations)


def share_out(features: int, activations: Sequence[Activation]) -> list[Activation]:
    """The activations with a budget of features shared out among them; those that get none are left out.

    Means get up to half of it, shorter ones leaving the rest to longer ones. Of the rest, the grid gets a quarter and
    the covariances what is then left, at a quarter, half and three quarters of the depth.
    """
    inner = [index for index, one in enumerate(activations) if one.several]
    spots = sorted({inner[len(inner) * quarter // 4] for quarter in (1, 2, 3)} if inner else set())
    channels = [one.channels for one in activations]
    means = _shares(features if not spots else features // 2, channels)
    rest = features - sum(means)
    with_grid = [index for index in spots if activations[index].layout == "image"]
    fields = dict(zip(with_grid, _shares(rest // 4 // GRID**2, [channels[i] for i in with_grid]), strict=True))
    rest -= GRID**2 * sum(fields.values())
    counts = dict(zip(spots, _shares(rest, [channels[i] * (channels[i] + 1) // 2 for i in spots]), strict=True))
    shared = [
        replace(one, means=means[i], pairs=_sketch(counts.get(i, 0), one.channels), fields=fields.get(i, 0))
        for i, one in enumerate(activations)
    ]
    return [one for one in shared if one.length]


def _shares(budget: int, wishes: Sequence[int]) -> list[int]:
    """Equal shares of a budget, none above its wish; what one does not need goes to the others."""
    shares = [0] * len(wishes)
    for done, index in enumerate(sorted(range(len(wishes)), key=lambda i: wishes[i])):
        shares[index] = min(wishes[index], (budget - sum(shares)) // (len(wishes) - done))
    return shares


def _sketch(count: int, channels: int) -> tuple[int, int] | None:
    """Rows and columns of a covariance's sketch; (0, 0) for all of its upper triangle."""
    if count < 1:
        return None
    if count >= channels * (channels + 1) // 2:
        return 0, 0
    rows = math.isqrt(count)
    return rows, count // rows


def _pair_count(one: Activation) -> int:
    if one.pairs is None:
        return 0
    return one.channels * (one.channels + 1) // 2 if one.pairs == (0, 0) else one.pairs[0] * one.pairs[1]


_Note = Callable[[str, bool, Tensor, Tensor | None], None]


@contextmanager
def watching(network: nn.Module, layers: set[str] | None, note: _Note) -> Iterator[None]:
    """Inside this context `note` is called with every activation: the layer's name, whether it is its output, a mask.

    `layers` are the names to watch; None for all convolutions, linear and recurrent layers.
    """

    def watch(name: str) -> list[Any]:
        module = network.get_submodule(name)
        recurrent = isinstance(module, nn.RNNBase)

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            given = args[0] if args else kwargs.get("input")
            note(name, False, *(_padded(given, module) if recurrent else (given, None)))

        def after(_: nn.Module, args: Any, result: Any) -> None:
            note(name, True, *_padded(result[0], module))

        handles = [module.register_forward_pre_hook(hook, with_kwargs=True)]
        return [*handles, module.register_forward_hook(after)] if recurrent else handles

    kinds = (Layer, nn.RNNBase)
    names = [name for name, m in network.named_modules() if isinstance(m, kinds) and (layers is None or name in layers)]
    handles = [handle for name in names for handle in watch(name)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _padded(sequence: Tensor | PackedSequence, module: Any) -> tuple[Tensor, Tensor | None]:
    """The steps of a recurrent layer, samples first, and which of them are real."""
    if isinstance(sequence, PackedSequence):
        padded, lengths = pad_packed_sequence(sequence, batch_first=True)
        return padded, torch.arange(padded.shape[1])[None] < lengths[:, None]
    return (sequence if module.batch_first else sequence.transpose(0, 1)), None


def _weights(rows: Tensor, mask: Any, own_mask: Tensor | None) -> Tensor | None:
    """The weight of each position, where some are padding; they sum to 1."""
    real = own_mask if own_mask is not None else mask
    if not isinstance(real, Tensor) or real.shape != rows.shape[:2]:
        return None
    real = real.to(rows)
    return real / real.sum(1, keepdim=True).clamp(min=1)


_Seen = dict[tuple[str, bool], list[Tensor]]


def _seen(network: nn.Module, x: Input) -> _Seen:
    """Every activation of a forward pass by layer, those shared by several layers once, for each use of the layer."""
    seen: _Seen = {}
    known: list[tuple[Tensor, int]] = []  # kept, so that no other tensor gets its identity

    def note(layer: str, output: bool, a: Any, _: Any) -> None:
        if isinstance(a, Tensor) and a.is_floating_point():
            # in place, a tensor may become another activation
            if not any(a is other and a._version == version for other, version in known):
                seen.setdefault((layer, output), []).append(a.clone())
            known.append((a, a._version))

    with watching(network, None, note):
        call(network, x)
    return seen


def _activation(network: nn.Module, key: tuple[str, bool], small: _Seen, large: _Seen) -> Activation | None:
    """An activation seen with two and with three samples; None if its rows cannot be assigned to samples."""
    if len(small.get(key, [])) != len(large[key]):
        return None
    two, three = small[key][0], large[key][0]
    convolution = not isinstance(network.get_submodule(key[0]), nn.Linear | nn.RNNBase)
    if three.dim() < 2 + convolution or two.dim() != three.dim():
        return None
    if 3 * len(two) == 2 * len(three):  # each sample has as many rows, or windows
        whole = three.dim() == 4 and len(three) == 3 and min(three.shape[2:]) >= GRID
        layout = ("image" if whole else "channels") if convolution else "rows"
    elif not convolution and three.dim() == 3 and (two.shape[1], three.shape[1]) == (2, 3):
        layout = "time"
    else:
        return None
    one = Activation(*key, channels=three.shape[1 if convolution else -1], layout=layout, several=True)
    fewer, rows = one.rows(two, 2), one.rows(three, 3)
    before = fewer.mean(1)
    mixed = (rows[:2].mean(1) - before).norm() > _SAME * before.norm()
    return None if mixed else replace(one, several=rows.shape[1] > 1)


def _three(x: Input) -> Input:
    """Three different samples: those given, then they mirrored along their last axis."""

    def three(t: Tensor) -> Tensor:
        return torch.cat([t, t.flip(-1) if t.dim() > 1 else t, t])[:3]

    return tree_map_only(Tensor, three, x)  # type: ignore[no-any-return]
