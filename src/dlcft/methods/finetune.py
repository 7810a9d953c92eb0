"""Fine-tuning: no memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dlcft.methods.base import Batch, Method, Task


@dataclass
class Finetune(Method):
    """Train on, without a memory. With all data in one task it is joint training."""

    refits_heads: ClassVar[bool] = True

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data`."""
        return task.loss.value(task.model(batch.x, task.head), batch.y)
