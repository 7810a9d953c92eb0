"""Several processes that learn together: everything gathered over data is a sum, and a sum over processes too.

`torchrun` starts them, and a program calls `torch.distributed.init_process_group` (the command line does). Without that
there is one worker, and nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class WorkerError(ConnectionError):
    """Another worker has failed or ended; nothing was changed."""


def count() -> int:
    """How many workers there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


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
    if count() > 1:
        with _connected():
            for tensor in tensors:
                dist.all_reduce(tensor)


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
    if count() > 1:
        told = gathered(None if problem is None else f"{type(problem).__name__}: {problem}")
        failed = [(where, text) for where, text in enumerate(told) if text is not None]
        if failed and problem is None:
            raise WorkerError(f"worker {failed[0][0]} has failed ({failed[0][1]})")
    if problem is not None:
        raise problem


def share(parts: Sequence[T]) -> list[T]:
    """The parts of a common work that are this worker's: every n-th."""
    return list(parts[place() :: count()])


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise WorkerError(f"another worker has ended or does not answer ({reason[:200]})") from error
