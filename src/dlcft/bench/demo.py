"""The demonstration: real images that a dependency carries, and a real pre-trained network that the package carries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlcft.bench.choices import CHOICES
from dlcft.bench.experiment import Experiment, Result
from dlcft.bench.many import cores, run_all
from dlcft.methods.recipes import RECIPES

METHODS = {  # by `Experiment.title`
    "none": "fine-tune on, no memory",
    "ewc": "diagonal penalty",
    "osla": "K-FAC penalty",
    "lwf": "keep the old outputs",
    "er": "replay 50 old images",
    "dlcft-paper": "linearised, TK-FAC penalty",
    "dlcft": "linearised, exact TK",
    "ranpac": "closed form, random features",
    "dlcft-exact": "closed form, all depths",
    "none (joint)": "all data at once",
}
TITLES = {
    "data-il": "The same ten digits, turned 40° further in each of 3 tasks: accuracy in the end",
    "class-il": "Two new digits in each of 5 tasks: accuracy in the end, over all ten",
}

# Handwritten digits turned by 40 degrees more in each task, and digits two by two. Small, so that it ends in minutes.
TURNED = Experiment(dataset="digits", scenario="data-il", tasks=3, turn=40.0, per_class=32)
NEW_CLASSES = Experiment(dataset="digits", scenario="class-il", tasks=5, per_class=32)
BATCH_SIZE, BUFFER = 16, 50
# A task is a hundred steps, in which a head from zero hardly moves at the recipes' learning rates: those of scale small
RATES = CHOICES["lr"].value["small"]
FEATURES = 1024  # more than twice the 320 images; solving takes their cube
MOST_JOBS = 4  # a process takes about a gigabyte


def experiments(epochs: int, seed: int) -> Iterator[Experiment]:
    """The runs of the demonstration."""
    for base in (TURNED, NEW_CLASSES):
        for title in METHODS:
            method, joint = title.removesuffix(" (joint)"), title.endswith(" (joint)")
            yield replace(base, joint=joint, method=method, seed=seed, settings=_settings(method, epochs))


def _settings(method: str, epochs: int) -> dict[str, Any]:
    recipe, settings = RECIPES[method].settings, {"epochs": epochs, "batch_size": BATCH_SIZE, "buffer": BUFFER}
    settings["first_times"] = 2  # as long as those that start from the network after the first task
    if recipe.get("head_start") == "zero":
        settings |= {"lr": RATES.get(method, RATES[recipe["optimizer"]]), "start_lr": RATES["sgd"]}
    if RECIPES[method].closed_form:
        settings = {"depth_features": FEATURES, "random_features": FEATURES}
    return {name: value for name, value in settings.items() if recipe.get(name)}


def demonstrate(
    out: Path, *, epochs: int, seed: int, jobs: int | None = None, report: Callable[[str], None]
) -> list[Result]:
    """Run all of it, by default one method a core, four at most; see `run_all`."""
    planned = list(experiments(epochs, seed))
    return run_all(planned, out, jobs=min(cores(), MOST_JOBS) if jobs is None else jobs, report=report)
