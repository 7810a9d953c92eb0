"""Changes to a pre-trained network before it is linearised."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

import torch
import torch.fx
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.nn.utils.parametrize import is_parametrized


def fold_batchnorm(module: nn.Module) -> nn.Module:
    """A copy in which no BatchNorm is left and, in evaluation mode, every output is the same.

    A BatchNorm that directly follows a convolution or linear layer is merged into it. Any other becomes a frozen affine
    map. If its class does more than normalise, such as apply an activation, that part stays. The order of the layers
    comes from a symbolic trace; a network that cannot be traced as a whole is traced part by part.

    Raises:
        ValueError: when a BatchNorm has no running statistics.
    """
    folded = copy.deepcopy(module).eval()
    require_statistics(folded)
    if isinstance(folded, _BatchNorm):
        return _frozen(folded)
    merged = set()
    for layer_name, norm_name in list(_norm_pairs(folded)):
        norm = folded.get_submodule(norm_name)
        assert isinstance(norm, _BatchNorm)
        layer = folded.get_submodule(layer_name)
        trainable = any(p.requires_grad for p in (*layer.parameters(), *norm.parameters()))
        if isinstance(layer, nn.Linear):
            fused: nn.Module = fuse_linear_bn_eval(layer, norm)
        else:
            fused = fuse_conv_bn_eval(layer, norm, isinstance(layer, _TRANSPOSED))  # type: ignore[type-var]
        folded.set_submodule(layer_name, fused.requires_grad_(trainable))
        folded.set_submodule(norm_name, _rest(norm))
        merged.add(norm_name)
    for name, norm in list(folded.named_modules()):
        if isinstance(norm, _BatchNorm) and name not in merged:
            folded.set_submodule(name, _frozen(norm))
    return folded.train(module.training)


def _frozen(norm: _BatchNorm) -> nn.Module:
    affine, rest = FrozenAffine(norm), _rest(norm)
    return affine if isinstance(rest, nn.Identity) else nn.Sequential(affine, rest)


def _rest(norm: _BatchNorm) -> nn.Module:
    """A BatchNorm without its affine map: the identity, unless its class does more than normalise."""
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

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = torch.rsqrt(norm.running_var + norm.eps)
        if norm.affine:
            scale = scale * norm.weight.detach()
        shift = -norm.running_mean * scale
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift + norm.bias.detach() if norm.affine else shift)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *([1] * (x.dim() - 2)))
        return x * self.scale.view(shape) + self.shift.view(shape)


class _NeverFull(dict[str, Tensor]):
    """A dict that contains no key, so that its owner computes every entry again."""

    def __contains__(self, key: object) -> bool:
        return False


def drop_caches(module: nn.Module) -> None:
    """Keep a network from reusing tensors of an earlier call, in place.

    Some networks (LeViT, EfficientFormer, TinyViT) keep a function of their parameters in a dict called `…_cache` while
    they are in evaluation mode. Such a tensor has no derivative in later calls.
    """
    for part in module.modules():
        for name, value in vars(part).items():
            if name.endswith("_cache") and isinstance(value, dict):
                setattr(part, name, _NeverFull())


def relu_to_leaky(module: nn.Module, slope: float = 0.1) -> nn.Module:
    """A copy in which every `nn.ReLU` is an `nn.LeakyReLU` of the given slope, as in the paper.

    Raises:
        ValueError: when there is no `nn.ReLU`, when the network calls relu as a function (which cannot be replaced), or
            when the slope is not in [0, 1).
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
    """Traces into every module except torch's own and BatchNorms of any class."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _traces(module: nn.Module, name: str = "") -> Iterator[tuple[str, torch.fx.Graph]]:
    """Symbolic graphs of the largest parts of a network that can be traced, each with its module's name."""
    try:
        yield name, _Tracer().trace(module)
    except (torch.fx.proxy.TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError):
        # running a network on symbols may raise any of these; its parts may still be traceable
        for child, part in module.named_children():
            if next(part.children(), None) is not None:
                yield from _traces(part, f"{name}.{child}" if name else child)


def _norm_pairs(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names of (convolution or linear layer, BatchNorm) where the second is the only use of the first's output."""
    owners = Counter(id(p) for part in module.modules() for p in part.parameters(recurse=False))
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


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_FUSIBLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED, nn.Linear)


def require_statistics(module: nn.Module) -> None:
    """Refuse a BatchNorm without running statistics: it cannot be frozen."""
    for name, norm in module.named_modules():
        if isinstance(norm, _BatchNorm) and (norm.running_mean is None or norm.running_var is None):
            raise ValueError(
                f"{name!r} ({type(norm).__name__}) has no running statistics: it mixes the samples of a batch also in "
                "evaluation mode. Use track_running_stats=True."
            )
