"""What is looked at beside accuracy: features by their nearest neighbours, and the loss on images of the old tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlcft.bench.metrics import nearest_neighbours
from dlcft.bench.streams import Pair, Stream, Task
from dlcft.data.samples import Inputs
from dlcft.learner.learner import Learner

NEIGHBOURS = 20  # that vote in the probe of features
OLD_IMAGES = 500  # that the rise of the old tasks' loss is measured on


class Examiner:
    """Tests of a learner on a stream. What learning never changes, the features of closed form, is computed once.

    Args:
        learner: it may learn on between tests.
        stream: its tasks.
    """

    def __init__(self, learner: Learner, stream: Stream) -> None:
        self.learner, self.stream = learner, stream
        self._fixed: dict[int, Tensor] = {}
        self._neighbours: float | None = None

    def accuracies(self, tasks: int) -> list[float]:
        """On each of the first tasks, or on the test set that all share."""
        return [self._accuracy(index) for index in range(1 if self.stream.shares_test else tasks)]

    def neighbours(self) -> float:
        """The accuracy of nearest neighbours among the features of all training images, of tasks to come too."""
        if self.learner.method.trains or self._neighbours is None:
            everything = self.stream.joint().tasks[0]
            (known, labels), (asked, truth) = everything.train, everything.test
            references, queries = _features(self.learner, known), _features(self.learner, asked)
            found = nearest_neighbours(references, labels, queries, NEIGHBOURS)
            self._neighbours = float((found == truth).double().mean())
        return self._neighbours

    @torch.no_grad()
    def _accuracy(self, index: int) -> float:
        learner, task = self.learner, self.stream.tasks[index]
        if learner.method.trains:
            return learner.evaluate(task.test, head=task.head)["accuracy"]
        x, y = task.test
        if index not in self._fixed:
            self._fixed[index] = _features(learner, x)
        head = learner._known(task.head)
        layer = learner.model.head(head)
        answers = layer(self._fixed[index].to(layer.weight)).argmax(1).tolist()
        names = learner._labels[head].names
        right: list[bool] = [names[answer] == label for answer, label in zip(answers, y.tolist(), strict=True)]
        return sum(right) / len(right)


def old_loss(learner: Learner, tasks: Sequence[Task], images: int = OLD_IMAGES) -> float:
    """The mean over tasks of the loss on some of each one's training images, as many of each, so many in all."""
    some = [(evenly(task.train, max(1, images // len(tasks))), task.head) for task in tasks]
    if all(head is None for _, head in some):
        x, y = (torch.cat(parts) for parts in zip(*(pair for pair, _ in some), strict=True))
        return learner.evaluate((x, y))["loss"]
    return sum(learner.evaluate(pair, head=head)["loss"] for pair, head in some) / len(some)


def evenly(pair: Pair, count: int) -> Pair:
    """So many images, evenly spaced: in a stream they stand class by class."""
    x, y = pair
    chosen = torch.linspace(0, len(y) - 1, min(count, len(y))).round().long()
    return x[chosen], y[chosen]


@torch.no_grad()
def _features(learner: Learner, x: Tensor) -> Tensor:
    inputs, model = Inputs(x, preprocess=learner._reading), learner.model.eval()
    batches = learner._batches(inputs, torch.zeros(len(inputs), dtype=torch.long), 256)
    return torch.cat([model.features(part).float().cpu() for part, _ in batches])
