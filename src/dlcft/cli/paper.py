"""The command `reproduce`: the paper's tables and figures."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dlcft.cli.arguments import positive, say

if TYPE_CHECKING:
    from dlcft.bench.paper import Planned

Artefact = Literal[
    "data-il",
    "task-class-il",
    "ablation",
    "curvatures",
    "bwt",
    "joint",
    "vanishing-curvature",
    "data-il-curves",
    "knn",
    "all",
]


def reproduce(
    artefact: Artefact,
    *,
    scale: Literal["smoke", "small", "paper"] = "smoke",
    seeds: int | None = None,
    only: Annotated[list[str] | None, Parameter(name="--only")] = None,
    tune: bool = False,
    jobs: int = 1,
    data: Path | None = None,
    weights: str | None = None,
    out: Path = Path("runs"),
    tensorboard: Path | None = None,
    dry_run: bool = False,
) -> None:
    """Run the experiments of a table or figure of the paper, and show it beside the paper's own numbers.

    Runs that several tables need come first, and the second seed after the first of everything. A command that was
    killed continues where it stopped.

    Example: dlcft reproduce data-il --scale smoke --only None --only EWC --tune --jobs 2

    Args:
        artefact: The table or figure, or all of them.
        scale: Digits in seconds (smoke), part of CIFAR-10 in hours (small), the paper's own settings on a GPU (paper).
        seeds: How many; by default as many as the scale has.
        only: A row to run, by its name or its method's; may be repeated.
        tune: First choose learning rates, and α of DER, on held-out training images of the first tasks, from one grid
            for all methods. The choices are noted in OUT/tuning, and not computed again.
        jobs: How many to run at once on this machine; each gets its share of the cores.
        data: The folder or file of the data set.
        weights: The backbone's file.
        out: The folder of results; those that are there already are read.
        tensorboard: A folder for TensorBoard to read; needs the extra dlcft[tensorboard].
        dry_run: Only list the runs, with an estimate of time and memory from a short trial.
    """
    if seeds is not None:
        positive("--seeds", seeds)
    positive("--jobs", jobs)
    from dlcft.bench.events import need_tensorboard
    from dlcft.bench.paper import experiments
    from dlcft.bench.reproduction import Reproduction
    from dlcft.bench.tune import noted, trials, tunings

    if tensorboard is not None:
        need_tensorboard()
    rows = only or []
    kinds = tunings(artefact, scale, rows) if tune else {}
    if dry_run:
        tests, planned = trials(kinds, out), experiments(artefact, scale, seeds, noted(kinds, out), rows)
        _show_costs([*tests, *planned], len(tests), out, jobs)
        return
    runs = Reproduction(out, data, weights, tensorboard, jobs, _told)
    chosen = runs.choose(kinds)
    while True:
        results, failures = runs.execute(experiments(artefact, scale, seeds, chosen, rows))
        smaller = runs.lower(kinds, failures)
        if not smaller:
            break
        chosen |= smaller
    _show(list(results.values()), artefact, scale)
    say(f"results: {out.resolve()}; dlcft report --runs {out} makes a page of them")
    if failures:
        sentences = " ".join(f"{one}: {why}" for one, why in failures)
        raise FloatingPointError(f"{len(failures)} of the runs have no result. {sentences}")


def _told(line: str) -> None:
    say(line, to=sys.stderr)


def _show_costs(planned: list[Planned], tests: int, out: Path, jobs: int) -> None:
    from dlcft.bench.reproduction import costs
    from dlcft.pages import in_seconds

    found = costs(planned, out, report=lambda line: _told(f"trial: {line}"))
    for one, cost in zip(planned, found, strict=True):
        told = "done" if cost is None else f"{in_seconds(cost.seconds)}, {cost.peak / 2**30:.1f} GiB"
        say(f"{one}: {told}")
    left = [cost for cost in found if cost is not None]
    seconds, peak = sum(cost.seconds for cost in left), max((cost.peak for cost in left), default=0)
    tuned = f", {tests} of them to tune" if tests else ""
    say(
        f"{len(left)} runs{tuned}; {in_seconds(seconds)} one after another, about {in_seconds(seconds / jobs)} with "
        f"--jobs {jobs}; at most {peak / 2**30:.1f} GiB each, and the images"
    )


def _show(found: list[Any], artefact: str, scale: str) -> None:
    """One table an artefact: ours, the paper's, and the difference; digits have nothing to be compared with."""
    from rich.console import Console
    from rich.table import Table

    from dlcft.bench.report import reported, summarise
    from dlcft.bench.report.tables import STAND_IN, artefact_table
    from dlcft.bench.spectrum import Trace

    console = Console()
    if scale == "smoke":
        console.print(STAND_IN)
    traces = [result for result in found if isinstance(result, Trace)]
    for one in reported(summarise(result for result in found if not isinstance(result, Trace)), traces):
        if one.scale != scale or artefact not in (one.name, "all"):
            continue
        title, figures = f"{one.name}, scale {scale}", ("ours", "paper", "difference", "recovered")
        table = Table("row", "column", *figures, title=title)
        for entry in one.entries:
            if entry.ours is not None:
                table.add_row(entry.cell.label, entry.cell.column, *(entry.figures()[name].text for name in figures))
        if one.traces:
            shown = artefact_table(one)
            table = Table("network", *shown.head, title=title)
            for line in shown.lines:
                table.add_row(line.name, *(cell.text for cell in line.cells))
        console.print(table)
