"""The memory of past tasks as a callback of the Trainer in transformers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlcft.integrations.penalty import FILE, PastTasks
from dlcft.network.inputs import Input

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(f"this callback needs transformers ({error}): pip install 'dlcft[huggingface]'.") from error


class DLCFTCallback(TrainerCallback):
    """Keeps what a classifier of texts or images has learned in earlier trainings; give it to every `Trainer`.

    The penalty's gradient is added once for each step of the optimizer, after accumulation and after gradients are
    clipped, so that clipping is of the new task's loss alone. When training ends, the curvature is estimated on the
    training data. Logs have the penalty as `dlcft_penalty`, and every checkpoint has the memory as a file beside the
    weights (`load`).

    Parameters of adapters (`peft`) are remembered as all others; frozen ones are not.

    Args:
        past: the memory and its settings.
    """

    def __init__(self, past: PastTasks | None = None) -> None:
        self.past = PastTasks() if past is None else past
        self.penalty = 0.0

    def load(self, checkpoint: str | Path) -> None:
        """Take the memory from a checkpoint's folder, before a training is resumed from it."""
        self.past.load(Path(checkpoint) / FILE)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if args.fp16 and not args.max_grad_norm:
            raise ValueError(
                "fp16=True with max_grad_norm=0 leaves gradients scaled where the penalty's is added; give bf16=True, "
                "or a max_grad_norm."
            )
        if args.n_gpu > 1 or args.world_size > 1:
            raise ValueError(f"{max(args.n_gpu, args.world_size)} devices train together; the memory needs one.")

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **given: Any
    ) -> None:
        self.penalty = self.past.add_gradient(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, float],
        **given: Any,
    ) -> None:
        if self.past.memory is not None and "loss" in logs:
            logs["dlcft_penalty"] = state.log_history[-1]["dlcft_penalty"] = self.penalty

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self.past.save(Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / FILE)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: nn.Module,
        train_dataloader: DataLoader[Any],
        **given: Any,
    ) -> None:
        self.past.remember(model, _Batches(train_dataloader))


class _Batches:
    """The batches of a loader as pairs of inputs and labels, as often as asked for."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for batch in self.loader:
            if not isinstance(batch, Mapping) or "labels" not in batch:
                got = f"keys {', '.join(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
                raise ValueError(f"a batch has {got}; the memory needs a mapping with labels.")
            yield {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
