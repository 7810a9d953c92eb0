"""Choosing what the paper leaves open: by a part of the training images, never by test images, on the first tasks.

What was chosen stands in a file beside the trials, in a folder of its own among the results, and is not computed again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlcft.bench.experiment import Experiment, run, write_atomically
from dlcft.bench.paper import Planned, experiments, of_length, variant, with_choices
from dlcft.methods.recipes import RECIPES

Grid = Mapping[str, Sequence[Any]]

FOLDER = "tuning"  # among the results
PREFIX = "tuned-"  # of the files that say what was chosen
# The paper's value stands first, where it has one: of equals the first is taken. The others are larger, because the
# smaller scales have fewer steps than the paper.
LEARNING_RATES = {"sgd": (1e-3, 3e-3, 1e-2), "adam": (1e-4, 3e-4, 1e-3)}
TUNING: dict[str, Grid] = {
    "lwf": {"strength": (1.0, 0.3, 3.0, 10.0)},
    "ewc": {"strength": (1.0, 10.0, 100.0, 1000.0)},
    "mas": {"strength": (1.0, 0.001, 0.01, 0.1)},
    "osla": {"strength": (1.0, 0.1, 10.0, 100.0)},
    "der": {"replay_logits": (0.3, 1.0, 3.0, 10.0)},
    "derpp": {"replay_logits": (0.1, 0.3, 1.0, 3.0)},
}


def first_tasks(tasks: int) -> int:
    """How many of the tasks are learned in a trial: three, and a tenth of many."""
    return min(tasks, max(3, tasks // 10))


def grid_of(experiment: Experiment) -> Grid:
    """What is tuned of a method: its learning rate, then its λ (or DER's α) if it has one; nothing in closed form."""
    recipe = RECIPES[experiment.method]
    if recipe.method == "ridge":
        return {}
    return {"lr": LEARNING_RATES[recipe.optimizer], **TUNING.get(experiment.method, {})}


def tunings(artefact: str, scale: str, only: Sequence[str] = ()) -> dict[str, Planned]:
    """What there is to tune for an artefact (or for "all"), by `paper.variant`."""
    usual: dict[str, Planned] = {}
    for experiment, planned in sorted(_tunable("all", scale), key=lambda pair: _usual(pair[0])):
        usual.setdefault(variant(experiment), planned)
    needed = {variant(experiment) for experiment, _ in _tunable(artefact, scale, only)}
    return {name: planned for name, planned in usual.items() if name in needed}


def _usual(experiment: Experiment) -> tuple[int, int]:
    """The least is tuned: on the fewest tasks, with the method as it is in its recipe."""
    return experiment.tasks, len(experiment.settings)


def _tunable(artefact: str, scale: str, only: Sequence[str] = ()) -> list[tuple[Experiment, Planned]]:
    found = [(one.experiment, one) for one in experiments(artefact, scale, seeds=1, only=only)]
    return [(what, one) for what, one in found if isinstance(what, Experiment) and grid_of(what)]


def trial(base: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """What is run to judge settings of an experiment."""
    tasks = first_tasks(base.tasks)
    return replace(with_choices(base, settings), validate=True, first=tasks, evaluate_every=tasks, knn=0)


def chosen_file(base: Experiment, out: Path) -> Path:
    """Where `tune` notes what it has chosen for a kind of experiment."""
    return out / FOLDER / f"{PREFIX}{variant(base).replace('/', '-')}-{trial(base, {}).key}.json"


def read_chosen(base: Experiment, grid: Grid, out: Path) -> dict[str, dict[str, Any]]:
    """What was chosen before from the same grid, by `variant`, and by `of_length` where that diverged; {} if nothing.

    Raises:
        ValueError: when the file is damaged.
    """
    path = chosen_file(base, out)
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text())
        if content["grid"] != json.loads(json.dumps(grid)):
            return {}
        less = {of_length(variant(base), tasks): dict(chosen) for tasks, chosen in content.get("less", {}).items()}
        return {variant(base): dict(content["chosen"]), **less}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no record of tuning; remove it, and its trials are read again.") from error


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

    Where the largest learning rate is the best, three times as much is tried, until that is no better.

    Args:
        base: what to tune; its seed is the trials'.
        grid: the values of each setting.
        out: the folder of results; trials and choices go to `FOLDER` in it.
        data: see `experiment.run`.
        weights: see `experiment.run`.
        report: called with a line after each trial.

    Raises:
        ValueError: when training diverges with every value of a setting.
    """
    known = read_chosen(base, grid, out)
    if known:
        return known[variant(base)]
    chosen: dict[str, Any] = {}
    tried: dict[str, list[tuple[Any, float | None]]] = {}
    for name, values in grid.items():
        scores: dict[Any, float] = {}
        left = list(values)
        while left:
            value = left.pop(0)
            one = trial(base, {**chosen, name: value})
            try:
                scores[value] = run(one, out / FOLDER, data=data, weights=weights, report=lambda line: None).accuracy
            except FloatingPointError:
                scores[value] = -math.inf
            report(f"{variant(base)}, {name}={value}: {scores[value]:.1%}")
            chosen[name] = max(scores, key=lambda value: scores[value])
            if name == "lr" and not left and chosen[name] == max(scores) and math.isfinite(scores[value]):
                left = [_next(value)]
        if scores[chosen[name]] == -math.inf:
            raise ValueError(f"{base.method} diverges with every {name} that was tried: {', '.join(map(str, values))}.")
        # a run that diverged has no accuracy, and JSON no infinity
        tried[name] = [(value, score if math.isfinite(score) else None) for value, score in scores.items()]
    record = {"variant": variant(base), "chosen": chosen, "grid": grid, "accuracy": tried}
    write_atomically(chosen_file(base, out), json.dumps({**record, "base": base.to_dict()}, indent=1))
    return chosen


def _next(lr: float) -> float:
    """After 1e-3 comes 3e-3, then 1e-2."""
    return float(f"{10 ** ((round(2 * math.log10(lr)) + 1) / 2):.0e}")


def choose_less(base: Experiment, tasks: int, out: Path) -> dict[str, Any] | None:
    """After a run with what was chosen has diverged, on more tasks than were tried: the best of the smaller values.

    It is noted beside the trials, for streams of so many tasks. None, and nothing is noted, where there is none.
    """
    path = chosen_file(base, out)
    record = json.loads(path.read_text())
    name, tried = list(record["accuracy"].items())[-1]
    less = record.setdefault("less", {})
    chosen = less.get(str(tasks), record["chosen"])
    diverged = chosen[name]
    smaller = [(accuracy, value) for value, accuracy in tried if value < diverged and accuracy is not None]
    if not smaller:
        return None
    less[str(tasks)] = {**chosen, name: max(smaller)[1]}
    record["diverged"] = [*record.get("diverged", []), {name: diverged, "tasks": tasks}]
    write_atomically(path, json.dumps(record, indent=1))
    return dict(less[str(tasks)])
