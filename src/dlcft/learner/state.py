"""Where a learner is saved: its versions, and its progress inside a task."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dlcft.learner.train import Training
from dlcft.methods import Method
from dlcft.methods.base import State, joined_states, split_states
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

LEARNER_FORMAT = 1
PROGRESS_SECONDS = 20.0  # how often progress inside a task is noted


class Home:
    """The directory that a learner was saved to or loaded from.

    Args:
        directory: where it is.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.store = Store(directory)
        self.version: str | None = None  # the hash of the version that the learner came from

    def is_at(self, directory: str | os.PathLike[str]) -> bool:
        """Whether it is that directory."""
        return Path(directory).resolve() == self.store.directory.resolve()

    def read(self, version: int | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What `commit` wrote, of the current version by default.

        Raises:
            CheckpointError: when it cannot be used.
        """
        self.version = self._current()
        tensors, header = self.store.read(version)
        found = header.get("learner")
        if found != LEARNER_FORMAT:
            raise CheckpointError(
                f"{self.store.directory} holds learner format {found!r}; this version reads {LEARNER_FORMAT}."
            )
        return tensors, header

    def commit(self, tensors: dict[str, Tensor], header: dict[str, Any], *, keep: int, current: bool = True) -> int:
        """Write a version on top of the one that the learner came from.

        Raises:
            CheckpointError: when the directory holds something else.
            OSError: when it cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1.")
        with self.store.writing():
            self._check()
            number = self.store.commit(tensors, {"learner": LEARNER_FORMAT, **header}, keep=keep, current=current)
            self.version = self._current()
        return number

    @contextmanager
    def learning(self, *, resume: bool) -> Iterator[None]:
        """Keep other processes out while a task is learned; without `resume`, drop the progress that was noted.

        Raises:
            CheckpointError: when another process is at work here, or the directory holds something else by now.
        """
        with self.store.lock():
            self._check()
            if not resume:
                self.store.clear_progress()
            yield

    def resume(self, training: Training, data: str) -> None:
        """Bring training to where it was interrupted, if it was.

        Raises:
            CheckpointError: when that was a run on other data.
        """
        found = self.store.load_progress()
        if found is None:
            return
        tensors, header = found
        if header["data"] != data:
            raise CheckpointError(
                f"{self.store.directory} holds an interrupted run on other data; learn that data again to continue it, "
                "or begin anew: resume=False, dlcft update --restart."
            )
        parts = split_states(tensors, header["parts"])
        training.model.load_state_dict(parts["model"][0], strict=False)
        training.load_state(*parts["training"])
        training.method.load_unfinished(*parts["method"])

    def saver(self, training: Training, data: str) -> Callable[[bool], None]:
        """A function that notes progress: now, or if it was not noted lately."""
        last = time.monotonic()

        def save(now: bool) -> None:
            nonlocal last
            if now or time.monotonic() - last >= PROGRESS_SECONDS:
                unfinished = _Unfinished(training.method)
                tensors, parts = joined_states(model=training.model, training=training, method=unfinished)
                self.store.save_progress(tensors, {"data": data, "parts": parts})
                last = time.monotonic()

        return save

    def _check(self) -> None:
        """Refuse to write over what the learner did not come from."""
        if self._current() != self.version:
            why = "another learner" if self.version is None else "what was learned, or gone back to, meanwhile"
            raise CheckpointError(f"{self.store.directory} holds {why}; load it, or choose an empty directory.")

    def _current(self) -> str | None:
        current = self.store.current
        return None if current is None else current.sha256


class _Unfinished:
    """What a method gathers inside a task."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def state(self) -> State:
        return self.method.unfinished_state()
