"""From a backbone and a recipe to a classifier."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlcft.closed_form.features import FlipAveraged, FrozenFeatures, TangentFeatures
from dlcft.closed_form.sums import RidgeSums
from dlcft.data.images import Preprocess
from dlcft.methods import PastOfHead, Task
from dlcft.methods.recipes import Recipe
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input, call, reference
from dlcft.network.linearize import Linearized, Selection, select
from dlcft.network.prepare import fold_batchnorm

HEAD_RIDGE = 0.3  # of a task; what cross-validation finds in one small task is far too much for all
_CONSTANT = 1e-6  # the least share of a feature's mean square that counts as its variance
DIRECTION_SAMPLES = 256  # of the first task, whose features tell the principal direction


class _Normalise:
    """Before a network's forward: images get the mean and deviation that it wants.

    Not when they are read, because augmentation comes in between: what a crop pads with is black, not the mean.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def normalised(x: Any) -> Any:
            images = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
            return self.preprocess.normalised(x) if images else x

        return tree_map(normalised, (args, kwargs))  # type: ignore[no-any-return]


def prepared(
    backbone: nn.Module, recipe: Recipe, train: Selection = None, preprocess: Preprocess | None = None
) -> nn.Module:
    """A copy of the backbone as the recipe learns it: linearised, or as it is; it normalises its images itself.

    Raises:
        TypeError: when it is no module.
        ValueError: when `train` is given to a recipe that cannot heed it.
    """
    if not isinstance(backbone, nn.Module):
        raise TypeError(f"the backbone is a {type(backbone).__name__}; an nn.Module is needed.")
    if preprocess is not None and preprocess.mean is not None:
        backbone = copy.deepcopy(backbone)
        backbone.register_forward_pre_hook(_Normalise(preprocess), with_kwargs=True)
    if recipe.method != "ridge" and reference(backbone).dtype in (torch.float16, torch.bfloat16):
        backbone = copy.deepcopy(backbone).float()  # its steps would be rounded away; amp=True computes in bfloat16
    if recipe.linear:
        return Linearized(fold_batchnorm(backbone), train=train)
    if train is not None and not recipe.tangent_features:
        raise ValueError("train= is for recipes on the tangent space: linearised ones, 'tangent' and 'dlcft-exact'.")
    return copy.deepcopy(backbone).requires_grad_(recipe.method != "ridge")


def as_given(backbone: nn.Module) -> nn.Module:
    """A copy of a prepared backbone that takes images normalised already, as the one that it was made from."""
    network = copy.deepcopy(backbone)
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, _Normalise):
            del network._forward_pre_hooks[key], network._forward_pre_hooks_with_kwargs[key]
    return network


@torch.no_grad()
def first_features(backbone: nn.Module, x: Input) -> Tensor:
    """The backbone's features of a first batch.

    Raises:
        ValueError: when they are no matrix.
    """
    z = call(backbone.eval(), x)
    if not isinstance(z, Tensor) or z.dim() != 2:
        got = f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
        raise ValueError(f"the backbone must map a batch to a batch × features matrix; it gave {got}.")
    return z


def assembled(backbone: nn.Module, recipe: Recipe, z: Tensor, train: Selection, seed: int) -> Classifier:
    """The classifier on a prepared backbone whose first features are z."""
    width = z.shape[1]
    if recipe.method != "ridge":
        return Classifier(backbone, width, strict=recipe.strict)
    features: nn.Module
    if recipe.tangent_features:
        features = TangentFeatures(
            backbone,
            _direction(recipe, z, seed),
            features=recipe.tangent_features,
            random=recipe.random_features,
            train=train,
            share=recipe.tangent_share,
            seed=seed,
        )
        width += recipe.random_features + features.length
    else:
        features = FrozenFeatures(backbone, width, random=recipe.random_features, seed=seed)
        width = recipe.random_features or width
    return Classifier(FlipAveraged(features) if "flip" in recipe.augment.split("+") else features, width)


def _direction(recipe: Recipe, z: Tensor, seed: int) -> Tensor:
    if recipe.direction == "random":
        return torch.randn(1, z.shape[1], generator=torch.Generator().manual_seed(seed)).to(z)
    principal: Tensor = torch.linalg.svd((z - z.mean(0)).double(), full_matrices=False)[2]
    return principal[:1].to(z)


@torch.no_grad()
def start_from_ridge(task: Task, scale: float, past: PastOfHead | None = None, *, keep: bool = False) -> None:
    """Bring a head, before it is trained, to where the task's objective is least with the features as they are.

    Without a memory of it, a head that has no new outputs stays.

    Args:
        task: what is about to be learned.
        scale: α of the squared loss.
        past: what the memory knows of the head.
        keep: whether, where it knows nothing, old outputs stay where they are.
    """
    layer = task.model.eval().head(task.head)
    new = ~layer.weight.any(1)
    if past is None and not new.any():
        return
    sums = RidgeSums.empty(layer.in_features, device=layer.weight.device)
    sums = sums.extend((task.model.features(x), y) for x, y in task.batches).grow(layer.out_features)
    change = head_step(sums, torch.cat([layer.weight, layer.bias[:, None]], 1), past, HEAD_RIDGE, scale)
    if past is None and keep:
        change[~new] = 0
    layer.weight.add_(change[:, :-1])
    layer.bias.add_(change[:, -1])
    if task.model.strict:
        task.model.fix_directions(task.head, torch.where(new[:, None], layer.weight, task.model.directions(task.head)))


def head_step(sums: RidgeSums, head: Tensor, past: PastOfHead | None, ridge: float, scale: float) -> Tensor:
    """D, the least of `½E‖α·onehot − (W + D)z‖² + ½r⟨D, D Z⟩ + (ridge/2)‖D diag(σ)‖²`, z with a last 1.

    σ² is the variance in new and old data, r times, together, divided by their weight 1 + r. So the ridge stays what it
    was while r grows with every task, as in recursive least squares: in the end it counts once, not in every step.

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


def named_selection(backbone: nn.Module, train: Selection) -> str | list[str] | None:
    """A selection of parameters as JSON can hold it; a predicate is asked about the network that learns."""
    if train is None or isinstance(train, str):
        return train
    if not callable(train):
        return list(train)
    return select([name for name, _ in fold_batchnorm(backbone).named_parameters()], train)


def fingerprint(module: nn.Module) -> str:
    """A hash of a network's weights and buffers, and of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
