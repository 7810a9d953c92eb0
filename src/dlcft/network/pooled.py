"""Models of the package transformers as modules that map a batch to feature vectors."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Pooled(nn.Module):
    """A model of the package transformers as feature vectors: its pooled output, or the first token.

    With `mean`, the mean of the last layer's tokens without padding, as sentence encoders are trained for.

    Args:
        model: a base model, such as `AutoModel` gives: one without a classifier.
        mean: see above.
    """

    def __init__(self, model: nn.Module, *, mean: bool = False) -> None:
        super().__init__()
        self.model, self.mean = model, mean

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map a batch, as the model takes it, to N feature vectors.

        Raises:
            ValueError: when the model gives neither a pooled output nor hidden states.
        """
        output = self.model(*args, **kwargs, return_dict=True)
        z: Tensor | None = None if self.mean else output.get("pooler_output")
        if z is not None:
            return z.flatten(1)
        hidden: Tensor | None = output.get("last_hidden_state")
        if hidden is None:
            kind = type(self.model).__name__
            raise ValueError(
                f"the backbone is a {kind}, which gives {', '.join(output)}; a base model is needed, which gives "
                "pooler_output or last_hidden_state: AutoModel.from_pretrained, or .base_model of this one."
            )
        if not self.mean:
            return (hidden.mean((2, 3)) if hidden.dim() == 4 else hidden[:, 0]).flatten(1)
        mask = kwargs.get("attention_mask")
        if mask is None:
            return hidden.mean(1)
        real: Tensor = mask[:, :, None].to(hidden.dtype)
        return (hidden * real).sum(1) / real.sum(1).clamp(min=1)


def with_features(backbone: nn.Module) -> nn.Module:
    """The backbone itself; a bare model of transformers, which returns an object, as `Pooled`."""
    kinds = type(backbone).__mro__  # by name, because transformers must not be imported for this
    bare = any(kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.") for kind in kinds)
    return Pooled(backbone) if bare else backbone
