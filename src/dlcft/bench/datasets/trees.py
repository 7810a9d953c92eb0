"""Folders of image files: MIT-67, Tiny-ImageNet, and any other with train/<class>/ and test/<class>/."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from dlcft.bench.datasets.image_set import Absent, ImageFiles, Parts, first_with
from dlcft.data.files import read_folder


def mit67(path: Path) -> Parts:
    """MIT-67: Images/<class>/*.jpg, TrainImages.txt and TestImages.txt there or above.

    As in the paper, images are resized to 256 × 256 (training takes windows of 224), test images then cut to the
    central 224 × 224.
    """
    root = first_with("Images", path, path / "indoorCVPR_09")
    lists = [first_with(name, root, path) / name for name in ("TrainImages.txt", "TestImages.txt")]
    train, test = (_pairs(file, r"([^/]+)/([^/]+)", "<class>/<image>") for file in lists)
    train_files, test_files = ([root / "Images" / name / image for name, image in pairs] for pairs in (train, test))
    parts = _parts(
        ImageFiles(train_files, size=(256, 256)),
        [name for name, _ in train],
        ImageFiles(test_files, size=(256, 256), crop=(224, 224)),
        [name for name, _ in test],
        lists[1],
    )
    _check_there(train_files, lists[0])
    _check_there(test_files, lists[1])
    return parts


def tiny_imagenet(path: Path) -> Parts:
    """Tiny-ImageNet: train/<class>/images/*.JPEG, and val/images with val/val_annotations.txt.

    Its test images have no labels; the validation images are the test part, as usual.
    """
    root = first_with("val/val_annotations.txt", path, path / "tiny-imagenet-200")
    train, val, table = first_with("train", root) / "train", root / "val", root / "val" / "val_annotations.txt"
    files, names = read_folder(train)
    pairs = _pairs(table, r"([^\t]+)\t([^\t]+)(?:\t.*)?", "an image, its class and a box")
    tests = [val / "images" / image for image, _ in pairs]
    parts = _parts(ImageFiles(files), names, ImageFiles(tests), [name for _, name in pairs], table)
    _check_there(tests, table)
    return parts


def image_folder(path: Path) -> Parts:
    """train/<class>/* and test/<class>/* (or val/<class>/*), classes sorted by name."""
    train = path / "train"
    if not train.is_dir():
        raise Absent("train/<class>/")
    tests = [path / name for name in ("test", "val", "valid", "validation")]
    tests = [test for test in tests if test.is_dir() and any(child.is_dir() for child in test.iterdir())]
    if not tests:
        raise ValueError(
            f"the image folder {path} has train/ and no test part; put images to test on into {path}/test/<class>/ or "
            f"{path}/val/<class>/."
        )
    (files, names), (test_files, test_names) = read_folder(train), read_folder(tests[0])
    return _parts(ImageFiles(files), names, ImageFiles(test_files), test_names, tests[0])


def _pairs(file: Path, pattern: str, form: str) -> list[tuple[str, str]]:
    """The two names in each line of a list."""
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {file} ({error}); lines of text are needed.") from error
    found = []
    for line in lines or [""]:
        match = re.fullmatch(pattern, line)
        if match is None:
            raise ValueError(f"{file} has the line {line!r}; lines are {form}.")
        found.append((match[1], match[2]))
    return found


def _parts(
    train: ImageFiles, train_names: Sequence[str], test: ImageFiles, test_names: Sequence[str], place: Path
) -> Parts:
    """With the class names sorted, and labels as positions among them; `place` says the classes to test."""
    index = {name: position for position, name in enumerate(sorted(set(train_names)))}
    unknown = sorted(set(test_names) - set(index))
    if unknown:
        raise ValueError(f"{place} has the class {unknown[0]!r}, of which there are no training images.")
    y_train, y_test = (torch.tensor([index[name] for name in names]) for names in (train_names, test_names))
    return Parts(train, y_train, test, y_test, tuple(index))


def _check_there(paths: Sequence[Path], listed: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}, which {listed} lists; unpack the official file anew.")
