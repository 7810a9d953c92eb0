"""Commands under torchrun: every process runs the same command, and the first one speaks and writes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta

_TIMEOUT = "DLCFT_WORKER_TIMEOUT"


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun has started, if it has; those but the first say nothing.

    A worker that does not answer for `$DLCFT_WORKER_TIMEOUT` seconds (half an hour) ends all of them.
    """
    if not _several():
        yield
        return
    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    text = os.environ.get(_TIMEOUT) or "1800"
    try:
        timeout = timedelta(seconds=float(text))
    except ValueError as error:
        raise ValueError(f"{_TIMEOUT} is {text!r}; a number of seconds is needed.") from error
    store, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    # torchrun keeps its store when it starts all anew, and with it the addresses of those that have died
    life = f"life {os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    store = dist.PrefixStore(life, store)  # type: ignore[attr-defined]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    try:
        if dist.get_rank() == 0:
            yield
            return
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process speaks for all: what fails on another one, the first is told."""
    return not _several() or os.environ["RANK"] == "0"


def started_again() -> bool:
    """Whether torchrun has started this command anew, after a worker had died: perhaps after the commit."""
    return _several() and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE") or 1) > 1 and "RANK" in os.environ
