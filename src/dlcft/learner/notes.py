"""Notes of a task's progress in the learner's directory, to go on after a kill."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from dlcft.learner.state import as_written
from dlcft.methods.base import HasState, State, joined_states, split_states
from dlcft.network import workers
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

PROGRESS_SECONDS = 20.0  # how often progress inside a task is noted


class ProgressNotes:
    """Notes of how far a task was learned; with several workers the first one writes them.

    Args:
        store: where they are written.
        data: the fingerprint of the task's data.
    """

    def __init__(self, store: Store, data: str) -> None:
        self.store, self.data = store, data
        self._last = time.monotonic()

    @contextmanager
    def last(self) -> Iterator[dict[str, State]]:
        """The states of the last note, to be loaded inside the block; none if there is no note.

        Raises:
            CheckpointError: when it is of other data, or its states cannot be loaded.
        """
        found = self.store.load_progress()
        if found is None:
            yield {}
            return
        tensors, header = found
        if header.get("data") != self.data:
            raise CheckpointError(
                f"{self.store.directory} holds an interrupted run on other data; learn that data again to continue it, "
                "or begin anew: resume=False, dlcft update --restart."
            )
        with as_written(self.store.directory):
            yield split_states(tensors, header["parts"])

    def write(self, *, now: bool = False, **parts: HasState | None) -> None:
        """Note the states of some parts: now, or if the last note is `PROGRESS_SECONDS` old."""
        if workers.place() == 0 and (now or time.monotonic() - self._last >= PROGRESS_SECONDS):
            tensors, header = joined_states(**parts)
            self.store.save_progress(tensors, {"data": self.data, "parts": header})
            self._last = time.monotonic()
