"""Commands under torchrun: every process runs the same command, and the first one speaks and writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

_TOGETHER = ("update", "predict", "evaluate", "forget", "run")  # what several processes do together


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun has started, if it has; those but the first say nothing."""
    if not _several():
        yield
        return
    from dlcft.network import workers

    with workers.joined():
        try:
            if is_first():
                yield
            else:
                with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                    yield
        except SystemExit:
            workers.gathered(None)  # torchrun ends all as soon as one has: not before the first one has spoken
            raise


def check_several(command: str) -> None:
    """Refuse a command that several processes would do several times.

    Raises:
        ValueError: when torchrun has started several.
    """
    if _several() and command not in _TOGETHER:
        raise ValueError(f"dlcft {command} is done by one process; start it without torchrun.")


def is_first() -> bool:
    """Whether this process speaks for all: what fails on another one, the first is told."""
    return not _several() or os.environ["RANK"] == "0"


def started_again() -> bool:
    """Whether torchrun has started this command anew, after a worker had died: perhaps after the commit."""
    return _several() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ
