"""The inputs of a network: calling it on a batch, and the memory layout of images.

Convolutions are about 1.25 times faster on a CPU in the channels_last layout. The rule for it stands here:
`use_channels_last` decides for a network, and a network that it changed runs under `AnyLayout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

TOGETHER = 4  # fewer samples are multiplied by other kernels, which round otherwise; measured on a CPU

Input = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(network: Callable[..., Any], x: Input) -> Any:
    """A network on a batch: a tensor, a tuple of positional or a mapping of keyword arguments."""
    try:
        if isinstance(x, Mapping):
            return network(**x)
        return network(*x) if isinstance(x, tuple) else network(x)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        got = ", ".join(f"{tuple(t.shape)} of {t.dtype}" for t in tree_leaves(x) if isinstance(t, Tensor))
        why = str(error).strip().splitlines()[0]
        if isinstance(error, TypeError) and isinstance(x, Mapping):
            keys = ", ".join(map(str, x))
            why += f" (a dict is given as keyword arguments, forward(self, {keys}), not as one argument)"
        raise ValueError(f"the network cannot take a batch {got}: {why}") from error


def filled(x: Input, samples: int) -> Input:
    """A batch with its last sample repeated until there are a multiple of `TOGETHER`.

    Then a sample's features mostly have the same last bits in whatever batch it is.
    """
    more = -samples % TOGETHER
    if not more:
        return x

    def longer(t: Tensor) -> Tensor:
        return torch.cat([t, t[-1:].expand(more, *t.shape[1:])]) if t.dim() and len(t) == samples else t

    return tree_map_only(Tensor, longer, x)  # type: ignore[no-any-return]


def functional_call(network: nn.Module, tensors: Mapping[str, Tensor], args: Any = (), kwargs: Any = None) -> Any:
    """`torch.func.functional_call`, also for a network in which one module has several names.

    There torch's own leaves the given tensors in the network when it is done. `args` is a tuple of positional
    arguments, or the only one.
    """
    chosen = {id(p): tensors[name] for name, p in network.named_parameters() if name in tensors}
    places = [(m._parameters, key, p) for m in network.modules() for key, p in m._parameters.items() if id(p) in chosen]
    for owner, key, p in places:
        owner[key] = chosen[id(p)]  # type: ignore[assignment]
    try:
        return network(*(args if isinstance(args, tuple) else (args,)), **(kwargs or {}))
    finally:
        for owner, key, p in places:
            owner[key] = p


def reference(network: nn.Module) -> Tensor:
    """A tensor of the dtype and on the device of a network; a network without parameters is float32 on the CPU."""
    return next(network.parameters(), torch.empty(0))


def in_half(t: Tensor) -> bool:
    """Whether a tensor is in half precision."""
    return t.dtype in (torch.float16, torch.bfloat16)


def use_channels_last(network: nn.Module) -> None:
    """Store the weights of all 2-D convolutions in the channels_last layout, in place, if that is safe.

    It is not safe for a network with a strided 1×1 convolution of fewer than 8 input channels: torch's backward pass
    of such a layer writes past its memory in this layout. That network stays as it is.
    """
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    if not any(c.kernel_size == (1, 1) and c.stride != (1, 1) and c.weight.shape[1] < 8 for c in convolutions):
        for convolution in convolutions:
            convolution.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class AnyLayout(TorchFunctionMode):
    """Runs `view` as `reshape`, because a network written for the default layout may flatten a tensor with `view`."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.view and len(args) > 1 and not isinstance(args[1], torch.dtype):
            func = torch.Tensor.reshape
        elif func is torch.Tensor.view_as:
            func = torch.Tensor.reshape_as
        return func(*args, **(kwargs or {}))
