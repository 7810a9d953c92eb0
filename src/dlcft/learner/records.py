"""Records: what a learner has done, one frozen object a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dlcft.store.files import plain


class _Record:
    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"kind": type(self).__name__.lower(), **vars(self)}


@dataclass(frozen=True)
class Learned(_Record):
    """A task was learned.

    Attributes:
        task: its number, from 0.
        heads: the heads that learned it.
        samples: how many.
        data: the fingerprint of its data.
        loss: the mean objective of every epoch; empty where nothing was trained.
        predicted_increase: of the old tasks' mean loss, by the memory; None where it is unknown or was not asked for.
        seconds_training: of all but remembering.
        seconds_remembering: of curvature and buffer, or of the sums.
        notes: facts that a caller added, see `Learner.annotate`.
    """

    task: int
    heads: list[str]
    samples: int
    data: str
    loss: list[float]
    predicted_increase: float | None
    seconds_training: float
    seconds_remembering: float
    notes: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; notes stand beside the fields."""
        own = super().to_dict()
        notes: dict[str, Any] = own.pop("notes")
        return own | notes

    def annotated(self, facts: Mapping[str, Any]) -> Learned:
        """With facts added; `predicted_increase` sets the field.

        Raises:
            ValueError: when a fact has the name of another field.
            TypeError: when JSON cannot hold a value.
        """
        rest = dict(facts)
        increase = rest.pop("predicted_increase", self.predicted_increase)
        for name in rest:
            if name == "kind" or name in vars(self):
                raise ValueError(f"{name!r} is part of the record itself; give the fact another name.")
        return dataclasses.replace(self, predicted_increase=increase, notes={**self.notes, **plain(rest)})


@dataclass(frozen=True)
class Forgotten(_Record):
    """Samples were forgotten, after so many tasks.

    Attributes:
        task: how many tasks were learned before.
        heads: theirs.
        samples: how many.
        data: the fingerprint of these samples.
    """

    task: int
    heads: list[str]
    samples: int
    data: str


@dataclass(frozen=True)
class Adopted(_Record):
    """A trained classifier was adopted, as task 0.

    Attributes:
        task: 0.
        heads: its head.
        labels: how many outputs it had.
        samples: how many samples came with it.
        data: their fingerprint; None without any.
        weight: how much each of them counts.
        scale: the factor that its logits were multiplied by.
    """

    task: int
    heads: list[str]
    labels: int
    samples: int
    data: str | None
    weight: float
    scale: float


Record = Learned | Forgotten | Adopted
_KINDS: dict[str, type[Record]] = {"learned": Learned, "forgotten": Forgotten, "adopted": Adopted}


def read_record(content: Mapping[str, Any]) -> Record:
    """The inverse of `to_dict`; also reads the dictionaries of versions before 0.1.0."""
    content = dict(content)
    kind = content.pop("kind", None)
    if kind is None:
        kind = "forgotten" if "forgotten" in content else "adopted" if "adopted" in content else "learned"
        if kind == "forgotten":
            content["samples"] = content.pop("forgotten")
        if kind == "adopted":
            content["labels"] = content.pop("adopted")
    names = [f.name for f in dataclasses.fields(_KINDS[kind]) if f.name != "notes"]
    own = {name: content.pop(name) for name in names}
    return Learned(**own, notes=content) if kind == "learned" else _KINDS[kind](**own)
