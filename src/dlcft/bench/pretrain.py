"""Pre-training as the paper does it, and the conversion of a ReLU network to LeakyReLU.

References:
    Achille, Golatkar, Ravichandran, Polito, Soatto, "LQF: Linear Quadratic Fine-Tuning" (2020),
    https://arxiv.org/abs/2012.11140: LeakyReLU, and one epoch to get used to it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from dlcft import __version__
from dlcft.backbones.files import read_weights
from dlcft.bench.datasets.image_set import moments
from dlcft.data.files import new_file
from dlcft.data.images import Preprocess
from dlcft.data.labels import Label, Labels
from dlcft.data.samples import Samples
from dlcft.learner.build import fingerprint
from dlcft.learner.display import Report
from dlcft.learner.heads import HEAD
from dlcft.learner.learner import Learner
from dlcft.learner.records import Learned
from dlcft.methods.recipes import Recipe
from dlcft.methods.settings import Network, Training
from dlcft.network.names import check_name
from dlcft.network.prepare import relu_to_leaky
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

CLASSIFIER = "fc"
# The paper's settings; and those by which it trains on a network with another activation, for MIT-67.
SETTINGS: dict[str, Any] = {"optimizer": "sgd", "epochs": 100, "lr": 0.1, "batch_size": 256, "weight_decay": 1e-5}
SETTINGS |= {"momentum": 0.9, "schedule": "cosine", "augment": "crop4+flip"}
CONVERSION: dict[str, Any] = {"epochs": 1, "lr": 1e-4, "schedule": "constant", "augment": "resized-crop+flip"}
_MEASURED = 10_000  # images from which mean and deviation are measured


@dataclass(frozen=True, eq=False)
class Pretrained:
    """The outcome of pre-training."""

    network: nn.Module  # maps a batch to feature vectors; in evaluation mode
    classifier: nn.Linear  # the layer `fc` on them
    labels: list[Label]  # of its outputs
    preprocess: Preprocess
    losses: list[float]  # the mean of every epoch
    top1: float | None  # the accuracy on the validation images, if there are any


def pretrain(
    network: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    preprocess: Preprocess | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool | Report = True,
    device: str = "auto",
    **settings: Any,
) -> Pretrained:
    """Train a network and a linear classifier `fc` by SGD with cross-entropy; `settings` change those of `SETTINGS`.

    With `save`, progress is noted beside that file; after a kill the same call goes on from there, and on a CPU it ends
    with the same bits. A finished file of the same call is read, not trained again.

    Args:
        network: maps a batch of images to feature vectors, such as `ResNet18(64, "small", 0.1)`. A linear layer that
            it has as `fc` is the classifier that is trained on. It is copied.
        data: images with labels in any form that `Samples` takes.
        validation: more of them, to measure the accuracy at the end.
        preprocess: the preprocessing of images; by default they keep their size and are normalised by channel.
        seed: fixes everything random.
        save: a .safetensors file for `load_backbone`, with all this in its metadata.
        resume: whether to go on with an interrupted run; False begins anew, also over a finished file.
        progress: True for a line on a terminal, or a function that gets a `Progress`.
        device: see `Learner`.
        settings: see `Training`.
    """
    for name in settings:
        check_name("setting", name, SETTINGS)
    settings = SETTINGS | settings
    recipe = Recipe(Network(linear=False, loss="cross-entropy"), Training(**settings))
    file = None if save is None else Path(save)
    if file is not None and (file.suffix != ".safetensors" or file.is_dir()):
        raise ValueError(f"save is {str(file)!r}; a file whose name ends in .safetensors is accepted.")
    body, classifier = _split(network)
    preprocess = preprocess or _measured(network, data)
    learner = Learner(body, recipe, scenario="data-il", seed=seed, preprocess=preprocess, device=device)
    samples, tests = learner.samples(data), None if validation is None else learner.samples(validation)
    labels = _labels(classifier, samples.labels)
    unknown = [] if tests is None else labels.unknown(tests.labels)
    if unknown:
        raise ValueError(f"the validation label {unknown[0]!r} is none of the {len(labels)} that are trained.")
    run = {"loss": "cross-entropy", **settings, "seed": seed, "slope": _slope(network)}
    run |= {"preprocess": preprocess.to_dict(), "data": samples.fingerprint(), "samples": len(samples)}
    run |= {"labels": labels.names, "network": fingerprint(network), "class": type(network).__name__}

    notes = None if file is None else file.with_name(f"{file.name}.progress")
    if file is not None and notes is not None:
        learner.notes = {"pretraining": run}
        if resume and file.exists():
            tensors, metadata = read_weights(file)
            if "losses" not in metadata:
                raise ValueError(f"{file} exists and was not written by pretrain; choose another file, or remove it.")
            _check_same(run, json.loads(metadata["recipe"]), file)
            head = {name: tensors.pop(f"{CLASSIFIER}.{name}") for name in ("weight", "bias")}
            learner._builder.backbone.load_state_dict(tensors)
            _start(learner, samples, labels, head)
            return _pretrained(learner, json.loads(metadata["losses"]), tests)
        current = Store(notes).current if resume else None
        if current is not None:
            _check_same(run, current.header["notes"]["pretraining"], notes)
            learner = Learner.load(notes, body, device=device)
    if learner.directory is None:
        _start(learner, samples, labels, {} if classifier is None else classifier.state_dict())
        if notes is not None:
            shutil.rmtree(notes, ignore_errors=True)
            learner.save(notes)
    if not learner.history:
        learner.learn(samples, progress=progress)
        if notes is not None:
            learner.save()  # before the validation, which may take long
    record = learner.history[0]
    assert isinstance(record, Learned)
    done = _pretrained(learner, record.loss, tests)
    if file is not None and notes is not None:
        _write(file, done, run)
        shutil.rmtree(notes, ignore_errors=True)
    return done


def leaky_classifier(network: nn.Module, slope: float = 0.1) -> nn.Module:
    """A trained network with LeakyReLU in place of ReLU: `pretrain(…, preprocess=…, **CONVERSION)` trains it on.

    The network comes with the linear classifier `fc` that it was trained with (`load_classifier` gives it so). Labels
    are then the numbers of its outputs, or as many names, in sorted order.
    """
    if not isinstance(dict(network.named_children()).get(CLASSIFIER), nn.Linear):
        raise ValueError(
            f"{type(network).__name__} has no linear classifier {CLASSIFIER!r}; a conversion goes on with the one that "
            "the network was trained with, give load_classifier(name, weights=FILE)."
        )
    return relu_to_leaky(network, slope)


def _split(network: nn.Module) -> tuple[nn.Module, nn.Linear | None]:
    """A copy of the network without its classifier, and that."""
    network = copy.deepcopy(network)
    own = dict(network.named_children()).get(CLASSIFIER)
    if isinstance(own, nn.Linear):
        network.set_submodule(CLASSIFIER, nn.Identity())
        return network, own
    if own is not None and own.state_dict():
        raise ValueError(
            f"the network's {CLASSIFIER!r} is a {type(own).__name__}; a linear layer, or none, is accepted."
        )
    return network, None


def _measured(network: nn.Module, data: Any) -> Preprocess:
    """Images in their size, normalised by the mean and deviation of up to 10,000 of them."""
    first_in = next((m.in_channels for m in network.modules() if isinstance(m, nn.Conv2d)), None)
    channels = first_in if first_in in (1, 3) else None
    samples = Samples(data, preprocess=Preprocess(channels=channels))
    chosen = torch.linspace(0, len(samples) - 1, min(len(samples), _MEASURED)).long()
    first = samples.fetch(chosen[:1])
    if not isinstance(first, Tensor) or first.dim() != 4:
        kind = f"of shape {tuple(first.shape)}" if isinstance(first, Tensor) else f"a {type(first).__name__}"
        raise ValueError(f"a batch of the data is {kind}; images, N × C × H × W or N × H × W × C, are needed.")
    mean, std = moments(x for x in map(samples.fetch, chosen.split(256)) if isinstance(x, Tensor))
    return Preprocess((first.shape[2], first.shape[3]), mean, std, channels=channels)


def _labels(classifier: nn.Linear | None, found: Any) -> Labels:
    """The labels of the outputs: of a trained classifier all of its own, even if the data has fewer."""
    labels = Labels().append(Labels().unknown(found))
    if classifier is None:
        return labels
    count, names = classifier.out_features, labels.names
    if all(isinstance(name, int) and 0 <= name < count for name in names):
        return Labels(range(count))
    if len(names) != count:
        raise ValueError(
            f"the data has {len(names)} labels ({names[0]!r} …) and the network's classifier {count} outputs; give the "
            "outputs' numbers as labels, or as many names."
        )
    return labels


def _start(learner: Learner, samples: Samples, labels: Labels, classifier: Mapping[str, Tensor]) -> None:
    """Give the learner its head: the network's own classifier, or one that is zero at first."""
    learner._model = model = learner._builder.build(samples)
    learner._grow(HEAD, labels)
    if classifier:
        if classifier["weight"].shape[1] != model.feature_count or "bias" not in classifier:
            found = f"{' and '.join(classifier)} for {classifier['weight'].shape[1]} features"
            raise ValueError(f"the network's {CLASSIFIER!r} has {found}; a bias and {model.feature_count} are needed.")
        model.head(HEAD).load_state_dict(classifier)


def _check_same(run: Mapping[str, Any], found: Mapping[str, Any], where: Path) -> None:
    for key, value in run.items():
        if found.get(key) != value:
            raise CheckpointError(
                f"{where} holds a run with {key} {str(found.get(key))[:60]}, not {str(value)[:60]}; choose another "
                "file to save to, or remove this one to begin anew."
            )


def _pretrained(learner: Learner, losses: list[float], tests: Samples | None) -> Pretrained:
    top1 = None if tests is None else learner.evaluate(tests)["accuracy"]
    classifier, network = copy.deepcopy(learner.model.head(HEAD)).cpu(), learner.trained_backbone.cpu()
    assert learner.preprocess is not None
    return Pretrained(network, classifier, learner.labels(), learner.preprocess, losses, top1)


def _write(file: Path, done: Pretrained, run: Mapping[str, Any]) -> None:
    head = {f"{CLASSIFIER}.{key}": t for key, t in done.classifier.state_dict().items()}
    # copies, since tensors that share memory cannot be stored
    state = {**done.network.state_dict(), **head}
    tensors = {key: t.detach().clone(memory_format=torch.contiguous_format) for key, t in state.items()}
    content = {"recipe": run, "losses": done.losses, "top1": done.top1}
    content |= {"preprocess": run["preprocess"], "slope": run["slope"]}
    metadata = {key: json.dumps(value) for key, value in content.items()}
    metadata |= {"format": "pt", "dlcft": __version__, "torch": str(torch.__version__)}
    with new_file(file) as target:
        target.write(safetensors_bytes(tensors, metadata))


def _slope(network: nn.Module) -> float | None:
    """LeakyReLU's slope, 0 for ReLU; None if there are several or none."""
    slopes = {float(m.negative_slope) for m in network.modules() if isinstance(m, nn.LeakyReLU)}
    slopes |= {0.0 for m in network.modules() if isinstance(m, nn.ReLU)}
    return slopes.pop() if len(slopes) == 1 else None
