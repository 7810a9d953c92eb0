"""Pre-training as the paper does it, and the conversion of a ReLU network to LeakyReLU.

References:
    Achille, Golatkar, Ravichandran, Polito, Soatto, "LQF: Linear Quadratic Fine-Tuning" (2020),
    https://arxiv.org/abs/2012.11140: LeakyReLU, and one epoch to get used to it.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from dlcft import __version__
from dlcft.backbones.files import read_weights
from dlcft.curvature.losses import CrossEntropy
from dlcft.data.augment import Augmentation
from dlcft.data.images import Preprocess
from dlcft.data.labels import Label, Labels
from dlcft.data.samples import Batches, Samples
from dlcft.learner.build import fingerprint, first_features
from dlcft.learner.progress import Report, reporter
from dlcft.learner.train import Training
from dlcft.methods import Batch, Finetune, Task
from dlcft.methods.base import joined_states, split_states
from dlcft.methods.recipes import Recipe
from dlcft.network.classifier import Classifier
from dlcft.network.inputs import Input
from dlcft.network.prepare import relu_to_leaky
from dlcft.store.files import CheckpointError, new_file
from dlcft.store.store import Store

PROGRESS_SECONDS = 60.0  # how often progress is noted
HEAD = "fc"
_MEASURED = 10_000  # images from which mean and deviation are measured


@dataclass(frozen=True, eq=False)
class Pretrained:
    """What pre-training gives.

    Attributes:
        network: maps a batch to feature vectors; in evaluation mode.
        classifier: the linear layer `fc` on them.
        labels: what its outputs stand for.
        preprocess: what images go through.
        losses: the mean loss of every epoch.
        top1: the accuracy on the validation images, if there are any.
    """

    network: nn.Module
    classifier: nn.Linear
    labels: list[Label]
    preprocess: Preprocess
    losses: list[float]
    top1: float | None


def pretrain(
    network: nn.Module,
    data: Any,
    *,
    validation: Any = None,
    epochs: int = 100,
    lr: float = 0.1,
    batch_size: int = 256,
    weight_decay: float = 1e-5,
    momentum: float = 0.9,
    schedule: str = "cosine",
    augment: str = "crop4+flip",
    preprocess: Preprocess | None = None,
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool | Report = True,
    device: str | None = None,
) -> Pretrained:
    """Train a network and a linear classifier `fc` by SGD with cross-entropy; the defaults are the paper's.

    Every step's randomness depends on the seed and its position alone. With `save`, progress is noted beside that file
    every minute; after a kill the same call goes on from there, and on a CPU it ends with the same bits. A finished
    file of the same call is read, not trained again.

    Args:
        network: maps a batch of images to feature vectors, such as `ResNet18(64, "small", 0.1)`. A linear layer that
            it has as `fc` is the classifier that is trained on. It is copied.
        data: images with labels in any form that `Samples` takes, such as a pair (x, y) of uint8 images or floats in
            [0, 1].
        validation: more of them, to measure the accuracy at the end.
        epochs: passes over the data.
        lr: the learning rate at first.
        batch_size: samples a step.
        weight_decay: coupled L2.
        momentum: of SGD.
        schedule: "cosine" or "constant".
        augment: see `Augmentation`; it happens before the normalisation.
        preprocess: what images go through; by default they keep their size and are normalised by channel.
        seed: fixes everything random.
        save: a .safetensors file, with torchvision's names if the network has them, and all this in its metadata;
            `load_backbone` reads it. Its folder is made if need be.
        resume: whether to go on with what was interrupted; False begins anew, also over a finished file.
        progress: True for a line on a terminal, or a function that gets a `Progress`.
        device: by default a GPU if there is one.

    Raises:
        ValueError: when a setting has no meaning or the data does not fit; when `save` holds another run.
        FloatingPointError: when the loss stops being finite.
    """
    settings: dict[str, Any] = {"optimizer": "sgd", "loss": "cross-entropy", "epochs": epochs, "lr": lr}
    settings |= {"batch_size": batch_size, "weight_decay": weight_decay, "momentum": momentum}
    settings |= {"schedule": schedule, "augment": augment}
    recipe = Recipe(linear=False, **settings)
    augmentation, file = Augmentation(augment), None if save is None else _file(save)
    preprocess = preprocess or _measured(network, data)
    samples = Samples(data, preprocess=replace(preprocess, mean=None, std=None))
    model, labels = _classifier(network, samples, preprocess)
    run = {**settings, "seed": seed, "slope": _slope(network), "preprocess": preprocess.to_dict()}
    run |= {"data": samples.fingerprint(), "samples": len(samples), "labels": labels.names}
    run |= {"network": fingerprint(network), "class": type(network).__name__}

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = model.to(where)
    if _channels_last_is_safe(model):  # about 1.25 times faster on a CPU
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def change(x: Input, generator: torch.Generator) -> Input:
        assert isinstance(x, Tensor)
        return preprocess.normalised(augmentation(x, generator))

    def stream(purpose: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{seed}/pretrain/{purpose}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    batches = Batches(samples, labels.indices(samples.labels), batch_size, where, dtype=model.head(HEAD).weight.dtype)
    task = Task(model, HEAD, CrossEntropy(), batches, len(samples), change, stream)
    training = Training(model, _Supervised(), [task], recipe, stream, batchnorm=True)
    tests = _tests(validation, preprocess, labels, batches)
    if file is None:
        losses, top1 = training.run(reporter(progress), 0), _top1(model, tests)
        model.cpu()
        return Pretrained(model.backbone, model.head(HEAD), labels.names, preprocess, losses, top1)

    store = Store(file.with_name(f"{file.name}.progress"))
    with store.lock():
        if not resume:
            store.clear_progress()
        finished = _finished(file, run, model) if resume else None
        if finished is None:
            _resume(store, training, run)
            note = _noter(store, training, run)
            losses = training.run(reporter(progress), 0, lambda: note(False))
            note(True)  # before the validation, which may take long
            finished = losses, _top1(model, tests)
            _write(file, model, run, *finished)
        elif tests is not None:
            finished = finished[0], _top1(model, tests)
        store.clear_progress()
    with contextlib.suppress(OSError):  # another process may have begun there
        (store.directory / ".lock").unlink()
        store.directory.rmdir()
    model.cpu().eval()
    return Pretrained(model.backbone, model.head(HEAD), labels.names, preprocess, *finished)


def convert_activations(
    network: nn.Module,
    data: Any,
    *,
    preprocess: Preprocess,
    slope: float = 0.1,
    validation: Any = None,
    epochs: int = 1,
    lr: float = 1e-4,
    batch_size: int = 256,
    weight_decay: float = 1e-5,
    momentum: float = 0.9,
    schedule: str = "constant",
    augment: str = "resized-crop+flip",
    seed: int = 0,
    save: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool | Report = True,
    device: str | None = None,
) -> Pretrained:
    """Turn a pre-trained network's ReLU into LeakyReLU and train it on for an epoch, as the paper does for MIT-67.

    The network comes with the linear classifier `fc` that it was trained with (`load_classifier` gives it so); labels
    are the numbers of its outputs, or as many names, whose sorted order is theirs. `preprocess` is what images went
    through when it was trained, and `slope` is LeakyReLU's. The rest is as in `pretrain`.

    Raises:
        ValueError: when the network has no classifier or no ReLU; see also `pretrain`.
    """
    if not isinstance(dict(network.named_children()).get(HEAD), nn.Linear):
        raise ValueError(
            f"{type(network).__name__} has no linear classifier {HEAD!r}; a conversion goes on with the one that the "
            "network was trained with, give load_classifier(name, weights=FILE)."
        )
    return pretrain(
        relu_to_leaky(network, slope),
        data,
        validation=validation,
        epochs=epochs,
        lr=lr,
        batch_size=batch_size,
        weight_decay=weight_decay,
        momentum=momentum,
        schedule=schedule,
        augment=augment,
        preprocess=preprocess,
        seed=seed,
        save=save,
        resume=resume,
        progress=progress,
        device=device,
    )


class _Supervised(Finetune):
    """Training on, with dropout and the like drawn from the step's own stream."""

    def objective(self, task: Task, batch: Batch) -> Tensor:
        """`L_data`."""
        device = task.model.head(task.head).weight.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(batch.generator.initial_seed())
            return super().objective(task, batch)


def _channels_last_is_safe(network: nn.Module) -> bool:
    """In torch 2.13 the backward pass of narrow 1×1 convolutions with a stride overwrites other memory in it."""
    convolutions = [m for m in network.modules() if isinstance(m, nn.Conv2d)]
    narrow = [m for m in convolutions if m.in_channels < 8 * m.groups and min(m.kernel_size) == 1]
    return not narrow and all(m.out_channels >= 8 for m in convolutions)


def _file(save: str | os.PathLike[str]) -> Path:
    path = Path(save)
    if path.suffix != ".safetensors" or path.is_dir():
        raise ValueError(f"save is {str(path)!r}; a file whose name ends in .safetensors is accepted.")
    return path


def _measured(network: nn.Module, data: Any) -> Preprocess:
    """Images as they are, normalised by the mean and deviation of up to 10,000 of them."""
    convolution = next((m for m in network.modules() if isinstance(m, nn.Conv2d)), None)
    channels = convolution.in_channels if convolution is not None and convolution.in_channels in (1, 3) else None
    samples = Samples(data, preprocess=Preprocess(channels=channels))
    chosen = torch.linspace(0, len(samples) - 1, min(len(samples), _MEASURED)).long()
    count, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for indices in chosen.split(256):
        x = _images(samples, indices).double()
        count += x.numel() // x.shape[1]
        total, squares = total + x.sum((0, 2, 3)), squares + x.square().sum((0, 2, 3))
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=1e-6).sqrt()
    size, numbers = (x.shape[2], x.shape[3]), [tuple(round(v, 4) for v in t.tolist()) for t in (mean, std)]
    return Preprocess(size, numbers[0], numbers[1], channels=channels)


def _images(samples: Samples, indices: Tensor) -> Tensor:
    x = samples.fetch(indices)
    if not isinstance(x, Tensor) or x.dim() != 4:
        got = f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise ValueError(f"a batch of the data is {got}; images, N × C × H × W or N × H × W × C, are needed.")
    return x


def _classifier(network: nn.Module, samples: Samples, preprocess: Preprocess) -> tuple[Classifier, Labels]:
    """A copy of the network with its own classifier, or with one that is zero at first."""
    network = copy.deepcopy(network)
    own = dict(network.named_children()).get(HEAD)
    labels = Labels().append(Labels().unknown(samples.labels))
    if isinstance(own, nn.Linear):
        network.set_submodule(HEAD, nn.Identity())
        labels = _rows(own, labels)
    elif own is not None and own.state_dict():
        raise ValueError(f"the network's {HEAD!r} is a {type(own).__name__}; a linear layer, or none, is accepted.")
    x = preprocess.normalised(_images(samples, torch.arange(1)))
    reference = next(network.parameters(), None)
    model = Classifier(network, first_features(network, x if reference is None else x.to(reference)).shape[1])
    model.add_head(HEAD, len(labels))
    if isinstance(own, nn.Linear):
        if own.in_features != model.feature_count or own.bias is None:
            raise ValueError(f"the network's classifier is {own}; one of {model.feature_count} features is needed.")
        model.head(HEAD).load_state_dict(own.state_dict())
    return model, labels


def _rows(classifier: nn.Linear, labels: Labels) -> Labels:
    """What the outputs of a trained classifier stand for."""
    count, names = classifier.out_features, labels.names
    if all(isinstance(name, int) and 0 <= name < count for name in names):
        return Labels(range(count))
    if len(names) != count:
        raise ValueError(
            f"the data has {len(names)} labels ({names[0]!r} …) and the network's classifier {count} outputs; give the "
            "outputs' numbers as labels, or as many names."
        )
    return labels


def _tests(validation: Any, preprocess: Preprocess, labels: Labels, training: Batches) -> Batches | None:
    if validation is None:
        return None
    samples = Samples(validation, preprocess=preprocess)
    unknown = labels.unknown(samples.labels)
    if unknown:
        raise ValueError(f"the validation label {unknown[0]!r} is none of the {len(labels)} that are trained.")
    return Batches(samples, labels.indices(samples.labels), training.size, training.device, dtype=training.dtype)


@torch.no_grad()
def _top1(model: Classifier, tests: Batches | None) -> float | None:
    if tests is None:
        return None
    model.eval()
    right = sum(int((model(x, HEAD).argmax(1) == y).sum()) for x, y in tests)
    return right / len(tests.y)


def _noter(store: Store, training: Training, run: Mapping[str, Any]) -> Callable[[bool], None]:
    """A function that notes progress: now, or if it was not noted lately."""
    last = time.monotonic()

    def note(now: bool) -> None:
        nonlocal last
        if now or time.monotonic() - last >= PROGRESS_SECONDS:
            tensors, parts = joined_states(model=training.model, training=training)
            store.save_progress(tensors, {"run": run, "parts": parts})
            last = time.monotonic()

    return note


def _resume(store: Store, training: Training, run: dict[str, Any]) -> None:
    """Bring training to where it was interrupted, if it was."""
    found = store.load_progress()
    if found is None:
        return
    tensors, header = found
    _same(run, header["run"], store.directory)
    parts = split_states(tensors, header["parts"])
    training.model.load_state_dict(parts["model"][0])
    training.load_state(*parts["training"])
    for parameter, slot in training.optimizer.state.items():
        for key, value in slot.items():  # as they lay in memory: sums in another order could end in other bits
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                slot[key] = torch.empty_like(parameter).copy_(value)


def _finished(file: Path, run: dict[str, Any], model: Classifier) -> tuple[list[float], float | None] | None:
    """What a finished run of the same settings ended with, its weights loaded into the model."""
    if not file.exists():
        return None
    tensors, metadata = read_weights(file)
    if "losses" not in metadata:
        raise ValueError(f"{file} exists and was not written by pretrain; choose another file, or remove it.")
    _same(run, json.loads(metadata["recipe"]), file)
    own = {f"heads.{key}" if key.startswith(f"{HEAD}.") else f"backbone.{key}": t for key, t in tensors.items()}
    model.load_state_dict(own)
    return json.loads(metadata["losses"]), json.loads(metadata["top1"])


def _same(run: dict[str, Any], found: Mapping[str, Any], where: Path) -> None:
    differ = [key for key in run if found.get(key) != run[key]]
    if differ:
        key = differ[0]
        raise CheckpointError(
            f"{where} holds a run with {key} {str(found.get(key))[:60]}, not {str(run[key])[:60]}; choose another "
            "file to save to, or remove this one to begin anew."
        )


def _write(file: Path, model: Classifier, run: Mapping[str, Any], losses: list[float], top1: float | None) -> None:
    head = {f"{HEAD}.{key}": t for key, t in model.head(HEAD).state_dict().items()}
    named = {**model.backbone.state_dict(), **head}
    # copies, since tensors that share memory cannot be stored
    tensors = {key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in named.items()}
    content = {"recipe": run, "losses": losses, "top1": top1, "preprocess": run["preprocess"], "slope": run["slope"]}
    metadata = {key: json.dumps(value) for key, value in content.items()}
    metadata |= {"format": "pt", "dlcft": __version__, "torch": str(torch.__version__)}
    with new_file(file) as target:
        target.write(safetensors_bytes(tensors, metadata))


def _slope(network: nn.Module) -> float | None:
    """LeakyReLU's slope, 0 for ReLU; None if there are several or none."""
    slopes = {float(m.negative_slope) for m in network.modules() if isinstance(m, nn.LeakyReLU)}
    slopes |= {0.0 for m in network.modules() if isinstance(m, nn.ReLU)}
    return slopes.pop() if len(slopes) == 1 else None
