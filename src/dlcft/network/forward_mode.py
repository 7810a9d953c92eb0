"""Forward-mode derivatives of single operations, where torch has none, or a slow one, or one that fails.

`forward_mode_kernels` arranges all of them while a linearised network runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dlcft.network.inputs import AnyLayout
from dlcft.network.products import by_onednn

_LAST = torch.channels_last


@contextmanager
def forward_mode_kernels() -> Iterator[None]:
    """Arrange kernels that have forward-mode derivatives, and put the former choice back."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), _ForwardMode():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


Compute = Callable[[Tensor], Tensor]


class Passing(Protocol):
    """Whoever gives the values of layers in a pass through a network, in place of the layers themselves."""

    def layer(self, x: Tensor, compute: Compute, carries: bool, learns: bool) -> tuple[Tensor, Tensor]:
        """A layer's input and value.

        Args:
            x: the input that the layer is given.
            compute: gives the value of an input.
            carries: whether the input has a tangent.
            learns: whether the layer's parameters have one.
        """


_PASSING: ContextVar[Passing | None] = ContextVar("passing", default=None)


@contextmanager
def passing(by: Passing | None) -> Iterator[None]:
    """Inside this context the layers' values are those of `by`; None for the layers' own."""
    token = _PASSING.set(by)
    try:
        yield
    finally:
        _PASSING.reset(token)


def without_mkldnn() -> AbstractContextManager[None]:
    """The CPU's fused kernels off, and their other switches as they are: which of them exist depends on torch."""
    flags = torch.backends.mkldnn.flags
    return flags(**{name: False if name == "enabled" else None for name in inspect.signature(flags).parameters})


class LeavesTorch(Exception):
    """A value with a tangent was turned into a Python number, so its derivative would be lost."""


class _ForwardMode(AnyLayout):
    """Replaces single operations while a network runs."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _RULES:
            return _RULES[func](*args, **kwargs)
        if func in _NUMBERS and forward_ad.unpack_dual(args[0]).tangent is not None:
            raise LeavesTorch(f"it calls .{func.__name__}() on a value that depends on the trainable parameters.")
        if func is torch.lstm:  # the fused kernel has no forward-mode derivative
            with without_mkldnn():
                return func(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)


def _layer(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor:
    """A linear or convolutional layer: one product for the value and one for each factor that has a tangent.

    Torch's own rule multiplies with zeros where a tangent is absent, so frozen layers would not be free.
    """
    x, dx = forward_ad.unpack_dual(input)
    weight, dweight = forward_ad.unpack_dual(weight)
    bias, dbias = (None, None) if bias is None else forward_ad.unpack_dual(bias)
    by = _PASSING.get()
    if by is None:
        value = func(x, weight, bias, *args, **kwargs)
    else:
        learns = dweight is not None or dbias is not None
        x, value = by.layer(x, lambda given: func(given, weight, bias, *args, **kwargs), dx is not None, learns)
    if func is F.conv2d and dx is not None and dweight is not None and _plain(args, kwargs):
        convolution = _ConvolutionChange.apply if torch.is_grad_enabled() else _ConvolutionChange.forward
        return forward_ad.make_dual(value, convolution(x, dx, weight, dweight, dbias, *args))  # type: ignore[no-any-return]
    change = None
    if dweight is not None:
        change = func(x, dweight, dbias, *args, **kwargs)
    elif dbias is not None:
        change = dbias.view(-1, *[1] * (weight.dim() - 2)).to(value.dtype).expand_as(value)
    if dx is not None:
        carried = func(dx, weight, None, *args, **kwargs)
        change = carried if change is None else carried + change
    return value if change is None else forward_ad.make_dual(value, change)  # type: ignore[no-any-return]


def _plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a convolution is called as `nn.Conv2d` does, with tuples of numbers, in one precision."""
    complete = len(args) == 4 and not kwargs and all(isinstance(a, tuple) for a in args[:3])
    return complete and not torch.is_autocast_enabled("cpu") and not torch.is_autocast_enabled("cuda")


def _adds_in_place(total: Tensor, x: Tensor) -> bool:
    """Whether oneDNN can add a convolution of x to a tensor in its memory."""
    there = hasattr(torch.ops.mkldnn, "_convolution_pointwise_") and total.dim() == 4 and total.numel() > 0
    return there and by_onednn(total, x.detach()) and all(t.is_contiguous(memory_format=_LAST) for t in (total, x))


class _ConvolutionChange(torch.autograd.Function):
    """`conv(x; ΔW, Δb) + conv(Δx; W)`, which keeps x for the backward pass but not Δx.

    Torch's own convolution keeps its input also where only the gradient of that input is wanted, which does not
    depend on it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dx: Tensor, weight: Tensor, dweight: Tensor, dbias: Tensor | None, *how: Any) -> Tensor:
        carried = F.conv2d(dx, weight, None, *how)
        if not _adds_in_place(carried, x):
            return carried + F.conv2d(x, dweight, dbias, *how)
        stride, padding, dilation, groups = how
        geometry = (padding, stride, dilation, groups)
        torch.ops.mkldnn._convolution_pointwise_(carried, x, dweight, dbias, *geometry, "add", 1.0, None, [], None)
        return carried

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, weight, _, _, *ctx.how = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.how
        _, of_dx, _, of_dweight, of_dbias, *rest = ctx.needs_input_grad
        geometry = (stride, padding, dilation, False, (0, 0), groups)
        grads = torch.ops.aten.convolution_backward(
            g, x, weight, [len(weight)], *geometry, (of_dx, of_dweight, of_dbias)
        )
        return None, grads[0], None, grads[1], grads[2], *[None] * len(rest)


# torch asks for the signature at every call, which takes as long as a small convolution if it is not written down
_ConvolutionChange.forward.__signature__ = inspect.signature(_ConvolutionChange.forward)  # type: ignore[attr-defined]


def _relu(input: Tensor, inplace: bool = False) -> Tensor:
    return F.relu(input, inplace=True) if inplace else _rectifier(input, 0.0)


def _leaky(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor:
    if inplace or negative_slope < 0:  # with a negative slope, the result does not tell the sign of the input
        return F.leaky_relu(input, negative_slope, inplace)
    return _rectifier(input, negative_slope)


def _rectifier(x: Tensor, slope: float) -> Tensor:
    """ReLU and LeakyReLU, whose derivative is read off the result: the layer above keeps it anyway, not the input."""
    x, dx = forward_ad.unpack_dual(x)
    value = F.leaky_relu(x, slope) if slope else torch.relu(x)
    if dx is None:
        return value
    change = torch.ops.aten.leaky_relu_backward(dx, value, slope, True)
    return forward_ad.make_dual(value, change)  # type: ignore[no-any-return]


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Torch's own rule has no gradient with respect to the tangent."""
    x, dx = forward_ad.unpack_dual(input)
    value = F.hardsigmoid(x)
    result = value if dx is None else forward_ad.make_dual(value, dx * ((x > -3) & (x < 3)) / 6)
    return input.copy_(result) if inplace else result


def _glu(input: Tensor, dim: int = -1) -> Tensor:
    """Torch's own rule has no gradient with respect to the tangent."""
    value, gate = input.chunk(2, dim)
    return value * torch.sigmoid(gate)


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Torch has no rule."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)  # type: ignore[no-any-return]


def _grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch has no rule; for a grid without a tangent the operation is linear."""
    x, dx = forward_ad.unpack_dual(input)
    value = F.grid_sample(x, grid, *args, **kwargs)
    return value if dx is None else forward_ad.make_dual(value, F.grid_sample(dx, grid, *args, **kwargs))


def _normalize(input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: None = None) -> Tensor:
    """Torch's own rule has no finite gradient where the input is zero, as tokens are that a network pads with."""
    x, dx = forward_ad.unpack_dual(input)
    if dx is None or p != 2:
        return F.normalize(input, p, dim, eps)
    norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    value = x / norm.clamp_min(eps)
    radial = (value * dx).sum(dim, keepdim=True) * (norm > eps)
    return forward_ad.make_dual(value, (dx - value * radial) / norm.clamp_min(eps))  # type: ignore[no-any-return]


def _embedding_bag(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Torch has no rule; sums and means are linear in the embeddings."""
    mode = args[4] if len(args) > 4 else kwargs.get("mode", "mean")
    weight, dweight = forward_ad.unpack_dual(weight)
    value = F.embedding_bag(input, weight, *args, **kwargs)
    if dweight is None:
        return value
    if mode == "max":
        raise RuntimeError("embedding_bag with mode='max' has no forward-mode derivative.")
    return forward_ad.make_dual(value, F.embedding_bag(input, dweight, *args, **kwargs))  # type: ignore[no-any-return]


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Torch has no rule."""
    others = [d for d in range(v.dim()) if d != dim]
    return v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))  # type: ignore[no-any-return]


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """BatchNorm in evaluation mode as the affine map that it is: torch's own rule fails under autocast."""
    if training:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    assert running_mean is not None
    assert running_var is not None
    shape = (-1, *[1] * (input.dim() - 2))
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    return (input * scale.view(shape) + shift.view(shape)).to(input.dtype)


def _group_norm(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """GroupNorm in the default layout: torch's own rule calls `view` on its input."""
    return func(input.contiguous(), *args, **kwargs)  # type: ignore[no-any-return]


_RULES: dict[Any, Callable[..., Tensor]] = {
    **{layer: partial(_layer, layer) for layer in (F.linear, F.conv1d, F.conv2d, F.conv3d)},
    **{norm: partial(_group_norm, norm) for norm in (F.group_norm, torch.group_norm)},
    torch.relu: _relu,
    F.relu: _relu,
    F.leaky_relu: _leaky,
    F.hardsigmoid: _hardsigmoid,
    F.glu: _glu,
    F.normalize: _normalize,
    F.batch_norm: _batch_norm,
    F.grid_sample: _grid_sample,
    F.embedding_bag: _embedding_bag,
    torch.cdist: _cdist,
    torch._weight_norm: _weight_norm,
}
_NUMBERS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__float__, Tensor.__int__, Tensor.__index__}
