"""The command line: one function a subcommand. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from cyclopts import App

from dlcft import __version__
from dlcft.cli import bench, model, paper

app = App(
    name="dlcft",
    version=__version__,
    help="Continually fine-tune a pre-trained network: learn new data, keep the old, without the old data.",
)
COMMANDS: list[Callable[..., None]] = [
    bench.demo,
    model.update,
    model.predict,
    model.evaluate,
    model.history,
    model.rollback,
    model.forget,
    bench.run,
    paper.reproduce,
    bench.report,
    bench.pretrain,
]
for command in COMMANDS:
    app.command(command)
app.command(bench.list_, name="list")
app.register_install_completion_command()


def main() -> None:
    """Run the command line: a user's mistake is one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if os.environ.get("DLCFT_TRACEBACK"):
            raise
        print(f"dlcft: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("dlcft: interrupted; the same command continues where this one stopped.", file=sys.stderr)
        raise SystemExit(130) from None
