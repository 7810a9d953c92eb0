"""How good closed-form learning is by its features: directions, sizes, flips, and what the first task may add.

    python benchmarks/tangent.py --data cifar100.npz           # 100 classes of CIFAR-100: about half an hour, two cores
    python benchmarks/tangent.py --data cifar100.npz --only "ridge on z"     # some rows, by name
    python benchmarks/tangent.py --data cifar100.npz --sizes sizes.svg       # accuracy by the size of the sketch
    python benchmarks/tangent.py --quick                       # the digits that come with scikit-learn: a minute

The file holds `x_train` (N×H×W×3, uint8) and `y_train`; nothing else in it is read. A fifth of these training images is
held out; accuracy is on that part, so that settings may be chosen by it. The shipped network, 32×32, one seed.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from measure import table
from torch import Tensor, nn

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.bench.datasets import load
from dlcft.bench.streams import Pair, validation_part
from dlcft.closed_form.features import FlipAveraged, TangentFeatures
from dlcft.closed_form.sums import RidgeSums
from dlcft.data.images import Preprocess
from dlcft.learner.build import Builder
from dlcft.methods.recipes import RECIPES
from dlcft.methods.ridge import accuracy_share

Settings = dict[str, object]

BATCH = 250
SHARES = (0.04, 0.12, 0.25, 0.5, 1.0)  # of the largest sketch

PRINCIPAL_FLIP: Settings = {"direction": "principal", "augment": "flip"}
BOTH: Settings = {"tangent_features": 4096, "random_features": 1024, "augment": "flip"}
ROWS: dict[str, tuple[str, Settings]] = {
    "ridge on z": ("ridge", {}),
    "ranpac, 4,000": ("ranpac", {}),
    "ranpac, 4,000, flip": ("ranpac", {"augment": "flip"}),
    "tangent 5,120, random direction": ("tangent", {}),
    "tangent 5,120, principal direction": ("tangent", {"direction": "principal"}),
    "tangent 5,120, principal, last stage only": ("tangent", {"train": "layer4", "direction": "principal"}),
    "tangent 1,000, flip": ("tangent", {"tangent_features": 1000, **PRINCIPAL_FLIP}),
    "tangent 2,500, flip": ("tangent", {"tangent_features": 2500, **PRINCIPAL_FLIP}),
    "tangent 5,120, flip": ("tangent", PRINCIPAL_FLIP),
    "tangent 10,000, flip": ("tangent", {"tangent_features": 10_000, **PRINCIPAL_FLIP}),
    "tangent 4,096 + random 1,024, flip": ("tangent", BOTH),
    "the same, tangent of all layers": ("tangent", {**BOTH, "tangent_share": 1.0}),
    "the same, of the last three quarters": ("tangent", {**BOTH, "tangent_share": 0.75}),
    "the same, of the last quarter": ("tangent", {**BOTH, "tangent_share": 0.25}),
    "the same, principal direction": ("tangent", {**BOTH, **PRINCIPAL_FLIP}),
    "depth 4,096, flip": ("depth", {"augment": "flip"}),
    "depth 4,096, flip, shrunken-lda (dlcft-exact)": ("dlcft-exact", {"augment": "flip"}),
    "tangent 5,120 + random 2,000, flip": (
        "tangent",
        {"tangent_features": 5120, "random_features": 2000, **PRINCIPAL_FLIP},
    ),
}

# rows whose network is first trained on the images of so many classes, as a large first task would allow
FIRST_CLASSES = {"dlcft-exact, network trained on 50 classes first": 50}
ROWS |= {"dlcft-exact": ("dlcft-exact", {}), **{name: ("dlcft-exact", {}) for name in FIRST_CLASSES}}
FIRST_TRAINING: Settings = {"epochs": 5, "lr": 1e-2, "schedule": "cosine", "augment": "crop4+flip"}


def images(path: Path | None) -> tuple[Pair, Pair]:
    if path is None:
        data = load("digits")
        assert isinstance(data.x_train, Tensor)
        return validation_part((data.x_train, data.y_train), 0.2, seed=0)
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"].astype(np.int64))
    return validation_part((x.permute(0, 3, 1, 2), y), 0.2, seed=0)


def corners(sketch: TangentFeatures, share: float, random: int) -> Tensor:
    """The columns of a smaller sketch: of every layer's `S D R` a corner, and only so many random features of z."""
    width = sketch.directions.shape[1]
    first = width + (0 if sketch.weight is None else len(sketch.weight))
    columns = [torch.arange(width + random)]
    for name in sketch.layers:
        left, right = sketch._pair(name, 0)
        o, k = left.shape[1], right.shape[2]
        block = first + torch.arange(o * k).view(o, k)
        columns.append(block[: math.ceil(o * math.sqrt(share)), : math.ceil(k * math.sqrt(share))].flatten())
        first += o * k
    return torch.cat(columns)


def features_of(sketch: nn.Module, read: Preprocess, x: Tensor) -> Iterator[Tensor]:
    """With mirror images averaged, batch by batch."""
    averaged = FlipAveraged(sketch)
    with torch.no_grad():
        for part in x.split(BATCH):
            yield averaged(read(part))


def by_size(train: Pair, held_out: Pair, largest: int, random: int) -> list[tuple[int, int, float]]:
    """(random features, features, accuracy) for parts of one large sketch, from one pass over the data."""
    backbone = load_backbone("shipped")
    builder = Builder(
        backbone.module,
        RECIPES["tangent"],
        train=None,
        preprocess=backbone.preprocess,
        seed=0,
        device=torch.device("cpu"),
    )
    read = replace(backbone.preprocess, mean=None, std=None)  # the network normalises its images itself
    z = builder.features(read(train[0][:: max(1, len(train[0]) // 256)]))
    principal = torch.linalg.svd((z - z.mean(0)).double(), full_matrices=False)[2][:1]
    sketch = TangentFeatures(builder.backbone, principal, features=largest, random=random)
    sums = RidgeSums.empty(z.shape[1] + random + sketch.length)
    sums = sums.extend(zip(features_of(sketch, read, train[0]), train[1].split(BATCH), strict=True))
    asked = torch.cat(list(features_of(sketch, read, held_out[0]))).double()
    return [
        (some, len(kept), accuracy(sums, kept, asked, held_out[1]))
        for some in (0, random)
        for share in SHARES
        for kept in [corners(sketch, share, some)]
    ]


def accuracy(sums: RidgeSums, kept: Tensor, asked: Tensor, labels: Tensor) -> float:
    """Of the closed form on some of the features."""
    part = sums
    if len(kept) < sums.features:
        part = replace(sums, class_sums=sums.class_sums[:, kept], gram=sums.gram[kept][:, kept])
    weight, bias = part.solve(accuracy_share(part.features, part.samples) * part.choose_ridge())
    found = ((asked[:, kept] @ weight.T + bias).argmax(1) == labels).double().mean()
    print(part.features, f"{float(found):.1%}", flush=True)
    return float(found)


def draw_sizes(points: list[tuple[int, int, float]], path: Path) -> None:
    """Accuracy against features, the state's bytes above."""
    figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for random in sorted({point[0] for point in points}):
        line = [(features, 100 * found) for some, features, found in points if some == random]
        name = f"z + tangent + {random:,} random" if random else "z + tangent"
        axis.plot(*zip(*line, strict=True), marker="o", label=name)
    axis.set(xscale="log", xlabel="features", ylabel="accuracy on held-out images, %")
    ticks = [1000, 2500, 5000, 10_000, 20_000]
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()
    above = axis.secondary_xaxis("top")
    above.set_xticks(ticks, [f"{8 * tick**2 / 1e9:.2g} GB" for tick in ticks])
    above.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file with x_train and y_train")
    parser.add_argument("--quick", action="store_true", help="digits")
    parser.add_argument("--only", nargs="+", help="rows by name")
    parser.add_argument("--sizes", type=Path, help="draw accuracy against the size of the sketch into this file")
    options = parser.parse_args()
    if not options.quick and options.data is None:
        parser.error("--data is needed, or --quick for the digits that come with scikit-learn.")
    train, held_out = images(options.data)
    if options.sizes:
        points = by_size(train, held_out, *((1000, 256) if options.quick else (20_000, 1024)))
        draw_sizes(points, options.sizes)
        rows = [[f"{random:,}", f"{features:,}", f"{found:.1%}"] for random, features, found in points]
        table("Accuracy by size, mirror images averaged", ["random features of z", "features in all", "accuracy"], rows)
        return
    backbone = load_backbone("shipped")
    rows = []
    for name, (method, settings) in ROWS.items():
        if options.only and name not in options.only:
            continue
        start = time.perf_counter()
        network = backbone.module
        if name in FIRST_CLASSES:
            tuner = Learner(network, "none", preprocess=backbone.preprocess, **FIRST_TRAINING)
            some = train[1] < FIRST_CLASSES[name]
            tuner.learn((train[0][some], train[1][some]))
            network = tuner.trained_backbone
        learner = Learner(network, method, preprocess=backbone.preprocess, **settings)
        learner.learn(train)
        learned = time.perf_counter() - start
        accuracy = learner.evaluate(held_out)["accuracy"]
        state = sum(t.numel() * t.element_size() for t in learner.method.state()[0].values())
        rows.append(
            [name, f"{learner.model.feature_count:,}", f"{accuracy:.1%}", f"{state / 2**20:.0f}", f"{learned:.0f}"]
        )
        print(rows[-1], flush=True)
    header = ["", "features", "accuracy", "state, MiB", "seconds to learn"]
    table(f"{len(train[1])} images learned, {len(held_out[1])} others asked", header, rows)


if __name__ == "__main__":
    main()
