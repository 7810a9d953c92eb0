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
    """Learn two tasks on real images in a minute or two, and show what is remembered.

    A ResNet-18 pre-trained on Tiny-ImageNet, shipped with the package, learns upright digits, then turned ones.

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

    from dlcft.bench.demo import METHODS, run

    console = Console()
    with console.status("learning …") as status:
        outcomes = run(epochs=epochs, seed=seed, report=lambda method: status.update(f"learning with {method} …"))
    table = Table(title="Accuracy after both tasks, 599 test images each")
    table.add_column("method")
    table.add_column("what it does")
    for column in ("upright (first)", "turned (second)", "mean"):
        table.add_column(column, justify="right")
    for o in outcomes:
        table.add_row(
            o.method, METHODS[o.method], f"{o.first:.1%}", f"{o.second:.1%}", f"{(o.first + o.second) / 2:.1%}"
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
