"""The command that makes the paper's tables and figures again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dlcft.cli.arguments import positive

if TYPE_CHECKING:
    from dlcft.bench.paper import Planned

Artefact = Literal[
    "data-il",
    "task-class-il",
    "ablation",
    "curvatures",
    "bwt",
    "vanishing-curvature",
    "data-il-curves",
    "knn",
    "all",
]


def reproduce(
    artefact: Artefact,
    *,
    scale: Literal["smoke", "mini", "paper"] = "smoke",
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
    """Run what a table or figure of the paper needs, and show it beside the paper's own numbers.

    What is needed by several of them is run first, and the second seed after the first of everything. A command that
    was killed continues where it stopped.

    Example: dlcft reproduce data-il --scale smoke --only None --only EWC --tune --jobs 2

    Parameters
    ----------
    artefact
        The table or figure, or all of them.
    scale
        Digits in seconds (smoke), part of CIFAR-100 in hours (mini), the paper's own settings on a GPU (paper).
    seeds
        How many; by default what the scale says.
    only
        A row to run, by its name or its method's; may be repeated.
    tune
        First choose λ and learning rates on held-out training images of the first tasks, from one grid for all methods.
        The choices stand in OUT/tuning, and are not computed again.
    jobs
        How many to run at once on this machine; each gets its share of the cores.
    data
        The folder or file of the data set.
    weights
        The backbone's file.
    out
        The folder of results; what is there already is not computed again.
    tensorboard
        A folder for TensorBoard to read; needs the extra dlcft[tensorboard].
    dry_run
        Only list the runs, with an estimate of time and memory from a short trial.
    """
    if seeds is not None:
        positive("--seeds", seeds)
    positive("--jobs", jobs)
    from dlcft.bench.events import need_tensorboard
    from dlcft.bench.paper import experiments
    from dlcft.bench.reproduction import choose, execute_all, lowered, noted, trials
    from dlcft.bench.tune import tunings

    if tensorboard is not None:
        need_tensorboard()
    rows = only or []
    kinds = tunings(artefact, scale, rows) if tune else {}
    if dry_run:
        known = noted(kinds, out)
        _show_plan(trials(kinds, out), experiments(artefact, scale, seeds, known, rows), out, jobs)
        return
    how: dict[str, Any] = {"data": data, "weights": weights, "jobs": jobs, "report": _told}
    chosen = choose(kinds, out, **how)
    while True:
        planned = experiments(artefact, scale, seeds, chosen, rows)
        results, failures = execute_all(planned, out, tensorboard=tensorboard, **how)
        smaller = lowered(kinds, failures, out, report=_told)
        if not smaller:
            break
        chosen |= smaller
    _show(list(results.values()), artefact, scale, chosen)
    print(f"results: {out.resolve()}; dlcft report --runs {out} makes a page of them")
    if failures:
        sentences = " ".join(f"{one}: {why}" for one, why in failures)
        raise FloatingPointError(f"{len(failures)} of the runs have no result. {sentences}")


def _told(line: str) -> None:
    print(line, file=sys.stderr)


def _show_plan(tests: list[Planned], planned: list[Planned], out: Path, jobs: int) -> None:
    from dlcft.bench.planning import plan
    from dlcft.pages import in_seconds

    found = plan([*tests, *planned], out, report=lambda line: _told(f"trial: {line}"))
    for one in found.estimates:
        print(f"{one.planned}: " + ("done" if one.done else f"{in_seconds(one.seconds)}, {one.peak / 2**30:.1f} GiB"))
    tuned = f", {len(tests)} of them to tune" if tests else ""
    print(
        f"{found.runs} runs{tuned}; {in_seconds(found.seconds)} one after another, about "
        f"{in_seconds(found.seconds / jobs)} with --jobs {jobs}; at most {found.peak / 2**30:.1f} GiB each"
    )


def _show(found: list[Any], artefact: str, scale: str, chosen: dict[str, Any]) -> None:
    """One table an artefact: ours, the paper's, and the difference; digits have nothing to be compared with."""
    from rich.console import Console
    from rich.table import Table

    from dlcft.bench.report import reported, summarise
    from dlcft.bench.report.artefacts import STAND_IN
    from dlcft.bench.report.tables import difference_cell, ours_cell, paper_cell, recovered_cell
    from dlcft.bench.spectrum import Trace

    console = Console()
    if scale == "smoke":
        console.print(STAND_IN)
    rows = summarise(result for result in found if not isinstance(result, Trace))
    traces = [result for result in found if isinstance(result, Trace)]
    for one in reported(rows, traces, {scale: chosen}):
        if artefact not in (one.name, "all"):
            continue
        if one.traces:
            names = "data", "network", "loss", "largest eigenvalue at first", "at its peak", "in the end"
            table = Table(*names, title=f"{one.name}, scale {scale}")
            for trace in one.traces:
                values = [record["eigenvalue"] for record in trace.records]
                figures = (f"{value:.4g}" for value in (values[0], max(values), values[-1]))
                table.add_row(trace.spectrum.dataset, trace.spectrum.network, trace.spectrum.loss, *figures)
            console.print(table)
            continue
        table = Table("row", "column", "ours", "paper", "difference", "recovered", title=f"{one.name}, scale {scale}")
        for entry in one.entries:
            if entry.ours is not None:
                cells = (ours_cell(entry), paper_cell(entry), difference_cell(entry), recovered_cell(entry))
                table.add_row(entry.label, entry.column, *(cell.text for cell in cells))
        console.print(table)
