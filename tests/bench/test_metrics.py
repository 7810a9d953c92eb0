"""Figures of merit against their definitions."""

import math

import pytest
import torch
from torch import nn

from dlcft.bench.metrics import (
    NEIGHBOURS,
    Examiner,
    backward_transfer,
    forgetting,
    largest_eigenvalue,
    nearest_neighbours,
)
from dlcft.bench.streams import split_classes, split_data
from dlcft.curvature.estimate import estimate
from dlcft.curvature.losses import CrossEntropy, ScaledMSE
from dlcft.learner.heads import HEAD
from dlcft.learner.learner import Learner
from dlcft.network.classifier import Classifier
from dlcft.network.linearize import Linearized
from tests.support.networks import build

MATRIX = torch.tensor([[0.9, math.nan, math.nan], [0.5, 0.8, math.nan], [0.6, 0.7, 0.4]], dtype=torch.float64)


def test_definitions():
    assert backward_transfer(MATRIX) == pytest.approx(((0.6 - 0.9) + (0.7 - 0.8)) / 2)
    assert forgetting(MATRIX) == pytest.approx(((0.9 - 0.6) + (0.8 - 0.7)) / 2)


def test_one_task():
    one = torch.tensor([[0.7]])
    assert (backward_transfer(one), forgetting(one)) == (0, 0)


def test_nearest_neighbours_against_brute_force():
    torch.manual_seed(0)
    features, labels = torch.randn(50, 6, dtype=torch.float64), torch.randint(0, 4, (50,))
    queries = torch.randn(23, 6, dtype=torch.float64)
    found = nearest_neighbours(features, labels, queries, k=7, chunk=10)
    for query, label in zip(queries, found, strict=True):
        near = torch.cosine_similarity(query[None], features).topk(7)
        votes = torch.bincount(labels[near.indices], minlength=4)
        winners = (votes == votes.max()).nonzero()[:, 0]
        assert label in winners
        if len(winners) > 1:
            nearness = [float(near.values[labels[near.indices] == winner].sum()) for winner in winners]
            assert label == winners[int(torch.tensor(nearness).argmax())]
    assert torch.equal(nearest_neighbours(features, labels, features, k=1), labels)
    with pytest.raises(ValueError, match="k is 51"):
        nearest_neighbours(features, labels, queries, k=51)


def images(count, seed):
    """Random images; the row of a bright stripe, on the left, says which of four labels it is."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = torch.randn(count, 1, 4, 6, generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        image[0, label, :3] += 1.0
    return x, 7 + y


def examined(method, scenario, *, mirrored, **settings):
    """An examiner of a learner that has learned two tasks on a network which sees left and right."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 6))
    data = images(60, 1), images(200, 2)
    stream = split_data(*data, 2, 0) if scenario == "data-il" else split_classes(*data, 2, 0, scenario)
    learner = Learner(network, method, scenario=scenario, device="cpu", **settings)
    for task in stream.tasks:
        learner.learn(task.train, head=task.head, progress=False)
    return Examiner(learner, stream, mirrored=mirrored)


def accuracy_by_hand(learner, task, views):
    """Image by image, the label whose mean output over some views is the largest."""
    head, right = task.head or HEAD, 0
    learner.solve()
    with torch.no_grad():
        for image, label in zip(*task.test, strict=True):
            outputs = [learner.model.eval()(view(image[None]), head)[0].double() for view in views]
            mean = [sum(float(one[place]) for one in outputs) / len(views) for place in range(len(outputs[0]))]
            right += learner.labels(head)[mean.index(max(mean))] == int(label)
    return right / len(task.test[1])


VIEWS = {"plain": [lambda x: x], "mirror": [lambda x: x.flip(-1)], "both": [lambda x: x, lambda x: x.flip(-1)]}
TRAINED = {"epochs": 4, "batch_size": 8, "lr": 0.02}


@pytest.mark.parametrize("scenario", ["data-il", "task-il", "class-il"])
@pytest.mark.parametrize("method", ["none", "none-linear"])
def test_accuracy_of_an_image_and_its_mirror_image(method, scenario):
    examiner = examined(method, scenario, mirrored=True, augment="flip", **TRAINED)
    tested = examiner.stream.tasks[: 1 if scenario == "data-il" else 2]
    by_hand = {
        name: [accuracy_by_hand(examiner.learner, task, views) for task in tested] for name, views in VIEWS.items()
    }
    assert examiner.accuracies(2) == pytest.approx(by_hand["both"], abs=1e-12)
    assert Examiner(examiner.learner, examiner.stream).accuracies(2) == pytest.approx(by_hand["plain"], abs=1e-12)
    assert by_hand["both"] not in (by_hand["plain"], by_hand["mirror"]), "here it makes a difference"


def test_neighbours_of_an_image_and_its_mirror_image():
    examiner = examined("none", "data-il", mirrored=True, augment="flip", **TRAINED)
    learner, (everything,) = examiner.learner, examiner.stream.joint().tasks

    def accuracy(views):
        with torch.no_grad():
            learned, asked = (
                torch.stack([learner.model.eval().features(view(x)) for view in views]).mean(0)
                for x in (everything.train[0], everything.test[0])
            )
        found = nearest_neighbours(learned, everything.train[1], asked, NEIGHBOURS)
        return float((found == everything.test[1]).double().mean())

    assert examiner.neighbours() == pytest.approx(accuracy(VIEWS["both"]), abs=1e-12)
    assert Examiner(learner, examiner.stream).neighbours() == pytest.approx(accuracy(VIEWS["plain"]), abs=1e-12)
    assert accuracy(VIEWS["both"]) != accuracy(VIEWS["plain"])


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_closed_form_has_its_mirror_images_in_its_features(augment):
    examiner = examined("ridge", "class-il", mirrored=augment == "flip", augment=augment)
    by_hand = {
        name: [accuracy_by_hand(examiner.learner, task, views) for task in examiner.stream.tasks]
        for name, views in VIEWS.items()
    }
    assert examiner.accuracies(2) == pytest.approx(by_hand["plain"], abs=1e-12)
    assert (by_hand["plain"] == by_hand["mirror"]) == (augment == "flip")


def classifier(name, linear):
    """A classifier with 3 outputs on a network of the tests, its parameters away from zero, and batches for it."""
    network, x = build(name)
    backbone = Linearized(network) if linear else network
    model = Classifier(backbone, network(x).shape[1])
    model.add_head("main", 3)
    generator = torch.Generator().manual_seed(3)
    for p in [*model.params("main").values()] if linear else model.head("main").parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    y = torch.arange(len(x)) % 3
    return model.eval(), [(x[:2], y[:2]), (x[2:], y[2:])]


def dense(model, batches, loss):
    (block,) = estimate("dense", model, batches, loss, "main", draws=None).curvature.blocks.values()
    return block.names, next(iter(block.tensors().values()))


@pytest.mark.parametrize("loss", [ScaledMSE(15.0), CrossEntropy()])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", ["mlp", "vgg", "vit"])
def test_power_iteration_is_that_with_the_dense_matrix(name, linear, loss):
    model, batches = classifier(name, linear)
    names, matrix = dense(model, batches, loss)
    generator = torch.Generator().manual_seed(0)
    start = {key: torch.randn(p.shape, generator=generator).double() for key, p in model.params("main").items()}
    vector = torch.cat([start[key].flatten() for key in names])
    for _ in range(4):
        direction = vector / vector.norm()
        vector = matrix @ direction
    generator.manual_seed(0)
    found = largest_eigenvalue(model, iter(batches), loss, "main", iterations=4, generator=generator)
    assert found == pytest.approx(float(direction @ vector), rel=1e-9)
    assert 0 < found <= float(torch.linalg.eigvalsh(matrix)[-1])


def test_largest_eigenvalue():
    model, batches = classifier("mlp", linear=True)
    expected = float(torch.linalg.eigvalsh(dense(model, batches, CrossEntropy())[1])[-1])
    generator = torch.Generator().manual_seed(0)
    found = largest_eigenvalue(model, batches, CrossEntropy(), "main", iterations=60, generator=generator)
    assert found == pytest.approx(expected, rel=1e-9)


def test_largest_eigenvalue_leaves_the_model_as_it_was():
    model, batches = classifier("vgg", linear=False)
    model.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        largest_eigenvalue(model, batches, CrossEntropy(), "main", iterations=2, generator=torch.Generator())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
