"""The samples of a task as all workers together have them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dlcft.data.labels import Label
from dlcft.data.samples import Samples
from dlcft.data.streams import Stream
from dlcft.network import workers

LOOK = 256  # samples of a stream that tell which it is, and from which the features are made


@dataclass(frozen=True)
class Gathered:
    """The samples of one head.

    Attributes:
        samples: those that this worker can read.
        own: whether other workers have others; otherwise all have the same.
        total: how many all have together.
        labels: of these; each at least once.
        fingerprint: of all of them.
        stream: where they come from, if they are read once; then all of the above are of its first samples.
    """

    samples: Samples
    own: bool
    total: int
    labels: list[Label]
    fingerprint: str
    stream: Stream | None = None


def gathered_stream(stream: Stream) -> Gathered:
    """What all workers have of their streams, by a look at the first samples.

    Raises:
        ValueError: when all are empty.
    """
    with workers.together():
        first = stream.first(LOOK)
    return replace(gathered_samples(first, shares=True), own=True, stream=stream)


def gathered_samples(samples: Samples, *, shares: bool) -> Gathered:
    """What all workers have: the same samples, or, with `shares`, each its own.

    Raises:
        ValueError: when they are not the same, or no worker has any.
    """
    with workers.together():
        own = samples.fingerprint() if len(samples) else ""
    found = workers.gathered((len(samples), sorted(set(samples.labels), key=str), own))
    total = sum(length for length, _, _ in found)
    if not total:
        nobody = "there is no sample" if workers.count() == 1 else "no worker has a sample"
        raise ValueError(f"{nobody}; at least one is needed.")
    if workers.count() == 1 or not shares:
        if len({name for _, _, name in found}) > 1:
            raise ValueError(
                "the workers were given different data; give all the same, or to each its part: shares=True."
            )
        return Gathered(samples, False, len(samples), list(samples.labels), own)
    labels = [label for _, names, _ in found for label in names]
    text = "+".join(name for _, _, name in found).encode()
    return Gathered(samples, True, total, labels, hashlib.blake2b(text, digest_size=16).hexdigest())


def fingerprint(tasks: Mapping[str, Gathered]) -> str:
    """Names the data of several heads, to tell whether it is the same as before."""
    return "+".join(f"{head}:{given.fingerprint}" for head, given in tasks.items())
