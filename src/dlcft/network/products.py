"""Float32 matrix products on the processor by oneDNN: half the time of torch's own where MKL leaves AVX-512 unused.

Small products, other dtypes and devices, tensors with gradients, and views that oneDNN would not take as they lie in
memory go to torch's own product. A column slice given to oneDNN takes its reference code, a thousand times slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LEAST = 1 << 24  # multiplications; below, starting oneDNN takes longer than the product

_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def by_onednn(*tensors: Tensor) -> bool:
    """Whether oneDNN is there, switched on, and takes such tensors, and nobody records or transforms the operations."""
    if _LINEAR is None or not torch.backends.mkldnn.is_available() or not torch._C._get_mkldnn_enabled():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state():
        return False
    return all(
        t.device.type == "cpu"
        and t.dtype == torch.float32
        and not t.requires_grad
        and type(t) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
        for t in tensors
    )


def times_transposed(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b.mT` of matrices M × K and N × K, or of batches of them."""
    if a.dim() == 3 and len(a) == len(b) == 1:
        return times_transposed(a[0], b[0])[None]
    if a.dim() == 3:
        return a @ b.mT
    fits = a.is_contiguous() and (b.is_contiguous() or b.T.is_contiguous())
    if not fits or a.numel() * len(b) < LEAST or not by_onednn(a, b):
        return a @ b.T
    found: Tensor = _LINEAR(a, b, None, "none", [], "")
    return found


def transposed_times(a: Tensor, b: Tensor) -> Tensor:
    """`a.T @ b` of matrices R × M and R × N: the sum of the outer products of their rows."""
    fits = a.is_contiguous() and b.is_contiguous()
    if not fits or a.numel() * b.shape[1] < LEAST or not by_onednn(a, b):
        return a.T @ b
    if len(a) < max(a.shape[1], b.shape[1]):
        return times_transposed(a.T.contiguous(), b.T)
    # Of tall matrices a transposed copy would take as long as the product. The weight gradient of a convolution of
    # one tap, whose positions are the rows, needs none.
    gradient, image = (t.view(1, len(t), 1, -1).permute(0, 3, 1, 2) for t in (a, b))
    return weight_gradient(gradient, image, (1, 1), (1, 1), (0, 0), (1, 1), 1).view(a.shape[1], b.shape[1])


def weight_gradient(
    gradient: Tensor,
    image: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's weight, from that at its output and its input (N, C, *spatial)."""
    weight = image.new_empty(gradient.shape[1], image.shape[1] // groups, *kernel)
    none = [0] * len(kernel)
    wanted = (False, True, False)
    return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
        gradient, image, weight, None, stride, padding, dilation, False, none, groups, wanted
    )[1]
