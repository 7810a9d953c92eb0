"""Several processes that learn together: everything gathered over data is a sum, and a sum over processes too.

`torchrun` starts them, and a program calls `torch.distributed.init_process_group` (the command line does). Without that
there is one worker, and nothing here does anything.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
_TIMEOUT = "DLCFT_WORKER_TIMEOUT"
_ALONE = 4 << 20  # bytes of a tensor that is exchanged for itself
_apart: ContextVar[bool] = ContextVar("apart", default=False)


class WorkerError(ConnectionError):
    """Another worker has failed or ended; nothing was changed."""


def count() -> int:
    """How many workers there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() and not _apart.get() else 1


@contextmanager
def joined() -> Iterator[None]:
    """Join the processes that torchrun, or a cluster, has started: by the environment variables that these set.

    A worker that does not answer for `$DLCFT_WORKER_TIMEOUT` seconds (half an hour) ends all of them.

    Raises:
        ValueError: when the time is no number.
    """
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
        yield
    finally:
        sys.stdout.flush()
        dist.destroy_process_group()


@contextmanager
def apart() -> Iterator[None]:
    """Inside the block this worker is alone: nothing is exchanged with others."""
    before = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(before)


def place() -> int:
    """The place of this one among them, from 0."""
    return dist.get_rank() if count() > 1 else 0


def gathered(value: T) -> list[T]:
    """The values of all workers, in the order of their places."""
    if count() == 1:
        return [value]
    found: list[Any] = [None] * count()
    with _connected():
        dist.all_gather_object(found, value)
    return found


def from_first(value: T) -> T:
    """The first worker's value."""
    if count() == 1:
        return value
    found = [value]
    with _connected():
        dist.broadcast_object_list(found, src=0)
    return found[0]


@torch.no_grad()
def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor, on every worker, by the sum over all workers."""
    if count() == 1:
        return
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    with _connected():
        for tensor in tensors:
            if tensor.numel() * tensor.element_size() >= _ALONE:
                dist.all_reduce(tensor)
            else:  # one exchange for many: each costs a round trip
                small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for group in small.values():
            joined_up = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.all_reduce(joined_up)
            for tensor, total in zip(group, joined_up.split([t.numel() for t in group]), strict=True):
                tensor.copy_(total.view_as(tensor))


@contextmanager
def together() -> Iterator[None]:
    """Do a part of a common work: if it fails on one worker, it fails on all, with that worker's sentence.

    Inside the block there must be no other exchange between workers.

    Raises:
        WorkerError: on the workers where it has not failed.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # whatever it is, the others wait for us
        problem = error
    if count() > 1 and _any(problem is not None):
        told = gathered(None if problem is None else f"{type(problem).__name__}: {problem}")
        failed = [(where, text) for where, text in enumerate(told) if text is not None]
        if failed and problem is None:
            raise WorkerError(f"worker {failed[0][0]} has failed ({failed[0][1]})")
    if problem is not None:
        raise problem


def share(parts: Sequence[T]) -> list[T]:
    """The parts of a common work that are this worker's: every n-th."""
    return list(parts[place() :: count()])


def _any(value: bool) -> bool:
    """Whether it is so on any worker."""
    flag = torch.tensor([float(value)], device="cuda" if dist.get_backend() == "nccl" else "cpu")
    with _connected():
        dist.all_reduce(flag)
    return bool(flag.item())


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise WorkerError(f"another worker has ended or does not answer ({reason[:200]})") from error
