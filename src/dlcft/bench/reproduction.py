"""All runs of an artefact: tuned if asked, several at once, the time that is left told, and nothing done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dlcft.bench.experiment import Experiment, Result
from dlcft.bench.many import each
from dlcft.bench.paper import Planned, execute, of_length, variant
from dlcft.bench.planning import usual_seconds
from dlcft.bench.spectrum import Trace
from dlcft.bench.tune import FOLDER, Grid, choose_less, grid_of, read_chosen, trial, tune
from dlcft.pages import in_seconds
from dlcft.store.files import CheckpointError

Report = Callable[[str], None]
Failure = FloatingPointError | CheckpointError


class Forecast:
    """Time left: what is usual for the work that is left, times how much longer than usual things have taken so far."""

    def __init__(self, work: Mapping[int, float], jobs: int) -> None:
        self.left, self.jobs, self.count = dict(work), jobs, len(work)
        self.usual = self.taken = 0.0

    def finish(self, place: int, seconds: float) -> None:
        """One is done, and has taken so long."""
        self.usual += self.left.pop(place)
        self.taken += seconds

    def __str__(self) -> str:
        slower = self.taken / self.usual if self.usual and self.taken else 1.0
        seconds = sum(self.left.values()) * slower / min(self.jobs, max(1, len(self.left)))
        left = f"about {in_seconds(seconds)} left" if self.left else "all done"
        return f"{self.count - len(self.left)} of {self.count}, {left}"


def choose(
    tunings: Mapping[str, Planned],
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    jobs: int = 1,
    report: Report = print,
) -> dict[str, dict[str, Any]]:
    """The settings of each kind of experiment: as noted before, else tuned.

    Args:
        tunings: see `tuning.tunings`.
        out: the folder of results.
        data: see `experiment.run`.
        weights: see `paper.execute`.
        jobs: see `executor.each`.
        report: called with a line after each kind.
    """
    chosen = noted(tunings, out)
    open_ = [planned for name, planned in tunings.items() if name not in chosen]
    forecast = Forecast({place: tuning_seconds(planned) for place, planned in enumerate(open_)}, jobs)
    for place, (settings, seconds) in each(partial(_tuned, out=out, data=data, weights=weights), open_, jobs):
        name = variant(tuned_base(open_[place])[0])
        chosen[name] = settings
        forecast.finish(place, seconds)
        report(f"tuning, {forecast}: {name}: " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    return chosen


def noted(tunings: Mapping[str, Planned], out: Path) -> dict[str, dict[str, Any]]:
    """The settings that were chosen before; see `tuning.read_chosen`."""
    return {
        name: settings
        for planned in tunings.values()
        for name, settings in read_chosen(*tuned_base(planned), out).items()
    }


def trials(tunings: Mapping[str, Planned], out: Path) -> list[Planned]:
    """The runs that `choose` has to do at most, as they are before anything is chosen."""
    known = noted(tunings, out)
    found: dict[str, Planned] = {}
    for planned in (planned for name, planned in tunings.items() if name not in known):
        base, grid = tuned_base(planned)
        for name, value in ((name, value) for name, values in grid.items() for value in values):
            one = trial(base, {name: value})
            if not (out / FOLDER / one.file).exists():
                label = f"{planned.label}, tuning {name}={value}"
                found.setdefault(one.key, replace(planned, label=label, experiment=one))
    return list(found.values())


def tuned_base(planned: Planned) -> tuple[Experiment, Grid]:
    """The experiment that is tuned, and from what."""
    assert isinstance(planned.experiment, Experiment)
    return planned.experiment, grid_of(planned.experiment)


def tuning_seconds(planned: Planned) -> float:
    """How long tuning usually takes."""
    base, grid = tuned_base(planned)
    # each setting is tried at the value of what was best so far, which is known, and at its others
    return (1 + sum(len(values) - 1 for values in grid.values())) * usual_seconds(trial(base, {}))


def execute_all(
    planned: Sequence[Planned],
    out: Path,
    *,
    data: Path | None = None,
    weights: str | None = None,
    tensorboard: Path | None = None,
    jobs: int = 1,
    report: Report = print,
) -> tuple[dict[str, Result | Trace], list[tuple[Planned, Failure]]]:
    """Run all that is not in `out` yet.

    Args:
        planned: see `paper.experiments`; begun in this order.
        out: the folder of results.
        data: see `experiment.run`.
        weights: see `paper.execute`.
        tensorboard: see `experiment.run`.
        jobs: see `executor.each`.
        report: called with a line before the first run and after each.

    Returns:
        The results by the experiment's key, and why a run has none: its training diverged, or another process is at it.
    """
    forecast = Forecast({place: usual_seconds(one.experiment) for place, one in enumerate(planned)}, jobs)
    results: dict[str, Result | Trace] = {}
    there = [place for place, one in enumerate(planned) if (out / one.experiment.file).exists()]
    for place in there:
        result = execute(planned[place], out, data=data, weights=weights)
        results[planned[place].experiment.key] = result
        forecast.finish(place, result.seconds)
    report(f"{forecast}")
    missing = [place for place in range(len(planned)) if place not in set(there)]
    work = partial(_attempted, out=out, data=data, weights=weights, tensorboard=tensorboard)
    failures: list[tuple[Planned, Failure]] = []
    for index, made in each(work, [planned[place] for place in missing], jobs):
        place = missing[index]
        one = planned[place]
        if isinstance(made, Failure):
            failures.append((one, made))
            forecast.finish(place, 0.0)
            report(f"{forecast}: {one}: {made}")
            continue
        results[one.experiment.key] = made
        forecast.finish(place, made.seconds)
        accuracy = f", {made.accuracy:.2%}" if isinstance(made, Result) else ""
        report(f"{forecast}: {one}{accuracy}, in {in_seconds(made.seconds)}")
    return results, failures


def lowered(
    tunings: Mapping[str, Planned], failures: Sequence[tuple[Planned, Failure]], out: Path, *, report: Report = print
) -> dict[str, dict[str, Any]]:
    """Smaller settings for each kind of experiment that has diverged with the tuned ones; see `tuning.choose_less`."""
    diverged = {
        (variant(planned.experiment), planned.experiment.tasks)
        for planned, why in failures
        if isinstance(why, FloatingPointError) and isinstance(planned.experiment, Experiment)
    }
    found = {
        of_length(name, tasks): choose_less(tuned_base(tunings[name])[0], tasks, out)
        for name, tasks in sorted(diverged)
        if name in tunings
    }
    chosen = {name: settings for name, settings in found.items() if settings is not None}
    for name, settings in chosen.items():
        report(f"{name} diverged; now " + ", ".join(f"{key}={value}" for key, value in settings.items()))
    return chosen


def _tuned(planned: Planned, out: Path, data: Path | None, weights: str | None) -> tuple[dict[str, Any], float]:
    """The settings, and the seconds that it took."""
    started = time.perf_counter()
    base, grid = tuned_base(planned)
    settings = tune(base, grid, out, data=data, weights=weights or planned.weights, report=_silent)
    return settings, time.perf_counter() - started


def _attempted(
    planned: Planned, out: Path, data: Path | None, weights: str | None, tensorboard: Path | None
) -> Result | Trace | Failure:
    """The result, or why there is none: one run of many must not end the others."""
    try:
        return execute(planned, out, data=data, weights=weights, tensorboard=tensorboard, report=_silent)
    except (FloatingPointError, CheckpointError) as error:
        return error


def _silent(line: str) -> None:
    pass
