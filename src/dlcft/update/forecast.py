"""What an update would cost, from a trial on a few of its samples."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dlcft.data.samples import Samples
from dlcft.learner.learner import Learner
from dlcft.update.trial import TEST_BATCH, Rates, apart, measure_learning

_TRIAL = (8, 8, TEST_BATCH)  # samples of the three tasks of a trial
_COPIES = 3  # of a batch's inputs: as read, as resized, as moved to the device


@dataclass(frozen=True)
class Forecast:
    """What an update would cost.

    Attributes:
        seconds: to learn it, test it and solve what is solved.
        peak: bytes of memory.
        bytes: on disk, of one version.
        trial_samples: how many samples the trial looked at.
        trial_seconds: how long that took.
    """

    seconds: float
    peak: int
    bytes: int
    trial_samples: int
    trial_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def forecast(
    open_learner: Callable[..., tuple[Learner, Samples]], arguments: tuple[Any, ...], *, samples: int, tested: int
) -> Forecast:
    """Try an update in a process of its own, and count it up.

    Args:
        open_learner: gives a learner that is bound to no directory, and what it would learn; a function of a module.
        arguments: of that function.
        samples: how many would be learned.
        tested: how many are held out.
    """
    started = time.perf_counter()
    rates, trained, solves, state = apart(_try, open_learner, arguments)
    seconds = learning_seconds(rates, samples=samples, epochs=trained, solves=solves)
    seconds += tested * rates.testing * solves  # before, if there is a version before, and after
    return Forecast(seconds, rates.peak, state, min(max(_TRIAL), samples), time.perf_counter() - started)


def learning_seconds(rates: Rates, *, samples: int, epochs: int, solves: int) -> float:
    """How long an update learns: passes in training (0 in closed form), memory, and fits that are solved."""
    passes = samples * (epochs * rates.training + rates.remembering)
    return passes + rates.remembering_once + solves * rates.settling


def _try(
    open_learner: Callable[..., tuple[Learner, Samples]], arguments: tuple[Any, ...]
) -> tuple[Rates, int, int, int]:
    """Rates, passes over the samples in training, how many fits are solved, and bytes of the state."""
    learner, samples = open_learner(*arguments)
    # the new fit, and the old one again for the predicted rise
    solves = 2 if learner.tasks else 1
    some = torch.linspace(0, len(samples) - 1, max(_TRIAL)).long()
    rates = measure_learning(learner, [(samples.part(some[:: len(some) // count]), None) for count in _TRIAL])
    one = samples.part(some[:1]).fetch(torch.tensor([0]))
    missing = max(0, learner.recipe.batch_size - TEST_BATCH) * sum(part.nbytes for part in tree_leaves(one))
    peak = rates.peak + _COPIES * missing
    rates = Rates(**{**asdict(rates), "peak": peak})
    return rates, learner.recipe.epochs if learner.method.trains else 0, solves, _state_bytes(learner)


def _state_bytes(learner: Learner) -> int:
    return sum(tensor.nbytes for tensor in learner._state()[0].values())
