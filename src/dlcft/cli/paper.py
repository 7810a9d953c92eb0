"""The command that makes the paper's tables and figures again."""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    data: Path | None = None,
    weights: str | None = None,
    out: Path = Path("runs"),
    dry_run: bool = False,
) -> None:
    """Run what a table or figure of the paper needs, and show it beside the paper's own numbers.

    Example: dlcft reproduce data-il --scale smoke

    Parameters
    ----------
    artefact
        The table or figure, or all of them.
    scale
        Digits in seconds (smoke), part of CIFAR-100 in hours (mini), the paper's own settings on a GPU (paper).
    seeds
        How many; by default what the scale says.
    data
        The folder or file of the data set.
    weights
        The backbone's file.
    out
        The folder of results; what is there already is not computed again.
    dry_run
        Only list the runs, with an estimate of time and memory from a short trial.
    """
    if seeds is not None:
        positive("--seeds", seeds)
    from dlcft.bench.paper import cells, experiments

    planned = experiments(artefact, scale, seeds)
    if dry_run:
        _show_plan(planned, out)
        return
    results = _executed(planned, out, data, weights)
    _show_cells(cells(artefact, scale, seeds), results, scale)
    print(f"results: {out.resolve()}; dlcft report --runs {out} makes a page of them")


def _executed(planned: list[Planned], out: Path, data: Path | None, weights: str | None) -> dict[str, Any]:
    from dlcft.bench.paper import execute

    results: dict[str, Any] = {}
    for number, one in enumerate(planned, 1):
        print(f"{number} of {len(planned)}: {one.artefact}, {one.label}, {one.column}", file=sys.stderr)
        results[one.experiment.key] = execute(one, out, data=data, weights=weights, report=lambda line: None)
    return results


def _show_plan(planned: list[Planned], out: Path) -> None:
    from dlcft.bench.planning import plan

    found = plan(planned, out, report=lambda line: print(f"trial: {line}", file=sys.stderr))
    for one in found.estimates:
        name = f"{one.planned.artefact}, {one.planned.label}, {one.planned.column}, seed {one.planned.experiment.seed}"
        print(f"{name}: " + ("done" if one.done else f"{one.seconds / 60:.1f} min, {one.peak / 2**30:.1f} GiB"))
    print(f"{found.runs} runs, {found.seconds / 3600:.1f} h one after another, at most {found.peak / 2**30:.1f} GiB")


def _show_cells(planned: list[Planned], results: dict[str, Any], scale: str) -> None:
    """One table an artefact: ours, the paper's, and the difference; digits have nothing to be compared with."""
    from rich.console import Console
    from rich.table import Table

    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    published: dict[tuple[str, str, str], float | None] = {}
    for one in planned:
        value = _value(one.metric, results[one.experiment.key])
        published[one.artefact, one.label, one.column] = None if scale == "smoke" else one.paper
        if value is not None:
            values[one.artefact, one.label, one.column].append(100 * value)
    console = Console()
    if scale == "smoke":
        console.print(
            "Columns name the paper's streams; at this scale handwritten digits in a few tasks stand in for them."
        )
    for artefact in dict.fromkeys(one.artefact for one in planned):
        table = Table("row", "column", "ours", "seeds", "paper", "difference", title=f"{artefact}, scale {scale}")
        for (owner, label, column), paper in published.items():
            found = values[owner, label, column]
            if owner != artefact or not found:
                continue
            ours = statistics.mean(found)
            beside = ("", "") if paper is None else (f"{paper:.2f}", f"{ours - paper:+.2f}")
            table.add_row(label, column, f"{ours:.2f}", str(len(found)), *beside)
        if table.row_count:
            console.print(table)


def _value(metric: str, result: Any) -> float | None:
    """The one number of a cell; curves and probes show where they end, traces of eigenvalues have none."""
    if metric == "bwt":
        from dlcft.metrics import backward_transfer

        return None if result.matrix is None else backward_transfer(result.matrix)
    if metric == "knn":
        probed = [entry["knn"] for entry in result.history if entry.get("knn") is not None]
        return probed[-1] if probed else None
    return None if metric == "eigenvalue" else float(result.accuracy)
