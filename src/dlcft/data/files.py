"""Data in files: image folders, tables of image files or texts, numpy's archives; nothing is loaded too early."""

from __future__ import annotations

import csv
import io
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from dlcft.data.images import EXTENSIONS

_KEYS = (("x", "y"), ("images", "labels"), ("data", "targets"))
_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


def read_inputs(path: str | Path, *, text: bool = False) -> Any:
    """Image files, or an array, of a folder of images, an image, a .csv, .npz or .npy file.

    With `text`, a .csv file holds texts, and images are refused.

    Raises:
        ValueError: when it is none of these.
    """
    path = existing(path)
    kind = path.suffix.lower()
    _refuse_images(path, text)
    if path.is_dir():
        return _images_below(path)
    if kind in EXTENSIONS:
        return [path]
    if kind == ".csv":
        return read_table(path, ("text" if text else "path",))[0]
    if kind == ".npz":
        return read_npz(path, labelled=False)[0]
    if kind == ".npy":
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"cannot read {path} ({error}); give what np.save wrote of numbers.") from error
    raise ValueError(f"cannot read inputs from {path}; give a folder of images, an image, a .csv, .npz or .npy file.")


def read_labelled(path: str | Path, *, text: bool = False) -> tuple[Any, Any]:
    """Inputs and labels of an image folder, a .csv or an .npz file; with `text`, a .csv holds texts.

    Raises:
        ValueError: when it is none of these.
    """
    path = existing(path)
    _refuse_images(path, text)
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() == ".csv":
        inputs, labels = read_table(path, ("text" if text else "path", "label"))
        return inputs, labels
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    raise ValueError(
        f"cannot read labelled data from {path}; give a folder with one folder a class, a .csv or an .npz."
    )


def read_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Image files `<folder>/<class>/**/*` and their classes.

    Raises:
        ValueError: when images lie outside of a class's folder, or a class has none.
    """
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith((".", "__")))
    loose = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if loose or not classes:
        held = f"the image {loose[0]} outside of a class" if loose else "no folders"
        raise ValueError(f"the image folder {folder} holds {held}; one folder a class with its images is needed.")
    if {path.name.lower() for path in classes} <= _SPLITS:
        raise ValueError(
            f"the image folder {folder} holds {', '.join(path.name for path in classes)}, which are no classes; give "
            f"one of them, such as {classes[0]}."
        )
    files = {path.name: _images_below(path) for path in classes}
    return [file for found in files.values() for file in found], [name for name in files for _ in files[name]]


def read_table(path: Path, columns: tuple[str, ...]) -> tuple[list[Any], ...]:
    """Columns of a .csv file with a header; `path` is relative to the file's folder. Labels are strings.

    Raises:
        ValueError: when it is no such file, or a column or value is missing.
    """
    try:
        return _read_table(path, columns)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not written in UTF-8 ({error.reason}); save it so.") from error
    except csv.Error as error:
        raise ValueError(f"cannot read {path} ({error}); give a .csv with a header.") from error


def _read_table(path: Path, columns: tuple[str, ...]) -> tuple[list[Any], ...]:
    found: tuple[list[Any], ...] = tuple([] for _ in columns)
    with path.open(newline="", encoding="utf-8-sig") as file:
        text = file.read()
    reader = csv.DictReader(io.StringIO(text.lstrip(), newline=""))
    before = text[: len(text) - len(text.lstrip())].count("\n")  # blank lines
    header = reader.fieldnames or ()
    missing = [name for name in columns if name not in header]
    if missing == ["path"] and "text" in header:
        raise ValueError(
            f"{path} holds texts, and this backbone reads images; take a text encoder (hf:NAME), or one of your "
            "own with a tokenizer."
        )
    repeated = [name for name in columns if header.count(name) > 1]
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]} more than once; which one is meant cannot be told.")
    if missing:
        there = f"has the columns {header}" if header else "is empty"
        raise ValueError(f"{path} {there}; the columns {', '.join(columns)} are needed.")
    for row in reader:
        place = f"line {before + reader.line_num} of {path}"
        if None in row:
            raise ValueError(f"{place} has more fields than the header; put what holds a comma in quotes.")
        for name, values in zip(columns, found, strict=True):
            value = (row[name] or "").strip()
            if not value:
                raise ValueError(f"{place} has no {name}; every line needs one.")
            values.append(path.parent / value if name == "path" else value)
    if not found[0]:
        raise ValueError(f"{path} has a header only; at least one sample is needed.")
    return found


def read_npz(path: Path, *, labelled: bool = True) -> tuple[Any, Any]:
    """The arrays x and y (or images and labels, or data and targets) of an .npz file; y is None if not `labelled`.

    What `np.savez` wrote is memory-mapped; `np.savez_compressed` packs an array as a whole, so it is loaded as one.

    Raises:
        ValueError: when the file is broken or has other names.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            pairs = [pair for pair in _KEYS if set(pair if labelled else pair[:1]) <= set(names)]
            if len(pairs) != 1:
                wanted = " or ".join(" and ".join(pair) if labelled else pair[0] for pair in _KEYS)
                raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; it must hold {wanted}.")
            x, y = pairs[0]
            return _member(path, archive, x), _member(path, archive, y) if labelled else None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"cannot read {path} ({error}); give what np.savez wrote.") from error


def existing(path: str | Path) -> Path:
    """The path, with `~` expanded.

    Raises:
        ValueError: when nothing is there.
    """
    path = Path(path).expanduser()
    if not os.path.exists(path):  # Path.exists fails for text too long to be a path
        raise ValueError(f"there is no file or folder {path}; give the path of one that exists.")
    return path


def _refuse_images(path: Path, text: bool) -> None:
    if text and (path.is_dir() or path.suffix.lower() in EXTENSIONS):
        raise ValueError(f"{path} holds images, and this backbone reads texts; give a .csv with a column text.")


def _images_below(folder: Path) -> list[Path]:
    images = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    found = sorted(path for path in images if not _hidden(path.relative_to(folder)) and path.is_file())
    if not found:
        raise ValueError(f"the folder {folder} holds no images; {', '.join(EXTENSIONS)} files are read.")
    return found


def _hidden(path: Path) -> bool:
    """Whether it, or a folder that it is in, begins with a dot."""
    return any(part[0] == "." for part in path.parts)


@contextmanager
def written_whole(path: Path, errors: str = "strict") -> Iterator[TextIO]:
    """A text file of which all is written or nothing; a link stays one, and a pipe or terminal is written as it is.

    Raises:
        ValueError: when it is a folder.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a file is needed.")
    path = path.resolve()
    options: dict[str, Any] = {"newline": "", "encoding": "utf-8", "errors": errors}
    if path.exists() and not path.is_file():
        with path.open("w", **options) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("w", **options) as file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> np.ndarray[Any, Any]:
    """One array of an .npz file, memory-mapped where it lies there as it is in memory."""
    info = archive.getinfo(f"{name}.npy")
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)  # two lengths end a member's header; they differ from those in `info`
        lengths = file.read(4)
        file.seek(int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little"), 1)
        if info.compress_type == zipfile.ZIP_STORED:
            reader = readers.get(np.lib.format.read_magic(file))
            if reader is not None:
                shape, fortran, dtype = reader(file)
                if 0 not in shape and not dtype.hasobject:
                    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")
    with archive.open(info) as member:
        try:
            return np.lib.format.read_array(member, allow_pickle=False)
        except ValueError as error:
            raise ValueError(f"cannot read {name} of {path} ({error}); numbers or strings are needed.") from error
