"""Forecast of an update's time and memory, from a trial on a few of its samples."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from dlcft.closed_form.costs import costs
from dlcft.data.samples import Samples
from dlcft.learner.learner import Learner
from dlcft.learner.records import Learned
from dlcft.store.files import stored_bytes

T = TypeVar("T")
TEST_BATCH = 64  # held-out samples that are looked at together, so that testing takes no more memory than learning
_TRIAL = (8, 8, TEST_BATCH)  # samples of the three tasks of a trial
_EPOCHS = 2  # of a trial at most
_COPIES = 3  # of a batch's inputs: as read, as resized, as moved to the device


@dataclass(frozen=True)
class Rates:
    """The measured seconds of each step, and bytes.

    Attributes:
        training: of a training sample in one epoch.
        remembering: of a training sample when the task ends.
        remembering_once: of a task when it ends, whatever its size.
        testing: of a test sample.
        solving: of the first test after a task.
        peak: the process's memory at its peak.
    """

    training: float
    remembering: float
    remembering_once: float
    testing: float
    solving: float
    peak: int


@dataclass(frozen=True)
class Forecast:
    """Seconds to learn, solve and test; bytes of memory at the peak, and on disk for one version; the trial's cost.

    In closed form also the numbers of features and of classes, from which `closed_form.costs` tells their share.
    """

    seconds: float
    peak: int
    bytes: int
    features: int | None
    classes: int
    trial_samples: int
    trial_seconds: float


def forecast(
    open_learner: Callable[..., tuple[Learner, Samples]], arguments: tuple[Any, ...], *, samples: int, tested: int
) -> Forecast:
    """Try an update on a few samples in a process of its own, and count it up.

    Args:
        open_learner: gives a learner that is bound to no directory, and its new data; a function of a module.
        arguments: of that function.
        samples: how many would be learned.
        tested: how many are held out.
    """
    started = time.perf_counter()
    rates, epochs, solves, size, features, classes = apart(_try, open_learner, arguments)
    seconds = learning_seconds(rates, samples=samples, epochs=epochs, solves=solves)
    seconds += tested * rates.testing * solves  # before, if there is a version before, and after
    tried, took = min(max(_TRIAL), samples), time.perf_counter() - started
    return Forecast(seconds, rates.peak, size, features, classes, tried, took)


def learning_seconds(rates: Rates, *, samples: int, epochs: int, solves: int) -> float:
    """The time to learn: epochs of training (0 in closed form), remembering, and solving."""
    passes = samples * (epochs * rates.training + rates.remembering)
    return passes + rates.remembering_once + solves * rates.solving


def _try(
    open_learner: Callable[..., tuple[Learner, Samples]], arguments: tuple[Any, ...]
) -> tuple[Rates, int, int, int, int | None, int]:
    """Rates, epochs, how often a regression is solved, bytes of a version, features in closed form, and classes."""
    learner, samples = open_learner(*arguments)
    # the new fit, and the old one again for the predicted rise
    solves = 2 if learner.tasks else 1
    some = torch.linspace(0, len(samples) - 1, max(_TRIAL)).long()
    rates = measure_learning(learner, [(samples.part(some[:: len(some) // count]), None) for count in _TRIAL])
    one = samples.part(some[:1]).fetch(torch.tensor([0]))
    missing = max(0, learner.recipe.training.batch_size - TEST_BATCH) * sum(part.nbytes for part in tree_leaves(one))
    rates = replace(rates, peak=rates.peak + _COPIES * missing)
    size, seen = stored_bytes(learner.state()[0]), len(learner.labels())
    classes = len({*learner.labels(), *samples.labels})  # the trial may not have seen all
    features = learner.model.feature_count if learner.recipe.closed_form else None
    if features is not None:
        size += costs(features, classes).disk - costs(features, seen).disk
    return rates, learner.recipe.settings.get("epochs", 0), solves, size, features, classes


def measure_learning(learner: Learner, tasks: Sequence[tuple[Any, str | None]]) -> Rates:
    """Learn three tasks (samples and head): to warm up, and two sizes that tell a fixed cost from one a sample.

    At most two epochs are trained. A new learner that would train its network in the first task only trains it in all
    three: an upper bound.
    """
    asked = learner.recipe
    if not asked.closed_form:
        learner.recipe = asked.with_settings({"epochs": min(asked.settings["epochs"], _EPOCHS)})
    if learner.tasks == 0 and "adapt" in asked.settings:
        learner.method = asked.with_settings({"adapt": "always"}).make_method(learner.scenario)
    for samples, head in tasks:
        learner.learn(samples, head=head, progress=False)
    samples, head = tasks[-1]
    times = [time.perf_counter()]
    for _ in range(2):
        learner.evaluate(samples, head=head, batch_size=TEST_BATCH)
        times.append(time.perf_counter())
    once, again = times[1] - times[0], times[2] - times[1]
    earlier, last = (record for record in learner.history[-2:] if isinstance(record, Learned))
    slope = max(0.0, (last.seconds_remembering - earlier.seconds_remembering) / (last.samples - earlier.samples))
    epochs, learner.recipe = learner.recipe.settings.get("epochs", 1), asked
    return Rates(
        training=last.seconds_training / last.samples / epochs,
        remembering=slope,
        remembering_once=max(0.0, earlier.seconds_remembering - earlier.samples * slope),
        testing=again / last.samples,
        solving=max(0.0, once - again),
        peak=peak_memory(),
    )


def peak_memory() -> int:
    """The peak of this process's memory, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def fresh_peak() -> None:
    """Begin anew to note the peak of memory, where the system can (Linux): see `peak_since`.

    Memory that the process holds and does not use is given back before.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_since() -> int:
    """The peak of this process's memory since `fresh_peak`, in bytes; where that is not noted, since its start."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    return peak_memory()


def apart(work: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a process of its own, because the peak of a process's memory never falls."""
    # Ctrl-C reaches the other process too, which then ends silently
    quiet: dict[str, Any] = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **quiet) as pool:
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            raise ChildProcessError("the process of the trial was killed; did the memory run out?") from error
