"""A classifier that already knows classes: its backbone, and its head brought to the scale of squared-loss targets."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from dlcft.data.images import Preprocess
from dlcft.network.inputs import Input, call, in_half

CONFIDENT = 0.9  # the probability that a softmax classifier is taken to give its answer, where no sample tells


def split_head(model: nn.Module, head: str) -> tuple[nn.Module, nn.Linear]:
    """A copy of a classifier that gives what its head is given, and that head.

    Raises:
        ValueError: when there is no linear layer of that name.
    """
    backbone = copy.deepcopy(model)
    linear = [name for name, module in backbone.named_modules() if isinstance(module, nn.Linear)]
    if head not in linear:
        last = f"; its last linear layer is {linear[-1]!r}" if linear else ""
        raise ValueError(f"the model has no linear layer {head!r}{last}.")
    owner, _, own = head.rpartition(".")
    parent = backbone.get_submodule(owner)
    if isinstance(parent, nn.Sequential):
        names = list(dict(parent.named_children()))
        for name in names[names.index(own) + 1 :]:
            module = parent.get_submodule(name)
            if not isinstance(module, nn.Identity | nn.Dropout | nn.Flatten):
                raise ValueError(f"{head!r} is not the model's last layer: a {type(module).__name__} follows.")
    layer = backbone.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    backbone.set_submodule(head, nn.Identity())
    return backbone, layer


@torch.no_grad()
def check_last(
    model: nn.Module, features: Tensor, head: nn.Linear, x: Input, preprocess: Preprocess | None = None
) -> None:
    """Reject a classifier that does more to its head's outputs than to return them.

    Raises:
        ValueError: when its outputs are not those of its head.
    """
    if preprocess is not None and isinstance(x, Tensor):
        x = preprocess.normalised(x)
    answers = call(copy.deepcopy(model).eval().to(features.device, features.dtype), x)
    wanted = copy.deepcopy(head).to(features)(features)
    if not isinstance(answers, Tensor) or answers.shape != wanted.shape:
        return
    if not torch.allclose(answers, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())):
        raise ValueError("the model changes its head's outputs, by a softmax for example; give it without that.")


@torch.no_grad()
def centred_head(layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Its weight and bias with the mean over outputs taken off: a softmax does not see the difference."""
    weight = layer.weight.float() if in_half(layer.weight) else layer.weight
    bias = weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias.to(weight)
    return weight - weight.mean(0), bias - bias.mean()


def margin_scale(outputs: int, scale: float) -> float:
    """The factor that brings logits to the scale of targets `α·onehot`, where no sample tells.

    A softmax over C outputs that is sure of its answer by `CONFIDENT` has it ahead of each other one by
    `log((C − 1)·p/(1 − p))`; squared loss has it ahead by α.
    """
    return scale / math.log(max(outputs - 1, 1) * CONFIDENT / (1 - CONFIDENT))


def fitted_scale(logits: Tensor, y: Tensor, scale: float) -> float:
    """The factor a that minimises `Σ‖α·onehot(y) − a·logits‖²`, both centred over outputs."""
    target = scale * nn.functional.one_hot(y, logits.shape[1]).to(logits)
    target = target - target.mean(1, keepdim=True)
    centred = logits - logits.mean(1, keepdim=True)
    return float((target * centred).sum() / centred.square().sum().clamp(min=1e-12))
