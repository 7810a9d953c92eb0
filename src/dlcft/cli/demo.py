"""The command `demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlcft.cli.arguments import positive


def demo(*, epochs: int = 8, seed: int = 0, jobs: int | None = None, out: Path = Path("dlcft-demo")) -> None:
    """Learn on real images in a few minutes, by ten methods, and show how much each remembers.

    A ResNet-18 pre-trained on Tiny-ImageNet, shipped with the package, learns handwritten digits: first the same digits
    turned further from task to task, then two new digits in each task.

    Example: dlcft demo --epochs 2

    Args:
        epochs: Passes over each task, for methods that are trained.
        seed: Fixes everything random.
        jobs: How many methods to run at once: by default one a core, four at most.
        out: The folder for results and the report; results that are there already are read.
    """
    positive("--epochs", epochs)
    if jobs is not None:
        positive("--jobs", jobs)
    from rich.console import Console

    from dlcft.bench.demo import METHODS, TITLES, demonstrate
    from dlcft.bench.report import to_html
    from dlcft.data.files import write_text

    console = Console()
    with console.status("learning …") as status:
        results = demonstrate(
            out, epochs=epochs, seed=seed, jobs=jobs, report=lambda line: status.update(f"learning … {line}")
        )
    for scenario, title in TITLES.items():
        console.print(_accuracy_table([r for r in results if r.experiment.scenario == scenario], title, METHODS))
    page = out / "report.html"
    write_text(page, to_html(results, title="dlcft demo"))
    console.print(f"report: {page.resolve()}", soft_wrap=True)


def _accuracy_table(results: list[Any], title: str, methods: dict[str, str]) -> Any:
    from rich.table import Table

    table = Table(title=title)
    for name in ("method", "how it remembers", "first task", "mean", "", "s"):
        number = name in ("first task", "mean", "s")
        table.add_column(name, justify="right" if number else "left", no_wrap=name in ("method", ""))
    for r in results:
        first, bar = r.history[-1]["accuracy"][0], "█" * round(10 * r.accuracy)
        facts = f"{first:.0%}", f"{r.accuracy:.1%}", bar, f"{r.seconds_learning:.0f}"
        table.add_row(r.experiment.title, methods[r.experiment.title], *facts)
    return table
