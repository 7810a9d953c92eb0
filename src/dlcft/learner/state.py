"""A learner on disk: writing and reading a version, and refusing one that cannot be used or continued."""

from __future__ import annotations

import copy
import json
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlcft.data.decoding import BROKEN, first_line
from dlcft.learner.records import Record, read_record
from dlcft.network.names import is_imported
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

# All are read. 1 had flat settings and untyped records; in 1 and 2 `_RENAMED` curvatures had other names, and DER's α
# was the weight of a mean over outputs; up to 3 symmetric matrices were stored whole, which is read all the same; up to
# 4 the header had the history, by which a manifest grew with every task.
LEARNER_FORMAT = 5
_RENAMED = {"tkfac": "tkfac-per-sample", "tkfac-trace": "tkfac"}
_NONE = type(None)
_MOST_FEATURES = 10**6  # of a network's own
_FIELDS: dict[str, set[type]] = {
    "backbone": {str},
    "recipe": {dict},
    "scenario": {str},
    "new_labels": {str},
    "seed": {int},
    "amp": {bool},
    "train": {str, list, _NONE},
    "preprocess": {dict, _NONE},
    "width": {int, _NONE},
    "labels": {dict},
    "tasks": {int},
    "notes": {dict},
    "parts": {dict},
}


def write_learner(store: Store, tensors: dict[str, Tensor], header: dict[str, Any], **options: Any) -> int:
    """Commit a learner's state; its history, which grows with every task, goes beside the tensors as JSON."""
    rest = {name: value for name, value in header.items() if name != "history"}
    history = torch.frombuffer(bytearray(json.dumps(header["history"]).encode()), dtype=torch.uint8)
    return store.commit({**tensors, "history": history}, {"learner": LEARNER_FORMAT, **rest}, **options)


def check_header(header: Mapping[str, Any], directory: Path) -> None:
    """Refuse a version that is no learner's, or a newer one's, before anything else in it is looked at.

    Raises:
        CheckpointError: says which.
    """
    found = header.get("learner")
    if type(found) is not int or found < 1:
        raise CheckpointError(f"{directory} holds no learner that dlcft has written.")
    if found > LEARNER_FORMAT:
        newer = f"{directory} was written by a newer dlcft (learner format {found})"
        raise CheckpointError(f"{newer}; this one reads formats up to {LEARNER_FORMAT}.")
    for name, kinds in _FIELDS.items():
        if name not in header or type(header[name]) not in kinds:
            held = f"a {type(header[name]).__name__}" if name in header else "nothing"
            raise CheckpointError(f"{directory} holds a learner with {held} as {name!r}; dlcft writes none such.")
    notes, width = header["notes"], header["width"]
    origin, temperature = notes.get("backbone"), notes.get("temperature")
    right = header["tasks"] >= 0 and (width is None or 0 < width <= _MOST_FEATURES)
    right &= temperature is None or (type(temperature) in (int, float) and 1e-9 < temperature < 1e9)
    if origin is not None:
        right &= isinstance(origin, dict) and origin.keys() <= {"name", "weights", "width"}
        right &= right and isinstance(origin.get("name"), str) and isinstance(origin.get("weights"), str | _NONE)
    if not right:
        raise CheckpointError(f"{directory} holds a learner whose tasks, width or notes dlcft has not written.")


def read_learner(store: Store, version: int | None) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The tensors, the header and the hash of a learner's version, of the current one by default.

    Raises:
        CheckpointError: when the directory holds none, or of a newer format.
    """
    tensors, entry = store.load(version)
    check_header(entry.header, store.directory)
    if entry.header.get("custom") is not None:
        raise CheckpointError(
            f"{store.directory} was learned by {entry.header['custom']!r}, a method of your own, in a version before "
            "0.1.0 that did not save its settings; it cannot be loaded."
        )
    with as_written(store.directory):
        header = copy.deepcopy(entry.header)
        if header["learner"] > 4:
            header["history"] = json.loads(tensors.pop("history").numpy().tobytes())
        if header["learner"] < 3:
            _rename(header)
        header["labels"] = {head: _composed(names) for head, names in header["labels"].items()}
    wrong = [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.isnan().any()]
    if wrong:
        raise CheckpointError(f"{store.directory} holds numbers that are none (NaN) in {wrong[0]!r}.")
    return tensors, header, entry.sha256


def read_history(store: Store) -> list[Record]:
    """The records of the current version.

    Raises:
        CheckpointError: see `read_learner`.
    """
    header = read_learner(store, None)[1]
    with as_written(store.directory):
        return [read_record(content) for content in header["history"]]


@contextmanager
def as_written(directory: Path) -> Iterator[None]:
    """Turn an error from inside a state that dlcft cannot have written into one sentence."""
    try:
        yield
    except CheckpointError:  # a sentence already
        raise
    except BROKEN as error:
        why = first_line(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{directory} holds a learner that cannot be read ({why}).") from error


def _rename(header: dict[str, Any]) -> None:
    settings = header["recipe"] if header["learner"] == 1 else header["recipe"]["method"]
    if settings.get("curvature") in _RENAMED:
        settings["curvature"] = _RENAMED[settings["curvature"]]
    if settings.get("replay_logits"):
        settings["replay_logits"] /= max(map(len, header["labels"].values()), default=1)


def _composed(names: list[Any]) -> list[Any]:
    """Label names in the Unicode form of today's data, unless two would become one."""
    composed = [unicodedata.normalize("NFC", name) if isinstance(name, str) else name for name in names]
    return composed if len(set(composed)) == len(names) else names


def check_current(store: Store, sha256: str | None) -> None:
    """Refuse to go on from a version that is not current any more.

    Args:
        store: of the learner.
        sha256: of the version that the learner came from; None for a new one.

    Raises:
        CheckpointError: when the directory holds another learner, or another version is current by now.
    """
    current = store.current
    if (None if current is None else current.sha256) != sha256:
        why = "holds another learner" if sha256 is None else "has changed meanwhile: another version is current now"
        raise CheckpointError(f"{store.directory} {why}; load it, or choose an empty directory.")


def refuse_unimported(header: Any, directory: object) -> None:
    """Reject a saved learner that names a class from a module which is not imported: loading runs no foreign code.

    Raises:
        CheckpointError: names the class and the module.
    """
    for name in _own_classes(header):
        module, _, path = name.partition(":")
        if module == "__main__" and not hasattr(sys.modules["__main__"], path.split(".")[0]):
            raise CheckpointError(
                f"{directory} was learned with {path!r}, a class of the program that saved it; define it there too, or "
                "before learning in a module of its own."
            )
        if not is_imported(name):
            raise CheckpointError(
                f"{directory} was learned with {name!r}, a class of your own; import {module} first, or on the command "
                f"line give --import {module}, if you trust it."
            )


def _own_classes(header: Any) -> Iterator[str]:
    """Every `module:Name` under "kind" and "curvature" in a header."""
    if isinstance(header, Mapping):
        for key, value in header.items():
            if key in ("kind", "curvature") and isinstance(value, str) and ":" in value:
                yield value
            yield from _own_classes(value)
    elif isinstance(header, list):
        for value in header:
            yield from _own_classes(value)
