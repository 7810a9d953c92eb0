"""Streams of tasks, made from one data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dlcft.bench.datasets.embedded import rotated
from dlcft.methods.recipes import Scenario

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """One arriving batch of data: images and labels to learn, others to test, and the head's name in "task-il"."""

    train: Pair
    test: Pair
    head: str | None = None


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in order, of one scenario."""

    scenario: Scenario
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
        return Stream(self.scenario, (Task(_joined([t.train for t in self.tasks]), _joined([t.test for t in tests])),))


def split_data(train: Pair, test: Pair, tasks: int, seed: int) -> Stream:
    """Data-incremental: the training images, class by class as evenly as they divide, over tasks; one test set.

    Raises:
        ValueError: when there are more tasks than images.
    """
    x, y = train
    if not 1 <= tasks <= len(y):
        raise ValueError(f"tasks is {tasks}; it must lie between 1 and the number of images, {len(y)}.")
    generator = torch.Generator().manual_seed(seed)
    # shuffled, then sorted by class: dealing out one image after another is a stratified split
    order = torch.randperm(len(y), generator=generator)
    order = order[torch.argsort(y[order], stable=True)]
    parts = [order[index::tasks] for index in range(tasks)]
    return Stream("data-il", tuple(Task((x[part], y[part]), test) for part in parts))


def split_classes(train: Pair, test: Pair, tasks: int, seed: int, scenario: Scenario = "class-il") -> Stream:
    """Task- or class-incremental: the classes, in a random order, over tasks of equal size.

    Raises:
        ValueError: when the classes do not divide by the tasks.
    """
    classes = train[1].unique()
    if tasks < 1 or len(classes) % tasks:
        raise ValueError(f"{len(classes)} classes do not divide into {tasks} tasks.")
    order = classes[torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))]
    groups = order.view(tasks, -1)
    return Stream(
        scenario,
        tuple(
            Task(_of(train, group), _of(test, group), f"task-{index}" if scenario == "task-il" else None)
            for index, group in enumerate(groups)
        ),
    )


def turned(stream: Stream, degrees: float) -> Stream:
    """A shift from task to task: the images of task t are turned by `t · degrees`, those to learn and those to test."""

    def turn(pair: Pair, number: int) -> Pair:
        return rotated(pair[0].float(), number * degrees).round().to(pair[0].dtype), pair[1]

    tasks = [Task(turn(t.train, n), turn(t.test, n), t.head) for n, t in enumerate(stream.tasks)]
    return Stream(stream.scenario, tuple(tasks))


def validation_part(train: Pair, share: float, seed: int) -> tuple[Pair, Pair]:
    """The training images in two: those to learn from, and a stratified share of them to choose settings by."""
    (x, y), generator = train, torch.Generator().manual_seed(seed)
    order = torch.randperm(len(y), generator=generator)
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
