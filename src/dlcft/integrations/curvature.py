"""The curvature of any module that gives logits, by the names of its own parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dlcft.curvature.estimate import estimate
from dlcft.curvature.form import Curvature
from dlcft.curvature.losses import Loss
from dlcft.curvature.rows import find_layers, parameter_names
from dlcft.curvature.statistics import Statistics
from dlcft.network.classifier import Classifier, evaluating
from dlcft.network.inputs import Input, call, in_half, reference

Forward = Callable[[nn.Module, Input], Any]
Batches = Iterable[tuple[Input, Tensor]]

_INSIDE = "backbone.network."  # where a module's parameters stand in the classifier that is made of it
_HEAD = "outputs"
_MAX_FACTOR = 8192
_GRADIENT_FLOATS = 1 << 28  # most numbers in the gradients by sample, which parameters outside of known layers need


def module_curvature(
    module: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    estimator: str | type[Statistics] = "exact-tk",
    names: Collection[str],
    forward: Forward | None = None,
    draws: int | None = 1,
    samples: int | None = None,
    generator: torch.Generator | None = None,
) -> Curvature:
    """The curvature of the mean loss with respect to the parameters `names`.

    The module's logits are taken as features under a head that is the identity, which leaves the Gauss-Newton matrix as
    it is. Under a squared loss the module's own last layer becomes the head, if it is linear: its block is then exact.

    Args:
        module: any module that gives logits, batch × outputs; it is not changed.
        batches: pairs of inputs and class indices; some estimators go over them twice.
        loss: see `dlcft.curvature.losses`.
        estimator: see `dlcft.curvature.estimate.estimate`.
        names: which parameters; all of them must be used by the module.
        forward: computes the logits from the module and a batch's inputs, where calling the module does not.
        draws: see `estimate`.
        samples: see `estimate`.
        generator: see `estimate`.

    Raises:
        ValueError: when the outputs or labels are no classification, or a layer is not supported.
    """
    forward = forward or logits
    batches = _Parts(module, batches, names)
    with evaluating(module), _training_only(module, names):
        inputs, outputs = _first(module, batches, forward)
        head = _last_layer(module, inputs, forward) if loss.is_quadratic else None
        classifier, renamed = _as_classifier(module, outputs, forward, head, names)
        with _training_only(module, set(names) - set(renamed.values())):
            found = estimate(
                estimator, classifier, batches, loss, _HEAD,
                draws=draws, generator=generator, samples=samples,
                include_head=bool(renamed), include_backbone=len(names) > len(renamed), max_factor=_MAX_FACTOR,
            )  # fmt: skip

    renamed |= {name.rpartition(".")[0]: own.rpartition(".")[0] for name, own in renamed.items()}  # a block's name

    def own(name: str) -> str:
        return renamed.get(name, name.removeprefix(_INSIDE))

    blocks = found.curvature.blocks.items()
    return Curvature({own(name): dataclasses.replace(b, names=tuple(map(own, b.names))) for name, b in blocks})


def logits(module: nn.Module, x: Input) -> Any:
    """What calling the module gives: a tensor, or the `logits` of what it returns."""
    returned = module(**x) if isinstance(x, Mapping) else module(*x) if isinstance(x, tuple) else module(x)
    if isinstance(returned, Tensor):
        return returned
    return returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", returned)


class _Parts:
    """Batches on the module's device, as often as asked for, in parts whose gradients by sample fit into memory.

    An embedding of 30,000 tokens has 12 million numbers a sample, and most of them are zero.
    """

    def __init__(self, module: nn.Module, batches: Batches, names: Collection[str]) -> None:
        self.batches = list(batches) if isinstance(batches, Iterator) else batches
        self.device = reference(module).device
        layers = find_layers(module, names, _MAX_FACTOR)
        known = {p for name, layer in layers.items() for p in parameter_names(name, layer)}
        others = sum(p.numel() for name, p in module.named_parameters() if name in names and name not in known)
        self.most = max(1, _GRADIENT_FLOATS // max(1, others))

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for given, labels in self.batches:
            x = dict(given) if isinstance(given, Mapping) else tuple(given) if isinstance(given, list) else given
            for start in range(0, len(labels), self.most):
                part = slice(start, start + self.most)
                yield tree_map_only(Tensor, lambda t, p=part: t[p].to(self.device), x), labels[part].to(self.device)


class _Whole(nn.Module):
    """A network as a backbone: its features are its logits, or the inputs of its last layer."""

    def __init__(self, network: nn.Module, forward: Forward, last: nn.Linear | None) -> None:
        super().__init__()
        self.network = network
        self._compute = forward
        self._last = [last] if last is not None else []  # in a list, so that it does not become a second submodule

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        x = kwargs or (args if len(args) > 1 else args[0])
        if not self._last:
            outputs: Tensor = self._compute(self.network, x)
            return outputs.float() if in_half(outputs) else outputs
        inputs: list[Tensor] = []
        handle = self._last[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
        try:
            self._compute(self.network, x)
        finally:
            handle.remove()
        (z,) = inputs
        return z


def _as_classifier(
    module: nn.Module, outputs: Tensor, forward: Forward, head: str | None, names: Collection[str]
) -> tuple[Classifier, dict[str, str]]:
    """A classifier that computes the module's logits, and the module's names of its head's parameters."""
    own = tuple(f"{head}.{part}" if head else part for part in ("weight", "bias"))
    if head is not None and set(own) <= set(names):
        last = module.get_submodule(head)
        assert isinstance(last, nn.Linear)
        classifier = Classifier(_Whole(module, forward, last), last.in_features)
        classifier.heads[_HEAD] = last
        return classifier, dict(zip(classifier.head_names(_HEAD), own, strict=True))
    classifier = Classifier(_Whole(module, forward, None), outputs.shape[1])
    like = torch.float32 if in_half(outputs) else outputs.dtype
    identity = nn.Linear(outputs.shape[1], outputs.shape[1], device=outputs.device, dtype=like).requires_grad_(False)
    nn.init.eye_(identity.weight)
    nn.init.zeros_(identity.bias)
    classifier.heads[_HEAD] = identity
    return classifier, {}


@torch.no_grad()
def _first(module: nn.Module, batches: Batches, forward: Forward) -> tuple[Input, Tensor]:
    """The inputs of the first batch, and the module's logits for them."""
    for x, labels in batches:
        if labels.dim() != 1 or labels.is_floating_point():
            got = f"{labels.dtype} of shape {tuple(labels.shape)}"
            raise ValueError(f"labels are {got}; curvature needs one class index for each sample.")
        outputs = call(forward, (module, x))  # which says in one sentence what a network cannot take
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or len(outputs) != len(labels):
            got = str(tuple(outputs.shape)) if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise ValueError(f"the network must give logits, {len(labels)} × outputs; it gave {got}.")
        return x, outputs
    raise ValueError("there is no training data; curvature needs at least one batch.")


@torch.no_grad()
def _last_layer(module: nn.Module, x: Input, forward: Forward) -> str | None:
    """The name of the linear layer that gives the logits, if there is one."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    linear = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
    handles = [
        m.register_forward_hook(lambda _, given, out, name=name: seen.update({name: (given[0], out)}))
        for name, m in linear.items()
    ]
    try:
        outputs = forward(module, x)
    finally:
        for handle in handles:
            handle.remove()
    for name, (z, out) in seen.items():
        # a network may change the outputs afterwards, also in place, as masks of unseen classes do
        if out is outputs and z.dim() == 2 and not in_half(z) and torch.equal(linear[name](z), outputs):
            return name
    return None


@contextmanager
def _training_only(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Inside the block exactly these parameters require gradients."""
    changed = [p for name, p in module.named_parameters() if p.requires_grad != (name in names)]
    for p in changed:
        p.requires_grad_(not p.requires_grad)
    try:
        yield
    finally:
        for p in changed:
            p.requires_grad_(not p.requires_grad)
