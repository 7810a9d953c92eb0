"""Which features a closed form should look at: accuracy on held-out training images, and size on disk, by budget.

    python benchmarks/depth.py --data cifar100.npz                                    # the shipped network
    python benchmarks/depth.py --data cifar100.npz --backbone resnet18 --weights FILE --size 64
    python benchmarks/depth.py --data digits
    python benchmarks/depth.py --data docstrings --backbone hf:minilm --weights FOLDER     # texts
    python benchmarks/depth.py --draw figure.svg a.json b.json                          # of what --out wrote

A file holds `x_train` (N×H×W×3, uint8) and `y_train`; of each class `--each` images are learned and `--held-out` others
tested. `docstrings` are first sentences in the documentation of installed packages, by package. `name:budget` is a
recipe with that many `depth_features`. Logistic regression sees the features z, with the best of five strengths on the
held-out samples themselves. With `--flip` features are averaged over an image and its mirror image.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import time
import warnings
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from measure import table
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from dlcft import Learner
from dlcft.backbones import load_backbone
from dlcft.data.images import Preprocess
from dlcft.store.files import stored_bytes

PACKAGES = [
    "scipy.stats",
    "scipy.signal",
    "scipy.special",
    "scipy.linalg",
    "scipy.optimize",
    "scipy.ndimage",
    "scipy.sparse.linalg",
    "sklearn.metrics",
    "sklearn.datasets",
    "sklearn.linear_model",
    "torch",
    "torch.nn",
    "torch.nn.functional",
    "torch.linalg",
    "matplotlib.pyplot",
    "matplotlib.axes",
    "numpy",
    "numpy.linalg",
    "numpy.ma",
    "os",
    "builtins",
    "socket",
]
ARRAYS = {"matplotlib.axes": "Axes", "builtins": "str"}
STRENGTHS = (0.001, 0.01, 0.1, 1, 10)
Data = tuple[Any, list[Any]]


def docstrings() -> Data:
    """First sentences of what packages document, each text once, with the package as its label."""
    texts: dict[str, str] = {}
    for package in PACKAGES:
        home = importlib.import_module(package)
        for place in (home, getattr(home, ARRAYS.get(package, ""), None)):
            for name in dir(place) if place is not None else ():
                text = " ".join((inspect.getdoc(getattr(place, name, None)) or "").split("\n\n")[0].split())
                if not name.startswith("_") and text.endswith(".") and 4 < len(text.split()) < 60:
                    texts.setdefault(text, package)
    return list(texts), list(texts.values())


def read(name: str) -> Data:
    if name == "docstrings":
        return docstrings()
    if name == "digits":
        from dlcft.bench.datasets.arrays import digits

        found = digits()
        return np.asarray(found.x_train), found.y_train.tolist()
    with np.load(name) as raw:
        return raw["x_train"], raw["y_train"].tolist()


def split(data: Data, each: int, held_out: int, classes: int | None, seed: int) -> tuple[Data, Data]:
    """Samples to learn and to test: of each class so many; classes without enough are left out."""
    x, y = data
    draw, learned, tested = np.random.default_rng(seed), [], []
    for label in sorted(set(y))[:classes]:
        mine = draw.permutation([index for index, own in enumerate(y) if own == label])
        if len(mine) >= each + held_out:
            tested += mine[:held_out].tolist()
            learned += mine[held_out : held_out + each].tolist()
    learned = draw.permutation(learned).tolist()

    def pick(places: list[int]) -> Data:
        return [x[i] for i in places] if isinstance(x, list) else x[places], [y[i] for i in places]

    return pick(learned), pick(tested)


def logistic(frozen: Learner, learn: Data, test: Data) -> tuple[float, int]:
    """The best accuracy of logistic regression on the features z, and their number."""
    frozen.learn((learn[0][:8], learn[1][:8]), progress=False)

    def features(x: Any) -> np.ndarray:
        inputs = frozen.inputs(x)
        batches = [frozen._batches(inputs, torch.zeros(len(inputs), dtype=torch.long), 64)]
        with torch.no_grad():
            return torch.cat([frozen.model.features(part) for batch in batches for part, _ in batch]).numpy()

    z, other = features(learn[0]), features(test[0])
    scale = StandardScaler().fit(z)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not yet converged
        fits = [LogisticRegression(C=c, max_iter=300).fit(scale.transform(z), learn[1]) for c in STRENGTHS]
    return max(float(fit.score(scale.transform(other), test[1])) for fit in fits), z.shape[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="what --out wrote, for --draw")
    parser.add_argument("--draw", type=Path, help="a figure to write: accuracy by size on disk")
    parser.add_argument("--out", type=Path, help="a .json file to write")
    parser.add_argument("--data", help="an .npz file, digits, or docstrings")
    parser.add_argument("--backbone", default="shipped")
    parser.add_argument("--weights")
    parser.add_argument("--size", type=int, help="height and width of images; by default the backbone's")
    parser.add_argument("--each", type=int, default=100, help="samples of a class to learn")
    parser.add_argument("--held-out", type=int, default=30, help="samples of a class to test")
    parser.add_argument("--classes", type=int, help="how many of the classes")
    parser.add_argument("--flip", action="store_true", help="average over mirror images")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--recipes",
        nargs="+",
        default=["logistic", "ncm", "slda", "ridge", "ranpac", "dlcft-exact:2048", "dlcft-exact:4096"],
    )
    options = parser.parse_args()
    if options.draw is not None:
        draw(options.files, options.draw)
        return
    if options.data is None:
        print("benchmarks/depth.py needs --data: left out")
        return
    data = read(options.data)
    found = load_backbone(options.backbone, weights=options.weights)
    preprocess = found.preprocess
    if options.size:
        kept = {**preprocess.to_dict(), "size": [options.size] * 2}
        preprocess = Preprocess.from_dict(kept)
    rows, augment = [], "flip" if options.flip else "none"
    for name in options.recipes:
        method, _, budget = name.partition(":")
        scores, size, seconds, width = [], 0, 0.0, 0
        for seed in range(options.seeds):
            learn, test = split(data, options.each, options.held_out, options.classes, seed)
            start = time.perf_counter()
            settings: dict[str, Any] = {"depth_features": int(budget)} if budget else {}
            settings |= {"preprocess": preprocess, "tokenizer": found.tokenizer, "augment": augment}
            learner = Learner(found.module, "ridge" if method == "logistic" else method, seed=seed, **settings)
            if method == "logistic":
                score, width = logistic(learner, learn, test)
                scores.append(score)
            else:
                learner.learn(learn, progress=False)
                scores.append(learner.evaluate(test, batch_size=64)["accuracy"])
                size, width = stored_bytes(learner.state()[0]), learner.model.feature_count
            seconds = time.perf_counter() - start
        each = ", ".join(f"{100 * score:.1f}" for score in scores)
        told = f"{100 * np.mean(scores):.1f}" + (f" ({each})" if len(scores) > 1 else "")
        rows.append([name, f"{width:,}", f"{size / 1e6:.1f}", told, f"{seconds:.0f}"])
        print("…", *rows[-1], flush=True)
    learn, test = split(data, options.each, options.held_out, options.classes, 0)
    spread = 100 * np.sqrt(0.25 / len(test[1]))
    pixels = f" at {options.size} pixels" if options.size else ""
    many = f"{len(set(learn[1]))} classes, {options.each} each"
    title = f"{Path(options.data).name}, {options.backbone}{pixels}: {many}"
    header = ["recipe", "features", "MB", f"held out, % ({len(test[1])} samples, ± {spread:.1f} at most)", "s"]
    table(title, header, rows)
    if options.out is not None:
        options.out.write_text(json.dumps({"title": title, "rows": rows}, indent=1))


def draw(files: list[Path], picture: Path) -> None:
    """Accuracy by size on disk, one panel a file."""
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "depth"})
    figure, axes = plt.subplots(1, len(files), figsize=(4.2 * len(files), 3.2), layout="constrained", squeeze=False)
    for path, axis in zip(files, axes[0], strict=True):
        found = json.loads(path.read_text())
        points = {row[0]: (float(row[2]), float(row[3].split()[0])) for row in found["rows"] if float(row[2]) > 0}
        ours = [place for name, place in points.items() if name.startswith("dlcft-exact")]
        axis.plot(*zip(*ours, strict=True), "o-", color="#c2410c", label="dlcft-exact, by budget")
        for place, (name, (size, score)) in enumerate(points.items()):
            budget = name.partition(":")[2]
            where, side = ((0, 6 if place % 2 else -13), "center") if budget else ((7, -3), "left")
            axis.annotate(budget or name, (size, score), where, textcoords="offset points", ha=side, fontsize=8)
            if not budget:
                axis.plot([size], [score], "s", color="#777777")
        axis.set(xscale="log", xlabel="MB on disk, a version", ylabel="accuracy on held-out images, %")
        axis.set_title(found["title"], fontsize=9)
        axis.margins(x=0.12, y=0.12)
        axis.xaxis.set_major_formatter("{x:g}")
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
