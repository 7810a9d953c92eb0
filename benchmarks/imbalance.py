"""Closed forms where classes have few and many images: what is right of all classes, and of the small ones.

    python benchmarks/imbalance.py --data cifar100.npz                         # the shipped network, hours on a core
    python benchmarks/imbalance.py --data cifar100.npz --recipes ridge --seeds 1       # a minute
    python benchmarks/imbalance.py --features mine.npz                         # other features: `x` and `y`

The first file holds `x_train` (N×H×W×3, uint8) and `y_train`; of the first 50 classes 80 images each are held out, and
the others, up to 120, are learned. Mirror images are averaged. A cell has three accuracies in percent: all classes
counted the same; counted by their share of the learned images; and of the small classes. Small are those with the
fewest images; a third of the classes in the long tail.
"""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from measure import table
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.closed_form.discriminant import class_means, linear_discriminant, nearest_mean
from dlcft.closed_form.sums import RidgeSums
from dlcft.methods.ridge import accuracy_share

Fit = tuple[Tensor, Tensor]

CLASSES, HELD_OUT = 50, 80
STRENGTHS = "C of logistic regression, which takes most of the time; the best by the first number stands in the table"
SIZES: dict[str, list[int]] = {
    "balanced": [60] * 50,
    "10 to 1": [120] * 25 + [12] * 25,
    "100 to 1": [100] * 25 + [1] * 25,
    "long tail": [round(120 * 60 ** (-c / 49)) for c in range(50)],
    "months": [120] * 18 + [96] * 8 + [72] * 8 + [48] * 8 + [24] * 8,  # 8 new classes a month, 24 images of each known
    "5 each": [5] * 50,
}


def weighted(sums: RidgeSums, power: float) -> RidgeSums:
    """The sums with classes weighted by `n_c^power` in all, which share their covariance; all classes have samples."""
    means, _ = class_means(sums)
    share = sums.counts**power / (sums.counts**power).sum()
    moved = share * sums.weight - sums.counts
    return replace(sums, counts=share * sums.weight, class_sums=means * (share * sums.weight)[:, None],
                   gram=sums.gram + (means.T * moved) @ means)  # fmt: skip


@functools.lru_cache(4)
def usual_ridge(sums: RidgeSums) -> float:
    return accuracy_share(sums.features, sums.samples) * sums.choose_ridge()


@functools.lru_cache(4)
def regression(sums: RidgeSums, power: float = 1.0) -> Fit:
    sums = sums if power == 1 else weighted(sums, power)
    return sums.solve(usual_ridge(sums), scale=1.0)


def without_prior(sums: RidgeSums, divided: bool) -> Fit:
    weight, bias = regression(sums)
    prior = sums.counts / sums.weight
    return (weight / prior[:, None], bias / prior) if divided else (weight, bias - prior)


def lda_step(sums: RidgeSums, power: float, step: float = 0.5) -> Fit:
    """From a ridge regression half of the way to linear discriminant analysis, in the space of its outputs."""
    weight, bias = regression(sums, power)
    bias = bias - sums.counts**power / (sums.counts**power).sum()
    at_means = class_means(sums)[0] @ weight.T + bias
    at_means = (at_means + at_means.T) / 2
    moved = torch.linalg.inv(torch.eye(len(bias)).to(bias) - step * at_means)
    return moved @ weight, moved @ bias - 0.5 * step * (at_means @ moved).diagonal()


def discriminant(sums: RidgeSums, ridge: float | None = None, *, shrunken: bool = False, equal: bool = True) -> Fit:
    return linear_discriminant(
        sums, usual_ridge(sums) if ridge is None else ridge, equal_classes=equal, shrunken=shrunken
    )


ROWS: dict[str, Callable[[RidgeSums], Fit]] = {
    "ridge": regression,
    "ridge, classes weighted by 1/√n_c": lambda sums: regression(sums, 0.5),
    "ridge, `equal_classes=True`": lambda sums: regression(sums, 0.0),
    "ridge, prior taken off": lambda sums: without_prior(sums, divided=False),
    "ridge, divided by the prior": lambda sums: without_prior(sums, divided=True),
    "ridge, half an LDA step": lambda sums: lda_step(sums, 1.0),
    "equal classes, half an LDA step": lambda sums: lda_step(sums, 0.0),
    "`ncm`": nearest_mean,
    "`slda`": lambda sums: discriminant(sums, 1e-4),
    "`lda`": discriminant,
    "`lda`, priors as learned": lambda sums: discriminant(sums, equal=False),
    "**`shrunken-lda`**": lambda sums: discriminant(sums, shrunken=True),
    "`shrunken-lda`, priors as learned": lambda sums: discriminant(sums, shrunken=True, equal=False),
}


def features(path: Path, recipe: str) -> tuple[Tensor, Tensor]:
    """Features of the shipped network, as a recipe has them."""
    with np.load(path, allow_pickle=False) as file:
        x, y = torch.from_numpy(file["x_train"]).permute(0, 3, 1, 2), torch.from_numpy(file["y_train"].astype(np.int64))
    x, y = x[y < CLASSES], y[y < CLASSES]
    backbone = load_backbone("shipped")
    learner = Learner(backbone.module, recipe, augment="flip", preprocess=backbone.preprocess)
    learner.learn((x[:8], y[:8]), progress=False)
    read = replace(backbone.preprocess, mean=None, std=None)  # the network normalises its images itself
    with torch.no_grad():
        return torch.cat([learner.model.features(read(part)) for part in x.split(250)]), y


def split(y: Tensor, sizes: list[int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The size of each class, and what is learned and held out."""
    random = np.random.default_rng(seed)
    counts = np.array(sizes)[random.permutation(CLASSES)]
    orders = [torch.from_numpy(random.permutation(np.flatnonzero(y.numpy() == c))) for c in range(CLASSES)]
    learned = torch.cat([order[HELD_OUT : HELD_OUT + n] for order, n in zip(orders, counts, strict=True)])
    return torch.from_numpy(counts), learned, torch.cat([order[:HELD_OUT] for order in orders])


def accuracies(outputs: Tensor, y: Tensor, counts: Tensor) -> list[float]:
    right = (outputs.argmax(1) == y).double()
    each = torch.stack([right[y == c].mean() for c in range(CLASSES)])
    few = counts.unique()[0] if len(counts.unique()) < 10 else counts.sort().values[CLASSES // 3]
    return [100 * float(v) for v in (each.mean(), (each * counts).sum() / counts.sum(), each[counts <= few].mean())]


def logistic(x: Tensor, y: Tensor, test: Tensor, strength: float, weight: str | None) -> Tensor:
    mean, deviation = x.mean(0), x.std(0).clamp(min=1e-6)
    model = LogisticRegression(C=strength, max_iter=150, class_weight=weight)
    model.fit(((x - mean) / deviation).numpy(), y.numpy())
    return torch.from_numpy(model.decision_function(((test - mean) / deviation).numpy()))


def measure(name: str, x: Tensor, y: Tensor, seeds: int, strengths: Sequence[float]) -> None:
    found: dict[str, dict[str, list[list[float]]]] = {}
    for case, sizes in SIZES.items():
        for seed in range(seeds):
            counts, learned, held_out = split(y, sizes, seed)
            sums = RidgeSums.empty(x.shape[1]).add(x[learned], y[learned])
            outputs = {
                row: (lambda fit: x[held_out].double() @ fit[0].T + fit[1])(make(sums)) for row, make in ROWS.items()
            }
            for row, kind in {"logistic regression": None, "the same, classes weighted": "balanced"}.items():
                for strength in strengths:
                    outputs[f"{row}, C={strength:g}"] = logistic(x[learned], y[learned], x[held_out], strength, kind)
            for row, given in outputs.items():
                found.setdefault(row, {}).setdefault(case, []).append(accuracies(given, y[held_out], counts))
            print(case, seed, flush=True)
    for row in ("logistic regression", "the same, classes weighted") if strengths else ():
        tried = {key: found.pop(key) for key in list(found) if key.startswith(f"{row}, C=")}
        found[f"{row}, the best C"] = {
            case: max((cases[case] for cases in tried.values()), key=lambda runs: sum(run[0] for run in runs))
            for case in SIZES
        }
    rows = []
    for row, cases in found.items():
        cells = [" / ".join(f"{v:.1f}" for v in np.mean(runs, 0)) for runs in cases.values()]
        rows.append([row, *cells])
    errors = [
        max(float(np.std([run[0] for run in cases[case]], ddof=1)) for cases in found.values()) / math.sqrt(seeds)
        for case in SIZES
    ] if seeds > 1 else []  # fmt: skip
    table(f"{name}, {x.shape[1]} features, {seeds} seeds", ["", *SIZES], rows)
    print("largest standard errors of the first numbers:", ", ".join(f"{error:.1f}" for error in errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="an .npz file of images")
    parser.add_argument("--recipes", nargs="+", default=["ridge", "ranpac", "dlcft-exact"], help="whose features")
    parser.add_argument("--features", type=Path, help="an .npz file of features, in place of --data")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--strengths", nargs="*", type=float, default=[1e-4, 1e-3, 1e-2], help=STRENGTHS)
    options = parser.parse_args()
    if options.features is not None:
        with np.load(options.features, allow_pickle=False) as file:
            x, y = torch.from_numpy(file["x"]), torch.from_numpy(file["y"].astype(np.int64))
        measure(options.features.stem, x[y < CLASSES], y[y < CLASSES], options.seeds, options.strengths)
    elif options.data is not None:
        for recipe in options.recipes:
            measure(recipe, *features(options.data, recipe), options.seeds, options.strengths)
    else:
        print("benchmarks/imbalance.py needs --data or --features, an .npz file: left out")


if __name__ == "__main__":
    main()
