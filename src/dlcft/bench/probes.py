"""What is looked at beside accuracy: features by their nearest neighbours, and the loss on images of the old tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dlcft.bench.streams import Pair, Stream, Task
from dlcft.data import Inputs
from dlcft.learner import Learner
from dlcft.metrics import nearest_neighbours

NEIGHBOURS = 20  # that vote in the probe of features
OLD_IMAGES = 500  # that the rise of the old tasks' loss is measured on


def neighbours_accuracy(learner: Learner, stream: Stream) -> float:
    """The accuracy of nearest neighbours among the features of all training images, of tasks to come too."""
    everything = stream.joint().tasks[0]
    (references, labels), (queries, truth) = everything.train, everything.test
    found = nearest_neighbours(_features(learner, references), labels, _features(learner, queries), NEIGHBOURS)
    return float((found == truth).double().mean())


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
