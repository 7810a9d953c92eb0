"""Months with two swapped folders, and ordinary ones: what a look at the batch and the gates tell.

    python benchmarks/wrong_folders.py --data cifar100.npz

The file holds `x_train`, `y_train`, `x_test`, `y_test` of CIFAR-100. Three months of so many images of each of so
many classes, drawn anew for each seed, are learned by `dlcft-exact` on the shipped network. The second and the third
month are also tried with the labels of two classes swapped: two drawn at random, and the two that the version before
confuses most, which are the hardest to see. 30 test images of each class are held out.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import table

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.update.gates import fallen
from dlcft.update.update import Update, update

MONTHS, HELD_OUT = 3, 30
CASES = ((10, 40, 5), (10, 10, 5), (30, 20, 3), (100, 20, 2))  # classes, images of each a month, seeds


def months(arrays: dict[str, np.ndarray], classes: int, each: int, seed: int) -> tuple[list, tuple]:
    """Each month's images and labels, and the held-out ones."""
    draw = np.random.default_rng(seed)
    chosen = draw.choice(100, classes, replace=False)
    places = {c: draw.permutation(np.flatnonzero(arrays["y_train"] == c)) for c in chosen}
    parts = [np.concatenate([places[c][m * each : (m + 1) * each] for c in chosen]) for m in range(MONTHS)]
    test = np.concatenate([np.flatnonzero(arrays["y_test"] == c)[:HELD_OUT] for c in chosen])
    learned = [(arrays["x_train"][part], arrays["y_train"][part].astype(int)) for part in parts]
    return learned, (arrays["x_test"][test], arrays["y_test"][test].astype(int))


def swapped(y: np.ndarray, pair: tuple[int, int]) -> np.ndarray:
    one, two = pair
    return np.where(y == one, two, np.where(y == two, one, y))


def confused(learner: Learner, holdout: tuple) -> tuple[int, int]:
    """The two classes that are taken for one another most often."""
    names = np.array(learner.labels())
    answers, wanted = names[learner.outputs(holdout[0]).argmax(1).numpy()], holdout[1]
    counts = {(a, b): int(((wanted == a) & (answers == b)).sum()) for a in names for b in names if a != b}
    return max(counts, key=lambda pair: (counts[pair] + counts[pair[::-1]], pair))


def tried(learner: Learner, x: np.ndarray, y: np.ndarray, holdout: tuple) -> Update:
    """An update of a copy of the learner that lives nowhere else."""
    own = copy.deepcopy(learner)
    own.store, own.saved_hash = None, None
    with tempfile.TemporaryDirectory() as scratch:
        return update(own, (x, y), directory=Path(scratch) / "model", holdout=holdout)


def worst(done: Update) -> float:
    facts = {"flipped": done.flipped, "per_class": done.per_class, "per_class_before": done.per_class_before}
    return max((drop for _, drop, *_ in fallen(facts)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="an .npz file")
    parser.add_argument("--features", type=int, default=1000, help="depth features; the method's own default is 4096")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    if options.data is None:
        print("benchmarks/wrong_folders.py needs --data, an .npz file of CIFAR-100: left out")
        return
    torch.set_num_threads(1)
    arrays, found, rows = dict(np.load(options.data)), load_backbone("shipped"), []
    for classes, each, seeds in CASES:
        kinds: dict[str, list[Update]] = {"ordinary": [], "two swapped": [], "the most confused two swapped": []}
        named: dict[str, list[bool]] = {kind: [] for kind in kinds}
        for seed in range(options.seed, options.seed + seeds):
            learned, holdout = months(arrays, classes, each, seed)
            learner = Learner(found.module, preprocess=found.preprocess, depth_features=options.features)
            learner.learn(learned[0], progress=False)
            for x, y in learned[1:]:
                drawn = tuple(int(c) for c in np.random.default_rng(seed).choice(np.unique(y), 2, replace=False))
                pairs = {"ordinary": None, "two swapped": drawn}
                pairs["the most confused two swapped"] = confused(learner, holdout)
                for kind, pair in pairs.items():
                    done = tried(learner, x, y if pair is None else swapped(y, pair), holdout)
                    kinds[kind].append(done)
                    doubtful = {row.label for row in done.incoming if row.doubtful}
                    named[kind].append(doubtful == ({str(c) for c in pair} if pair else set()))
                learner.learn((x, y), progress=False)
        for kind, all_done in kinds.items():
            told = sum(bool(done.doubts) for done in all_done)
            right = np.mean([done.accuracy_before for done in all_done])
            drops, each_worst = [done.drop for done in all_done], [worst(done) for done in all_done]
            rises = [done.rise for done in all_done]
            cells = [f"{classes} × {each}", f"{right:.1%}", kind, f"{told} of {len(all_done)}", f"{sum(named[kind])}"]
            cells += [f"{min(v):+.1%} to {max(v):+.1%}" for v in (drops, each_worst, rises)]
            rows.append(cells)
            print(" | ".join(cells), flush=True)
    header = ["classes × images", "accuracy before", "month", "told", "exactly these", "drop", "worst label", "rise"]
    table("Months with swapped labels", header, rows)


if __name__ == "__main__":
    main()
