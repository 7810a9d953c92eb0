"""Files: image folders and tables, read only when needed; writing a file whole or not at all."""

from __future__ import annotations

import csv
import io
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from dlcft.data.arrays import read_npy, read_npz
from dlcft.data.images import EXTENSIONS
from dlcft.data.labels import label_name
from dlcft.data.shards import Shards, find_shards

_SPLITS = {"train", "training", "val", "valid", "validation", "test"}


def read_inputs(path: str | Path, *, text: bool = False) -> Any:
    """The inputs in a folder of images, an image, .tar shards, a .csv, .npz or .npy file.

    With `text`, a .csv or .tar file holds texts, and images are refused.
    """
    path = existing(path)
    if shards := find_shards(path):
        return Shards(shards, text=text, labelled=False)
    path = _existing_of_kind(path, text)
    kind = path.suffix.lower()
    if path.is_dir():
        return _images_below(path)
    if kind in EXTENSIONS:
        return [path]
    if kind == ".csv":
        return read_table(path, ("text" if text else "path",))[0]
    if kind == ".npz":
        return read_npz(path, labelled=False)[0]
    if kind == ".npy":
        return read_npy(path)
    accepted = "a folder of images, an image, .tar shards, a .csv, .npz or .npy file"
    raise ValueError(f"cannot read inputs from {path}; give {accepted}.")


def read_labelled(path: str | Path, *, text: bool = False) -> tuple[Any, Any]:
    """Inputs and labels of an image folder, .tar shards, a .csv or an .npz file; with `text`, a .csv holds texts."""
    path = existing(path)
    if files := find_shards(path):
        shards = Shards(files, text=text)
        return shards, shards.labels
    path = _existing_of_kind(path, text)
    if path.is_dir():
        return read_folder(path)
    if path.suffix.lower() == ".csv":
        inputs, labels = read_table(path, ("text" if text else "path", "label"))
        return inputs, labels
    if path.suffix.lower() == ".npz":
        return read_npz(path)
    accepted = "a folder with one folder a class, .tar shards, a .csv or an .npz"
    raise ValueError(f"cannot read labelled data from {path}; give {accepted}.")


def read_folder(folder: Path) -> tuple[list[Path], list[str]]:
    """Image files `<folder>/<class>/**/*` and their classes."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not _is_hidden(path.name))
    loose = sorted(path.name for path in folder.iterdir() if path.suffix.lower() in EXTENSIONS)
    if loose or not classes:
        held = f"the image {loose[0]} outside of a class" if loose else "no folders"
        raise ValueError(f"the image folder {folder} holds {held}; one folder a class with its images is needed.")
    if {path.name.lower() for path in classes} <= _SPLITS:
        splits = ", ".join(path.name for path in classes)
        given = f"the image folder {folder} holds {splits}, which are no classes"
        raise ValueError(f"{given}; give one of them, such as {classes[0]}.")
    files = {path.name: _images_below(path) for path in classes}
    return [file for found in files.values() for file in found], [name for name in files for _ in files[name]]


def _is_hidden(name: str) -> bool:
    """Whether a folder is none of the user's: of an editor, of Python, or of an archive from a Mac."""
    return name.startswith(".") or name in ("__pycache__", "__MACOSX")


def read_table(path: Path, columns: tuple[str, ...]) -> tuple[list[Any], ...]:
    """Columns of a .csv file with a header; `path` is relative to the file's folder. Labels are strings."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            text = file.read()
        reader = csv.DictReader(io.StringIO(text.lstrip(), newline=""))
        header = reader.fieldnames or ()
        rows = [(reader.line_num, row) for row in reader]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not written in UTF-8 ({error.reason}); save it in UTF-8.") from error
    except csv.Error as error:
        raise ValueError(f"cannot read {path} ({error}); give a .csv with a header.") from error
    missing = [name for name in columns if name not in header]
    if missing == ["path"] and "text" in header:
        given = f"{path} holds texts, and this backbone reads images"
        raise ValueError(f"{given}; take a text encoder (hf:NAME), or one of your own with a tokenizer.")
    repeated = [name for name in columns if header.count(name) > 1]
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]} more than once; keep one of them.")
    if missing:
        there = f"has the columns {header}" if header else "is empty"
        raise ValueError(f"{path} {there}; the columns {', '.join(columns)} are needed.")
    found: tuple[list[Any], ...] = tuple([] for _ in columns)
    blank_lines = text[: len(text) - len(text.lstrip())].count("\n")
    for line, row in rows:
        place = f"line {blank_lines + line} of {path}"
        if None in row:
            raise ValueError(f"{place} has more fields than the header; put a value with a comma in quotes.")
        for name, values in zip(columns, found, strict=True):
            value = (row[name] or "").strip()
            if not value:
                raise ValueError(f"{place} has no {name}; every line needs one.")
            values.append(path.parent / value if name == "path" else value)
            if name == "label":
                _check_label(value, place)
        if columns[0] == "path" and not os.path.isfile(found[0][-1]):  # Path.is_file fails for a null character
            missing_file = "\0" not in row["path"] and not os.path.lexists(found[0][-1])
            why = "is not there" if missing_file else "is no regular file"
            raise ValueError(f"{place} names {row['path']!r}, which {why}; give the path of an image.")
    if not found[0]:
        raise ValueError(f"{path} has a header only; at least one sample is needed.")
    return found


def at_home(path: str | os.PathLike[str]) -> Path:
    """A path in which `~/` is the home folder; other names may begin with `~` as they like."""
    path = Path(path)
    return path.expanduser() if path.parts[:1] == ("~",) else path


def _check_label(value: str, place: str) -> None:
    try:
        label_name(value)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def existing(path: str | Path) -> Path:
    """The path of a file or folder that exists; `~/` is the home folder."""
    path = at_home(path)
    if not os.path.exists(path):  # Path.exists fails for text too long to be a path
        raise ValueError(f"there is no file or folder {path}; give the path of one that exists.")
    return path


def _existing_of_kind(path: str | Path, text: bool) -> Path:
    path = existing(path)
    if not (path.is_dir() or path.is_file()):  # reading a pipe or device may never end
        raise ValueError(f"{path} is neither a folder nor a regular file; give one of these.")
    if text and (path.is_dir() or path.suffix.lower() in EXTENSIONS):
        raise ValueError(f"{path} holds images, and this backbone reads texts; give a .csv with a column text.")
    return path


def _images_below(folder: Path) -> list[Path]:
    images = (path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS and path.is_file())
    found = sorted(path for path in images if not any(part[0] == "." for part in path.relative_to(folder).parts))
    if not found:
        raise ValueError(f"the folder {folder} holds no images; {', '.join(EXTENSIONS)} files are read.")
    return found


@contextmanager
def new_file(path: Path, mode: str = "xb", **options: str) -> Iterator[Any]:
    """A file to write to (mode "xb" or "x"), which replaces the one at `path` when all is on disk, or not at all."""
    temporary = path.parent / f".dlcft-{secrets.token_hex(8)}.tmp"
    try:
        with open(temporary, mode, **options) as file:  # type: ignore[call-overload]
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_names(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing, so that a power cut leaves them."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        _sync_names(folder.parent)


def _sync_names(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if sys.platform == "win32":  # which can neither open a folder nor needs to
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def written_whole(path: Path, errors: str = "strict") -> Iterator[TextIO]:
    """As `new_file`, for text, in a folder that need not exist; a link stays one, a pipe or terminal is written to."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; a file is needed.")
    path = path.resolve()
    if path.exists() and not path.is_file():
        with path.open("w", newline="", encoding="utf-8", errors=errors) as file:
            yield file
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path, "x", newline="", encoding="utf-8", errors=errors) as file:
        yield file


def write_text(path: Path, text: str) -> None:
    """Write a text file by `written_whole`."""
    with written_whole(path) as file:
        file.write(text)
