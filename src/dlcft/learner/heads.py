"""The heads of a learner and their labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dlcft.data.labels import Label, Labels
from dlcft.methods.settings import Scenario
from dlcft.network import workers

HEAD = "main"  # the only head, but in task-IL


class Heads:
    """The labels of each head; they keep their places and are only appended to.

    Args:
        scenario: see `Learner`.
        new_labels: "grow" or "error".
    """

    def __init__(self, scenario: Scenario, new_labels: str) -> None:
        self.scenario, self.new_labels = scenario, new_labels
        self.labels: dict[str, Labels] = {}

    def to_learn(self, head: str | None) -> str:
        """The head of a new task.

        Raises:
            ValueError: when it is missing in "task-il", or given elsewhere.
        """
        if head is not None and not isinstance(head, str):
            raise TypeError(f"head is {head!r}; it must be a name, such as 'scenes'.")
        if (self.scenario == "task-il") != (head is not None):
            raise ValueError(
                "in 'task-il' every task needs a head= name."
                if head is None
                else f"head= is for 'task-il', not {self.scenario!r}."
            )
        return HEAD if head is None else head

    def known(self, head: str | None) -> str:
        """A head that has learned something.

        Raises:
            ValueError: when there is none of that name.
        """
        name = HEAD if head is None and self.scenario != "task-il" else head
        if not self.labels:
            raise ValueError("nothing has been learned yet; call learn(data) first.")
        if name is None or name not in self.labels:
            given = "no head is given" if head is None else f"head is {head!r}"
            raise ValueError(f"{given}; learned so far: {', '.join(self.labels)}. Give head= one of them.")
        return name

    def of(self, head: str) -> Labels:
        """The labels of a head; none where it is new."""
        return self.labels.get(head, Labels())

    def extended(self, head: str, names: Sequence[Label]) -> Labels:
        """The labels of a head with those of new samples.

        Raises:
            ValueError: when one is new and may not be.
        """
        labels = self.of(head)
        new = labels.unknown(names)
        if new and len(labels) and self.new_labels == "error":
            raise ValueError(f"label {new[0]!r} is new; with new_labels='error' only {labels.names[:10]} are accepted.")
        return labels.append(new)


class Settling:
    """Makes a head's outputs for labels that a stream shows: see `methods.base.Settle`.

    Args:
        heads: the learner's.
        head: the one that learns.
        grow: gives a head its labels.
    """

    def __init__(self, heads: Heads, head: str, grow: Callable[[str, Labels], None]) -> None:
        self._heads, self._head, self._grow = heads, head, grow

    def __call__(self, labels: Sequence[Label]) -> list[int]:
        everywhere = [label for found in workers.gathered(list(labels)) for label in found]
        extended = self._heads.extended(self._head, everywhere)
        self._grow(self._head, extended)
        return extended.indices(labels).tolist()

    def known(self) -> list[Label]:
        return self._heads.of(self._head).names
