"""Fixed features of a frozen network, for closed-form learners."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Projection(nn.Module):
    """`relu(P z)` with a fixed random P: ranpac's features on a frozen backbone.

    Args:
        backbone: gives z.
        inputs: its length.
        features: how many random features.
        generator: where P comes from.
    """

    weight: Tensor

    def __init__(self, backbone: nn.Module, inputs: int, features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.backbone = backbone
        reference = next(backbone.parameters())
        self.register_buffer("weight", torch.randn(features, inputs, generator=generator).to(reference))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Random features of what the backbone says."""
        return torch.relu(self.backbone(*args, **kwargs) @ self.weight.T)
