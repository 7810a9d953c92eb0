"""Fine-tuning: no memory."""

from __future__ import annotations

from torch import Tensor

from dlcft.methods.base import Batch, Method, Task


class Finetune(Method):
    """No memory: train on. With all data in one task it is joint training."""

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data`."""
        return task.loss.value(task.model(batch.x, task.head), batch.y)
