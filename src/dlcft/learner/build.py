"""From a backbone and a recipe to a classifier."""

from __future__ import annotations

import copy
import hashlib
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from dlcft.closed_form.depth import Activation, DepthFeatures, find_activations
from dlcft.closed_form.features import FlipAveraged, FrozenFeatures, Joined, TangentFeatures
from dlcft.data.images import Preprocess, UnitImages
from dlcft.data.samples import Samples, to_device
from dlcft.methods.recipes import Recipe
from dlcft.methods.settings import Features, Network
from dlcft.network.classifier import Classifier, check_kinds
from dlcft.network.inputs import Input, call, in_half, reference
from dlcft.network.linearize import Linearized, Selection, select
from dlcft.network.pooled import with_features
from dlcft.network.prepare import fold_batchnorm

_DIRECTION_SAMPLES = 256  # of the first task, whose features tell the principal direction
_TOGETHER = 32  # samples whose features are looked at first: large images must not need more memory than learning them


class _Normalise:
    """Before a network's forward: images get the mean and deviation that it expects.

    Not when they are read, because augmentation comes in between: a crop pads with black, not with the mean.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        def normalised(x: Any) -> Any:
            images = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
            return self.preprocess.normalised(x) if images else x

        return tree_map(normalised, (args, kwargs))  # type: ignore[no-any-return]


class Builder:
    """Makes the classifier of a recipe on a backbone, when the first batch tells how long the features are.

    Args:
        backbone: the pre-trained network. It is copied.
        recipe: what the classifier is for.
        first: the recipe that trains the plain network on the first task, if any.
        train: which parameters learn, see `Linearized`.
        preprocess: its mean and deviation are applied by the network.
        seed: of random features.
        device: where the classifier lies.

    Attributes:
        backbone: the network as the recipe learns it; the classifier shares it.
        train: the selection as JSON can hold it.
        fingerprint: of the given backbone.
        width: the length of its features; None before the first batch.
        activations: those that depth features are taken of; None before the first batch, or without such features.
        given: a copy of the given backbone, where the first task trains it.
        started: the network after the first task, once trained.

    Raises:
        TypeError: when the backbone is no module.
        ValueError: when `train` is given to a recipe that cannot heed it.
    """

    def __init__(
        self,
        backbone: nn.Module,
        recipe: Recipe,
        *,
        first: Recipe | None = None,
        train: Selection,
        preprocess: Preprocess | None,
        seed: int,
        device: torch.device,
    ) -> None:
        if not isinstance(backbone, nn.Module):
            raise TypeError(f"the backbone is a {type(backbone).__name__}; an nn.Module is needed.")
        backbone = with_features(backbone)
        self.recipe, self.seed, self.device, self.preprocess = recipe, seed, device, preprocess
        if isinstance(recipe.model, Features) and recipe.model.bfloat16 and reference(backbone).dtype != torch.float32:
            raise ValueError(f"bfloat16=True is for a float32 network; this one has {reference(backbone).dtype}.")
        self.train = named_selection(backbone, train)
        self.fingerprint = fingerprint(backbone)
        self.backbone = _prepared(backbone, recipe, self.train, preprocess).to(device)
        self.dtype = reference(self.backbone).dtype
        self.width: int | None = None
        self.activations: list[Activation] | None = None
        self.first = first
        self.given = None if first is None else copy.deepcopy(backbone)
        self.started: nn.Module | None = None
        self.first_samples = torch.zeros(0, dtype=torch.int64)

    def plain(self) -> Builder:
        """The builder of the plain network that the first task trains."""
        assert self.given is not None
        assert self.first is not None
        options: dict[str, Any] = {"preprocess": self.preprocess, "seed": self.seed, "device": self.device}
        return Builder(self.given, self.first, train=None, **options)

    def start_from(self, trained: nn.Module, samples: Iterable[Samples]) -> None:
        """Take the network after the first task as the one that is linearised, or whose features are taken."""
        self._start_from(trained)
        self.first_samples = torch.cat([part.hashes() for part in samples]).unique()

    def _start_from(self, trained: nn.Module) -> None:
        self.started = trained.eval().requires_grad_(False)
        self.backbone = _prepared(trained, self.recipe, self.train, self.preprocess).to(self.device)
        self.dtype = reference(self.backbone).dtype  # half precision was trained in float32

    def trained_on(self, samples: Samples) -> int:
        """How many of some samples have trained the network."""
        if self.started is None:
            return 0
        return int(torch.isin(samples.hashes(), self.first_samples).sum())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The weights of the network after the first task, and hashes of the samples that have trained it."""
        assert self.started is not None
        tensors = {f"network/{name}": tensor.detach().clone() for name, tensor in self.started.state_dict().items()}
        return {**tensors, "samples": self.first_samples}, {}

    def load_state(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        trained = copy.deepcopy(self.given)
        assert trained is not None
        own = {name.removeprefix("network/"): t for name, t in tensors.items() if name.startswith("network/")}
        check_kinds(own, trained)
        trained.load_state_dict(own, assign=True)  # in the precision that it was trained in
        self._start_from(trained)
        self.first_samples = tensors["samples"]

    def build(self, samples: Samples) -> Classifier:
        """The classifier, from a look at the first samples."""
        return self.build_on(self.look_at(samples))

    def look_at(self, samples: Samples) -> Tensor:
        """The backbone's features of some samples, and a look at the activations: see `build_on` and `look`."""
        model = self.recipe.model
        principal = isinstance(model, Features) and model.tangent_features and model.direction == "principal"
        some = torch.linspace(0, len(samples) - 1, min(_DIRECTION_SAMPLES if principal else 1, len(samples))).long()
        parts = (to_device(samples.fetch(few), self.device, dtype=self.dtype) for few in some.split(_TOGETHER))
        z = torch.cat([self.features(x) for x in parts])
        if isinstance(model, Features) and model.depth_features:
            self.look(to_device(samples.fetch(torch.arange(min(3, len(samples)))), self.device, dtype=self.dtype))
        return z

    def look(self, x: Input) -> None:
        """Find the activations that depth features are taken of; a few samples show their shapes."""
        assert isinstance(self.recipe.model, Features)
        if self.recipe.model.depth_features:
            self.activations = find_activations(self.backbone, x, self.recipe.model.depth_features)

    def build_on(self, z: Tensor) -> Classifier:
        """The classifier, given features of the backbone; where it has depth features, `look` comes first."""
        self.width = z.shape[1]
        model = self.recipe.model
        if isinstance(model, Network):
            return Classifier(self.backbone, self.width, strict=model.strict).to(self.device)
        features, width = self._fixed_features(model, z)
        flips = "flip" in self.recipe.training.augment.split("+")
        return Classifier(FlipAveraged(features) if flips else features, width).to(self.device)

    @torch.no_grad()
    def features(self, x: Input) -> Tensor:
        """The backbone's features of a batch.

        Raises:
            ValueError: when they are no matrix.
        """
        z = call(self.backbone.eval(), x)
        if not isinstance(z, Tensor) or z.dim() != 2:
            got = f"a tensor of shape {tuple(z.shape)}" if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise ValueError(f"the backbone must map a batch to a batch × features matrix; it gave {got}.")
        return z

    def _fixed_features(self, model: Features, z: Tensor) -> tuple[nn.Module, int]:
        width, random = z.shape[1], model.random_features
        if model.depth_features:
            assert self.activations is not None
            depth = DepthFeatures(self.backbone, self.activations, seed=self.seed, bfloat16=model.bfloat16)
            if not (random or model.tangent_features):
                return depth, width + depth.length
            others, length = self._fixed_features(replace(model, depth_features=0), z)
            skipped = width if model.tangent_features else 0  # z stands first in both
            return Joined(depth, others, skipped), width + depth.length + length - skipped
        if not model.tangent_features:
            bandwidth = model.bandwidth if model.random_kind == "fourier" else None
            options: dict[str, Any] = {"random": random, "bandwidth": bandwidth, "bfloat16": model.bfloat16}
            return FrozenFeatures(self.backbone, width, seed=self.seed, **options), random or width
        if model.direction == "random":
            direction = torch.randn(1, width, generator=torch.Generator().manual_seed(self.seed)).to(z)
        else:
            direction = torch.linalg.svd((z - z.mean(0)).double(), full_matrices=False)[2][:1].to(z)
        features = TangentFeatures(
            self.backbone,
            direction,
            features=model.tangent_features,
            random=random,
            train=self.train,
            share=model.tangent_share,
            seed=self.seed,
        )
        return features, width + random + features.length


def _prepared(backbone: nn.Module, recipe: Recipe, train: Selection, preprocess: Preprocess | None) -> nn.Module:
    """A copy of the backbone as the recipe learns it: linearised, or as it is; it normalises its images itself."""
    if preprocess is not None and preprocess.mean is not None:
        backbone = copy.deepcopy(backbone)
        backbone.register_forward_pre_hook(_Normalise(preprocess), with_kwargs=True)
    if not recipe.closed_form and in_half(reference(backbone)):
        backbone = copy.deepcopy(backbone).float()  # its steps would be rounded away; amp=True computes in bfloat16
    if recipe.linear:
        return Linearized(fold_batchnorm(backbone), train=train)
    if train is not None and not recipe.settings.get("tangent_features"):
        raise ValueError("train= is for recipes on the tangent space: linearised ones and 'tangent'.")
    return copy.deepcopy(backbone).requires_grad_(not recipe.closed_form)


def without_normalising(preprocess: Preprocess | None) -> Preprocess | None:
    """A preprocessing without its mean and deviation."""
    if preprocess is None or preprocess.mean is None:
        return preprocess
    kind = UnitImages if max(preprocess.mean) <= 1 else Preprocess
    return kind(**{**asdict(preprocess), "mean": None, "std": None})


def as_given(backbone: nn.Module) -> nn.Module:
    """A copy of a prepared backbone that takes normalised images, as the one that it was made from."""
    network = copy.deepcopy(backbone)
    for key, hook in list(network._forward_pre_hooks.items()):
        if isinstance(hook, _Normalise):
            del network._forward_pre_hooks[key], network._forward_pre_hooks_with_kwargs[key]
    return network


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


def find_device(name: str) -> torch.device:
    """A device by its name, "auto" for the best one.

    Raises:
        ValueError: when this machine has no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(repr(n) for n, there in available.items() if there)
        raise ValueError(f"device is {name!r}; it must be 'auto' or, on this machine, one of {usable}.")
    return torch.device(name)


def computes_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16; a processor without them emulates it, slowly."""
    if device.type != "cpu":
        return True
    if platform.machine().lower() in ("x86_64", "amd64"):
        known = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
        return any(there is not None and there() for there in known)
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
