"""A batch through a frozen network in parts, as many samples at a time as its activations leave room for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dlcft.network.inputs import TOGETHER, Input
from dlcft.network.linearize import Frozen

MOST_SAMPLES = 64  # at once on a CPU: with more, activations leave its cache
_MEMORY = 1 << 28  # bytes that the activations of one forward pass may take
_ALIVE = 6  # largest activations that are there at the same time; measured, with what convolutions need besides

# how many samples at once, by the shapes and dtypes of one sample; None where a batch cannot be split
Known = dict[tuple[Any, ...], int | None]


class Chunked(Frozen):
    """Features of a frozen network that are computed for a few samples at a time.

    Attributes:
        at_once: whether a batch is taken whole instead, whatever memory that needs.
        in_bfloat16: whether the network, and nothing else, is computed in bfloat16.
    """

    at_once: bool = False
    in_bfloat16: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._known: Known = {}

    def in_chunks(self, compute: Callable[[Input], Tensor], x: Input) -> Tensor:
        """`compute(x)`, a row for each sample."""
        return compute(x) if self.at_once else in_chunks(compute, x, self._known)

    def precision(self, like: Tensor, *, network: bool) -> AbstractContextManager[Any]:
        """In which the network is computed, or, inside of that, what is made of its activations."""
        return torch.autocast(like.device.type, torch.bfloat16, enabled=network) if self.in_bfloat16 else nullcontext()


@torch.no_grad()
def in_chunks(compute: Callable[[Input], Tensor], x: Input, known: Known) -> Tensor:
    """`compute(x)`, a row for each sample, part by part on a CPU; elsewhere at once.

    The size of a part follows from the shape of a sample alone, and not from earlier calls: a sample's features must
    not depend on them.

    Args:
        compute: maps a batch to a matrix with a row for each sample.
        x: the batch.
        known: sizes that were found before, to be kept with `compute`.
    """
    leaves = [leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor)]
    samples = len(leaves[0]) if leaves and leaves[0].dim() else 0
    if samples <= TOGETHER or leaves[0].device.type != "cpu":
        return compute(x)
    if any(not leaf.dim() or len(leaf) != samples for leaf in leaves):
        return compute(x)
    key = tuple((tuple(leaf.shape[1:]), leaf.dtype) for leaf in leaves)
    if key not in known:
        known[key] = _fitting(compute, x)
    size = known[key]
    if size is None or size >= samples:
        return compute(x)
    return torch.cat([compute(_part(x, start, start + size)) for start in range(0, samples, size)])


def _fitting(compute: Callable[[Input], Tensor], x: Input) -> int | None:
    """How many samples fit, from a look at two; None where rows of the result are not those of the batch."""
    try:
        alone = len(compute(_part(x, 0, 1)))
        with _Largest() as seen:
            both = len(compute(_part(x, 0, 2)))
    except (RuntimeError, ValueError, IndexError):  # a network for batches of one size; a real fault comes again
        return None
    if (alone, both) != (1, 2):  # the first axis is time, not samples
        return None
    size = min(MOST_SAMPLES, 2 * _MEMORY // max(1, _ALIVE * seen.bytes))
    return int(max(TOGETHER, size - size % TOGETHER))


def _part(x: Input, start: int, end: int) -> Input:
    return tree_map_only(Tensor, lambda t: t[start:end], x)  # type: ignore[no-any-return]


class _Largest(TorchDispatchMode):
    """Inside this context, the bytes of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = func(*args, **(kwargs or {}))
        old = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(given):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in old:  # no view of an input
                self.bytes = max(self.bytes, leaf.numel() * leaf.element_size())
        return given
