"""Closed form beside joint fine-tuning: accuracy on test images against the time to learn, all data at once.

    python benchmarks/finetune.py --data cifar100.npz --out shipped.json              # about half an hour
    python benchmarks/finetune.py --data cifar100.npz --backbone resnet18 --weights FILE --size 64 --out imagenet.json
    python benchmarks/finetune.py --draw figure.svg shipped.json imagenet.json        # both in one figure
    python benchmarks/finetune.py --data cifar100.npz --each 5 --epochs 1 --rates 0.01 --out quick.json     # a minute

The file holds `x_train` (N×H×W×3, uint8), `y_train`, `x_test` and `y_test`. Fine-tuning has crops and mirror images,
cosine decay and batches of 64, and is the best, on training images that are not learned and with the first number of
epochs, of: cross-entropy from a head of zeros (SGD with momentum, `--rates`; BatchNorm learning, or frozen), and
squared loss from the head that ridge regression gives (Adam, `--ridge-rates`; BatchNorm frozen). Answers are averaged
over mirror images for all. Seconds are of the processor, so that other work on the machine hardly counts. A run that
was stopped goes on: what `--out` holds is not done again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from measure import table

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.data.images import Preprocess

BATCH = 64
Data = tuple[Any, list[int]]


def split(path: str, each: int, seed: int = 0) -> tuple[Data, Data, Data]:
    """Training images to learn, others to choose settings by, and test images."""
    with np.load(path) as raw:
        x, y, test = raw["x_train"], raw["y_train"], (raw["x_test"], raw["y_test"].tolist())
    draw, learned, others = np.random.default_rng(seed), [], []
    for label in np.unique(y):
        mine = draw.permutation(np.flatnonzero(y == label))
        learned += mine[:each].tolist()
        others += mine[each : each + 30].tolist()
    learned = draw.permutation(learned).tolist()
    return (x[learned], y[learned].tolist()), (x[others], y[others].tolist()), test


def accuracy(learner: Learner, data: Data) -> float:
    """Of the mean of the probabilities for an image and its mirror image."""
    views = [data[0], np.ascontiguousarray(data[0][:, :, ::-1])]
    outputs = sum(learner.outputs(view, batch_size=BATCH).softmax(1) for view in views)
    names = learner.labels()
    return float(np.mean([names[i] == label for i, label in zip(outputs.argmax(1).tolist(), data[1], strict=True)]))


class Runs:
    """Results by name, in a file that is read again."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self.path = path
        self.found = json.loads(path.read_text()) if path.exists() else {"facts": facts, "runs": {}}
        if self.found["facts"] != facts:
            raise SystemExit(f"{path} holds runs with {self.found['facts']}; give another file.")

    def run(self, name: str, learner: Learner, learn: Data, test: Data) -> dict[str, float]:
        if name not in self.found["runs"]:
            start = time.process_time()
            learner.learn(learn, progress=False)
            learner.solve()
            seconds = time.process_time() - start
            closed = learner.recipe.closed_form
            score = learner.evaluate(test, batch_size=BATCH)["accuracy"] if closed else accuracy(learner, test)
            self.found["runs"][name] = {"seconds": seconds, "accuracy": score}
            self.path.write_text(json.dumps(self.found, indent=1))
            print(name, self.found["runs"][name], flush=True)
        return self.found["runs"][name]


def measure(options: argparse.Namespace) -> None:
    learn, others, test = split(options.data, options.each)
    found = load_backbone(options.backbone, weights=options.weights)
    preprocess = found.preprocess
    if options.size:
        preprocess = Preprocess.from_dict({**preprocess.to_dict(), "size": [options.size] * 2})
    height = options.size or 32
    facts = {"backbone": options.backbone, "size": height, "images": len(learn[1]), "test": len(test[1])}
    runs = Runs(options.out, facts)

    def closed(method: str) -> Learner:
        return Learner(found.module, method, preprocess=preprocess, augment="flip")

    augment = {"augment": f"crop{height // 8}+flip", "schedule": "cosine", "batch_size": BATCH}
    zero = {"optimizer": "sgd", "weight_decay": 5e-4, **augment}
    ridge = {"loss": "mse", "head_start": "ridge", "careful": False, "batchnorm": "frozen", **augment}
    ways = {f"rate {rate}": {**zero, "lr": rate} for rate in options.rates}
    ways |= {f"BatchNorm frozen, {name}": {**way, "batchnorm": "frozen"} for name, way in ways.items()}
    ways |= {f"from ridge, rate {rate}": {**ridge, "lr": rate} for rate in options.ridge_rates}

    def tuned(way: str, epochs: int) -> Learner:
        return Learner(found.module, "none", preprocess=preprocess, epochs=epochs, **ways[way])

    for method in options.recipes:
        runs.run(f"{method}, held out", closed(method), learn, others)
        runs.run(method, closed(method), learn, test)
    short = options.epochs[0]
    scores = {}
    for way in ways:
        done = runs.run(f"fine-tuning, {short} epochs, {way}, held out", tuned(way, short), learn, others)
        scores[way] = done["accuracy"]
    best = max(scores, key=scores.__getitem__)
    for epochs in options.epochs:
        runs.run(f"fine-tuning, {epochs} epochs", tuned(best, epochs), learn, test)
    tell(options.out)


def tell(path: Path) -> None:
    found = json.loads(path.read_text())
    own = found["runs"]["dlcft-exact"]["seconds"]
    rows = [
        [name, f"{100 * run['accuracy']:.1f}", f"{run['seconds'] / own:.1f}"] for name, run in found["runs"].items()
    ]
    table(", ".join(f"{k} {v}" for k, v in found["facts"].items()), ["", "accuracy, %", "time / dlcft-exact"], rows)


def draw(files: list[Path], picture: Path) -> None:
    """Accuracy against time, one panel a file."""
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "finetune"})
    figure, axes = plt.subplots(1, len(files), figsize=(4.2 * len(files), 3.2), layout="constrained", squeeze=False)
    for path, axis in zip(files, axes[0], strict=True):
        found = json.loads(path.read_text())
        own = found["runs"]["dlcft-exact"]
        trained = {n: r for n, r in found["runs"].items() if n.startswith("fine") and "held out" not in n}
        x, y = ([run[key] for run in trained.values()] for key in ("seconds", "accuracy"))
        times = [seconds / own["seconds"] for seconds in x]
        axis.plot(times, [100 * a for a in y], "o-", color="#777777", label="joint fine-tuning")
        for name, at, score in zip(trained, times, y, strict=True):
            place = (at, 100 * score)
            axis.annotate(name.split(", ")[1], place, (0, -11), textcoords="offset points", ha="center", fontsize=8)
        axis.plot([1], [100 * own["accuracy"]], "*", ms=12, color="#c2410c", label="dlcft-exact, one pass")
        axis.axhline(100 * own["accuracy"], color="#c2410c", lw=0.6, ls=":")
        axis.set(xscale="log", xlabel="time to learn / dlcft-exact", ylabel="accuracy on test images, %")
        axis.set_title(f"{found['facts']['backbone']}, {found['facts']['size']} pixels", fontsize=9)
        axis.margins(x=0.12, y=0.18)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="what --out wrote, for --draw")
    parser.add_argument("--draw", type=Path, help="a figure to write")
    parser.add_argument("--data")
    parser.add_argument("--backbone", default="shipped")
    parser.add_argument("--weights")
    parser.add_argument("--size", type=int)
    parser.add_argument("--each", type=int, default=100, help="images of a class to learn")
    parser.add_argument("--epochs", type=int, nargs="+", default=[3, 10, 20])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1])
    parser.add_argument("--ridge-rates", type=float, nargs="*", default=[3e-4])
    parser.add_argument("--recipes", nargs="+", default=["dlcft-exact"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.draw is not None:
        draw(options.files, options.draw)
    elif options.data is None or options.out is None:
        print("benchmarks/finetune.py needs --data and --out: left out")
    else:
        measure(options)


if __name__ == "__main__":
    main()
