"""Load a network by name, with its weights and the preprocessing of its inputs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as load_bytes
from torch import nn

from dlcft.backbones.files import fill, find_weights, official_file, read_weights, weights_folder
from dlcft.backbones.packages import BACKBONES, PACKAGES, nearest, own_network, seeded
from dlcft.backbones.resnet import ResNet18
from dlcft.data.decoding import first_line
from dlcft.data.images import Preprocess
from dlcft.data.sources import Tokenizer

SHIPPED = "resnet18-32-w16-tinyimagenet.safetensors"


def shipped_resnet18() -> ResNet18:
    """The pre-trained network in the package: quarter width, 32-pixel stem, LeakyReLU 0.1, Tiny-ImageNet-200.

    42.4 % top-1 on that data set's validation images. `weights/README.md` describes the training.
    """
    network = ResNet18(16, "small", 0.1)
    fill(network, load_bytes((resources.files("dlcft.backbones") / "weights" / SHIPPED).read_bytes()), SHIPPED)
    return network.eval()


SMALL = Preprocess((32, 32), (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), channels=3)
MEAN, STD = torch.tensor(SMALL.mean), torch.tensor(SMALL.std)  # of the images that the shipped one was trained on
_IMAGENET = Preprocess((224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), channels=3)


@dataclass(frozen=True, eq=False)
class Backbone:
    """A network to start from.

    Attributes:
        name: as `load_backbone` spells it.
        module: maps a batch to feature vectors; in evaluation mode.
        preprocess: the preprocessing of its images. They are stretched to its size, unless `resize="crop"` is set.
        rebuild: arguments for JSON: `load_backbone(**rebuild)` gives the same network.
        tokenizer: turns a list of texts into its inputs; None if it reads no texts.
    """

    name: str
    module: nn.Module
    preprocess: Preprocess
    rebuild: dict[str, Any]
    tokenizer: Tokenizer | None = None


Weights = str | os.PathLike[str] | None


def load_backbone(name: str = "shipped", *, weights: Weights = None, width: int | None = None) -> Backbone:
    """A network without its classifier, by name (see `BACKBONES`).

    A package is imported, and weights are downloaded, only for a `timm:`, `torchvision:` or `hf:` name. A factory of
    one's own returns an `nn.Module`, or that and a `Preprocess` or a tokenizer (a function from texts to inputs); the
    current directory is searched for its module.

    Args:
        name: see `BACKBONES`.
        weights: a .safetensors, .pth or .pt file (a folder for `hf:`), also by its name in the folder
            `$DLCFT_WEIGHTS` (by default ~/.cache/dlcft/weights); "random" for an untrained network, always the same.
            By default the published weights.
        width: of `resnet18` and `resnet18-32`; by default that of the file, or 64.

    Raises:
        ValueError: when the name is unknown, or the weights do not fit the network.
        FileNotFoundError: when weights are neither there nor could be downloaded; the message says where to put them.
        ImportError: when the package of a name cannot be imported.

    Example:
        >>> backbone = load_backbone("shipped")
        >>> backbone.module(backbone.preprocess(torch.zeros(2, 40, 50, 3, dtype=torch.uint8))).shape
        torch.Size([2, 128])
        >>> backbone.rebuild
        {'name': 'shipped', 'weights': None, 'width': None}
    """
    kind, colon, model = name.partition(":")
    name = name if colon else name.lower()
    if width is not None and (name not in _RESNETS or width < 1):
        raise ValueError(f"width is {width} for {name!r}; a positive number is accepted, for {' and '.join(_RESNETS)}.")
    source = weights if weights is None or weights == "random" else find_weights(weights, folder=kind == "hf")
    module: nn.Module
    tokenizer: Tokenizer | None = None
    if name == "shipped":
        if source is not None:
            raise ValueError(f"weights is {str(weights)!r}; 'shipped' has its own, use 'resnet18-32' for others.")
        module, preprocess = shipped_resnet18(), SMALL
    elif name in _RESNETS:
        module, preprocess, width = _resnet(name, source, width)
    elif not colon:
        raise ValueError(f"unknown backbone {name!r}; accepted: {', '.join(BACKBONES)}.{nearest(name, BACKBONES)}")
    else:
        module, preprocess, tokenizer = PACKAGES.get(kind, own_network)(model if kind in PACKAGES else name, source)
        if isinstance(source, Path) and kind != "hf":  # which reads a folder itself
            fill(module, read_weights(source)[0], str(source))
    stored = source
    if isinstance(source, Path):
        stored = source.name if source.parent == weights_folder() else str(source.resolve())
    rebuild = {"name": name, "weights": stored, "width": width}
    return Backbone(name, module.eval(), preprocess, rebuild, tokenizer)


def load_classifier(name: str, weights: str | os.PathLike[str], *, width: int | None = None) -> ResNet18:
    """`resnet18` or `resnet18-32` from a file, with the classifier `fc` that the file holds."""
    if name not in _RESNETS:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(_RESNETS)}.")
    return _resnet(name, find_weights(weights), width, classifier=True)[0].eval()


_RESNETS: dict[str, tuple[Literal["imagenet", "small"], float | None, Preprocess]] = {
    "resnet18": ("imagenet", None, _IMAGENET),
    "resnet18-32": ("small", 0.1, SMALL),
}


def _resnet(
    name: str, source: str | Path | None, width: int | None, *, classifier: bool = False
) -> tuple[ResNet18, Preprocess, int]:
    stem, slope, preprocess = _RESNETS[name]
    if source is None and name != "resnet18":
        raise ValueError(f"{name!r} has no published weights; pass weights=, a file that pretrain wrote, or 'random'.")
    source = official_file() if source is None else source
    if not isinstance(source, Path):
        with seeded():
            return ResNet18(width or 64, stem, slope), preprocess, width or 64
    state, metadata = read_weights(source)
    try:
        if metadata.get("slope", "null") != "null":
            slope = float(metadata["slope"]) or None  # 0 is ReLU
        preprocess = Preprocess.from_dict(json.loads(metadata.get("preprocess", "null")) or preprocess.to_dict())
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata of {source} was not written by pretrain ({first_line(error)}).") from error
    if width is None:
        width = len(state["conv1.weight"]) if "conv1.weight" in state and state["conv1.weight"].dim() else 64
    if classifier and "fc.weight" not in state:
        raise ValueError(f"{source} holds no classifier 'fc.weight'; give the file of a whole network.")
    network = ResNet18(width, stem, slope, len(state["fc.weight"]) if classifier else None)
    fill(network, state, str(source))
    return network, preprocess, width
