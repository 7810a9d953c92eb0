"""What becomes of a classifier that is adopted and then learns new classes, with and without a sample of the old data.

    python benchmarks/adopt.py --data cifar100.npz    # x_train, y_train, x_test, y_test: minutes

The shipped network with a softmax head is fine-tuned on 15 classes of 100 images each, as people do. It is adopted with
a few of these images a class (each counting so often that they weigh as much as all), or with none; then come 5 new
classes of 100 images, and 5 more. Accuracy is on test images: of the 15 old classes, and of the new ones so far.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from measure import table
from torch import Tensor, nn

from dlcft import Learner
from dlcft.backbones import MEAN, STD, shipped_resnet18

OLD, UPDATES, IMAGES = range(15), (range(15, 20), range(20, 25)), 100
METHODS = {"ridge": {}, "dlcft-exact": {"depth_features": 1200}}


class Images:
    def __init__(self, path: str) -> None:
        self.arrays = dict(np.load(path))

    def part(self, split: str, labels: range, count: int | None = None) -> tuple[Tensor, Tensor]:
        y = self.arrays[f"y_{split}"]
        chosen = np.concatenate([np.flatnonzero(y == label)[:count] for label in labels])
        x = torch.from_numpy(self.arrays[f"x_{split}"][chosen]).permute(0, 3, 1, 2) / 255
        return (x - MEAN.view(3, 1, 1)) / STD.view(3, 1, 1), torch.from_numpy(y[chosen]).long()


def trained(images: Images, epochs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(shipped_resnet18(), nn.Linear(128, len(OLD))).train()
    x, y = images.part("train", OLD, IMAGES)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9, weight_decay=5e-4)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False)


def accuracies(model: nn.Module, images: Images, method: str, each: int) -> list[float]:
    sample = images.part("train", OLD, each) if each else None
    weight = IMAGES / each if each else 1.0
    shapes = images.part("train", UPDATES[0], 1)[0]  # where there is no sample, features need to see an input
    options = METHODS[method] | {"weight": weight, "example": shapes}
    learner = Learner.adopt(model, "1", list(OLD), sample, method, **options)
    old = images.part("test", OLD)
    found = [learner.evaluate(old)["accuracy"]]
    for new in UPDATES:
        learner.learn(images.part("train", new, IMAGES), progress=False)
        so_far = images.part("test", range(UPDATES[0].start, new.stop))
        found += [learner.evaluate(data)["accuracy"] for data in (old, so_far)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an .npz file with these arrays")
    options = parser.parse_args()
    if options.data is None:
        print("benchmarks/adopt.py needs --data, an .npz file of CIFAR-100: left out")
        return
    images = Images(options.data)
    model = trained(images)
    x, y = images.part("test", OLD)
    with torch.no_grad():
        before = float((model(x).argmax(1) == y).double().mean())
    rows = []
    for method in METHODS:
        for each in (IMAGES, 30, 10, 0):
            name = f"`{method}`, {each} old images a class" if each else f"`{method}`, none"
            rows.append([name, *(f"{100 * value:.1f}" for value in accuracies(model, images, method, each))])
            print(" ".join(rows[-1]), flush=True)
    header = ["", "old, adopted", "old, 5 new classes", "new", "old, 10 new classes", "new"]
    table(f"Adopted from a classifier with {100 * before:.1f} % on its 15 classes", header, rows)


if __name__ == "__main__":
    main()
