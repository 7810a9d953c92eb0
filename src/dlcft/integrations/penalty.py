"""The memory of past tasks for a training loop that is not ours: a penalty, or its gradient, and what to remember."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dlcft.curvature.losses import LOSSES, Loss
from dlcft.curvature.memory import Memory
from dlcft.curvature.statistics import Statistics, find_statistics
from dlcft.data.files import new_file
from dlcft.integrations.curvature import Batches, Forward, module_curvature
from dlcft.network import workers
from dlcft.network.inputs import in_half, reference
from dlcft.network.names import check_name, qualified

FILE = "dlcft_memory.safetensors"


class PastTasks:
    """`strength · w̄ · ½ dᵀHd`, to be added to the loss of a new task; d is the way from the last task's parameters.

    H is the curvature of the mean loss over all w̄ remembered tasks, so with `strength=1` the sum is, to second order,
    the loss of the new task plus those of all old ones. Every trainable parameter of the network is remembered. One
    that later becomes trainable, or is new, is refused, because the past cannot tell how much it matters.

    Args:
        curvature: an estimator's name (`dlcft.curvature.statistics.ESTIMATORS`), a `Statistics` class, or its
            "module:Name".
        loss: "cross-entropy", "mse" (`½‖α·onehot(y) − f(x)‖²`, summed over outputs), or a `Loss`: what is trained with.
        strength: factor on the penalty.
        samples: how many samples of a task the curvature is estimated from, the first that come; None for all.
        draws: output gradients drawn for each sample; None for the exact sum.
        free: names, module prefixes and patterns of parameters that shall not be remembered, such as heads that belong
            to one task each.
        seed: of the draws.
    """

    def __init__(
        self,
        curvature: str | type[Statistics] = "exact-tk",
        *,
        loss: str | Loss = "cross-entropy",
        strength: float = 1.0,
        samples: int | None = None,
        draws: int | None = 1,
        free: Iterable[str] = (),
        seed: int = 0,
    ) -> None:
        find_statistics(curvature)
        if isinstance(loss, str):
            check_name("loss", loss, LOSSES)
            loss = LOSSES[loss]()
        if not isinstance(loss, Loss):
            raise TypeError(f"loss is {loss!r}; it must be one of {', '.join(LOSSES)}, or a dlcft Loss.")
        if not strength >= 0:
            raise ValueError(f"strength is {strength}; it must be at least 0.")
        self.curvature = qualified(curvature) if isinstance(curvature, type) else curvature
        self.loss = loss
        self.strength = strength
        self.samples = samples
        self.draws = draws
        self.free = (free,) if isinstance(free, str) else tuple(free)
        self.seed = seed
        self.memory: Memory | None = None

    def penalty(self, module: nn.Module) -> Tensor:
        """The penalty at the module's parameters, differentiable in them; 0 while nothing is remembered.

        Raises:
            ValueError: when a trainable parameter is not in the memory, or one of the memory is not in the module.
        """
        if self.memory is None:
            return torch.zeros((), device=reference(module).device)
        memory = self._fitted(module)
        return self.strength * memory.weight * memory.penalty(_full_precision(module))

    def add_gradient(self, module: nn.Module, among: Collection[Tensor] | None = None) -> float:
        """Add the penalty's gradient to the gradients that are there, and return the penalty.

        That is the same as adding the penalty to the loss before the backward pass. It must be done once for each step
        of the optimizer, whatever number of batches was accumulated, on gradients without the scale of mixed precision.

        Args:
            module: the network.
            among: the parameters that are stepped, where an optimizer holds a part of them only.
        """
        if self.memory is None or not self.strength:
            return 0.0
        with torch.enable_grad():
            value = self.penalty(module)
            stepped = None if among is None else {id(p) for p in among}
            params = [
                p
                for name, p in module.named_parameters()
                if p.requires_grad and name in self.memory.anchor and (stepped is None or id(p) in stepped)
            ]
            gradients = torch.autograd.grad(value, params) if params else ()
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        return float(value.detach())

    def remember(
        self,
        module: nn.Module,
        batches: Batches,
        *,
        weight: float = 1.0,
        forward: Forward | None = None,
    ) -> None:
        """Estimate the curvature of a task that was just learned, merge it into the memory, move the anchor.

        Args:
            module: the network, after training; it is not changed.
            batches: pairs of inputs (a tensor, a tuple or a mapping) and class indices of the task's training data.
            weight: how much the task counts.
            forward: computes the logits from the module and a batch's inputs, where calling the module does not.

        Raises:
            ValueError: when the outputs or labels are no classification, a layer is not supported or was not there
                before, or several processes train.
        """
        if workers.count() > 1:
            raise ValueError(f"{workers.count()} processes train together; the memory of a task is made by one.")
        names = self._trainable(module)
        if not names:
            raise ValueError("no parameter of the network is trainable, or all are free; there is nothing to remember.")
        earlier = None if self.memory is None else self._fitted(module)
        if earlier is not None:
            names = list(earlier.anchor)  # also those that were frozen for this task alone
        curvature = module_curvature(
            module,
            batches,
            self.loss,
            estimator=self.curvature,
            names=names,
            forward=forward,
            draws=self.draws,
            samples=self.samples,
            generator=torch.Generator().manual_seed(self.seed),
        )
        self.memory = (Memory.of if earlier is None else earlier.absorb)(_full_precision(module), curvature, weight)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, and a header as JSON; empty while nothing is remembered."""
        if self.memory is None:
            return {}
        tensors, header = self.memory.state()
        made = {"curvature": self.curvature, "loss": type(self.loss).__name__}
        return {"tensors": tensors, "header": json.dumps({**made, "memory": header})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            ValueError: when the memory was made with another curvature or loss, or is damaged.
        """
        if not state:
            self.memory = None
            return
        try:
            header = json.loads(state["header"])
            made, own = (header["curvature"], header["loss"]), (self.curvature, type(self.loss).__name__)
            memory = Memory.from_state(state["tensors"], header["memory"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no saved memory of past tasks: {type(error).__name__} {error}.") from error
        if made != own:
            raise ValueError(
                f"the memory was made with curvature {made[0]!r} and loss {made[1]!r}; these are {own[0]!r} and "
                f"{own[1]!r}."
            )
        self.memory = memory

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, whole or not at all."""
        state = self.state_dict()
        tensors = {name: t.detach().cpu().contiguous() for name, t in state.get("tensors", {}).items()}
        content = save(tensors, {"dlcft": state.get("header", "")})
        with new_file(Path(path)) as file:
            file.write(content)

    def load(self, path: str | Path) -> None:
        """Read what `save` has written; nothing is unpickled."""
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no memory of past tasks at {path}.")
        try:
            with safe_open(path, "pt") as file:
                header = (file.metadata() or {})["dlcft"]
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        except (SafetensorError, KeyError) as error:
            raise ValueError(f"{path} holds no memory of past tasks ({error}).") from error
        self.load_state_dict({"tensors": tensors, "header": header} if header else {})

    def _trainable(self, module: nn.Module) -> list[str]:
        return [name for name, p in module.named_parameters() if p.requires_grad and not self._is_free(name)]

    def _is_free(self, name: str) -> bool:
        return any(name == f or name.startswith(f"{f}.") or fnmatchcase(name, f) for f in self.free)

    def _fitted(self, module: nn.Module) -> Memory:
        """The memory on the module's device, with the outputs that linear layers have got since."""
        assert self.memory is not None
        memory, params = self.memory, dict(module.named_parameters())
        lost = [name for name in self._trainable(module) if name not in memory.anchor]
        if lost:
            raise ValueError(
                f"{lost[0]!r} is trainable, and was not when a task was remembered, so nothing would keep it: freeze "
                "it, or name it in free=."
            )
        device = reference(module).device
        if next(iter(memory.anchor.values())).device != device:
            tensors, header = memory.state()
            memory = Memory.from_state({name: t.to(device) for name, t in tensors.items()}, header)
        grown: dict[str, list[str]] = {}
        for name, anchor in memory.anchor.items():
            now = params.get(name, anchor)
            if anchor.dim() in (1, 2) and now.shape[1:] == anchor.shape[1:] and len(now) > len(anchor):
                grown.setdefault(name.rpartition(".")[0], []).append(name)
        for names in grown.values():
            memory = memory.grow(tuple(names), len(params[names[0]]))
        self.memory = memory
        return memory


def _full_precision(module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, in float32 where they are in half precision."""
    return {name: p.float() if in_half(p) else p for name, p in module.named_parameters()}
