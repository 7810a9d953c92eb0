"""A network as a graph of ordinary operations, for runtimes that know neither hooks nor derivatives.

The network is run on batches of two sizes, and every tensor operation is written down. Forward-mode and reverse-mode
derivatives run above that record, so it has the operations that they consist of: a linearised network becomes the
explicit computation of value and change, layer by layer. A number that differs between the runs depends on the size.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from dlcft.network.forward_mode import without_mkldnn
from dlcft.network.inputs import Input, call

SAMPLES = (3, 5)  # of the runs: neither is 1, for which operations take other ways
LENGTHS = (7, 11)  # of the sequences, where there are any

aten = torch.ops.aten


class NotOneGraph(ValueError):
    """A network that is more than one fixed list of operations."""

    def __init__(self, why: str = "it does other operations for another batch size") -> None:
        super().__init__(f"the network cannot be written down as one graph of operations: {why}.")


def explicit(network: Callable[..., Any], x: Input, *, sequences: bool = False) -> fx.GraphModule:
    """The graph of what a network computes for a batch, as a module that takes batches of any size.

    Its tensors are the network's own. Nothing else of the network is left in it, neither classes nor hooks.

    Args:
        network: a module or function in evaluation mode, from a batch to a tensor or a tuple of tensors.
        x: an example. The shape of a sample is fixed by it.
        sequences: whether the second axis of integers is one of tokens, whose number is not fixed.

    Raises:
        NotOneGraph: when its operations depend on the batch size, or on computed values.
    """
    runs = [(n, length) for length, n in product(LENGTHS if sequences else (0,), SAMPLES)]
    names = list(x) if isinstance(x, Mapping) else ["x"] if isinstance(x, Tensor) else [f"x{i}" for i in range(len(x))]
    own: dict[int, str] = {}
    if isinstance(network, nn.Module):
        tensors = [*network.named_parameters(), *network.named_buffers()]
        own = {id(tensor): re.sub(r"[^\w.]", "_", name) for name, tensor in tensors}
    with torch.no_grad():
        call(network, x)  # some decide something at their first call
    return _joined([_traced(network, sized(x, *run)) for run in runs], _Sizes(runs), names, own)


def sized(x: Input, samples: int, length: int = 0) -> Input:
    """A batch of so many samples, and of so many tokens if that is not 0: those of `x`, over and over again."""
    known = batch_size(x)

    def repeated(t: Tensor) -> Tensor:
        if not t.dim() or len(t) != known:
            return t
        t = t[torch.arange(samples, device=t.device) % known]
        return t[:, torch.arange(length, device=t.device) % t.shape[1]] if length and is_tokens(t) else t

    return tree_map_only(Tensor, repeated, x)  # type: ignore[no-any-return]


def is_tokens(t: Tensor) -> bool:
    """Whether a tensor may be one of tokens, samples × positions."""
    return t.dim() == 2 and not t.is_floating_point()


def batch_size(x: Input) -> int:
    """How many samples a batch has."""
    return len(next(leaf for leaf in tree_leaves(x) if isinstance(leaf, Tensor) and leaf.dim()))


@torch.no_grad()
def _traced(network: Callable[..., Any], x: Input) -> fx.GraphModule:
    leaves, how = tree_flatten(x)

    def run(*given: Tensor) -> Any:
        return call(network, tree_unflatten(list(given), how))

    try:
        with _plain_kernels():
            traced = make_fx(run, decomposition_table=_decompositions())(*leaves)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        number = "value out of a tracing tensor" in str(error)
        why = "it goes on from a computed value as a Python number" if number else str(error).strip().splitlines()[0]
        raise NotOneGraph(why.rstrip(".")) from error
    traced.graph.eliminate_dead_code()
    return traced


@contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention and recurrent layers as the operations that they consist of, not as one kernel of this machine.

    Networks that ask `torch.compiler.is_compiling()` are told so: they look at no values then.
    """
    fast_path, compiling = torch.backends.mha.get_fastpath_enabled(), torch.compiler._is_compiling_flag
    torch.backends.mha.set_fastpath_enabled(False)
    torch.compiler._is_compiling_flag = True
    try:
        with sdpa_kernel(SDPBackend.MATH), without_mkldnn():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        torch.compiler._is_compiling_flag = compiling


def _joined(
    traces: Sequence[fx.GraphModule], sizes: _Sizes, names: list[str], own: Mapping[int, str]
) -> fx.GraphModule:
    """One graph from those of several runs; `own` are the names of the network's tensors, by their identity."""
    graph, root, places = fx.Graph(), dict[str, Tensor](), dict[fx.Node, fx.Node]()
    if len({len(trace.graph.nodes) for trace in traces}) > 1:
        raise NotOneGraph
    for nodes in zip(*(trace.graph.nodes for trace in traces), strict=True):
        first = nodes[0]
        if any((node.op, node.target) != (first.op, first.target) for node in nodes):
            raise NotOneGraph
        if first.op == "placeholder":
            places[first] = graph.placeholder(names[len(places)])
            if len(places) == len(names):
                sizes.measure(graph, list(traces[0].graph.nodes)[: len(names)], list(places.values()))
        elif first.op == "get_attr":
            tensors = [getattr(trace, first.target) for trace in traces]
            if not all(tensors[0] is tensor or torch.equal(tensors[0], tensor) for tensor in tensors):
                raise NotOneGraph
            name = own.get(id(tensors[0]), first.target)
            root[name] = tensors[0]
            places[first] = graph.get_attr(name)
        else:
            args, kwargs = _arguments([(node.args, node.kwargs) for node in nodes], sizes, places)
            if first.op == "output":
                graph.output(*args)
            elif _only_layout(first):
                places[first] = graph.call_method("reshape", args[:2])
            else:
                places[first] = _called(graph, first.target, args, kwargs)
    graph.eliminate_dead_code()
    return fx.GraphModule(root, graph, "Explicit").requires_grad_(False).eval()


def _called(graph: fx.Graph, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """The node of an operation; one that may depend on the batch size in the form that `torch.jit.trace` follows."""
    name = str(target.overloadpacket).removeprefix("aten.") if isinstance(target, torch._ops.OpOverload) else ""
    name = "reshape" if name in ("view", "_unsafe_view") else name  # the layout in memory may be another one
    if name in _METHODS:
        return graph.call_method(name, args, kwargs)
    return graph.call_function(getattr(torch, name) if name in _FUNCTIONS else target, args, kwargs)


def _only_layout(node: fx.Node) -> bool:
    """Whether an operation gives all elements of a tensor in their order, and says only how they lie in memory."""
    if node.target not in (aten.as_strided.default, aten.as_strided_.default):
        return False
    x, size, stride, offset = (*node.args, None)[:4]
    assert isinstance(x, fx.Node)
    given: Tensor = x.meta["val"]
    whole = torch.empty(size, device="meta")  # type: ignore[arg-type]
    ordered = [s for s, n in zip(whole.stride(), whole.shape, strict=True) if n > 1]
    wanted = [s for s, n in zip(stride, whole.shape, strict=True) if n > 1]  # type: ignore[arg-type]
    return ordered == wanted and not offset and given.is_contiguous() and given.numel() == whole.numel()


def _arguments(given: Sequence[Any], sizes: _Sizes, places: Mapping[fx.Node, fx.Node]) -> Any:
    """The arguments of an operation, given those of each run."""
    first = given[0]
    if isinstance(first, fx.Node):
        return places[first]
    if isinstance(first, Mapping):
        return {key: _arguments([one[key] for one in given], sizes, places) for key in first}
    if isinstance(first, list | tuple):
        if len({len(one) for one in given}) > 1:
            raise NotOneGraph
        return type(first)(_arguments(parts, sizes, places) for parts in zip(*given, strict=True))
    if all(one == first for one in given):
        return first
    if any(type(one) is not int for one in given):
        raise NotOneGraph
    return sizes.number(given)


class _Sizes:
    """Numbers that depend on the numbers of samples and tokens, as nodes of a graph.

    Args:
        runs: both for each run: all samples with the first length, then all with the second, if there is one.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        self.runs = runs
        self.known: dict[Any, fx.Node] = {}

    def measure(self, graph: fx.Graph, traced: list[fx.Node], inputs: list[fx.Node]) -> None:
        """Take both from the inputs."""
        self.graph = graph
        shapes = [node.meta["val"] for node in traced]
        batched = next(i for i, t in enumerate(shapes) if t.dim() and len(t) == SAMPLES[0])
        self.known["samples"] = graph.call_method("size", (inputs[batched], 0))
        if self.runs[0][1]:
            tokens = next(i for i, t in enumerate(shapes) if is_tokens(t) and len(t) == SAMPLES[0])
            self.known["length"] = graph.call_method("size", (inputs[tokens], 1))

    def number(self, values: Sequence[int]) -> fx.Node:
        """`a + b·samples + c·length + d·samples·length`, given its value in each run."""
        (n, length), step = self.runs[0], self.runs[1][0] - self.runs[0][0]
        slopes = [_exact(values[i + 1] - values[i], step) for i in range(0, len(values), 2)]
        starts = [values[2 * i] - slope * n for i, slope in enumerate(slopes)]
        further = self.runs[-1][1] - length
        of_both, of_length = (_exact(pair[-1] - pair[0], further) if further else 0 for pair in (slopes, starts))
        terms = {"samples": slopes[0] - of_both * length, "length": of_length, "both": of_both}
        total: fx.Node | int = starts[0] - of_length * length
        for name, factor in terms.items():
            if factor:
                total = self._operation(operator.add, self._operation(operator.mul, self._size(name), factor), total)
        assert isinstance(total, fx.Node)
        return total

    def _size(self, name: str) -> fx.Node:
        if name != "both":
            return self.known[name]
        return self._operation(operator.mul, self.known["samples"], self.known["length"])

    def _operation(self, what: Callable[..., Any], one: fx.Node, other: fx.Node | int) -> fx.Node:
        if other == (1 if what is operator.mul else 0):
            return one
        key = what, one, other
        if key not in self.known:
            self.known[key] = self.graph.call_function(what, (one, other))
        return self.known[key]


def _exact(difference: int, step: int) -> int:
    slope, left = divmod(difference, step)
    if left:
        raise NotOneGraph
    return slope


def _input_gradient(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Any,
    groups: int,
    wanted: Sequence[bool],
) -> Any:
    """The gradient at a convolution's input as a transposed convolution; features ask for no other."""
    if transposed or wanted[1] or wanted[2]:
        return NotImplemented
    axes = zip(x.shape[2:], g.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    more = [size - ((out - 1) * s - 2 * p + d * (kernel - 1) + 1) for size, out, kernel, s, p, d in axes]
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
