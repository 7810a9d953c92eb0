"""The classifier: a backbone that gives feature vectors, and named linear heads on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dlcft.network.inputs import Input, call, in_half, reference
from dlcft.network.linearize import Frozen, Linearized
from dlcft.network.prepare import drop_caches


class Classifier(nn.Module):
    """`f(x) = W_t z(x) + b_t` with features `z` from a plain or linearised backbone and one head per name t.

    On a linearised backbone f is linear in ψ and linear in (W, b) but bilinear in the pair. With `strict=True` the
    model is truly linear: `f(x) = W g(x; ψ0) + b + W0 D_ψ g(x; ψ0)·ψ`, where W0 is fixed (`fix_directions`) before
    training.

    Heads on a backbone in half precision are in float32: their weights would be rounded there, or overflow.

    Args:
        backbone: any module that maps a batch to feature vectors.
        features: the length of a feature vector.
        strict: see above.

    Raises:
        ValueError: when `strict` is True and the backbone is not `Linearized`.
    """

    def __init__(self, backbone: nn.Module, features: int, *, strict: bool = False) -> None:
        super().__init__()
        if strict and not isinstance(backbone, Linearized):
            raise ValueError(f"strict=True needs a Linearized backbone, not {type(backbone).__name__}.")
        self.backbone = backbone
        self.feature_count = features
        self.strict = strict
        self.heads = nn.ModuleDict()

    def forward(self, x: Input, head: str) -> Tensor:
        """Logits, batch × outputs."""
        layer = self.head(head)
        if self.strict:
            value, change = (z.to(layer.weight.dtype) for z in call(self.backbone.split, x))  # type: ignore[arg-type]
            return layer(value) + change @ self.directions(head).T  # type: ignore[no-any-return]
        return layer(self.features(x).to(layer.weight.dtype))  # type: ignore[no-any-return]

    def features(self, x: Input) -> Tensor:
        """Feature vectors, batch × features.

        Raises:
            ValueError: when the backbone returns anything else.
        """
        z = call(self.backbone, x)
        if not isinstance(z, Tensor) or z.dim() != 2 or z.shape[1] != self.feature_count:
            got = tuple(z.shape) if isinstance(z, Tensor) else type(z).__name__
            raise ValueError(
                f"the backbone must give a batch × {self.feature_count} matrix of features; it gave {got}."
            )
        return z

    def head(self, name: str) -> nn.Linear:
        """The linear layer of a head.

        Raises:
            ValueError: when no head has that name.
        """
        if name not in self.heads:
            raise ValueError(f"no head {name!r}; there are: {', '.join(self.heads) or 'none'}.")
        layer = self.heads[name]
        assert isinstance(layer, nn.Linear)
        return layer

    def add_head(self, name: str, outputs: int) -> None:
        """Add a head of zeros.

        Raises:
            ValueError: when the name is taken or invalid, or `outputs` is less than 1.
        """
        if name in self.heads or "." in name or not name:
            raise ValueError(f"a head cannot be called {name!r}: the name is taken, empty or has a dot.")
        if outputs < 1:
            raise ValueError(f"a head needs at least one output, not {outputs}.")
        like = reference(self.backbone)
        layer = self.heads[name] = _zero_layer(self.feature_count, outputs, like)
        if self.strict:
            self.register_buffer(f"directions_{name}", torch.zeros_like(layer.weight))

    def grow(self, name: str, outputs: int) -> None:
        """Append zero rows to a head until it has `outputs`; its old logits do not change.

        Raises:
            ValueError: when it has more outputs than that.
        """
        old = self.head(name)
        if outputs < old.out_features:
            raise ValueError(f"head {name!r} has {old.out_features} outputs and cannot shrink to {outputs}.")
        new = _zero_layer(self.feature_count, outputs, old.weight)
        with torch.no_grad():
            for grown, kept in ((new.weight, old.weight), (new.bias, old.bias)):
                grown[: len(kept)] = kept
        self.heads[name] = new
        if self.strict:
            directions = torch.zeros_like(new.weight)
            directions[: old.out_features] = self.directions(name)
            self.register_buffer(f"directions_{name}", directions)

    def set_heads(self, outputs: Mapping[str, int]) -> None:
        """Replace all heads by heads of zeros, given the number of outputs by name."""
        for name in list(self.heads):
            del self.heads[name]
        for name, count in outputs.items():
            self.add_head(name, count)

    def directions(self, name: str) -> Tensor:
        """W0 of a head of a strict model."""
        return self.get_buffer(f"directions_{name}")

    def fix_directions(self, name: str, weight: Tensor) -> None:
        """Set W0 of a head of a strict model."""
        self.directions(name).copy_(weight)

    def head_names(self, name: str) -> tuple[str, str]:
        """The names of a head's weight and bias among all parameters."""
        return f"heads.{name}.weight", f"heads.{name}.bias"

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All learned tensors, and the sizes of the heads."""
        return learned_state(self), {"heads": {name: self.head(name).out_features for name in self.heads}}

    def load_state(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """The inverse of `state`.

        Raises:
            ValueError: when a tensor belongs to no parameter or buffer of this model, or is of another kind.
        """
        for name, outputs in header["heads"].items():  # before memory is taken for them
            saved = tensors.get(f"heads.{name}.bias")
            if saved is None or saved.shape != (outputs,):
                raise ValueError(f"head {name!r} was saved with other outputs than {outputs}.")
        self.set_heads(header["heads"])
        check_kinds(tensors, self)
        self.load_state_dict(dict(tensors), strict=False)

    def params(self, head: str | None = None) -> dict[str, nn.Parameter]:
        """The trainable parameters θ by name: the backbone's, and one head's."""
        named = {name: p for name, p in self.named_parameters() if p.requires_grad and not name.startswith("heads.")}
        if head is not None:
            named |= {f"heads.{head}.{name}": p for name, p in self.head(head).named_parameters()}
        return named


@torch.no_grad()
def _zero_layer(features: int, outputs: int, like: Tensor) -> nn.Linear:
    """A linear layer of zeros; torch's own initialisation would change the caller's random state."""
    dtype = torch.float32 if in_half(like) else like.dtype
    layer = nn.utils.skip_init(nn.Linear, features, outputs, device=like.device, dtype=dtype)
    for parameter in layer.parameters():
        parameter.zero_()
    return layer  # type: ignore[no-any-return]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block, without caches; afterwards every module has its former mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    drop_caches(model)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def check_kinds(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Refuse tensors that a model has not, in another shape, or integers in place of real numbers.

    Raises:
        ValueError: names the first of them.
    """
    own = model.state_dict()
    for name, tensor in tensors.items():
        if name not in own:
            raise ValueError(f"{name!r} was learned, and the network has no such parameter.")
        if tensor.shape != own[name].shape or tensor.is_floating_point() != own[name].is_floating_point():
            got, kept = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (tensor, own[name]))
            raise ValueError(f"{name!r} was saved as {got}; the network has {kept}.")


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name, except those of frozen networks."""
    frozen = [f"{name}.base." if name else "base." for name, m in model.named_modules() if isinstance(m, Frozen)]
    named = model.state_dict().items()
    return {name: t.detach().clone() for name, t in named if not any(name.startswith(prefix) for prefix in frozen)}
