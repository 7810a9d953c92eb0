"""The data sets by name: source, reader, preprocessing and augmentation of each."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from dlcft.backbones.load import SMALL
from dlcft.bench.datasets.arrays import Idx, digits, npz
from dlcft.bench.datasets.download import Remote, fetch
from dlcft.bench.datasets.image_set import Absent, ImageSet, Parts, Read, moments
from dlcft.bench.datasets.pickled import Cifar, imagenet32
from dlcft.bench.datasets.trees import image_folder, mit67, tiny_imagenet
from dlcft.data.images import Preprocess
from dlcft.network.names import check_name

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True)
class Entry:
    """One data set."""

    read: Read
    preprocess: Preprocess | None  # None to take size, mean and standard deviation from the training images
    augment: str = "none"
    files: tuple[Remote, ...] = ()
    elsewhere: tuple[str, ...] = (".",)  # folders below `DLCFT_DATA` where it may be, besides one of its own name


def _idx_files(base: str, *sums: str) -> tuple[Remote, ...]:
    names = [f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return tuple(Remote(base + name, md5) for name, md5 in zip(names, sums, strict=True))


_CLOTHES = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

# In the order in which a path is compared with them.
CATALOGUE = {
    "seq-cifar100": Entry(
        Cifar("cifar-100-python", "cifar-100-python.tar.gz", ("train",), "test", "meta", "fine_label"),
        Preprocess(size=(32, 32), mean=(0.5071, 0.4865, 0.4409), std=(0.2673, 0.2564, 0.2762), channels=3),
        "crop4+flip",
        (Remote("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", md5="eb9058c3a382ffc7106e4002c42a8d85"),),
    ),
    "seq-cifar10": Entry(
        Cifar("cifar-10-batches-py", "cifar-10-python.tar.gz", _BATCHES, "test_batch", "batches.meta", "label"),
        Preprocess(size=(32, 32), mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616), channels=3),
        "crop4+flip",
        (Remote("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", md5="c58f30108f718f92721af3b95e74349a"),),
    ),
    "seq-mit67": Entry(
        mit67,
        Preprocess(mean=_IMAGENET[0], std=_IMAGENET[1], channels=3),  # files are resized as they are read
        "window224",
        (
            Remote("http://groups.csail.mit.edu/vision/LabelMe/NewImages/indoorCVPR_09.tar", unpacked="Images"),
            Remote("http://web.mit.edu/torralba/www/TrainImages.txt"),
            Remote("http://web.mit.edu/torralba/www/TestImages.txt"),
        ),
    ),
    "imagenet32": Entry(
        imagenet32,
        Preprocess(size=(32, 32), mean=_IMAGENET[0], std=_IMAGENET[1], channels=3),
        "crop4+flip",
        (
            Remote("https://image-net.org/data/downsample/Imagenet32_train.zip", unpacked="train_data_batch_1"),
            Remote("https://image-net.org/data/downsample/Imagenet32_val.zip", unpacked="val_data"),
        ),
    ),
    "tiny-imagenet": Entry(
        tiny_imagenet,
        replace(SMALL, size=(64, 64)),
        "crop4+flip",
        (
            Remote(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                md5="90528d7ca1a48142e341f4ef8d21d0de",
                unpacked="val/val_annotations.txt",
            ),
        ),
    ),
    "mnist": Entry(
        Idx(tuple("0123456789")),
        Preprocess(size=(32, 32), mean=(0.1307,), std=(0.3081,), channels=3),
        files=_idx_files(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        elsewhere=("MNIST/raw",),  # not "." because Fashion-MNIST's files have the same names
    ),
    "fashion-mnist": Entry(
        Idx(_CLOTHES),
        Preprocess(size=(32, 32), mean=(0.2860,), std=(0.3530,), channels=3),
        files=_idx_files(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        elsewhere=("FashionMNIST/raw",),
    ),
    "folder": Entry(image_folder, Preprocess(size=(224, 224), mean=_IMAGENET[0], std=_IMAGENET[1], channels=3)),
    "npz": Entry(npz, None),
}
NAMES = ("digits", *CATALOGUE)


def load(name: str | Path, path: str | Path | None = None, *, download: bool = False) -> ImageSet:
    """A data set by name, from the published files, or the data set that a path holds.

    Args:
        name: one of `NAMES`, or a path.
        path: the folder that has the official files, or the folder, archive or .npz file itself, or a folder of several
            data sets, each in a folder of its name; its kind is detected if `name` is unknown. By default
            `~/.cache/dlcft/data/<name>`, or, if that variable is set, the folder `<name>` in `DLCFT_DATA`, or
            `DLCFT_DATA` itself. "digits", which a dependency carries, has no path.
        download: whether to fetch missing files.

    Example:
        >>> images = load("digits")
        >>> images.x_train.shape, images.x_train.dtype, len(images.classes)
        (torch.Size([1198, 1, 32, 32]), torch.uint8, 10)
    """
    known = str(name)
    if known == "digits":
        return ImageSet("digits", *digits(), SMALL)
    if known in CATALOGUE:
        parts = _named(known, None if path is None else Path(path).expanduser(), download)
    else:
        known, parts = _detected(_some_path(name, path))
    return ImageSet(known, *parts, CATALOGUE[known].preprocess or _measured(parts), CATALOGUE[known].augment)


def _named(name: str, given: Path | None, download: bool) -> Parts:
    """The content of the first place that has the data set; if none has, it is downloaded if asked."""
    entry = CATALOGUE[name]
    if given is None and not entry.files:
        raise ValueError(f"the data set {name!r} has no place of its own; give a path, load({name!r}, path).")
    root = Path(os.environ.get("DLCFT_DATA") or "~/.cache/dlcft/data").expanduser()
    if given is not None and (given / name).is_dir():
        given = given / name
    path = given or root / name
    try:
        return entry.read(path)
    except Absent as error:
        missing = str(error)
    # official files elsewhere, else one .npz file in the first place
    elsewhere = [] if given else [(entry.read, root / place) for place in entry.elsewhere]
    for read, place in [*elsewhere, (npz, path)]:
        with contextlib.suppress(Absent):
            return read(place)
    if not download or not entry.files:
        raise FileNotFoundError(_absence(name, entry, path, given, missing))
    for file in entry.files:
        fetch(file, path)
    try:
        return entry.read(path)
    except Absent as error:
        raise ValueError(f"{path} has no {error}, though {name} was fetched; empty it and try again.") from None


def _absence(name: str, entry: Entry, path: Path, given: Path | None, missing: str) -> str:
    if not entry.files:
        return f"{path} has no {missing}; load({name!r}, path) needs it."
    call = f"load({name!r}, {f'{str(given)!r}, ' if given is not None else ''}download=True)"
    how = f"fetch it: dlcft run --download, in Python {call}"
    packed = [file.name for file in entry.files if file.unpacked and (path / file.name).is_file()]
    if packed:
        return f"{name} is in {path} as {packed[0]}, and {missing} is missing; unpack it there, or {how}."
    files = " and ".join(map(str, entry.files))
    return f"{name} is not in {path} ({missing} is missing); put {files} there, or {how}."


def _some_path(name: str | Path, path: str | Path | None) -> Path:
    found = Path(name if path is None else path).expanduser()
    if os.path.exists(found):  # Path.exists fails for text too long to be a path
        return found
    if path is None and isinstance(name, str) and os.sep not in name:
        check_name("data set or path", name, NAMES)
    raise FileNotFoundError(f"there is no file or folder {found}; give the path of a data set, or one of {NAMES}.")


def _detected(path: Path) -> tuple[str, Parts]:
    """The name and the content of the data set that a path holds."""
    for name, entry in CATALOGUE.items():
        with contextlib.suppress(Absent):
            parts = entry.read(path)
            if name != "mnist":
                return name, parts
            known = _which_mnist(path)
            return known, CATALOGUE[known].read(path)
    raise ValueError(
        f"{path} holds no known data set; official files of {', '.join(list(CATALOGUE)[:-2])}, an image folder with "
        "train/<class>/ and test/<class>/, or an .npz file are known."
    )


def _which_mnist(path: Path) -> str:
    """MNIST or Fashion-MNIST, whose files have the same names."""
    where = str(path.absolute()).lower()
    if "mnist" not in where:
        raise ValueError(
            f"{path} holds files of MNIST or of Fashion-MNIST, which have the same names; say which, load('mnist', "
            "path) or load('fashion-mnist', path)."
        )
    return "fashion-mnist" if "fashion" in where else "mnist"


def _measured(parts: Parts) -> Preprocess:
    """The training images' own size, mean and standard deviation."""
    x = parts.x_train
    assert isinstance(x, Tensor)
    mean, std = moments(part / 255 for part in x.split(1024))
    return Preprocess(size=(x.shape[2], x.shape[3]), mean=mean, std=std)
