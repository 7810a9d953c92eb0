"""ER, DER and DER++: the past as a few of its samples.

References:
    Buzzega et al., Dark experience for general continual learning (2020), https://arxiv.org/abs/2004.07211
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from dlcft.methods.base import Batch, Header, Method, State, Task, Tensors, joined_states, split_states
from dlcft.methods.buffer import Buffer
from dlcft.network.classifier import Classifier


@dataclass(eq=False)
class Replay(Method):
    """ER, DER and DER++: replay past samples by their labels, by their logits, or both.

    Args:
        buffer: filled while training: in the first epoch, or in each where logits are stored, so that they come from
            the whole way and not from its beginning alone (as in DER's own code).
        logits: DER's α: weight of the squared distance to the stored logits.
        labels: weight of the loss on replayed labels (ER: 1; DER++: β).
        replay_batch: how many are replayed a step.
    """

    buffer: Buffer
    logits: float = 0.0
    labels: float = 1.0
    replay_batch: int = 32

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data + α‖f − f_stored‖² + β·L_replay`."""
        outputs = task.model(batch.x, task.head)
        self._outputs = outputs.detach()
        total = task.loss.value(outputs, batch.y)
        if not len(self.buffer):
            return total
        if self.logits:
            total = total + self.logits * self._distance(task, batch.generator)
        if self.labels:
            total = total + self.labels * replayed_loss(task, self.buffer, self.replay_batch, batch.generator)
        return total

    def heads(self, task: Task) -> list[str]:
        """Those of replayed samples too."""
        return [task.head, *self.buffer.heads]

    def _distance(self, task: Task, generator: torch.Generator) -> Tensor:
        """Mean squared distance to the stored logits; outputs that came later were zero then, as new rows are.

        Were they left out, nothing would keep them from answering for old samples.
        """
        drawn = self.buffer.sample(self.replay_batch, generator)
        total, entries = torch.zeros((), device=drawn.y.device), 0
        for head, part in drawn.by_head():
            outputs = task.model(task.augment(part.x, generator), head)
            target = torch.zeros_like(outputs)
            width = min(target.shape[1], part.logits.shape[1])
            target[:, :width] = part.logits[:, :width]
            total = total + (outputs - target).square().sum()
            entries += outputs.numel()
        return total / entries

    def observe(self, task: Task, batch: Batch) -> None:
        """Offer the batch to the reservoir."""
        if batch.epoch == 0 or self.logits:
            logits = self._outputs if self.logits else None
            self.buffer.add(batch.original, batch.y, logits, head=task.head, generator=batch.generator)

    def state(self) -> State:
        """The buffer."""
        return joined_states(buffer=self.buffer)

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """See `Method`."""
        self.load_unfinished(tensors, header)

    def unfinished_state(self) -> State:
        """The buffer: it is filled while a task is trained."""
        return self.state()

    def load_unfinished(self, tensors: Tensors, header: Header) -> None:
        """See `Method`."""
        self.buffer = Buffer.from_state(*split_states(tensors, header)["buffer"])

    def snapshot(self) -> Method:
        """See `Method`."""
        kept = copy.copy(self)
        kept.buffer = copy.deepcopy(self.buffer)
        return kept


def replayed_loss(task: Task, buffer: Buffer, count: int, generator: torch.Generator) -> Tensor:
    """The mean loss on samples drawn from a buffer, each on its own head."""
    drawn = buffer.sample(min(count, len(buffer)), generator)
    total = torch.zeros((), device=drawn.y.device)
    for head, part in drawn.by_head():
        outputs = task.model(task.augment(part.x, generator), head)
        total = total + len(part.y) * task.loss.value(outputs, part.y)
    return total / len(drawn.y)
