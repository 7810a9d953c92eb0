"""Values of a linearised network's frozen layers, kept for samples that come again.

`g(x; ψ0)` does not change while ψ is trained. Of the five products that a layer needs in a training step, one gives
that value: it is read from memory instead. Layers below the first trainable one are not run at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dlcft.network.forward_mode import Compute, passing
from dlcft.network.inputs import Input
from dlcft.network.linearize import Linearized


class NotKept(Exception):
    """Why values are not kept."""


class Values:
    """The values of a linearised network's layers for the samples of a data set, whatever ψ is.

    Layers below the first trainable one are left out, with all that they compute, if nothing above needs it. That is
    tried out: the network must then give the same change for another input.

    Args:
        network: whose values these are.
        batches: inputs, in order; iterated once.
        samples: how many there are.
        bound: the most bytes to keep.

    Raises:
        NotKept: when they take more, or the network cannot go on from them.
    """

    def __init__(self, network: Linearized, batches: Iterable[Input], samples: int, bound: float) -> None:
        self.network, self.layers = network, list[_Kept]()
        start = 0
        with torch.no_grad():
            for x in batches:
                if not isinstance(x, Tensor):
                    raise NotKept("inputs are more than one tensor")
                if not start:
                    self.layers = _chosen(network, x[:2])
                    self.bytes = samples * sum(layer.bytes for layer in self.layers)
                    if self.bytes > bound:
                        raise NotKept(f"they take {self.bytes / 1e9:.2f} GB; {bound / 1e9:.2f} GB are allowed")
                    for layer in self.layers:
                        layer.make_room(samples)
                part = slice(start, start + len(x))
                with passing(_Writing(self.layers, part)):
                    network.value(x)
                start = part.stop

    def recalled(self, x: Tensor, indices: Tensor) -> AbstractContextManager[None]:
        """Inside this context the network computes no values for the batch `x`, of the samples at these places."""
        return self.network.recalling(x, lambda: Reading(self.layers, indices))


def _chosen(network: Linearized, few: Tensor) -> list[_Kept]:
    """What to keep of each layer, with the values of a few samples: the least that gives the same change."""
    numbers = torch.Generator().manual_seed(0)
    delta = {name: torch.randn(p.shape, generator=numbers).to(p) for name, p in network.delta.named_parameters()}
    looking = _Looking()
    network.value(few)  # decides which activations work in place, by passes of its own
    with passing(looking):
        wanted = network.change_by(delta, few)
    places = torch.arange(len(few), device=few.device)
    for short, x in ((True, torch.zeros_like(few)), (False, few)):
        layers = [_Kept.of(*seen, short=short) for seen in looking.layers]
        with passing(Reading(layers, places)):
            found = network.change_by(delta, x)
        if torch.equal(found, wanted):
            return layers
    raise NotKept("the network does not give the same change from them")


@dataclass
class _Rows:
    """A tensor by sample, as it lies in memory: images may be in the channels_last layout."""

    tensor: Tensor
    channels_last: bool

    @classmethod
    def of(cls, t: Tensor) -> _Rows:
        last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
        return cls(t.permute(0, 2, 3, 1) if last else t, last)

    def at(self, indices: Tensor) -> Tensor:
        rows = self.tensor.index_select(0, indices)
        return rows.permute(0, 3, 1, 2) if self.channels_last else rows

    def write(self, part: slice, t: Tensor) -> None:
        self.tensor[part] = t.permute(0, 2, 3, 1) if self.channels_last else t


@dataclass
class _Kept:
    """What is kept of a layer: its value, and its input if that cannot be had otherwise; or neither."""

    x: _Rows | None
    value: _Rows | None
    like: Tensor  # the value of one sample, for its shape and kind

    @classmethod
    def of(cls, x: Tensor, value: Tensor, carries: bool, learns: bool, *, short: bool) -> _Kept:
        like = value[:1]
        if short and not carries and not learns:
            return cls(None, None, like)
        return cls(_Rows.of(x) if short and not carries else None, _Rows.of(value), like)

    @property
    def bytes(self) -> int:
        """Of one sample."""
        return sum(r.tensor[0].numel() * r.tensor.element_size() for r in (self.x, self.value) if r is not None)

    def make_room(self, samples: int) -> None:
        for rows in (self.x, self.value):
            if rows is not None:
                rows.tensor = rows.tensor.new_empty(samples, *rows.tensor.shape[1:])


@dataclass
class _Looking:
    """A pass that notes each layer: its input and value, whether that input has a change, and whether it learns."""

    layers: list[tuple[Tensor, Tensor, bool, bool]] = field(default_factory=list)

    def layer(self, x: Tensor, compute: Compute, carries: bool, learns: bool) -> tuple[Tensor, Tensor]:
        value = compute(x)
        self.layers.append((x.clone(), value.clone(), carries, learns))  # activations may work in place
        return x, value


class _Writing:
    """A pass whose values are kept at some places."""

    def __init__(self, layers: Iterable[_Kept], part: slice) -> None:
        self.layers, self.part = iter(layers), part

    def layer(self, x: Tensor, compute: Compute, carries: bool, learns: bool) -> tuple[Tensor, Tensor]:
        value, kept = compute(x), _next(self.layers)
        for rows, tensor in ((kept.x, x), (kept.value, value)):
            if rows is not None:
                rows.write(self.part, tensor)
        return x, value


class Reading:
    """A pass that computes no value which was kept."""

    def __init__(self, layers: Iterable[_Kept], indices: Tensor) -> None:
        self.layers, self.indices = iter(layers), indices

    def layer(self, x: Tensor, compute: Compute, carries: bool, learns: bool) -> tuple[Tensor, Tensor]:
        kept = _next(self.layers)
        if kept.value is None:  # nothing above needs it, so one sample will do for the operations in between
            return x, torch.zeros_like(kept.like)
        return x if kept.x is None else kept.x.at(self.indices), kept.value.at(self.indices)


def _next(layers: Iterator[_Kept]) -> _Kept:
    found = next(layers, None)
    if found is None:
        raise RuntimeError("more layers run than in the first pass")
    return found
