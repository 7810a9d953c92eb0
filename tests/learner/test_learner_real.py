"""Real images and weights, where they are: the folder that DLCFT_TEST_DATA names (data/, weights/)."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dlcft import Classifier, Learner, Linearized, ScaledMSE, estimate, fold_batchnorm
from dlcft.backbones import load_backbone, shipped_resnet18

FOLDER = Path(os.environ.get("DLCFT_TEST_DATA", "nowhere"))
CIFAR = FOLDER / "data" / "cifar100-part.npz"
IMAGENET = FOLDER / "weights" / "resnet18-imagenet1k.safetensors"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cifar():
    if not CIFAR.exists():
        pytest.skip(f"needs {CIFAR}; set DLCFT_TEST_DATA to the folder that has data/cifar100-part.npz")
    raw = np.load(CIFAR)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in ([0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]))
    images = {k: (torch.from_numpy(raw[k]).permute(0, 3, 1, 2) / 255 - mean) / std for k in ("x_train", "x_test")}
    return images | {k: torch.from_numpy(raw[k]).long() for k in ("y_train", "y_test")}


def test_ridge_on_real_images_in_ten_tasks_equals_jointly(cifar):
    """100 classes × 200 images: about 39.9 % on frozen features, whatever the order of the classes."""
    outputs, test = {}, cifar["x_test"]
    for tasks in (1, 10):
        learner = Learner(shipped_resnet18(), "ridge", ridge=0.1)
        for part in torch.arange(100).chunk(tasks):
            of_task = torch.isin(cifar["y_train"], part)
            learner.learn((cifar["x_train"][of_task], cifar["y_train"][of_task]))
        outputs[tasks] = learner.outputs(test)
        accuracy = learner.evaluate((test, cifar["y_test"]))["accuracy"]
        assert 0.37 < accuracy < 0.43
    assert torch.allclose(outputs[1], outputs[10], atol=1e-3)


def test_a_memory_keeps_more_of_real_images(cifar):
    """Class-incremental, 2 × 5 classes: the old classes' accuracy with and without a memory."""
    kept = {}
    for name in ("none-linear", "dlcft"):
        learner = Learner(shipped_resnet18(), name, epochs=3)
        for part in (torch.arange(5), torch.arange(5, 10)):
            of_task = torch.isin(cifar["y_train"], part)
            learner.learn((cifar["x_train"][of_task], cifar["y_train"][of_task]))
        old = cifar["y_test"] < 5
        kept[name] = learner.evaluate((cifar["x_test"][old], cifar["y_test"][old]))["accuracy"]
    assert kept["dlcft"] > kept["none-linear"] + 0.05


def test_the_imagenet_network_folds_linearises_and_has_curvature(cifar):
    if not IMAGENET.exists():
        pytest.skip(f"needs {IMAGENET}")
    network = load_backbone("resnet18", weights=IMAGENET).module
    x = torch.nn.functional.interpolate(cifar["x_test"][:16], 64, mode="bilinear")
    folded = fold_batchnorm(network)
    with torch.no_grad():
        expected = network(x)
        assert (folded(x) - expected).abs().max() < 1e-3 * expected.abs().max()
        model = Classifier(Linearized(folded, train="layer4"), 512)
        assert (model.features(x) - expected).abs().max() < 1e-3 * expected.abs().max()
    model.add_head("h", 10)
    torch.nn.init.normal_(model.head("h").weight)
    found = estimate("exact-tk", model, [(x, torch.arange(16) % 10)], ScaledMSE(), "h")
    assert len(found.curvature.blocks) == 6
    assert found.curvature.trace(model.params("h")) > 0


def test_a_real_classifier_is_adopted_and_holds_its_classes(cifar):
    """Eight classes as people train them; then four new ones twice, with ten old images a class and with none."""

    def part(kind, classes, count=None):
        chosen = torch.cat([(cifar[f"y_{kind}"] == label).nonzero()[:count, 0] for label in classes])
        return cifar[f"x_{kind}"][chosen], cifar[f"y_{kind}"][chosen]

    torch.manual_seed(0)
    model = torch.nn.Sequential(shipped_resnet18(), torch.nn.Linear(128, 8)).train()
    x, y = part("train", range(8), 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=5e-4)
    for _ in range(2):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    model.eval().requires_grad_(False)
    old = part("test", range(8))
    original = float((model(old[0]).argmax(1) == old[1]).double().mean())
    assert original > 0.7
    for each, kept in ((20, 0.8), (0, 0.5)):
        sample = part("train", range(8), each) if each else None
        learner = Learner.adopt(model, "1", list(range(8)), sample, "ridge", weight=100 / (each or 100))
        assert abs(learner.evaluate(old)["accuracy"] - original) <= 0.01
        for new in (range(8, 12), range(12, 16)):
            learner.learn(part("train", new, 100))
        assert learner.evaluate(old)["accuracy"] > kept * original
        assert learner.evaluate(part("test", range(8, 16)))["accuracy"] > 0.5
