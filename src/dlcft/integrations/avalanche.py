"""The memory of past experiences as a plugin of Avalanche."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlcft.integrations.penalty import PastTasks
from dlcft.network.inputs import Input

try:
    from avalanche.evaluation.metric_results import MetricValue
    from avalanche.models import MultiHeadClassifier
    from avalanche.models.utils import avalanche_forward, is_multi_task_module
    from avalanche.training.plugins import SupervisedPlugin
except ImportError as error:
    raise ImportError(f"this plugin needs avalanche-lib ({error}): pip install 'dlcft[avalanche]'.") from error


class DLCFTPlugin(SupervisedPlugin):
    """Keeps what a strategy has learned in earlier experiences: `Naive(…, plugins=[DLCFTPlugin()])`.

    The penalty is added to the loss of every batch. After an experience, the curvature is estimated on its data, with
    the transforms of evaluation. The evaluator gets the penalty as `dlcft_penalty` after every epoch.

    An `IncrementalClassifier` may grow. The heads of a `MultiHeadClassifier` are not remembered: each belongs to one
    task, and no other trains it. So a task label that comes again is refused with them.

    Args:
        past: the memory and its settings.
    """

    def __init__(self, past: PastTasks | None = None) -> None:
        super().__init__()
        self.past = PastTasks() if past is None else past
        self.penalty = 0.0
        self.tasks: set[int] = set()  # whose heads were trained

    def before_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        heads = [name for name, m in strategy.model.named_modules() if isinstance(m, MultiHeadClassifier)]
        if not heads:
            return
        labels = {int(t) for t in strategy.experience.task_labels}
        if labels & self.tasks:
            raise ValueError(
                f"task label {min(labels & self.tasks)} comes again, and nothing would keep its head in a "
                "MultiHeadClassifier; take an IncrementalClassifier, or another label."
            )
        self.tasks |= labels
        self.past.free = tuple(dict.fromkeys((*self.past.free, *(f"{name}.classifiers" for name in heads))))

    def before_backward(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        penalty = self.past.penalty(strategy.model)
        self.penalty = penalty.item()
        strategy.loss = strategy.loss + penalty

    def after_training_epoch(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        value: Any = MetricValue(self, "dlcft_penalty", self.penalty, strategy.clock.train_iterations)
        strategy.evaluator.publish_metric_value(value)

    def after_training_exp(self, strategy: Any, *args: Any, **kwargs: Any) -> None:
        batches = _Batches(strategy)
        self.past.remember(strategy.model, batches, forward=batches.forward)


class _Batches:
    """An experience as pairs of inputs and labels, as often as asked for; inputs have task labels if they differ."""

    def __init__(self, strategy: Any) -> None:
        dataset = strategy.experience.dataset.eval()
        collate = getattr(dataset, "collate_fn", None)
        self.loader: DataLoader[Any] = DataLoader(dataset, batch_size=strategy.train_mb_size, collate_fn=collate)
        self.by_task = is_multi_task_module(strategy.model)
        tasks = sorted({int(t) for t in strategy.experience.task_labels}) if self.by_task else []
        self.task = tasks[0] if len(tasks) == 1 else None

    def __iter__(self) -> Iterator[tuple[Input, Tensor]]:
        for x, y, *more in self.loader:
            yield ((x, more[-1]) if self.by_task and self.task is None else x), y

    def forward(self, model: nn.Module, x: Any) -> Any:
        x, task = x if isinstance(x, tuple) else (x, self.task)
        return avalanche_forward(model, x, task)
