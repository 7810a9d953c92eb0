"""Choosing what the paper leaves open: by a part of the training images, never by test images, on the first tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlcft.bench.experiment import Experiment, run
from dlcft.bench.paper import Planned, experiments, variant
from dlcft.recipes import RECIPES

Grid = Mapping[str, Sequence[Any]]

FIRST_TASKS = 3
# The paper's value stands first, where it has one: of equals the first is taken.
LEARNING_RATES = {"sgd": (1e-3, 3e-4, 3e-3), "adam": (1e-4, 3e-5, 3e-4)}
TUNING: dict[str, Grid] = {
    "lwf": {"strength": (1.0, 0.3, 3.0, 10.0)},
    "ewc": {"strength": (1.0, 10.0, 100.0, 1000.0)},
    "mas": {"strength": (1.0, 0.1, 0.01, 10.0)},
    "osla": {"strength": (1.0, 0.1, 10.0, 100.0)},
    "der": {"replay_logits": (0.3, 0.1, 0.5, 1.0)},
    "derpp": {"replay_logits": (0.1, 0.3, 0.5, 1.0)},
}


def grid_of(experiment: Experiment) -> Grid:
    """What is tuned of a method: its λ (or DER's α) if it has one, then its learning rate; nothing in closed form."""
    recipe = RECIPES[experiment.method]
    if recipe.method == "ridge":
        return {}
    return {**TUNING.get(experiment.method, {}), "lr": LEARNING_RATES[recipe.optimizer]}


def tunings(artefact: str, scale: str) -> dict[str, Planned]:
    """What there is to tune for an artefact (or for "all"), by `paper.variant`."""
    found: dict[str, Planned] = {}
    for planned in experiments(artefact, scale, seeds=1):
        if isinstance(planned.experiment, Experiment) and grid_of(planned.experiment):
            found.setdefault(variant(planned.experiment), planned)
    return found


def tune(
    base: Experiment,
    grid: Grid,
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, Any]:
    """The best settings of a grid, found one setting after another; trials are results too, never run twice.

    Args:
        base: what to tune; its seed is the trials'.
        grid: the values of each setting.
        out: the folder of results.
        data: see `experiment.run`.
        weights: see `experiment.run`.
        report: called with a line after each trial.

    Raises:
        ValueError: when training diverges with every value of a setting.
    """
    chosen: dict[str, Any] = {}
    tasks = min(FIRST_TASKS, base.tasks)
    for name, values in grid.items():
        scores = {}
        for value in values:
            settings = {**base.settings, **chosen, name: value}
            trial = replace(base, validate=True, first=tasks, evaluate_every=tasks, knn=0, settings=settings)
            try:
                result = run(trial, out, data=data, weights=weights, report=lambda line: None)
                scores[value] = result.accuracy
            except FloatingPointError:
                scores[value] = -math.inf
            report(f"{variant(base)}, {name}={value}: {scores[value]:.1%}")
        chosen[name] = max(scores, key=lambda value: scores[value])
        if scores[chosen[name]] == -math.inf:
            tried = ", ".join(map(str, values))
            raise ValueError(f"{base.method} diverges with every {name} that was tried: {tried}.")
    return chosen
