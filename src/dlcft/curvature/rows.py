"""Recording of every trainable layer's inputs `a` and the gradients `g` at its outputs, by hooks."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import tree_map_only

from dlcft.curvature.grams import Layer
from dlcft.network.inputs import AnyLayout, Input, call, functional_call
from dlcft.network.linearize import choose_output

log = logging.getLogger("dlcft")

Calls = dict[str, list[tuple[Tensor, GradientEdge]]]
"""By layer name, for each use of the layer: its input, and its output's place in the graph."""


def find_layers(network: nn.Module, trainable: Collection[str], max_factor: int) -> dict[str, Layer]:
    """The linear and convolutional layers whose weights are among `trainable`, by name, without a frozen bias.

    Left out, with a log line: layers that share a weight, layers with more inputs or outputs than `max_factor`, and
    layers of a class with a forward of its own.
    """
    owners = Counter(id(p) for _, p in network.named_parameters(remove_duplicate=False))
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
            if module.bias is not None and f"{name}.bias" not in trainable:
                layers[name] = copy.copy(module)
                layers[name]._parameters = {**module._parameters, "bias": None}
    return layers


def parameter_names(name: str, layer: Layer) -> tuple[str, ...]:
    """The names of a layer's trainable parameters, weight first."""
    return (f"{name}.weight",) if layer.bias is None else (f"{name}.weight", f"{name}.bias")


def without_rows(
    network: nn.Module, trainable: Collection[str], layers: Collection[str], x: Input, run: Callable[..., Any]
) -> dict[str, str]:
    """The layers whose rows cannot be assigned to samples, and the reason; `run` calls the network.

    Attention uses the weights of its projections without calling them, so hooks there never fire. Other layers are
    given tokens or windows instead of samples. The network is run on the first sample twice and three times: in a
    single run, the number of tokens might happen to equal the number of samples.
    """
    why: dict[str, str] = {}
    for count in (2, 3):
        few = tree_map_only(Tensor, lambda t, n=count: t[:1].expand(n, *t.shape[1:]).clone(), x)
        with torch.inference_mode(False), torch.enable_grad(), recording(network, trainable, layers) as calls:
            call(run, few)
        for name in layers:
            if not calls[name]:
                why[name] = "is not called as a module"
            elif any(len(a) != count for a, _ in calls[name]):
                why[name] = "is not given one row per sample"
    return why


def _computes_as_usual(layer: Layer) -> bool:
    """Whether its class inherits torch's forward: one that pads or normalises on the way has other rows."""
    kind = next(kind for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))
    names = ("forward", "_conv_forward")
    return all(getattr(type(layer), name, None) is getattr(kind, name, None) for name in names)


@contextmanager
def recording(network: nn.Module, trainable: Iterable[str], layers: Iterable[str]) -> Iterator[Calls]:
    """Inside this context every use of a layer is recorded, and the frozen ones of `trainable` require gradients."""
    calls: Calls = {name: [] for name in layers}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            if not torch.is_grad_enabled():  # a call inside the network that no gradient reaches
                return output
            value, change = forward_ad.unpack_dual(output)
            # Neither a view nor a copy: an activation that works in place must not move this point of the graph.
            value = torch.ops.aten._unsafe_view(value, value.shape)
            calls[name].append((forward_ad.unpack_dual(args[0]).primal.detach(), get_gradient_edge(value)))
            # The change is not differentiated here: detach it, so that its graph is freed.
            return value if change is None else forward_ad.make_dual(value, change.detach())  # type: ignore[no-any-return]

        return hook

    frozen = [p for name, p in network.named_parameters() if name in set(trainable) and not p.requires_grad]
    handles = [network.get_submodule(name).register_forward_hook(note(name)) for name in calls]
    for p in frozen:
        p.requires_grad_(True)
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
        for p in frozen:
            p.requires_grad_(False)


def per_sample_gradients(
    network: nn.Module, x: Input, names: list[str], cotangents: Tensor, output: Any = None
) -> dict[str, Tensor]:
    """Gradients (draws × samples × shape) by sample of `cotangent · z` with respect to some parameters, by name.

    The network computes z, as the one of its outputs that `output` selects (see `Linearized`); the cotangents are
    draws × samples × features.
    """
    parameters = {name: p.detach() for name, p in network.named_parameters() if name in set(names)}

    def scalar(params: dict[str, Tensor], sample: Input, cotangent: Tensor) -> Tensor:
        batch = tree_map_only(Tensor, lambda t: t[None], sample)
        args, kwargs = ((), batch) if isinstance(batch, Mapping) else (batch, {})
        z = choose_output(functional_call(network, params, args, kwargs), output)
        return (z[0] * cotangent).sum()

    gradient = torch.func.grad(scalar)
    # torch.func.grad works here too; without no_grad the results would keep a graph alive
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), AnyLayout():
        try:
            each_draw = torch.func.vmap(gradient, (None, None, 0))
            return dict(torch.func.vmap(each_draw, (None, 0, 1), out_dims=1)(parameters, x, cotangents))
        except RuntimeError as error:
            log.info("one sample at a time, because the network cannot be vectorised: %s", str(error).split("\n")[0])
            samples = [
                [gradient(parameters, tree_map_only(Tensor, lambda t, n=n: t[n], x), c[n]) for n in range(len(c))]
                for c in cotangents
            ]
            return {
                name: torch.stack([torch.stack([g[name] for g in draw]) for draw in samples]) for name in parameters
            }


def backward(outputs: Tensor, calls: Calls, cotangent: Tensor, *, retain: bool) -> dict[str, list[Tensor]]:
    """The gradients of `cotangent · outputs` at the outputs of each layer, for each use of it."""
    edges = [edge for uses in calls.values() for _, edge in uses]
    if not edges:
        return {name: [] for name in calls}
    cotangent = cotangent.to(outputs.dtype)
    found = iter(torch.autograd.grad(outputs, edges, cotangent, retain_graph=retain, allow_unused=True))
    return {name: [next(found) for _ in uses] for name, uses in calls.items()}
