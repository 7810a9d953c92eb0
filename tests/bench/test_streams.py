"""Streams cover the data once, in the proportions promised, and depend on their seed alone."""

from dataclasses import replace

import pytest
import torch

from dlcft.bench.datasets import load
from dlcft.bench.experiment import Experiment, make_stream
from dlcft.bench.streams import split_classes, split_data, validation_part

Y = torch.arange(60) % 6
TRAIN = torch.arange(60.0)[:, None], Y
TEST = torch.arange(12.0)[:, None], torch.arange(12) % 6


def test_data_il_is_stratified_and_complete():
    stream = split_data(TRAIN, TEST, 5, seed=1)
    assert len(stream) == 5
    for task in stream.tasks:
        assert torch.equal(task.train[1].bincount(), torch.full((6,), 2))
        assert task.test is TEST
        assert task.head is None
    seen = torch.cat([task.train[0] for task in stream.tasks])[:, 0]
    assert torch.equal(seen.sort().values, torch.arange(60.0))
    joint = stream.joint()
    assert len(joint) == 1
    assert len(joint.tasks[0].train[1]) == 60
    assert torch.equal(joint.tasks[0].test[0], TEST[0])


@pytest.mark.parametrize("scenario", ["task-il", "class-il"])
def test_classes_are_split(scenario):
    stream = split_classes(TRAIN, TEST, 3, seed=1, scenario=scenario)
    groups = [set(task.train[1].tolist()) for task in stream.tasks]
    assert [len(group) for group in groups] == [2, 2, 2]
    assert set().union(*groups) == set(range(6))
    for task, group in zip(stream.tasks, groups, strict=True):
        assert set(task.test[1].tolist()) == group
        assert len(task.train[1]) == 20
    assert [task.head for task in stream.tasks] == (
        ["task-0", "task-1", "task-2"] if scenario == "task-il" else [None] * 3
    )


@pytest.mark.parametrize("scenario", ["task-il", "class-il"])
def test_classes_in_the_order_of_labels(scenario):
    plain = Experiment(dataset="digits", scenario=scenario, tasks=3, classes=6, per_class=4)
    images = load("digits")

    def groups(**changes):
        stream = make_stream(replace(plain, **changes), images)
        for task in stream.tasks:
            assert set(task.test[1].tolist()) == set(task.train[1].tolist())
            assert len(task.train[1]) == 8
        return [sorted(set(task.train[1].tolist())) for task in stream.tasks]

    for seed in range(3):
        assert groups(class_order="labels", seed=seed) == [[0, 1], [2, 3], [4, 5]], "whatever the seed"
    by_seed = [groups(seed=seed) for seed in range(3)]
    assert [groups(class_order="random", seed=seed) for seed in range(3)] == by_seed
    assert by_seed[0] != by_seed[1] != by_seed[2]
    stream = split_classes(TRAIN, TEST, 3, None, scenario)
    assert [set(task.train[1].tolist()) for task in stream.tasks] == [{0, 1}, {2, 3}, {4, 5}]
    with pytest.raises(ValueError, match="unknown class order 'label'; did you mean 'labels'"):
        replace(plain, class_order="label")


def test_the_order_of_classes_does_not_touch_data_il():
    plain, images = Experiment(dataset="digits", tasks=3, classes=6, per_class=4, seed=2), load("digits")
    random, labels = (make_stream(replace(plain, class_order=order), images) for order in ("random", "labels"))
    for one, other in zip(random.tasks, labels.tasks, strict=True):
        assert torch.equal(one.train[0], other.train[0])


def test_the_seed_decides():
    first, again, other = (split_data(TRAIN, TEST, 4, seed).tasks[0].train[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_validation_part_is_of_the_training_images_and_apart():
    rest, held = validation_part(TRAIN, 0.2, seed=0)
    assert torch.equal(held[1].bincount(), torch.full((6,), 2))
    assert torch.equal(torch.cat([rest[0], held[0]])[:, 0].sort().values, torch.arange(60.0))


def test_what_cannot_be_split():
    with pytest.raises(ValueError, match="6 classes do not divide into 4 tasks"):
        split_classes(TRAIN, TEST, 4, seed=0)
    with pytest.raises(ValueError, match="tasks is 61"):
        split_data(TRAIN, TEST, 61, seed=0)
