"""How a closed-form method goes through its data: in parts, after each of which it can be interrupted and go on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

from dlcft.data.samples import Batches
from dlcft.data.streams import StreamBatches, StreamPart
from dlcft.learner.display import Progress, Report
from dlcft.learner.notes import ProgressNotes
from dlcft.methods.base import Method, State, Task
from dlcft.network import workers
from dlcft.network.classifier import Classifier

PART = 8192  # samples of a worker whose sums are added up and noted together


class Parts:
    """The parts of a task. They depend on the data alone, and so does the rounding of what is summed over them.

    Args:
        model: the classifier.
        method: holds the sums of the parts that were gathered.
        number: of the task, from 0.
        report: called after every batch.
        notes: where progress is noted, if anywhere.
    """

    def __init__(
        self, model: Classifier, method: Method, number: int, report: Report, notes: ProgressNotes | None
    ) -> None:
        self.model, self.method, self.number, self.report, self.notes = model, method, number, report, notes
        self._done, self._noted = 0, 0
        self._task: Task | None = None
        self._began, self._samples, self._total = time.perf_counter(), 0, math.nan

    def of(self, task: Task) -> Iterator[Task]:
        """The parts of a task that are not in the method's sums yet."""
        batches = task.batches
        assert isinstance(batches, Batches | StreamBatches)
        first, self._task = self._task is None, task
        if first:
            self._resume(task)
        if isinstance(batches, Batches):
            self._samples, self._total = 0, len(batches.y) / (1 if batches.own else workers.count())
        for part in batches.parts(PART):
            self._done += 1
            if self._done <= self._noted:
                self._pass(part)
                continue
            part.told = self._tell
            yield replace(task, batches=part)
            if self.notes is not None:
                self.notes.write(gathered=self, method=self.method)

    def state(self) -> State:
        """How many parts are in the sums, and the labels that a stream has shown."""
        assert self._task is not None
        settle = self._task.settle
        return {}, {"parts": self._done, "labels": None if settle is None else settle.known()}

    def _resume(self, task: Task) -> None:
        if self.notes is None:
            return
        with self.notes.last() as found:
            if "gathered" in found:
                noted = found["gathered"][1]
                if task.settle is not None:
                    for label in noted["labels"]:  # one by one, to keep their order
                        task.settle([label])
                self.method.load_state(*found["method"], self.model)
                self._noted = noted["parts"]

    def _pass(self, part: Batches | StreamPart) -> None:
        if isinstance(part, StreamPart):
            part.skip()
            self._samples += part.samples
        else:
            self._samples += len(part.span) // (1 if part.own else workers.count())

    def _tell(self, samples: int) -> None:
        """Report that samples were read."""
        self._samples += samples
        share = min(1.0, self._samples / self._total) if self._total else 1.0
        seconds = time.perf_counter() - self._began
        left = seconds / share - seconds if share > 0 else math.nan
        self.report(Progress(self.number, 1, 1, math.nan, share, left, self._samples))
