"""A network as a graph of ordinary operations, for runtimes that know neither hooks nor derivatives.

The network is run on batches of two sizes, and every tensor operation is written down. Forward-mode and reverse-mode
derivatives run below that record as the operations that they consist of, so a linearised network becomes the explicit
computation of value and change, layer by layer. A number that differs between the two runs depends on the batch size.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from dlcft.network.inputs import Input

SIZES = (3, 5)  # of the two batches: neither is 1, for which operations take other ways

aten = torch.ops.aten


def explicit(network: Callable[..., Any], x: Input) -> fx.GraphModule:
    """The graph of what a network computes for a batch, as a module that takes batches of any size.

    Its tensors are the network's own. Nothing else of the network is left in it, neither classes nor hooks.

    Args:
        network: a module or function in evaluation mode, from a batch to a tensor or a tuple of tensors.
        x: an example. The shape of a sample is fixed by it.

    Raises:
        ValueError: when the operations, and not their sizes alone, depend on the batch size.
    """
    names = list(x) if isinstance(x, Mapping) else ["x"] if isinstance(x, Tensor) else [f"x{i}" for i in range(len(x))]
    own: dict[int, str] = {}
    if isinstance(network, nn.Module):
        tensors = [*network.named_parameters(), *network.named_buffers()]
        own = {id(tensor): re.sub(r"[^\w.]", "_", name) for name, tensor in tensors}
    first, second = (_traced(network, sized(x, size)) for size in SIZES)
    return _joined(first, second, names, own)


def sized(x: Input, size: int) -> Input:
    """A batch of `size` samples: those of `x`, from the first one on and over again."""
    samples = batch_size(x)

    def repeated(t: Tensor) -> Tensor:
        return t[torch.arange(size, device=t.device) % samples] if t.dim() and len(t) == samples else t

    return tree_map_only(Tensor, repeated, x)  # type: ignore[no-any-return]


def batch_size(x: Input) -> int:
    """How many samples a batch has."""
    return len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim()))


@torch.no_grad()
def _traced(network: Callable[..., Any], x: Input) -> fx.GraphModule:
    leaves, how = tree_flatten(x)

    def run(*given: Tensor) -> Any:
        batch = tree_unflatten(list(given), how)
        if isinstance(batch, Mapping):
            return network(**batch)
        return network(*batch) if isinstance(batch, tuple) else network(batch)

    with _plain_kernels():
        return make_fx(run, decomposition_table=_decompositions())(*leaves)


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention and recurrent layers as the operations that they consist of, not as one kernel of this machine."""
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    flags = torch.backends.mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None, fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH), flags:
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def _joined(first: fx.GraphModule, second: fx.GraphModule, names: list[str], own: Mapping[int, str]) -> fx.GraphModule:
    """One graph from those of two batch sizes; `own` are the names of the network's tensors, by their identity."""
    graph, root, places = fx.Graph(), dict[str, Tensor](), dict[fx.Node, fx.Node]()
    pairs = list(zip(first.graph.nodes, second.graph.nodes, strict=False))
    same = all((one.op, one.target) == (other.op, other.target) for one, other in pairs)
    if not same or len(first.graph.nodes) != len(second.graph.nodes):
        raise ValueError(_CHANGES)
    size = _Size(graph)
    for one, other in pairs:
        if one.op == "placeholder":
            places[one] = graph.placeholder(names[len(places)])
            if len(places) == len(names):
                size.measure(next(node for node in places.values()))
        elif one.op == "get_attr":
            tensor, again = (getattr(owner, one.target) for owner in (first, second))
            if tensor is not again and not torch.equal(tensor, again):
                raise ValueError(_CHANGES)
            name = own.get(id(tensor), one.target)
            root[name] = tensor
            places[one] = graph.get_attr(name)
        else:
            args, kwargs = size.joined((one.args, one.kwargs), (other.args, other.kwargs), places)
            if one.op == "output":
                graph.output(*args)
            else:
                places[one] = _called(graph, one.target, args, kwargs)
    graph.eliminate_dead_code()
    module = fx.GraphModule(root, graph, "Explicit")
    return module.requires_grad_(False).eval()


def _called(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """The node of an operation; one that may depend on the batch size in the form that `torch.jit.trace` follows."""
    name = str(target.overloadpacket).removeprefix("aten.") if isinstance(target, torch._ops.OpOverload) else ""
    name = "reshape" if name in ("view", "_unsafe_view") else name  # the layout in memory may be another one
    if name in _METHODS:
        return graph.call_method(name, args, kwargs)
    return graph.call_function(getattr(torch, name) if name in _FUNCTIONS else target, args, kwargs)


class _Size:
    """Numbers that depend on the batch size, as nodes of a graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.known: dict[tuple[int, int], fx.Node] = {}

    def measure(self, x: fx.Node) -> None:
        """Take the batch size from an input."""
        self.known[1, 0] = self.graph.call_method("size", (x, 0))

    def number(self, one: int, other: int) -> fx.Node:
        """`slope·size + rest`, given its values for the two sizes."""
        slope, left = divmod(other - one, SIZES[1] - SIZES[0])
        rest = one - slope * SIZES[0]
        if left:
            raise ValueError(_CHANGES)
        if (slope, 0) not in self.known:
            self.known[slope, 0] = self.graph.call_function(operator.mul, (self.known[1, 0], slope))
        if (slope, rest) not in self.known:
            self.known[slope, rest] = self.graph.call_function(operator.add, (self.known[slope, 0], rest))
        return self.known[slope, rest]

    def joined(self, one: Any, other: Any, places: Mapping[fx.Node, fx.Node]) -> Any:
        """The arguments of an operation, given those in the two runs."""
        if isinstance(one, fx.Node):
            return places[one]
        if isinstance(one, Mapping):
            return {key: self.joined(value, other[key], places) for key, value in one.items()}
        if isinstance(one, list | tuple):
            if len(one) != len(other):
                raise ValueError(_CHANGES)
            return type(one)(self.joined(a, b, places) for a, b in zip(one, other, strict=True))
        if type(one) is int and type(other) is int and one != other:
            return self.number(one, other)
        if one != other:
            raise ValueError(_CHANGES)
        return one


def _input_gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int, wanted: list[bool],
) -> Any:  # fmt: skip
    """The gradient at a convolution's input as a transposed convolution; that of its weight is never asked for."""
    if wanted[1] or wanted[2] or transposed:
        return NotImplemented
    reached = [
        (size - 1) * s - 2 * p + d * (k - 1) + 1
        for size, s, p, d, k in zip(g.shape[2:], stride, padding, dilation, weight.shape[2:], strict=True)
    ]
    more = [have - size for have, size in zip(x.shape[2:], reached, strict=True)]
    return aten.convolution(g, weight, None, stride, padding, dilation, True, more, groups), None, None


def _pool_gradient(
    g: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, indices: Tensor
) -> Tensor:
    """The gradient at the input of a pooling that takes the largest values: it goes to their places."""
    shape = [*x.shape[:-2], -1]
    zeros = torch.zeros_like(x).reshape(shape)
    return zeros.scatter_add(-1, indices.reshape(shape), g.reshape(shape)).reshape(x.shape)


def _zeros_alike(x: Tensor, other: Tensor, *, self_num_batch_dims: int = 0) -> Tensor:
    """The memory of a tangent that is laid out as its value."""
    return torch.zeros_like(other)


@functools.cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Gradients of single layers as other operations."""
    known = {op: rule for op, rule in core_aten_decompositions().items() if "backward" in str(op)}
    return {
        **known,
        aten.convolution_backward.default: _input_gradient,
        aten.max_pool2d_with_indices_backward.default: _pool_gradient,
        aten._new_zeros_with_same_feature_meta.default: _zeros_alike,
    }


_METHODS = ("reshape", "expand", "new_zeros", "new_ones", "new_full", "new_empty", "repeat")
_FUNCTIONS = ("zeros", "ones", "full", "empty", "arange")
_CHANGES = "the network does other operations for another batch size; it cannot be written down as one graph."
