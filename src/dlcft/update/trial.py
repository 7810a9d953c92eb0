"""How long learning takes and how much memory it needs, from a short trial."""

from __future__ import annotations

import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any, TypeVar

from dlcft.learner.learner import Learner

T = TypeVar("T")
_EPOCHS = 2  # of a trial at most
TEST_BATCH = 64  # held-out samples that are looked at together, so that testing takes no more memory than learning


@dataclass(frozen=True)
class Rates:
    """What a trial has measured, in seconds and bytes.

    Attributes:
        training: a training sample, once.
        remembering: a training sample, when the task ends.
        remembering_once: a task, besides.
        testing: a test sample.
        settling: before the first test sample after a task.
        peak: of the process's memory.
    """

    training: float
    remembering: float
    remembering_once: float
    testing: float
    settling: float
    peak: int


def measure_learning(learner: Learner, tasks: Sequence[tuple[Any, str | None]]) -> Rates:
    """Learn three tasks (samples and head): to warm up, and two sizes that tell a fixed cost from one a sample.

    A learner that trains its network in the first task only, and has not yet, trains it in all three: an upper bound.
    """
    if learner.tasks == 0 and learner.recipe.adapts_once(learner.scenario):
        learner.recipe = replace(learner.recipe, adapt="always")
    asked = learner.recipe
    learner.recipe = replace(asked, epochs=min(asked.epochs, _EPOCHS))
    for samples, head in tasks:
        learner.learn(samples, head=head, progress=False)
    samples, head = tasks[-1]
    once, again = (_seconds(lambda: learner.evaluate(samples, head=head, batch_size=TEST_BATCH)) for _ in range(2))
    earlier, last = learner.history[-2:]
    few, many = earlier["samples"], last["samples"]
    epochs, learner.recipe = learner.recipe.epochs, asked
    slope = max(0.0, (last["seconds_remembering"] - earlier["seconds_remembering"]) / (many - few))
    return Rates(
        training=last["seconds_training"] / many / (epochs if learner.method.trains else 1),
        remembering=slope,
        remembering_once=max(0.0, earlier["seconds_remembering"] - few * slope),
        testing=again / many,
        settling=max(0.0, once - again),
        peak=peak_memory(),
    )


def peak_memory() -> int:
    """Bytes that this process has had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Work in a process of its own, because the peak of a process's memory never falls.

    Raises:
        ChildProcessError: when that is killed.
    """
    # Ctrl-C reaches the other process too, which need not say anything
    quiet: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **quiet) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise ChildProcessError("the process of the trial was killed; did the memory run out?") from error


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
