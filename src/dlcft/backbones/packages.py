"""Networks of other packages, and one's own, by name. A package is imported only for a name of its own."""

from __future__ import annotations

import difflib
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from dlcft.backbones.files import CLASSIFIERS, some
from dlcft.data.decoding import first_line
from dlcft.data.images import Preprocess
from dlcft.data.sources import Tokenizer
from dlcft.network.pooled import Pooled

BACKBONES = {
    "shipped": "ResNet-18 of quarter width for 32 pixels, pre-trained on Tiny-ImageNet; in the package",
    "resnet18": "torchvision's ResNet-18 for 224 pixels; from its file",
    "resnet18-32": "ResNet-18 for 32 pixels with LeakyReLU, of any width; from a file that pre-training wrote",
    "timm:NAME": "a model of the package timm",
    "torchvision:NAME": "a model of the package torchvision",
    "hf:NAME": "a model of the package transformers, from the hub or a folder",
    "MODULE:FACTORY": "one's own: a function in a module, which returns an nn.Module",
}
_LONGEST = 512  # tokens of a text, where neither model nor tokenizer tells
Source = str | Path | None  # of weights: 'random', a file, or None for the published ones


# a network, the preprocessing of its images, and its tokenizer if it reads texts
Found = tuple[nn.Module, Preprocess, Tokenizer | None]


def _timm(name: str, source: Source) -> Found:
    timm, data = _package("timm"), _package("timm.data")
    try:
        with seeded():
            module: nn.Module = timm.create_model(name, pretrained=source is None, num_classes=0)
    except OSError as error:
        where = "download its model.safetensors from https://huggingface.co/timm and pass weights=FILE"
        raise FileNotFoundError(_offline(f"timm:{name}", error, where)) from error
    except RuntimeError as error:
        near = nearest(name, timm.list_models())
        raise ValueError(f"timm has no {name!r} as asked for ({first_line(error)}).{near}") from error
    config = data.resolve_model_data_config(module)
    channels, height, width = config["input_size"]
    used = _preprocess((height, width), config["mean"], config["std"], config["interpolation"], channels)
    return module, used, None


def _torchvision(name: str, source: Source) -> Found:
    models = _package("torchvision.models")
    if name not in models.list_models():
        raise ValueError(f"torchvision has no model {name!r}.{nearest(name, models.list_models())}")
    published = models.get_model_weights(name).DEFAULT
    try:
        with seeded():
            module: nn.Module = models.get_model(name, weights="DEFAULT" if source is None else None)
    except OSError as error:
        where = f"put {published.url} into {Path(torch.hub.get_dir()) / 'checkpoints'}, or pass weights=FILE"
        raise FileNotFoundError(_offline(f"torchvision:{name}", error, where)) from error
    _remove_classifier(module, name)
    used = published.transforms()
    size = used.crop_size[0]
    return module, _preprocess((size, size), used.mean, used.std, used.interpolation.value, 3), None


def _remove_classifier(module: nn.Module, name: str) -> None:
    """Replace the last layer that has weights; flattening, norms and hidden layers before it are kept."""
    children = dict(module.named_children())
    for part in (part for part in CLASSIFIERS if part in children):
        layers = [key for key, m in children[part].named_modules(prefix=part) if isinstance(m, nn.Linear | nn.Conv2d)]
        if layers:
            module.set_submodule(layers[-1], nn.Identity())
            return
    raise ValueError(f"torchvision's {name!r} has no classifier called {', '.join(CLASSIFIERS)} to remove.")


def _hf(name: str, source: Source) -> Found:
    transformers, preprocess, tokenizer, mean = _package("transformers"), Preprocess(), None, False
    if source == "random":
        raise ValueError("weights is 'random'; 'hf:' accepts a folder that save_pretrained wrote.")
    place = name if source is None else str(source)
    try:
        model, info = transformers.AutoModel.from_pretrained(place, output_loading_info=True, trust_remote_code=False)
        if model.main_input_name == "pixel_values":
            preprocess = _hf_preprocess(
                transformers.AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict()
            )
        if model.main_input_name == "input_ids":
            tokenizer, mean = _hf_tokenizer(transformers, place, model.config), _is_sentence_encoder(place)
    except OSError as error:
        where = f"download https://huggingface.co/{name} and pass weights=FOLDER"
        raise FileNotFoundError(_offline(f"hf:{name}", error, where)) from error
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]
    if missing:
        raise ValueError(f"{place!r} lacks weights of the model ({some(missing)}), which would be random.")
    if info["missing_keys"] or mean:
        # the checkpoint of a classifier has none, and a random one would spoil the features; a mean needs none
        model.pooler = None
    return Pooled(model, mean=mean), preprocess, tokenizer


def _hf_tokenizer(transformers: Any, place: str, config: Any) -> Tokenizer | None:
    """The model's own tokenizer; None where there is none. Texts longer than the model can take are cut."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError):
        return None
    limit = min(tokenizer.model_max_length, getattr(config, "max_position_embeddings", None) or _LONGEST)
    return lambda texts: tokenizer(texts, padding=True, truncation=True, max_length=limit, return_tensors="pt")


def _is_sentence_encoder(place: str) -> bool:
    """Whether the folder says, as sentence-transformers writes it, that features are the mean of the tokens."""
    file = Path(place) / "1_Pooling" / "config.json"
    return file.is_file() and bool(json.loads(file.read_text()).get("pooling_mode_mean_tokens"))


def _hf_preprocess(config: Mapping[str, Any]) -> Preprocess:
    size: Any = config.get("crop_size") if config.get("do_center_crop") else config.get("size")
    if isinstance(size, int):
        size = {"height": size}
    edges: dict[str, Any] = dict(size if isinstance(size, Mapping) else vars(size))  # transformers 5 has an object
    side = edges.get("shortest_edge") or edges.get("longest_edge") or 0
    height = int(edges.get("height") or side)
    width = int(edges.get("width") or height)
    interpolation = {0: "nearest", 2: "bilinear"}.get(config.get("resample", 2), "bicubic")  # Pillow's numbers
    normalise = config.get("do_normalize", True)
    mean, std = (config["image_mean"], config["image_std"]) if normalise else (None, None)
    return _preprocess((height, width), mean, std, interpolation, 3)


def own_network(name: str, source: Source) -> Found:
    """The network that a function `module:function` returns, with its preprocessing or its tokenizer if it has one."""
    path, _, factory = name.partition(":")
    accepted = f"accepted: {', '.join(BACKBONES)}"
    if not all(part.isidentifier() for part in (*path.split("."), factory)):
        raise ValueError(f"unknown backbone {name!r}; {accepted}.{nearest(path, PACKAGES)}")
    if source == "random":
        raise ValueError(f"weights is 'random'; {name!r} accepts a file, or none for the weights of its factory.")
    with _current_directory():
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if not f"{path}.".startswith(f"{error.name}."):
                raise  # the module is there, and one of its imports is not
            near = nearest(path, PACKAGES)
            raise ValueError(f"unknown backbone {name!r}: there is no module {path!r}; {accepted}.{near}") from error
        if factory not in vars(module):
            raise ValueError(f"the module {path!r} has no {factory!r}.{nearest(factory, vars(module))}")
        try:
            made = vars(module)[factory]()
        except Exception as error:  # another's code may raise anything
            raise ValueError(f"{name!r} failed: {type(error).__name__}: {first_line(error)}") from error
    network, reading = made if isinstance(made, tuple) and len(made) == 2 else (made, Preprocess())
    if not isinstance(network, nn.Module) or not (isinstance(reading, Preprocess) or callable(reading)):
        accepted = "an nn.Module is accepted, or that and a Preprocess or a tokenizer"
        raise ValueError(f"{name!r} returned a {type(made).__name__}; {accepted}.")
    if any(is_lazy(tensor) for tensor in (*network.parameters(), *network.buffers())):
        raise ValueError(f"{name!r} returned a network with lazy layers; pass a batch through it in the factory.")
    return (network, reading, None) if isinstance(reading, Preprocess) else (network, Preprocess(), reading)


PACKAGES: dict[str, Callable[[str, Source], Found]] = {"timm": _timm, "torchvision": _torchvision, "hf": _hf}


def _package(module: str) -> Any:
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    # a build for another torch raises the other two
    except (ImportError, RuntimeError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (package, module):
            raise ImportError(f"this backbone needs the package {package}: pip install {package}.") from error
        broken = f"this backbone needs the package {package}, which is installed but cannot be imported"
        raise ImportError(f"{broken} ({type(error).__name__}: {first_line(error)}).") from error


def _preprocess(
    size: tuple[int, int], mean: Iterable[float] | None, std: Iterable[float] | None, interpolation: str, channels: int
) -> Preprocess:
    known = interpolation if interpolation in ("bilinear", "bicubic", "nearest") else "bicubic"
    of = [None if values is None else tuple(map(float, values)) for values in (mean, std)]
    return Preprocess((int(size[0]), int(size[1])), of[0], of[1], known, channels)


@contextmanager
def seeded() -> Iterator[None]:
    """Draw the same random numbers each time, without a change to torch's global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _current_directory() -> Iterator[None]:
    """Search the current directory for modules, too: last, so that no file of it replaces an installed one."""
    here, before = os.getcwd(), list(sys.path)
    sys.path.append(here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def _offline(name: str, error: OSError, where: str) -> str:
    return f"{name!r} is not on this machine and could not be downloaded ({first_line(error)}); {where}."


def nearest(name: str, known: Iterable[str]) -> str:
    """The question "did you mean …?" if a known name is close, else nothing."""
    near = difflib.get_close_matches(name, list(known), 1)
    return f" Did you mean {near[0]!r}?" if near else ""
