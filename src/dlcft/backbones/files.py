"""Files of weights: find them, read them, fill a network from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from dlcft.data.decoding import decoding
from dlcft.data.files import at_home

OFFICIAL = "resnet18-f37072fd.pth"  # torchvision's ResNet-18, IMAGENET1K_V1
OFFICIAL_URL = f"https://download.pytorch.org/models/{OFFICIAL}"
CLASSIFIERS = ("fc", "classifier", "heads", "head")  # usual names of the last layer


def weights_folder() -> Path:
    """The folder of weights: `$DLCFT_WEIGHTS`, or ~/.cache/dlcft/weights."""
    return Path(os.environ.get("DLCFT_WEIGHTS") or Path.home() / ".cache" / "dlcft" / "weights")


def read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a .safetensors, .pth or .pt file by name, and its metadata; nothing in it can run code."""
    if path.suffix not in (".safetensors", ".pth", ".pt"):
        raise ValueError(f"weights is {str(path)!r}; a .safetensors, .pth or .pt file is accepted.")
    with decoding(f"weights from {path}", "give a whole file without code"):
        if path.suffix == ".safetensors":
            with safetensors.safe_open(path, framework="pt") as file:
                # a copy: the reader maps the file, which may be overwritten
                return {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        held = f" of {', '.join(map(str, list(state)[:3]))}" if isinstance(state, Mapping) else ""
        raise ValueError(f"{path} holds a {type(state).__name__}{held}; a state dict, names with tensors, is accepted.")
    return dict(state), {}


def official_file() -> Path:
    """Torchvision's weights of ResNet-18."""
    folder = weights_folder()
    for file in (folder / OFFICIAL, (folder / OFFICIAL).with_suffix(".safetensors")):
        if file.is_file():
            return file
    raise FileNotFoundError(
        f"'resnet18' needs torchvision's file {OFFICIAL}: download {OFFICIAL_URL} into {folder} (or the folder that "
        "the environment variable DLCFT_WEIGHTS names), or pass weights=FILE or 'random'."
    )


def find_weights(weights: str | os.PathLike[str], *, folder: bool = False) -> Path:
    """The file (or folder) as given, or of that name in the folder of weights."""
    for path in (at_home(weights), weights_folder() / weights):
        if path.is_dir() if folder else path.is_file():
            return path
    missing = f"there is no such {'folder' if folder else 'file'}, neither here nor in {weights_folder()}"
    raise FileNotFoundError(f"weights is {str(weights)!r}; {missing}.")


def fill(network: nn.Module, state: Mapping[str, Tensor], source: str) -> None:
    """Load weights, except those of a classifier that the network does not have."""
    wanted = network.state_dict()
    given = {key: t for key, t in state.items() if key in wanted or key.partition(".")[0] not in CLASSIFIERS}
    # files from before torch 0.4.1 lack the counter, which nothing here uses
    missing = [key for key in wanted if key not in given and not key.endswith("num_batches_tracked")]
    differ = [key for key in given if key in wanted and given[key].shape != wanted[key].shape]
    shapes = [f"{key} is {tuple(given[key].shape)}, not {tuple(wanted[key].shape)}" for key in differ]
    faults = {"missing": missing, "unexpected": [key for key in given if key not in wanted], "shapes": shapes}
    if any(faults.values()):
        told = "; ".join(f"{kind}: {some(found)}" for kind, found in faults.items() if found)
        raise ValueError(f"{source} does not fit the network ({told}).")
    network.load_state_dict(given, strict=False)


def some(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
