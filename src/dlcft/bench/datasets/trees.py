"""Folders of image files: MIT-67, Tiny-ImageNet, and any other with train/<class>/ and test/<class>/."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dlcft.bench.datasets.download import Absent
from dlcft.bench.datasets.image_set import ImageFiles, Parts
from dlcft.data.files import read_folder

_TESTS = ("test", "val", "valid", "validation")


def mit67(path: Path) -> Callable[[], Parts]:
    """Finds and reads MIT-67: Images/<class>/*.jpg, and TrainImages.txt and TestImages.txt in the same folder or above.

    As in the paper, images are brought to 256 × 256 (training takes windows of 224), test images then cut to the
    central 224 × 224.

    Raises:
        Absent: when it is not there.
    """
    roots = [root for root in (path, path / "indoorCVPR_09") if (root / "Images").is_dir()]
    if not roots:
        raise Absent("Images")
    lists = {}
    for name in ("TrainImages.txt", "TestImages.txt"):
        files = [folder / name for folder in (roots[0], path) if (folder / name).is_file()]
        if not files:
            raise Absent(name)
        lists[name] = files[0]

    def read() -> Parts:
        found = []
        for file in lists.values():
            names = [line.strip() for line in _lines(file) if line.strip()]
            loose = [name for name in names if name.count("/") != 1]
            if loose or not names:
                raise ValueError(f"{file} has the line {(loose or [''])[0]!r}; lines are <class>/<image>.")
            found.append(([roots[0] / "Images" / name for name in names], [name.split("/")[0] for name in names]))
        (train, train_labels), (test, test_labels) = found
        classes, y_train, y_test = _indexed(train_labels, test_labels, str(lists["TestImages.txt"]))
        for file, paths in zip(lists.values(), (train, test), strict=True):
            _check_there(paths, file)
        size = (256, 256)
        return Parts(
            ImageFiles(train, size=size), y_train, ImageFiles(test, size=size, crop=(224, 224)), y_test, classes
        )

    return read


def tiny_imagenet(path: Path) -> Callable[[], Parts]:
    """Finds and reads Tiny-ImageNet: train/<class>/images/*.JPEG, and val/images with val/val_annotations.txt.

    Its test images have no labels; the validation images are the test part, as usual.

    Raises:
        Absent: when it is not there.
    """
    roots = [root for root in (path, path / "tiny-imagenet-200") if (root / "val" / "val_annotations.txt").is_file()]
    if not roots:
        raise Absent("val/val_annotations.txt")
    train, val = roots[0] / "train", roots[0] / "val"
    if not train.is_dir():
        raise Absent("train")

    def read() -> Parts:
        files = {
            folder.name: sorted(folder.glob("images/*.JPEG")) for folder in sorted(train.iterdir()) if folder.is_dir()
        }
        empty = [name for name, found in files.items() if not found]
        if empty or not files:
            raise ValueError(f"{train / (empty[0] if empty else '')} has no images; the official folder has.")
        table = val / "val_annotations.txt"
        rows = [line.split("\t") for line in _lines(table) if line.strip()]
        short = [row for row in rows if len(row) < 2]
        if short or not rows:
            raise ValueError(
                f"{table} has the line {(short or [['']])[0][0]!r}; lines are an image, its class and a box."
            )
        test = [val / "images" / row[0] for row in rows]
        labels = [name for name, found in files.items() for _ in found]
        classes, y_train, y_test = _indexed(labels, [row[1].strip() for row in rows], str(table))
        _check_there(test, table)
        return Parts(
            ImageFiles([file for found in files.values() for file in found]), y_train, ImageFiles(test), y_test, classes
        )

    return read


def image_folder(path: Path) -> Callable[[], Parts]:
    """Finds and reads train/<class>/* and test/<class>/* (or val/<class>/*); classes are sorted by name.

    Raises:
        Absent: when there is no training part.
        ValueError: when there is no test part.
    """
    train = path / "train"
    if not train.is_dir():
        raise Absent("train/<class>/")
    tests = [path / name for name in _TESTS if _has_folders(path / name)]
    if not tests:
        raise ValueError(
            f"the image folder {path} has train/ and no test part; put images to test on into {path}/test/<class>/ or "
            f"{path}/val/<class>/."
        )

    def read() -> Parts:
        (files, labels), (test_files, test_labels) = read_folder(train), read_folder(tests[0])
        classes, y_train, y_test = _indexed(labels, test_labels, str(tests[0]))
        return Parts(ImageFiles(files), y_train, ImageFiles(test_files), y_test, classes)

    return read


def _has_folders(folder: Path) -> bool:
    return folder.is_dir() and any(child.is_dir() for child in folder.iterdir())


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"cannot read {path} ({error}); lines of text are needed.") from error


def _indexed(train: Sequence[str], test: Sequence[str], place: str) -> tuple[tuple[str, ...], Tensor, Tensor]:
    """Class names, sorted, and labels as positions among them."""
    classes = sorted(set(train))
    index = {name: position for position, name in enumerate(classes)}
    unknown = sorted(set(test) - set(index))
    if unknown:
        raise ValueError(f"{place} has the class {unknown[0]!r}, of which there are no training images.")
    y_train, y_test = (torch.tensor([index[name] for name in names]) for names in (train, test))
    return tuple(classes), y_train, y_test


def _check_there(paths: Sequence[Path], listed: Path) -> None:
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}, which {listed} lists; unpack the official file anew.")
