"""Choose settings that the paper leaves open: on the first tasks, by held-out training images, never by test images.

The choice is noted in a file beside the trials, in a folder of its own among the results, and is not computed again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlcft.bench.experiment import Experiment, run
from dlcft.bench.many import silent
from dlcft.bench.paper import Planned, experiments, of_length, variant, with_choices
from dlcft.data.files import write_text

Grid = Mapping[str, Sequence[Any]]

FOLDER = "tuning"  # among the results
PREFIX = "tuned-"  # of the files that note a choice
# The paper's value stands first, where it has one: of equals the first is taken. The others are larger, because the
# smaller scales have fewer steps than the paper.
LEARNING_RATES = {"sgd": (1e-3, 3e-3, 1e-2), "adam": (1e-4, 3e-4, 1e-3)}
# λ of LwF, EWC, MAS and OSLA is the authors' 1 and not tuned; rows of their own have another one, see `paper.ROWS`
TUNING: dict[str, Grid] = {
    "der": {"replay_logits": (0.03, 0.01, 0.1, 0.3)},
    "derpp": {"replay_logits": (0.01, 0.03, 0.1, 0.3)},
}


def grid_of(experiment: Experiment) -> Grid:
    """The values to try: of the learning rate, then of DER's α; none in closed form."""
    optimizer = experiment.recipe.settings.get("optimizer")
    return {"lr": LEARNING_RATES[optimizer], **TUNING.get(experiment.method, {})} if optimizer else {}


def tunings(artefact: str, scale: str, only: Sequence[str] = ()) -> dict[str, Planned]:
    """The experiments to tune for an artefact (or for "all"), by `paper.variant`.

    Of a variant, the one with the fewest tasks and the fewest settings is tuned, also if another one is asked for.
    """
    usual: dict[str, Planned] = {}
    for one in sorted(_tunable("all", scale), key=lambda one: (base_of(one).tasks, len(base_of(one).settings))):
        usual.setdefault(variant(base_of(one)), one)
    needed = {variant(base_of(one)) for one in _tunable(artefact, scale, only)}
    return {name: one for name, one in usual.items() if name in needed}


def _tunable(artefact: str, scale: str, only: Sequence[str] = ()) -> list[Planned]:
    found = experiments(artefact, scale, seeds=1, only=only)
    return [one for one in found if isinstance(one.experiment, Experiment) and grid_of(one.experiment)]


def base_of(planned: Planned) -> Experiment:
    """The experiment that is tuned."""
    assert isinstance(planned.experiment, Experiment)
    return planned.experiment


def noted(kinds: Mapping[str, Planned], out: Path) -> dict[str, dict[str, Any]]:
    """The settings that were chosen before for experiments of `tunings`; see `read_chosen`."""
    found: dict[str, dict[str, Any]] = {}
    for base in map(base_of, kinds.values()):
        found |= read_chosen(base, grid_of(base), out)
    return found


def trials(kinds: Mapping[str, Planned], out: Path) -> list[Planned]:
    """The runs that tuning has to do at most, as they are before anything is chosen."""
    known = noted(kinds, out)
    found: dict[str, Planned] = {}
    for planned in (kinds[name] for name in kinds if name not in known):
        base = base_of(planned)
        for name, value in ((name, value) for name, values in grid_of(base).items() for value in values):
            one = trial(base, {name: value})
            if not (out / FOLDER / one.file).exists():
                cell = replace(planned.cell, label=f"{planned.cell.label}, tuning {name}={value}")
                found.setdefault(one.key, replace(planned, cell=cell, experiment=one))
    return list(found.values())


def trial(base: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """The run that judges settings of an experiment, on its first tasks: three, and a tenth of many."""
    tasks = min(base.tasks, max(3, base.tasks // 10))
    return replace(with_choices(base, settings), validate=True, first=tasks, evaluate_every=tasks, knn=0)


def chosen_file(base: Experiment, out: Path) -> Path:
    """The file in which `tune` notes its choice for a kind of experiment."""
    return out / FOLDER / f"{PREFIX}{variant(base).replace('/', '-')}-{trial(base, {}).key}.json"


def read_chosen(base: Experiment, grid: Grid, out: Path) -> dict[str, dict[str, Any]]:
    """Earlier choices from the same grid, by `variant`, and by `of_length` where that diverged; {} if none."""
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


def tune(base: Experiment, grid: Grid, out: Path, **options: Any) -> dict[str, Any]:
    """The best settings of a grid, found one setting after another; trials are results too, never run twice.

    Where the largest learning rate is the best, three times as much is tried, until that is no better. Trials have the
    base's seed; they and the choice go to `FOLDER` in `out`. `options` are of `experiment.run`.
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
                scores[value] = run(one, out / FOLDER, report=silent, **options).accuracy
            except FloatingPointError:
                scores[value] = -math.inf
            chosen[name] = max(scores, key=lambda value: scores[value])
            if name == "lr" and not left and chosen[name] == max(scores) and math.isfinite(scores[value]):
                # after 1e-3 comes 3e-3, then 1e-2
                left = [float(f"{10 ** ((round(2 * math.log10(value)) + 1) / 2):.0e}")]
        if scores[chosen[name]] == -math.inf:
            raise ValueError(f"{base.method} diverges with every {name} that was tried: {', '.join(map(str, values))}.")
        # a run that diverged has no accuracy, and JSON no infinity
        tried[name] = [(value, score if math.isfinite(score) else None) for value, score in scores.items()]
    record = {"variant": variant(base), "chosen": chosen, "grid": grid, "accuracy": tried}
    write_text(chosen_file(base, out), json.dumps({**record, "base": base.to_dict()}, indent=1))
    return chosen


def choose_less(base: Experiment, tasks: int, out: Path) -> dict[str, Any] | None:
    """The best smaller value, after a run with the chosen one has diverged on more tasks than were tried.

    It is noted beside the trials, for streams of so many tasks. None, and nothing is noted, if there is no smaller one.
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
    write_text(path, json.dumps(record, indent=1))
    return dict(less[str(tasks)])
