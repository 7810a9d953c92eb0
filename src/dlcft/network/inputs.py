"""What a network is given: a tensor, a tuple of positional or a mapping of keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Input = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(network: Callable[..., Any], x: Input) -> Any:
    """A network on a batch: a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        ValueError: when the network cannot take it.
    """
    try:
        if isinstance(x, Mapping):
            return network(**x)
        return network(*x) if isinstance(x, tuple) else network(x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        got = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tree_leaves(x) if isinstance(t, Tensor))
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"the network cannot take a batch {got}: {why}") from error


def reference(network: nn.Module) -> Tensor:
    """A tensor of the dtype and on the device of a network; a network without parameters is float32 on the CPU."""
    return next(network.parameters(), torch.empty(0))
