"""Gates: limits that a new version must keep to become current."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_ERRORS = 2.0  # standard errors by which a single label must fall to count: one sample of three is chance
LEAST = math.ceil(_ERRORS**2)  # held-out samples with which a label can fall by so much
_ON_HOLDOUT = ("max_drop", "max_drop_per_label", "max_flips")


@dataclass(frozen=True)
class Gates:
    """The limits of an update, each None where there is none.

    Attributes:
        max_drop: by how much the accuracy on held-out samples of known labels may fall.
        max_drop_per_label: by how much that of a single known label may. A label counts only if more of its answers
            turned wrong than right by two standard errors, `2·√(turned wrong + turned right)`: at least four samples.
        max_flips: which share of these samples may turn from right to wrong.
        max_rise: by how much the mean loss of all old data may rise by the memory alone, as a share of that loss: 0.5
            is half as much again. It needs no held-out samples, but a closed-form method.
        max_doubtful: which share of the new samples of known labels may have a doubtful one (see `incoming.doubted`);
            0 stops at the first.

    Raises:
        ValueError: when one is no number that is accepted.
    """

    max_drop: float | None = None
    max_drop_per_label: float | None = None
    max_flips: float | None = None
    max_rise: float | None = None
    max_doubtful: float | None = None

    def __post_init__(self) -> None:
        """Check that each is a share; a rise may be of more than all."""
        for name, limit in asdict(self).items():
            if limit is None:
                continue
            if name == "max_rise" and not (limit >= 0 and math.isfinite(limit)):
                raise ValueError(f"{name} is {limit}; it must be a finite number from 0 on, such as 0.5.")
            if name != "max_rise" and not 0 <= limit <= 1:
                raise ValueError(f"{name} is {limit}; it must lie between 0 and 1, such as 0.02.")

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return any(limit is not None for limit in asdict(self).values())

    @property
    def on_holdout(self) -> bool:
        """Whether one is measured on held-out samples."""
        return any(getattr(self, name) is not None for name in _ON_HOLDOUT)

    def check(self, *, holdout: bool, closed_form: bool = True) -> None:
        """Reject a gate that cannot be measured.

        Raises:
            ValueError: when it needs held-out samples and there are none, or a closed-form method.
        """
        if self.on_holdout and not holdout:
            named = ", ".join(name for name in _ON_HOLDOUT if getattr(self, name) is not None)
            raise ValueError(f"{named} can be measured on holdout samples only; give some.")
        if self.max_rise is not None and not closed_form:
            raise ValueError(
                f"max_rise is {self.max_rise}, a share of the old loss, which only closed-form methods such as "
                "'dlcft-exact' remember; leave it out."
            )

    def exceeded(self, facts: Mapping[str, Any]) -> list[str]:
        """A sentence for each gate that an update exceeds, given fields of `Update`."""
        simple = (
            ("max_drop", "accuracy on known labels fell by", facts.get("drop")),
            ("max_flips", "turned from right to wrong:", facts.get("flips")),
            ("max_rise", "the old data's mean loss rose by", facts.get("rise")),
            ("max_doubtful", "new samples whose label is doubtful:", facts.get("doubtful")),
        )
        found = [
            f"{words} {value:.2%}, and {name} is {getattr(self, name):.2%}"
            for name, words, value in simple
            if value is not None and getattr(self, name) is not None and value > getattr(self, name)
        ]
        limit = self.max_drop_per_label
        if limit is not None:
            found += [
                f"{label} fell by {drop:.1%}, from {before} to {now} of {total} right, and max_drop_per_label is "
                f"{limit:.2%}"
                for label, drop, before, now, total in fallen(facts)
                if drop > limit
            ]
        return found


def fallen(facts: Mapping[str, Any]) -> list[tuple[str, float, int, int, int]]:
    """Known labels that are less accurate by two standard errors: drop, right before, right now, held-out samples."""
    lost = Counter(flip.label for flip in facts.get("flipped", ()))
    rows = []
    for label, before in facts.get("per_class_before", {}).items():
        now, total = facts["per_class"][label]
        worse = before - now
        turned = lost[label] + (lost[label] - worse)  # wrong, and right
        if worse > 0 and worse >= _ERRORS * math.sqrt(turned):
            rows.append((label, worse / total, before, now, total))
    return sorted(rows, key=lambda row: -row[1])


def too_few(facts: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """Known labels with so few held-out samples that `max_drop_per_label` cannot tell their fall from chance."""
    counts = {label: total for label, (_, total) in facts.get("per_class", {}).items()}
    return sorted(label for label in known if counts.get(label, 0) < LEAST)
