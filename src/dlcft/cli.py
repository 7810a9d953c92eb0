"""The command line: one function a subcommand. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys

from cyclopts import App

from dlcft import __version__

app = App(
    name="dlcft",
    version=__version__,
    help="Continually fine-tune a pre-trained network: learn new data, keep the old, without the old data.",
)


@app.command
def demo(*, epochs: int = 5, seed: int = 0) -> None:
    """Learn two tasks on real images in about a minute, and show what is remembered.

    A ResNet-18 pre-trained on Tiny-ImageNet, shipped with the package, learns upright digits, then turned ones.
    `none` fine-tunes on; `kfac` keeps a quadratic memory of the first task; `joint` sees both tasks at once.

    Example: dlcft demo --epochs 2

    Parameters
    ----------
    epochs
        How often each task is gone through.
    seed
        Of everything random.
    """
    if epochs < 1:
        _refuse(f"--epochs is {epochs}; it must be at least 1.")
    from rich.console import Console
    from rich.table import Table

    from dlcft.bench.demo import run

    console = Console()
    table = Table(title="Accuracy after both tasks (600 test images each)")
    for column in (
        "method",
        "upright, learned first",
        "turned, learned second",
        "rise of the old loss: predicted",
        "measured",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    with console.status("learning …"):
        for outcome in run(epochs=epochs, seed=seed, report=lambda o: console.print(f"{o.method} is done")):
            rises = (outcome.predicted_increase, outcome.measured_increase)
            table.add_row(
                outcome.method,
                f"{outcome.first:.1%}",
                f"{outcome.second:.1%}",
                *("–" if rise is None else f"{rise:+.2f}" for rise in rises),
            )
    console.print(table)


def _refuse(sentence: str) -> None:
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
