"""Where long work of several steps stands, and how long it will take: a guess at first, corrected by what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_PACE = 0.05  # of all work: before so much is done, the guess is not corrected


@dataclass(frozen=True)
class Stage:
    """Where the work stands: the step at hand, the share of all that is done, and an estimate of what is left."""

    what: str
    share: float
    seconds_left: float


Report = Callable[[Stage], None]


class Clock:
    """Counts up steps, in order, of which each has a guess of its seconds.

    Args:
        planned: the steps, and the seconds that each is guessed to take.
        report: called at once, and whenever something is done.
    """

    def __init__(self, planned: Mapping[str, float], report: Report) -> None:
        self._planned, self._report = dict(planned), report
        self._total, self._began = sum(planned.values()), time.perf_counter()
        if planned:
            self.tell(next(iter(planned)), 0.0)

    def tell(self, step: str, share: float) -> None:
        """A share of a step is done, and all steps before it."""
        names = list(self._planned)
        done = sum(self._planned[name] for name in names[: names.index(step)]) + share * self._planned[step]
        total = max(self._total, 1e-9)
        pace = (time.perf_counter() - self._began) / done if done > _PACE * total else 1.0
        self._report(Stage(step, min(1.0, done / total), pace * max(0.0, total - done)))
