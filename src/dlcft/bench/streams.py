"""Streams of tasks, made from one data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.methods.settings import Scenario

Pair = tuple[Tensor, Tensor]
CLASS_ORDERS = ("random", "labels")


@dataclass(frozen=True, eq=False)
class Task:
    """One arriving batch of data: images and labels to learn, others to test, and the head's name in "task-il"."""

    train: Pair
    test: Pair
    head: str | None = None


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in order."""

    tasks: tuple[Task, ...]

    @property
    def shares_test(self) -> bool:
        """Whether all tasks are tested by the same images."""
        return all(task.test is self.tasks[0].test for task in self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def joint(self) -> Stream:
        """All of it as one task, the upper bound; not for "task-il", which is learned by `Learner.learn_jointly`."""
        tests = self.tasks[:1] if self.shares_test else self.tasks
        return Stream((Task(_joined([task.train for task in self.tasks]), _joined([task.test for task in tests])),))


def split_data(train: Pair, test: Pair, tasks: int, seed: int) -> Stream:
    """Data-incremental: the training images, class by class as evenly as they divide, over tasks; one test set."""
    x, y = train
    if not 1 <= tasks <= len(y):
        raise ValueError(f"tasks is {tasks}; it must lie between 1 and the number of images, {len(y)}.")
    # shuffled, then sorted by class: dealing out one image after another is a stratified split
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    order = order[torch.argsort(y[order], stable=True)]
    parts = [order[index::tasks] for index in range(tasks)]
    return Stream(tuple(Task((x[part], y[part]), test) for part in parts))


def split_classes(train: Pair, test: Pair, tasks: int, seed: int | None, scenario: Scenario = "class-il") -> Stream:
    """Task- or class-incremental: the classes, in a random order, or without a seed in that of labels, over tasks."""
    classes = train[1].unique()
    if tasks < 1 or len(classes) % tasks:
        raise ValueError(f"{len(classes)} classes do not divide into {tasks} tasks.")
    if seed is not None:
        classes = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    heads = [f"task-{index}" if scenario == "task-il" else None for index in range(tasks)]
    groups = zip(classes.view(tasks, -1), heads, strict=True)
    return Stream(tuple(Task(_of(train, group), _of(test, group), head) for group, head in groups))


def turned(stream: Stream, degrees: float) -> Stream:
    """A shift from task to task: the images of task t are turned by `t · degrees`, those to learn and those to test."""
    turns = [(task, number * degrees) for number, task in enumerate(stream.tasks)]
    return Stream(tuple(Task(_turned(one.train, angle), _turned(one.test, angle), one.head) for one, angle in turns))


def _turned(pair: Pair, degrees: float) -> Pair:
    """Images turned about their centre, with black corners."""
    x, angle = pair[0].float(), torch.tensor(degrees).deg2rad()
    turn = torch.tensor([[angle.cos(), -angle.sin(), 0.0], [angle.sin(), angle.cos(), 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False).round().to(pair[0].dtype), pair[1]


def validation_part(train: Pair, share: float, seed: int) -> tuple[Pair, Pair]:
    """The training images in two: those to learn from, and a stratified share of them to choose settings by."""
    x, y = train
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        own = order[y[order] == label]
        held[own[: max(1, round(share * len(own)))]] = True
    return (x[~held], y[~held]), (x[held], y[held])


def _of(pair: Pair, classes: Tensor) -> Pair:
    chosen = torch.isin(pair[1], classes)
    return pair[0][chosen], pair[1][chosen]


def _joined(pairs: Sequence[Pair]) -> Pair:
    return torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])
