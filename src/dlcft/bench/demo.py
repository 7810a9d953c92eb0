"""The demonstration: real images that a dependency carries, and a real pre-trained network that the package carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from dlcft.bench.experiment import Experiment, Result, run
from dlcft.recipes import RECIPES

METHODS = {
    "none": "fine-tune on, no memory",
    "ewc": "diagonal penalty",
    "osla": "K-FAC penalty",
    "lwf": "keep the old outputs",
    "er": "replay 50 old images",
    "none-linear": "linearised, no memory",
    "dlcft-paper": "linearised, TK-FAC penalty",
    "dlcft": "linearised, exact TK",
    "ranpac": "closed form, random features",
    "dlcft-exact": "closed form, tangent space",
    "joint": "all data at once",
    "joint-linear": "all data at once, linearised",
}

# Handwritten digits turned by 40 degrees more in each task, and digits two by two. Small, so that it ends in minutes.
TURNED = Experiment(dataset="digits", scenario="data-il", tasks=3, turn=40.0, per_class=40)
NEW_CLASSES = Experiment(dataset="digits", scenario="class-il", tasks=5, per_class=40)
BUFFER = 50
FEW_FEATURES = {"tangent_features": 1024, "random_features": 256}


def experiments(epochs: int, seed: int) -> Iterator[Experiment]:
    """What the demonstration runs."""
    for base in (TURNED, NEW_CLASSES):
        for method in METHODS:
            recipe = RECIPES[method]
            settings: dict[str, object] = {} if recipe.method == "ridge" else {"epochs": epochs}
            if recipe.tangent_features:
                settings |= FEW_FEATURES
            if recipe.buffer:
                settings["buffer"] = BUFFER
            yield replace(base, method=method, seed=seed, settings=settings)


def demonstrate(out: Path, *, epochs: int, seed: int, report: Callable[[str], None]) -> list[Result]:
    """Run all of it; what is in `out` already is not computed again.

    Args:
        out: the folder of results.
        epochs: passes over a task, for methods that are trained.
        seed: of everything random.
        report: called with each method's name before it starts.
    """
    results = []
    for experiment in experiments(epochs, seed):
        report(f"{experiment.scenario}: {experiment.method}")
        results.append(run(experiment, out, report=lambda line: None))
    return results
