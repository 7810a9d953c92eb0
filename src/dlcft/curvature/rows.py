"""One pass over data: for every trainable layer its inputs `a` and the gradients `g` at its outputs, by hooks.

The gradient of a linearised classifier with respect to ψ is that of the frozen network, whatever ψ is. So the hooks
sit on the frozen network; only the features z, and with them the outputs, need the first-order change.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map

from dlcft.curvature.grams import Layer
from dlcft.curvature.losses import Loss
from dlcft.network.classifier import Classifier, call_split, evaluating
from dlcft.network.inputs import Input, call
from dlcft.network.linearize import Linearized, choose_output

log = logging.getLogger("dlcft")


@dataclass
class LayerRows:
    """What one batch says of one layer: a tensor for each use of it, and for each draw and use."""

    inputs: list[Tensor]
    grads: list[list[Tensor]]


@dataclass
class Rows:
    """What one batch says of the whole classifier.

    Attributes:
        count: samples.
        layers: by layer name.
        z: the head's inputs.
        output_grads: draws × samples × outputs.
        gradient: of the summed loss, by parameter name, where it was asked for.
        others: parameter name to the gradients (draws × samples × shape) of parameters that are in no such layer.
    """

    count: int
    layers: dict[str, LayerRows]
    z: Tensor
    output_grads: Tensor
    gradient: dict[str, Tensor]
    others: dict[str, Tensor] = field(default_factory=dict)


class Tape:
    """The trainable layers of a classifier's backbone, and the pass that records their rows.

    Args:
        model: the classifier.
        head: the head whose outputs count.
        max_factor: layers with more inputs or outputs than this are treated as `others`.
    """

    def __init__(self, model: Classifier, head: str, max_factor: int) -> None:
        self.model = model
        self.head = head
        self.network: nn.Module = model.backbone.base if isinstance(model.backbone, Linearized) else model.backbone
        self.output = model.backbone.output if isinstance(model.backbone, Linearized) else None
        self.prefix = "backbone.delta." if isinstance(model.backbone, Linearized) else "backbone."
        self.trainable = [n.removeprefix(self.prefix) for n in model.params() if n.startswith(self.prefix)]
        left_out = [n for n in model.params() if not n.startswith(self.prefix)]
        if left_out:
            raise ValueError(f"no curvature is defined for the trainable parameter {left_out[0]!r}.")
        self.layers = find_layers(self.network, self.trainable, max_factor)
        covered = {name for names in self.names().values() for name in names}
        self.others = [name for name in self.trainable if name not in covered]

    def names(self) -> dict[str, tuple[str, ...]]:
        """Layer name to its trainable parameters, weight first, as the network calls them."""
        both = {name: (f"{name}.weight", f"{name}.bias") for name in self.layers}
        return {name: tuple(p for p in pair if p in self.trainable) for name, pair in both.items()}

    def geometry(self, name: str) -> Layer:
        """The layer, without its bias where that is not trainable."""
        return trainable_layer(self.layers[name], f"{name}.bias" in self.trainable)

    def passes(
        self,
        batches: Iterable[tuple[Input, Tensor]],
        loss: Loss,
        *,
        draws: int | None,
        generator: torch.Generator | None,
        gradient: bool = False,
        needs_outputs: bool = True,
        output_grads: Any = None,
    ) -> Iterator[Rows]:
        """Rows of every batch.

        Args:
            batches: pairs of input and labels (indices of the head's outputs).
            loss: what the curvature is of.
            draws: see `Loss.output_grads`.
            generator: where the draws come from.
            gradient: whether to compute the gradient of the loss too (two more backward passes' worth).
            needs_outputs: False where z and the outputs at ψ are of no interest, so that the frozen network will do.
            output_grads: replaces the loss's own vectors: a function of the outputs.

        Raises:
            ValueError: when there is no sample, or a layer runs in one batch and not in another.
        """
        seen = False
        for x, labels in batches:
            if len(labels) == 0:
                continue
            if not seen:
                self._settle(x)
            seen = True
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                recording(self.model, self.network, self.trainable, self.layers) as calls,
            ):
                z_frozen, z = self._features(x, needs_outputs or gradient)
                self._check(calls, len(labels))
                rows = self._rows(labels, z_frozen, z, calls, loss, draws, generator, gradient, output_grads)
            if self.others:
                cotangents = rows.output_grads @ self.directions()
                rows.others = per_sample_gradients(self.network, x, self.others, cotangents, self.output)
            yield rows
        if not seen:
            raise ValueError("the data set is empty; curvature needs at least one sample.")

    def _features(self, x: Input, needs_outputs: bool) -> tuple[Tensor, Tensor]:
        """The features z of the frozen network, with a graph, and z at ψ."""
        backbone = self.model.backbone
        if not isinstance(backbone, Linearized):
            z = self.model.features(x)
            return z, z.detach()
        moved = needs_outputs and any(bool(p.any()) for p in backbone.delta.parameters())
        if not moved:
            value = call(backbone.value, x)
            return value, value.detach()
        value, change = call_split(backbone, x)
        return value, value.detach() + change.detach()

    def _rows(
        self,
        labels: Tensor,
        z_frozen: Tensor,
        z: Tensor,
        calls: dict[str, list[tuple[Tensor, GradientEdge]]],
        loss: Loss,
        draws: int | None,
        generator: torch.Generator | None,
        gradient: bool,
        output_grads: Any,
    ) -> Rows:
        head = self.model.head(self.head)
        directions = self.directions()
        z_head = z_frozen.detach() if self.model.strict else z
        with torch.no_grad():
            outputs = head(z_head)
            if self.model.strict:
                outputs = outputs + (z - z_head) @ directions.T
            vectors = loss.output_grads(outputs, draws, generator) if output_grads is None else output_grads(outputs)
        edges = [edge for name in self.layers for _, edge in calls[name]]
        layers = {name: LayerRows([a for a, _ in calls[name]], []) for name in self.layers}
        for index, vector in enumerate(vectors):
            last = index == len(vectors) - 1 and not gradient
            found = iter(backward(z_frozen, edges, vector @ directions, retain=not last))
            for name, rows in layers.items():
                rows.grads.append([next(found) for _ in calls[name]])
        summed = self._gradient(z_frozen, z_head, outputs, directions, labels, loss) if gradient else {}
        return Rows(len(labels), layers, z_head, vectors, summed)

    def directions(self) -> Tensor:
        """How each output depends on the features."""
        return self.model.directions(self.head) if self.model.strict else self.model.head(self.head).weight.detach()

    def _gradient(
        self, z_frozen: Tensor, z: Tensor, outputs: Tensor, directions: Tensor, labels: Tensor, loss: Loss
    ) -> dict[str, Tensor]:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            (residual,) = torch.autograd.grad(loss.value(leaf, labels) * len(labels), leaf)
        named = dict(self.network.named_parameters())
        parameters = [named[name] for name in self.trainable]
        found: tuple[Tensor | None, ...] = ()
        if parameters:
            found = torch.autograd.grad(z_frozen, parameters, residual @ directions, allow_unused=True)
        summed = {
            self.prefix + name: torch.zeros_like(p) if g is None else g
            for name, p, g in zip(self.trainable, parameters, found, strict=True)
        }
        weight, bias = self.model.head_names(self.head)
        return summed | {weight: residual.T @ z, bias: residual.sum(0)}

    def _settle(self, x: Input) -> None:
        """Find out which layers' rows can be told apart by sample; the others' parameters are treated one by one."""
        backbone = self.model.backbone
        run = backbone.value if isinstance(backbone, Linearized) else self.network
        for name, why in without_rows(self.network, self.trainable, self.layers, x, run).items():
            log.info("%s %s: diagonal curvature", name, why)
            self.others += self.names()[name]
            del self.layers[name]

    def _check(self, calls: Mapping[str, list[tuple[Tensor, GradientEdge]]], samples: int) -> None:
        for name in self.layers:
            if not calls[name] or any(len(a) != samples for a, _ in calls[name]):
                raise ValueError(f"layer {name!r} ran for an earlier batch, and not, or in another way, for this one.")


def find_layers(network: nn.Module, trainable: Collection[str], max_factor: int) -> dict[str, Layer]:
    """The linear and convolutional layers whose weights are among `trainable`, by name.

    Layers that share a weight, those with more inputs or outputs than `max_factor`, and those of a class that computes
    something else with its weight, are left out with a log line.
    """
    owners: dict[int, int] = {}
    for _, p in network.named_parameters(remove_duplicate=False):
        owners[id(p)] = owners.get(id(p), 0) + 1
    layers: dict[str, Layer] = {}
    for name, module in network.named_modules():
        if not isinstance(module, Layer) or is_parametrized(module) or f"{name}.weight" not in trainable:
            continue
        if any(owners[id(p)] > 1 for p in module.parameters(recurse=False)):
            log.info("%s shares a weight with another layer: treated parameter by parameter", name)
        elif max(module.weight[0].numel() + 1, len(module.weight)) > max_factor:
            log.info("%s is wider than max_factor=%d: treated parameter by parameter", name, max_factor)
        elif not _computes_as_usual(module):
            log.info("%s (%s) has a forward of its own: treated parameter by parameter", name, type(module).__name__)
        else:
            layers[name] = module
    return layers


def trainable_layer(layer: Layer, bias: bool) -> Layer:
    """The layer, without its bias where that is not trainable."""
    if layer.bias is None or bias:
        return layer
    without = copy.copy(layer)
    without._parameters = {**layer._parameters, "bias": None}
    return without


def without_rows(
    network: nn.Module,
    trainable: Collection[str],
    layers: Mapping[str, Layer],
    x: Input,
    run: Callable[..., Any],
) -> dict[str, str]:
    """The layers whose rows cannot be told apart by sample, and why.

    Hooks of attention's projections never fire; and a layer that is given tokens or windows in place of samples has
    rows of which only the network knows whose they are. One sample twice, and three times, tells: as many tokens as
    samples in a batch would look the same.

    Args:
        network: whose layers are meant.
        trainable: names of its parameters.
        layers: by name.
        x: a batch; its first sample is taken.
        run: calls the network.
    """
    why: dict[str, str] = {}
    for count in (2, 3):
        few = tree_map(lambda t, n=count: t[:1].expand(n, *t.shape[1:]).clone() if isinstance(t, Tensor) else t, x)
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            recording(network, network, trainable, layers) as calls,
        ):
            call(run, few)
        for name in layers:
            if not calls[name]:
                why[name] = "is not called as a module"
            elif any(len(a) != count for a, _ in calls[name]):
                why[name] = "is not given one row of the batch a sample"
    return why


def _computes_as_usual(layer: Layer) -> bool:
    """Whether its class leaves the output to torch: others pad or normalise on the way, and rows would be wrong."""
    own = type(layer)
    kind = next(kind for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))
    names = ("forward", "_conv_forward")
    return all(getattr(own, name, None) is getattr(kind, name, None) for name in names)


@contextmanager
def recording(
    model: nn.Module, network: nn.Module, trainable: Collection[str], layers: Mapping[str, Layer]
) -> Iterator[dict[str, list[tuple[Tensor, GradientEdge]]]]:
    """While it lasts, each layer's input and the place of its output in the graph are noted at every use.

    Args:
        model: what is called; it is in evaluation mode meanwhile.
        network: the part of it whose parameters are meant.
        trainable: names of the network's parameters that the graph shall reach, whether or not they are frozen.
        layers: the network's layers by name.
    """
    calls: dict[str, list[tuple[Tensor, GradientEdge]]] = {name: [] for name in layers}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():  # the network only looks at itself
                return output
            value, change = forward_ad.unpack_dual(output)
            # Neither a view nor a copy: an activation that works in place must not move this point of the graph.
            value = torch.ops.aten._unsafe_view(value, value.shape)
            calls[name].append((forward_ad.unpack_dual(args[0]).primal.detach(), get_gradient_edge(value)))
            # The change is not differentiated here, so its graph need not live.
            return value if change is None else forward_ad.make_dual(value, change.detach())  # type: ignore[no-any-return]

        return hook

    frozen = [p for name, p in network.named_parameters() if name in set(trainable) and not p.requires_grad]
    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    for p in frozen:
        p.requires_grad_(True)
    try:
        with evaluating(model):
            yield calls
    finally:
        for handle in handles:
            handle.remove()
        for p in frozen:
            p.requires_grad_(False)


def per_sample_gradients(
    network: nn.Module, x: Input, names: list[str], cotangents: Tensor, output: Any = None
) -> dict[str, Tensor]:
    """Gradients of `cotangent · z` with respect to any of the network's parameters, sample by sample.

    Args:
        network: gives z; its parameters are meant.
        x: the batch.
        names: which parameters.
        cotangents: draws × samples × features.
        output: which of the network's outputs is z, see `Linearized`.

    Returns:
        Parameter name to draws × samples × shape.
    """
    parameters = {name: p.detach() for name, p in network.named_parameters() if name in set(names)}

    def scalar(params: dict[str, Tensor], sample: Input, cotangent: Tensor) -> Tensor:
        batch = tree_map(lambda t: t[None] if isinstance(t, Tensor) else t, sample)
        z = choose_output(_functional(network, params, batch), output)
        return (z[0] * cotangent).sum()

    gradient = torch.func.grad(scalar)
    # it differentiates all the same; a graph of its own would live as long as the sums that the gradients go into
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        try:
            each_draw = torch.func.vmap(gradient, (None, None, 0))
            return dict(torch.func.vmap(each_draw, (None, 0, 1), out_dims=1)(parameters, x, cotangents))
        except RuntimeError as error:
            log.info("sample by sample, because the network cannot be vectorised: %s", str(error).split("\n")[0])
            samples = [
                [gradient(parameters, tree_map(lambda t, n=n: t[n], x), c[n]) for n in range(len(c))]
                for c in cotangents
            ]
            return {
                name: torch.stack([torch.stack([g[name] for g in draw]) for draw in samples]) for name in parameters
            }


def _functional(network: nn.Module, params: dict[str, Tensor], x: Input) -> Any:
    if isinstance(x, Mapping):
        return torch.func.functional_call(network, params, (), dict(x))
    return torch.func.functional_call(network, params, x)


def backward(outputs: Tensor, edges: list[GradientEdge], cotangent: Tensor, *, retain: bool) -> list[Tensor]:
    """The gradients at places of the graph."""
    if not edges:
        return []
    found = torch.autograd.grad(outputs, edges, cotangent.to(outputs.dtype), retain_graph=retain, allow_unused=True)
    return list(found)
