"""LwF: the past as the outputs of the previous model.

References:
    Li, Hoiem, Learning without forgetting (2016), https://arxiv.org/abs/1606.09282
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dlcft.curvature.losses import Loss
from dlcft.methods.base import Batch, Header, Method, State, Task, Tensors, joined_states, split_states
from dlcft.network.classifier import Classifier


@dataclass(eq=False)
class LwF(Method):
    """Keep the previous model's outputs on the new data.

    Args:
        strength: weight of the distillation.
        temperature: of the softmax, with cross-entropy; with squared loss the outputs themselves are compared.
    """

    strength: float = 1.0
    temperature: float = 2.0
    teacher: Classifier | None = None

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data + λ·L_distil`, over all outputs that the teacher had."""
        if self.teacher is None:
            return task.loss.value(task.model(batch.x, task.head), batch.y)
        z = task.model.features(batch.x)
        data = task.loss.value(task.model.head(task.head)(z), batch.y)
        with torch.no_grad():
            z_old = self.teacher.features(batch.x)
        return data + self.strength * sum(
            self._distance(
                task.model.head(head)(z)[:, : self.teacher.head(head).out_features],
                self.teacher.head(head)(z_old),
                task.loss,
            )
            for head in self.teacher.heads
        )

    def heads(self, task: Task) -> list[str]:
        """All that the teacher has: they learn with the rest of the network, as in LwF's own paper."""
        return [task.head, *(() if self.teacher is None else self.teacher.heads)]

    def _distance(self, new: Tensor, old: Tensor, loss: Loss) -> Tensor:
        old = old.detach()
        if loss.is_quadratic:
            return 0.5 * (new - old).square().sum() / len(new)
        soft = (old / self.temperature).log_softmax(1), (new / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(soft[1], soft[0], reduction="batchmean", log_target=True)

    def finish(self, task: Task) -> None:
        """The model as it is now becomes the teacher."""
        self.adopted(task.model)

    def adopted(self, model: Classifier) -> None:
        """It needs no sample to be a teacher."""
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def state(self) -> State:
        """The teacher, but for the frozen network that it shares with the model."""
        return joined_states(teacher=self.teacher)

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        """See `Method`."""
        parts = split_states(tensors, header)
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False) if parts else None
        if self.teacher is not None:
            self.teacher.load_state(*parts["teacher"])
