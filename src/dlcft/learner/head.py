"""A head before and after training: the minimum of the objective over the head alone, in closed form."""

from __future__ import annotations

import torch
from torch import Tensor

from dlcft.closed_form.sums import RidgeSums
from dlcft.data.samples import Batches
from dlcft.methods.base import PastOfHead, Task
from dlcft.network import workers

HEAD_RIDGE = 0.3  # fixed: cross-validation on one small task finds a ridge too strong for the whole sequence
_CONSTANT = 1e-6  # the least share of a feature's mean square that counts as its variance


@torch.no_grad()
def start_from_ridge(task: Task, scale: float, past: PastOfHead | None = None, *, keep: bool = False) -> None:
    """Bring a head to the minimum of the task's objective over the head alone, before the task is trained.

    Nothing changes where there is no memory of the head and it has no new outputs.

    Args:
        task: about to be trained.
        scale: α of the squared loss.
        past: the memory of the head.
        keep: leave old outputs as they are where there is no such memory.
    """
    layer = task.model.eval().head(task.head)
    new = ~layer.weight.any(1)
    if past is None and not new.any():
        return
    _solve(task, scale, head_matrix(layer), past, new | (past is not None or not keep))
    if task.model.strict:
        task.model.fix_directions(task.head, torch.where(new[:, None], layer.weight, task.model.directions(task.head)))


@torch.no_grad()
def solve_trained(task: Task, scale: float, origin: Tensor, past: PastOfHead | None, *, keep: bool) -> None:
    """Bring a head to the same minimum again, on the features as the task has trained them.

    Args:
        task: trained.
        scale: α of the squared loss.
        origin: `head_matrix` before the task: the memory's anchor. Were it the trained head, the past would count less.
        past: the memory of the head.
        keep: leave old outputs as they were trained where there is no such memory.
    """
    new = ~origin[:, :-1].any(1)
    _solve(task, scale, origin, past, new | (past is not None or not keep))


def head_matrix(layer: torch.nn.Linear) -> Tensor:
    """A copy of W with the bias as last column."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


def _solve(task: Task, scale: float, origin: Tensor, past: PastOfHead | None, chosen: Tensor) -> None:
    """Put the chosen outputs to `origin` and its `head_step`."""
    layer = task.model.eval().head(task.head)
    batches = task.batches.of_worker() if isinstance(task.batches, Batches) else task.batches
    with workers.together():
        sums = RidgeSums.empty(layer.in_features, device=layer.weight.device)
        sums = sums.extend((task.model.features(x), y) for x, y in batches).grow(layer.out_features)
    sums = sums.over_workers(layer.out_features)
    solved = origin + head_step(sums, origin, past, HEAD_RIDGE, scale)
    layer.weight[chosen] = solved[chosen, :-1]
    layer.bias[chosen] = solved[chosen, -1]


def head_step(sums: RidgeSums, head: Tensor, past: PastOfHead | None, ridge: float, scale: float) -> Tensor:
    """D, the least of `½E‖α·onehot − (W + D)z‖² + ½r⟨D, D Z⟩ + (ridge/2)‖D diag(σ)‖²`, z with a last 1.

    σ² is the variance of the new data plus r times that of the old, divided by 1 + r. So the ridge stays the same while
    r grows with every task, as in recursive least squares: in the end it counts once, not in every step.

    Args:
        sums: of the new data.
        head: W, with the bias as last column.
        past: Z and r; None for r = 0.
        ridge: relative to the features' deviations, the intercept excepted; see `RidgeSums.solve`.
        scale: α.
    """
    count = sums.weight
    mean = sums.class_sums.sum(0) / count
    ones = mean.new_ones(1)
    moment = torch.cat([torch.cat([sums.gram / count, mean[:, None]], 1), torch.cat([mean, ones])[None]])
    wanted = torch.cat([sums.class_sums, sums.counts[:, None]], 1) * (scale / count)
    total = moment if past is None else moment + past.weight * past.moment.to(moment)
    mass, squares = total[-1, -1], total.diagonal()
    # of a constant feature only rounding would be left, and be divided by
    spread = torch.maximum(squares - total[-1].square() / mass, _CONSTANT * squares)
    spread[-1] = 0
    damped = total + torch.diag(ridge * spread / mass)
    damped.diagonal()[squares == 0] = 1  # a feature that is always zero tells nothing: its weights stay
    step: Tensor = torch.linalg.solve(damped, (wanted - head.to(moment) @ moment).T).T
    return step.to(head)
