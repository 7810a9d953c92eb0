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
from dlcft.methods.settings import Model, Network, Reading, Scenario, setting
from dlcft.network.classifier import Classifier


@dataclass
class LwF(Method):
    """Keep the previous model's outputs on the new data.

    Args:
        strength: λ, the weight of the distillation.
        temperature: of the softmax, with cross-entropy; with squared loss the outputs themselves are compared.
        mean: `(L_data + λ(t−1)·L_distil)/t`, as the DLCFT authors' code; else `L_data + λ·L_distil`, as in LwF's paper.
    """

    strength: float = setting(1.0, least=0)
    temperature: float = setting(2.0, above=0)
    mean: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.teacher: Classifier | None = None
        self.tasks = 0

    def bind(self, scenario: Scenario, model: Model, training: Reading) -> None:
        super().bind(scenario, model, training)
        refuse_strict(model)

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """See `mean`; over all outputs of the teacher."""
        if self.teacher is None:
            return task.loss.value(task.model(batch.x, task.head), batch.y)
        z = task.model.features(batch.x)
        data = task.loss.value(task.model.head(task.head)(z), batch.y)
        with torch.no_grad():
            z_old = self.teacher.features(batch.x)
        old = self.strength * sum(
            self._distance(
                task.model.head(head)(z)[:, : self.teacher.head(head).out_features],
                self.teacher.head(head)(z_old),
                task.loss,
            )
            for head in self.teacher.heads
        )
        return (data + self.tasks * old) / (1 + self.tasks) if self.mean else data + old

    def heads(self, task: Task) -> list[str]:
        """All heads of the teacher: they learn with the rest of the network, as in LwF's own paper."""
        return [task.head, *(() if self.teacher is None else self.teacher.heads)]

    def _distance(self, new: Tensor, old: Tensor, loss: Loss) -> Tensor:
        old = old.detach()
        if loss.is_quadratic:
            return 0.5 * (new - old).square().sum() / len(new)
        soft = (old / self.temperature).log_softmax(1), (new / self.temperature).log_softmax(1)
        return self.temperature**2 * F.kl_div(soft[1], soft[0], reduction="batchmean", log_target=True)

    def finish(self, task: Task) -> None:
        """The model becomes the teacher."""
        self.tasks += 1
        self.teacher = copy.deepcopy(task.model).eval().requires_grad_(False)

    def adopted(self, model: Classifier, head: str, task: Task | None) -> None:
        """The adopted classifier becomes the teacher; no sample is needed."""
        self.tasks = 1
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)

    def state(self) -> State:
        """The teacher without the frozen network, which it shares with the model."""
        tensors, header = joined_states(teacher=self.teacher)
        return tensors, {**header, "tasks": self.tasks}

    def load_state(self, tensors: Tensors, header: Header, model: Classifier) -> None:
        header = dict(header)
        self.tasks = header.pop("tasks", 0)
        parts = split_states(tensors, header)
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False) if parts else None
        if self.teacher is not None:
            self.teacher.load_state(*parts["teacher"])


def refuse_strict(model: Model) -> None:
    """Reject the truly linear model.

    Raises:
        ValueError: when `strict` is set.
    """
    if isinstance(model, Network) and model.strict:
        raise ValueError("strict=True is for methods without replay and distillation, such as 'dlcft'.")
