"""How good closed-form learning is by its features: directions, sizes, flips, and what the first task may add.

    python benchmarks/tangent.py --data cifar100.npz           # 100 classes of CIFAR-100: about half an hour, two cores
    python benchmarks/tangent.py --data cifar100.npz --only "ridge on z"     # some rows, by name
    python benchmarks/tangent.py --quick                       # the digits that come with scikit-learn: a minute

The file holds `x_train` (N×H×W×3, uint8) and `y_train`; nothing else in it is read. A fifth of these training images is
held out; accuracy is on that part, so that settings may be chosen by it. The shipped network, 32×32, one seed.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from measure import table
from torch import Tensor

from dlcft import Learner
from dlcft.bench.backbones import load_backbone
from dlcft.bench.datasets import load
from dlcft.bench.streams import Pair, validation_part

Settings = dict[str, object]

ROWS: dict[str, tuple[str, Settings]] = {
    "ridge on z": ("ridge", {}),
    "ranpac, 4,000": ("ranpac", {}),
    "ranpac, 4,000, flip": ("ranpac", {"augment": "flip"}),
    "tangent 5,120, random direction": ("tangent", {"direction": "random"}),
    "tangent 5,120, principal direction": ("tangent", {}),
    "tangent 5,120, principal, last stage only": ("tangent", {"train": "layer4"}),
    "tangent 1,000, flip": ("tangent", {"tangent_features": 1000, "augment": "flip"}),
    "tangent 2,500, flip": ("tangent", {"tangent_features": 2500, "augment": "flip"}),
    "tangent 5,120, flip": ("tangent", {"augment": "flip"}),
    "tangent 10,000, flip": ("tangent", {"tangent_features": 10_000, "augment": "flip"}),
    "tangent 4,096 + random 1,024, flip (dlcft-exact)": ("dlcft-exact", {"augment": "flip"}),
    "tangent 5,120 + random 2,000, flip": (
        "dlcft-exact",
        {"augment": "flip", "tangent_features": 5120, "random_features": 2000},
    ),
}


def images(path: Path | None) -> tuple[Pair, Pair]:
    if path is None:
        data = load("digits")
        assert isinstance(data.x_train, Tensor)
        return validation_part((data.x_train, data.y_train), 0.2, seed=0)
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file["x_train"]), torch.from_numpy(file["y_train"].astype(np.int64))
    return validation_part((x.permute(0, 3, 1, 2), y), 0.2, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file with x_train and y_train")
    parser.add_argument("--quick", action="store_true", help="digits")
    parser.add_argument("--only", nargs="+", help="rows by name")
    options = parser.parse_args()
    if not options.quick and options.data is None:
        parser.error("--data is needed, or --quick for the digits that come with scikit-learn.")
    train, held_out = images(options.data)
    backbone = load_backbone("shipped")
    rows = []
    for name, (method, settings) in ROWS.items():
        if options.only and name not in options.only:
            continue
        start = time.perf_counter()
        learner = Learner(backbone.module, method, preprocess=backbone.preprocess, **settings)
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
