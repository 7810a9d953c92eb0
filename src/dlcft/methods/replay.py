"""ER, DER and DER++: the past as a few of its samples, kept in a reservoir.

References:
    Vitter, Random sampling with a reservoir, ACM TOMS 1985.
    Buzzega et al., Dark experience for general continual learning (2020), https://arxiv.org/abs/2004.07211
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dlcft.methods.base import Batch, Header, Method, State, Task, Tensors, joined_states, split_states
from dlcft.methods.lwf import refuse_strict
from dlcft.methods.settings import Model, Reading, Scenario, setting
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input


@dataclass
class Replay(Method):
    """Replay past samples by their labels (ER), by their stored logits (DER), or both (DER++).

    Args:
        buffer: how many past samples are kept. They are offered in the first epoch, or, where logits are stored, in the
            last, when the outputs know the task. (DER's own code offers them in every epoch.)
        replay_logits: DER's α: weight of the squared distance to the stored logits, summed over a sample's outputs, so
            that it stays the same while the head grows. (DER's own code takes the mean over all outputs that will ever
            be; with 10 of them, its 0.3 is 0.03 here.)
        replay_labels: weight of the loss on replayed labels (ER: 1; DER++: β).
        replay_batch: samples replayed a step.
    """

    buffer: int = setting(500, least=1)
    replay_logits: float = setting(0.0, least=0)
    replay_labels: float = setting(1.0, least=0)
    replay_batch: int = setting(32, least=1)

    gathers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kept = Buffer(self.buffer)

    def bind(self, scenario: Scenario, model: Model, training: Reading) -> None:
        super().bind(scenario, model, training)
        refuse_strict(model)

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data + α‖f − f_stored‖² + β·L_replay`."""
        outputs = task.model(batch.x, task.head)
        self._outputs = outputs.detach()
        total = task.loss.value(outputs, batch.y)
        if not len(self.kept):
            return total
        if self.replay_logits:
            total = total + self.replay_logits * self._distance(task, batch.generator)
        if self.replay_labels:
            total = total + self.replay_labels * replayed_loss(task, self.kept, self.replay_batch, batch.generator)
        return total

    def heads(self, task: Task) -> list[str]:
        """The heads of replayed samples too."""
        return [task.head, *self.kept.heads]

    def _distance(self, task: Task, generator: torch.Generator) -> Tensor:
        """The squared distance to the stored logits, mean over samples; later outputs were zero then, as new rows are.

        Were they left out, nothing would keep them from answering for old samples.
        """
        drawn = self.kept.sample(self.replay_batch, generator)
        total = torch.zeros((), device=drawn.y.device)
        for head, part in drawn.by_head():
            outputs = task.model(task.augment(part.x, generator), head)
            target = torch.zeros_like(outputs)
            width = min(target.shape[1], part.logits.shape[1])
            target[:, :width] = part.logits[:, :width]
            total = total + (outputs - target).square().sum()
        return total / len(drawn.y)

    def observe(self, task: Task, batch: Batch) -> None:
        """Offer the batch to the reservoir."""
        if batch.last if self.replay_logits else batch.epoch == 0:
            logits = batch.whole(self._outputs) if self.replay_logits else None
            original, y = batch.whole(batch.original), batch.whole(batch.y)
            assert isinstance(y, Tensor)
            assert logits is None or isinstance(logits, Tensor)
            self.kept.add(original, y, logits, head=task.head, generator=batch.generator)

    def state(self) -> State:
        """The buffer."""
        return joined_states(buffer=self.kept)

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        self.kept = Buffer.from_state(*split_states(tensors, header)["buffer"])

    def snapshot(self) -> Replay:
        snapshot = copy.copy(self)
        snapshot.kept = copy.deepcopy(self.kept)
        return snapshot


def replayed_loss(task: Task, buffer: Buffer, count: int, generator: torch.Generator) -> Tensor:
    """The mean loss on samples drawn from a buffer, each on its own head."""
    drawn = buffer.sample(min(count, len(buffer)), generator)
    total = torch.zeros((), device=drawn.y.device)
    for head, part in drawn.by_head():
        outputs = task.model(task.augment(part.x, generator), head)
        total = total + len(part.y) * task.loss.value(outputs, part.y)
    return total / len(drawn.y)


@dataclass(frozen=True, eq=False)
class Replayed:
    """Samples drawn from a buffer.

    Attributes:
        x: inputs as they were added: a tensor, or a tuple or dictionary of tensors.
        y: labels.
        logits: samples × widest; 0 where a row was stored with fewer, or with none.
        head: an index into `heads` for each sample.
        heads: names.
    """

    x: Input
    y: Tensor
    logits: Tensor
    head: Tensor
    heads: tuple[str, ...]

    def by_head(self) -> Iterator[tuple[str, Replayed]]:
        """The samples of each head that occurs."""
        for index in self.head.unique().tolist():
            rows = self.head == index
            kind, parts = _parts(self.x)
            x = _joined(kind, {name: t[rows] for name, t in parts.items()})
            yield (
                self.heads[index],
                Replayed(x, self.y[rows], self.logits[rows], self.head[rows], self.heads),
            )


class Buffer:
    """At most `capacity` samples, at any time a uniform draw from all that were added.

    Tensors keep their dtype and live on the device of the first batch.

    Args:
        capacity: the bound.

    Raises:
        ValueError: when the capacity is not positive.

    Example:
        >>> buffer, generator = Buffer(2), torch.Generator().manual_seed(0)
        >>> buffer.add(torch.arange(10.0)[:, None], torch.arange(10), head="all", generator=generator)
        >>> len(buffer), buffer.seen
        (2, 10)
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; it must be at least 1.")
        self.capacity = capacity
        self.seen = 0
        self._kind = ""
        self._heads: list[str] = []
        self._tensors: Tensors = {}

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads of the samples that have come so far."""
        return tuple(self._heads)

    def __len__(self) -> int:
        return min(self.seen, self.capacity)

    @torch.no_grad()
    def add(self, x: Input, y: Tensor, logits: Tensor | None = None, *, head: str, generator: torch.Generator) -> None:
        """Offer a batch: sample i of the stream (from 0) takes place r, uniform in 0 … i, if r is below the capacity.

        Args:
            x: inputs before augmentation.
            y: labels.
            logits: samples × outputs; the number of outputs may differ from call to call.
            head: name of the samples' head.
            generator: where draws come from.

        Raises:
            ValueError: when lengths differ, or shapes or dtypes are not those of the samples stored.
        """
        batch = self._checked(x, y, logits)
        if len(y) == 0:
            return
        self._kind = _parts(x)[0]
        if head not in self._heads:
            self._heads.append(head)
        batch["head"] = torch.full((len(y),), self._heads.index(head), device=y.device)
        self._allocate(batch)
        slots, rows = self._placed(len(y), generator)
        for name, tensor in batch.items():
            place = self._tensors[name]
            chosen = tensor.detach()[rows.to(tensor.device)].to(place.device)
            if name == "logits":
                place[slots.to(place.device)] = 0
                place[slots.to(place.device), : tensor.shape[1]] = chosen.to(place.dtype)
            else:
                place[slots.to(place.device)] = chosen
        self.seen += len(y)

    def sample(self, n: int, generator: torch.Generator) -> Replayed:
        """Draw n samples: all different when there are as many, else with replacement.

        Raises:
            ValueError: when the buffer is empty or n not positive.
        """
        if not len(self) or n < 1:
            raise ValueError(f"cannot draw {n} samples from a buffer of {len(self)}; both must be at least 1.")
        device = generator.device
        if n <= len(self):
            rows = torch.randperm(len(self), generator=generator, device=device)[:n]
        else:
            rows = torch.randint(len(self), (n,), generator=generator, device=device)
        drawn = {name: t[rows.to(t.device)] for name, t in self._tensors.items()}
        x = _joined(self._kind, {name[2:]: t for name, t in drawn.items() if name.startswith("x|")})
        return Replayed(x, drawn["y"], drawn["logits"], drawn["head"], tuple(self._heads))

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors, and a header that JSON can hold."""
        tensors = {name: t[: len(self)].clone() for name, t in self._tensors.items()}
        header = {"capacity": self.capacity, "seen": self.seen, "kind": self._kind, "heads": list(self._heads)}
        return tensors, header | {"names": list(self._tensors)}

    @classmethod
    def from_state(cls, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> Buffer:
        """The inverse of `state`."""
        buffer = cls(header["capacity"])
        buffer.seen, buffer._kind, buffer._heads = header["seen"], header["kind"], list(header["heads"])
        for name in header["names"]:
            stored = tensors[name]
            buffer._tensors[name] = stored.new_zeros(buffer.capacity, *stored.shape[1:])
            buffer._tensors[name][: len(stored)] = stored
        return buffer

    def _checked(self, x: Input, y: Tensor, logits: Tensor | None) -> Tensors:
        """The batch as named tensors of one length."""
        kind, parts = _parts(x)
        batch = {f"x|{name}": t for name, t in parts.items()} | {"y": y}
        for name, tensor in batch.items():
            if tensor.dim() == 0 or len(tensor) != len(y):
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}; its first axis must be the {len(y)} samples."
                )
        if self._tensors:
            known = {n: t for n, t in self._tensors.items() if n in ("y",) or n.startswith("x|")}
            got, kept = (
                {n: (tuple(t.shape[1:]), str(t.dtype)) for n, t in tensors.items()} for tensors in (batch, known)
            )
            if kind != self._kind or got != kept:
                raise ValueError(f"samples are {kind} {got}; the buffer holds {self._kind} {kept}.")
        if logits is None:
            logits = torch.zeros(len(y), 0, device=y.device)
        elif logits.dim() != 2 or len(logits) != len(y):
            raise ValueError(f"logits have shape {tuple(logits.shape)}; ({len(y)} samples × outputs) is needed.")
        return batch | {"logits": logits}

    def _allocate(self, batch: Tensors) -> None:
        """Places for `capacity` samples, with as many columns of logits as the widest row."""
        for name, tensor in batch.items():
            if name not in self._tensors:
                self._tensors[name] = tensor.new_zeros(self.capacity, *tensor.shape[1:])
        old, new = self._tensors["logits"], batch["logits"]
        if new.shape[1] > old.shape[1]:
            wider = new.new_zeros(self.capacity, new.shape[1], device=old.device)
            wider[:, : old.shape[1]] = old
            self._tensors["logits"] = wider

    def _placed(self, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which places change, and which row of the batch each gets."""
        uniform = torch.rand(n, generator=generator, dtype=torch.float64, device=generator.device).cpu()
        position = torch.arange(self.seen, self.seen + n)
        place = torch.where(position < self.capacity, position, (uniform * (position + 1)).long())
        rows = (place < self.capacity).nonzero()[:, 0]
        # Two rows of a batch may draw the same place: the later one keeps it, as if they had come one by one.
        last = torch.full((self.capacity,), -1).scatter_reduce(0, place[rows], rows, "amax")
        slots = (last >= 0).nonzero()[:, 0]
        return slots, last[slots]


def _parts(x: Input) -> tuple[str, Tensors]:
    """The kind of an input, and its tensors by name."""
    if isinstance(x, Tensor):
        return "tensor", {"0": x}
    kind = "dict" if isinstance(x, Mapping) else "tuple"
    parts = dict(x) if isinstance(x, Mapping) else {str(i): t for i, t in enumerate(x)}
    if not parts or not all(isinstance(t, Tensor) for t in parts.values()):
        kinds = [type(t).__name__ for t in parts.values()]
        raise ValueError(f"x is a {kind} of {kinds}; a tensor, or a tuple or dict of tensors is needed.")
    return kind, parts


def _joined(kind: str, parts: Tensors) -> Input:
    """The inverse of `_parts`."""
    if kind == "dict":
        return parts
    return tuple(parts.values()) if kind == "tuple" else parts["0"]
