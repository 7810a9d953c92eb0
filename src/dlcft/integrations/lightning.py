"""The memory of past tasks as a callback of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer

from dlcft.integrations.curvature import Forward
from dlcft.integrations.penalty import PastTasks
from dlcft.network.inputs import Input

try:
    import lightning.pytorch as pl
except ImportError as error:
    raise ImportError(f"this callback needs lightning ({error}): pip install 'dlcft[lightning]'.") from error


class DLCFTCallback(pl.Callback):
    """Keeps what a module has learned in earlier calls of `fit`; give the same callback to every trainer.

    The penalty's gradient is added once for each step of the optimizer, after accumulation and after the scale of mixed
    precision is taken off, and before gradients are clipped. When training ends, the curvature is estimated on the
    training data. The penalty is logged as `dlcft_penalty`.

    Args:
        past: the memory and its settings.
        unpack: from a batch to inputs and labels; by default a pair, or a mapping with `labels` or `label`.
        forward: from the module and inputs to logits; by default the module is called.
    """

    def __init__(
        self,
        past: PastTasks | None = None,
        *,
        unpack: Callable[[Any], tuple[Input, Tensor]] | None = None,
        forward: Forward | None = None,
    ) -> None:
        self.past = PastTasks() if past is None else past
        self.unpack = unpack or split_labels
        self.forward = forward

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self.past.memory is None:
            return
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS compares losses, and the penalty is not in them; take another optimizer.")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a fused {type(optimizer).__name__} takes the scale of float16 off itself, after the penalty's "
                "gradient is added; give fused=False, or precision='bf16-mixed'."
            )
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        pl_module.log("dlcft_penalty", self.past.add_gradient(pl_module, among=stepped))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.past.remember(pl_module, _Batches(trainer, self.unpack), forward=self.forward)

    def state_dict(self) -> dict[str, Any]:
        return self.past.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.past.load_state_dict(state_dict)


class _Batches:
    """The training batches as the module gets them, as often as asked for."""

    def __init__(self, trainer: pl.Trainer, unpack: Callable[[Any], tuple[Input, Tensor]]) -> None:
        self.trainer = trainer
        self.unpack = unpack

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for batch in self.trainer.train_dataloader:
            converted = self.trainer.precision_plugin.convert_input(batch)
            yield self.unpack(self.trainer.strategy.batch_to_device(converted))


def split_labels(batch: Any) -> tuple[Input, Tensor]:
    """Inputs and labels of a pair, or of a mapping with `labels` or `label`."""
    if isinstance(batch, Mapping):
        for key in ("labels", "label"):
            if key in batch:
                return {name: value for name, value in batch.items() if name != key}, batch[key]
    elif isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    got = f"a mapping of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise ValueError(f"a batch is {got}; a pair of inputs and labels is taken, or a mapping with labels.")
