"""A learner's answers as a plain module: from a batch to outputs, with nothing of the learner in it."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from dlcft.closed_form.chunks import Chunked
from dlcft.network.classifier import Classifier
from dlcft.network.explicit import NotOneGraph, explicit, is_tokens, sized
from dlcft.network.inputs import Input, call, in_half, reference


class Answers(nn.Module):
    """A classifier's outputs, or its probabilities, or both, as float32.

    Args:
        model: the classifier, with its heads solved. It is copied.
        head: the name of its head.
        temperature: divides the outputs before their softmax; None for no probabilities.
        both: whether outputs are given beside the probabilities.
    """

    def __init__(self, model: Classifier, head: str, temperature: float | None = None, *, both: bool = False) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval()
        for name in [name for name in self.model.heads if name != head]:
            del self.model.heads[name]
        for part in self.model.modules():
            if isinstance(part, Chunked):
                part.at_once = True
        self.head, self.temperature, self.both = head, temperature, both
        self.dtype = reference(self.model.backbone).dtype

    def forward(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Outputs, batch × labels."""
        given: Input = kwargs if kwargs else args[0] if len(args) == 1 else args
        x = tree_map_only(Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, given)
        outputs = self.model(x, self.head).float()
        if self.temperature is None:
            return outputs  # type: ignore[no-any-return]
        probabilities = (outputs / self.temperature).softmax(1)
        return (outputs, probabilities) if self.both else probabilities


def full_floats(x: Input) -> Input:
    """A batch with real numbers of half precision in float32: what a network computes in is its own matter."""
    return tree_map_only(Tensor, lambda t: t.float() if in_half(t) else t, x)  # type: ignore[no-any-return]


@torch.no_grad()
def plain_module(answers: Answers, x: Input) -> tuple[fx.GraphModule, bool]:
    """The answers as a module of ordinary operations, for batches like `x`; and whether it takes texts of any length.

    Raises:
        NotOneGraph: see `explicit`; also when the module's answers at other batch sizes are not the same.
    """
    if any(is_tokens(leaf) for leaf in tree_leaves(x) if isinstance(leaf, Tensor)):
        with suppress(NotOneGraph):  # a recurrent network has as many steps as there are tokens
            return _checked(explicit(answers, x, sequences=True), answers, x, (4, 9)), True
    return _checked(explicit(answers, x), answers, x, (4, 0)), False


def _checked(module: fx.GraphModule, answers: Answers, x: Input, other: tuple[int, int]) -> fx.GraphModule:
    for size in ((1, 0), other):
        batch = sized(x, *size)
        for found, wanted in zip(*(tree_leaves(call(one, batch)) for one in (module, answers)), strict=True):
            if not torch.allclose(found, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max())):
                raise NotOneGraph
    return module
