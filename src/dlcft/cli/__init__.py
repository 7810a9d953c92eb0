"""The command line: one function a subcommand. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import sys
from collections.abc import Callable

from cyclopts import App, CycloptsError, Parameter

from dlcft import __version__
from dlcft.cli import bench, model, paper, versions
from dlcft.cli.arguments import FAILURES, warn
from dlcft.cli.compare import compare
from dlcft.cli.demo import demo
from dlcft.cli.export import export
from dlcft.cli.workers import check_several, is_first, joined

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "compare": compare,
    "update": model.update,
    "predict": model.predict,
    "evaluate": model.evaluate,
    "history": versions.history,
    "rollback": versions.rollback,
    "forget": versions.forget,
    "export": export,
    "run": bench.run,
    "reproduce": paper.reproduce,
    "report": bench.report,
    "pretrain": bench.pretrain,
    "list": bench.list_,
}

log = logging.getLogger("dlcft")
app = App(
    name="dlcft",
    version=__version__,
    help="Continually fine-tune a pre-trained network: learn new data, keep the old, without the old data.\n\n"
    "Example: dlcft demo",
    default_parameter=Parameter(negative=()),  # no --no-json
    suppress_keyboard_interrupt=False,  # main tells what becomes of the work
)
for place, (name, command) in enumerate(COMMANDS.items()):
    app.command(command, name=name, sort_key=place)
app.register_install_completion_command()


def main(words: list[str] | None = None) -> None:
    """Run the command line, or the command in `words`: a user's mistake is one line and exit code 2."""
    if not any(isinstance(handler, _Spoken) for handler in log.handlers):
        log.addHandler(_Spoken(logging.WARNING))
    logging.getLogger("PIL").setLevel(
        logging.CRITICAL
    )  # what it tells of a broken image, our sentence tells with its name
    _keep_freed_memory()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that cannot show a label must not cost an update
            stream.reconfigure(errors="backslashreplace")
    try:
        if any(not word or (word[:2] == "--" and word[-1] == "=") for word in words or sys.argv[1:]):
            raise ValueError("one of the arguments is empty; was a variable of the shell not set?")
        given = sys.argv[1:] if words is None else words
        if given and given[0] in COMMANDS and "--help" not in given:
            check_several(given[0])
        with joined():
            app(words, exit_on_error=False, print_error=False, result_action="return_value")
            sys.stdout.flush()
    except CycloptsError as error:
        chain = " ".join(("dlcft", *(error.command_chain or ())))
        _end(f"{' '.join(str(error).split())} See {chain} --help.")
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except FAILURES as error:
        ours = isinstance(error, RuntimeError) and "allocate" not in str(error)
        if ours or os.environ.get("DLCFT_TRACEBACK"):
            raise
        own = error.strerror if isinstance(error, OSError) and error.filename is None else None  # without its number
        _end(own or str(error) or type(error).__name__)
    except KeyboardInterrupt as error:
        _end(f"interrupted{f'; {error}' if error.args else ''}.", 130)


def _keep_freed_memory() -> None:
    """Ask the C library to keep large blocks of freed memory, unless its own variables say something else.

    By default it gives blocks of 32 MiB and more back and gets them again, page by page: a tenth of a training step.
    """
    if sys.platform == "linux" and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # glibc
            for parameter, value in ((_MMAP_THRESHOLD, 1 << 30), (_TRIM_THRESHOLD, (1 << 31) - 1)):
                library.mallopt(parameter, value)


class _Spoken(logging.Handler):
    """Log lines of the library as sentences of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def _end(sentence: str, code: int = 2) -> None:
    if is_first():
        warn(sentence)
    raise SystemExit(code) from None
