"""Progress of long work: data for whoever asks, a line for a person at a terminal, silence otherwise."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where learning stands.

    Attributes:
        task: how many tasks were learned before this one.
        epoch: of `epochs`, from 1.
        epochs: in all.
        loss: the mean objective so far in this epoch; NaN for closed-form methods.
        share: of the task that is done; NaN for a stream.
        seconds_left: an estimate; NaN for a stream.
        samples: how many this process has read, for closed-form methods.
    """

    task: int
    epoch: int
    epochs: int
    loss: float
    share: float
    seconds_left: float
    samples: int = 0


Report = Callable[[Progress], None]


def reporter(progress: bool | Report) -> Report:
    """The function to call: the given one, a line on a terminal, or nothing."""
    if callable(progress):
        return progress
    if not progress or not sys.stderr.isatty():
        return lambda _: None
    last = [0.0]

    def line(p: Progress) -> None:
        if time.perf_counter() - last[0] < 0.2 and p.share < 1:
            return
        last[0] = time.perf_counter()
        text = f"task {p.task + 1}  {p.samples} samples"
        if not math.isnan(p.share):
            where = f"epoch {p.epoch}/{p.epochs}  {p.share:4.0%}  loss {p.loss:.4g}"
            where = where if math.isfinite(p.loss) else f"{p.share:4.0%}"
            text = f"task {p.task + 1}  {where}  {p.seconds_left:.0f} s left"
        sys.stderr.write(f"\r{text:<70}" + ("\r" + " " * 70 + "\r" if p.share >= 1 else ""))
        sys.stderr.flush()

    return line
