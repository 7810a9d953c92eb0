"""What is done to a pre-trained network before it is linearised: both functions return a changed copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.nn.utils.parametrize import is_parametrized


def fold_batchnorm(module: nn.Module) -> nn.Module:
    """A copy in which no BatchNorm is left and, in evaluation mode, every output is the same.

    One that directly follows a convolution or linear layer is merged into it. Any other becomes a frozen affine map. Of
    a class that does more than to normalise, such as to apply an activation too, the rest stays. What follows what is
    read off a symbolic trace; parts that cannot be traced are looked at piece by piece.

    Raises:
        ValueError: when a BatchNorm has no running statistics.
    """
    folded = copy.deepcopy(module).eval()
    for name, norm in list(folded.named_modules()):
        if isinstance(norm, _BatchNorm):
            require_statistics(name, norm)
    if isinstance(folded, _BatchNorm):
        return _frozen(folded)
    merged = set()
    for layer_name, norm_name in list(_norm_pairs(folded)):
        norm = folded.get_submodule(norm_name)
        assert isinstance(norm, _BatchNorm)
        layer = folded.get_submodule(layer_name)
        trainable = any(p.requires_grad for p in (*layer.parameters(), *norm.parameters()))
        folded.set_submodule(layer_name, _fuse(layer, norm).requires_grad_(trainable))
        folded.set_submodule(norm_name, _what_follows(norm))
        merged.add(norm_name)
    for name, norm in list(folded.named_modules()):
        if isinstance(norm, _BatchNorm) and name not in merged:
            folded.set_submodule(name, _frozen(norm))
    return folded.train(module.training)


def _frozen(norm: _BatchNorm) -> nn.Module:
    affine, rest = FrozenAffine.of(norm), _what_follows(norm)
    return affine if isinstance(rest, nn.Identity) else nn.Sequential(affine, rest)


def _what_follows(norm: _BatchNorm) -> nn.Module:
    """What is left of a BatchNorm once its map is merged elsewhere: nothing, unless its class does more than that."""
    if type(norm).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return nn.Identity()
    rest = copy.deepcopy(norm)
    assert rest.running_mean is not None
    assert rest.running_var is not None
    rest.weight = rest.bias = None  # type: ignore[assignment]
    rest.running_mean.zero_()
    rest.running_var.fill_(1 - rest.eps)
    return rest


class FrozenAffine(nn.Module):
    """`scale ∘ x + shift` per channel, neither trainable: a BatchNorm with no layer to be merged into."""

    scale: Tensor
    shift: Tensor

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    @classmethod
    def of(cls, norm: _BatchNorm) -> FrozenAffine:
        """The map that `norm` is in evaluation mode."""
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.affine:
            scale = scale * norm.weight.detach()
        shift = -norm.running_mean * scale
        if norm.affine:
            shift = shift + norm.bias.detach()
        return cls(scale, shift)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to dimension 1."""
        shape = (1, -1, *([1] * (x.dim() - 2)))
        return x * self.scale.view(shape) + self.shift.view(shape)


def relu_to_leaky(module: nn.Module, slope: float = 0.1) -> nn.Module:
    """A copy in which every `nn.ReLU` is an `nn.LeakyReLU` of the given slope, as the paper's recipe has it.

    Raises:
        ValueError: when there is none, when the network calls relu as a function (which no copy of a module can
            change), or when the slope is not in [0, 1).
    """
    if not 0 <= slope < 1:
        raise ValueError(f"slope is {slope}; it must be at least 0 and less than 1.")
    if isinstance(module, nn.ReLU):
        return nn.LeakyReLU(slope, inplace=module.inplace)
    for name, graph in _traces(module):
        for node in graph.nodes:
            if node.op in ("call_function", "call_method") and node.target in _RELU_FUNCTIONS:
                raise ValueError(
                    f"{name or 'the network'!r} calls relu as a function; use nn.ReLU modules to have it replaced."
                )
    leaky = copy.deepcopy(module)
    found = [(name, m) for name, m in leaky.named_modules(remove_duplicate=False) if isinstance(m, nn.ReLU)]
    if not found:
        raise ValueError(f"{type(module).__name__} contains no nn.ReLU.")
    for name, relu in found:
        leaky.set_submodule(name, nn.LeakyReLU(slope, inplace=relu.inplace))
    return leaky


_RELU_FUNCTIONS = (torch.relu, torch.relu_, nn.functional.relu, nn.functional.relu_, "relu", "relu_")


class _Tracer(torch.fx.Tracer):
    """Looks into every module that is not torch's own, BatchNorms of any class excepted."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _traces(module: nn.Module, name: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """Symbolic graphs that cover as much of a network as can be traced, with the prefix of each."""
    try:
        yield name, _Tracer().trace(module)
    except (
        torch.fx.proxy.TraceError,
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        KeyError,
        IndexError,
    ):
        # running a network on symbols may fail in any of these ways; its parts may still be traceable
        for child, part in module.named_children():
            if next(part.children(), None) is not None:
                yield from _traces(part, f"{name}.{child}" if name else child)


def _norm_pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of (convolution or linear layer, BatchNorm) where the second is the only use of the first's output."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for prefix, graph in _traces(module):
        calls = [node.target for node in graph.nodes if node.op == "call_module"]
        for node in graph.nodes:
            source = node.args[0] if node.args else None
            if node.op != "call_module" or not isinstance(source, torch.fx.Node) or source.op != "call_module":
                continue
            names = [f"{prefix}.{n.target}" if prefix else str(n.target) for n in (source, node)]
            layer, norm = (module.get_submodule(name) for name in names)
            mergeable = (
                isinstance(norm, _BatchNorm)
                and isinstance(layer, _FUSIBLE)
                and len(source.users) == 1
                and calls.count(source.target) == calls.count(node.target) == 1
                and all(owners[id(p)] == 1 for p in layer.parameters(recurse=False))
                and not is_parametrized(layer)
                and not (isinstance(layer, nn.Linear) and not isinstance(norm, nn.BatchNorm1d))
            )
            if mergeable:
                yield names[0], names[1]


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUSIBLE = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)


def _fuse(layer: nn.Module, norm: _BatchNorm) -> nn.Module:
    if isinstance(layer, nn.Linear):
        return fuse_linear_bn_eval(layer, norm)
    return fuse_conv_bn_eval(layer, norm, isinstance(layer, _TRANSPOSED))  # type: ignore[type-var]


def require_statistics(name: str, norm: _BatchNorm) -> None:
    """Refuse a BatchNorm that cannot be frozen.

    Raises:
        ValueError: when it has no running statistics.
    """
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            f"{name!r} ({type(norm).__name__}) has no running statistics: it mixes the samples of a batch also in "
            "evaluation mode. Use track_running_stats=True."
        )
