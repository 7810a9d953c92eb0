"""A learner on disk: reading a version, and refusing one that cannot be used or continued."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from dlcft.network.names import is_imported
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store

# All are read. 1 had flat settings and untyped records; in 1 and 2 `_RENAMED` curvatures had other names, and DER's α
# was the weight of a mean over outputs; up to 3 symmetric matrices were stored whole, which is read all the same.
LEARNER_FORMAT = 4
_RENAMED = {"tkfac": "tkfac-per-sample", "tkfac-trace": "tkfac"}


def read_learner(store: Store, version: int | None) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """The tensors, the header and the hash of a learner's version, of the current one by default.

    Raises:
        CheckpointError: when the directory holds none, or of a newer format.
    """
    tensors, entry = store.load(version)
    found = entry.header.get("learner")
    if not isinstance(found, int) or not 1 <= found <= LEARNER_FORMAT:
        raise CheckpointError(
            f"{store.directory} holds learner format {found!r}; this version reads up to {LEARNER_FORMAT}."
        )
    if entry.header.get("custom") is not None:
        raise CheckpointError(
            f"{store.directory} was learned by {entry.header['custom']!r}, a method of your own, in a version before "
            "0.1.0 that did not save its settings; it cannot be loaded."
        )
    header = copy.deepcopy(entry.header)
    if found < 3:
        settings = header["recipe"] if found == 1 else header["recipe"]["method"]
        if settings.get("curvature") in _RENAMED:
            settings["curvature"] = _RENAMED[settings["curvature"]]
        if settings.get("replay_logits"):
            settings["replay_logits"] /= max(map(len, header["labels"].values()), default=1)
    return tensors, header, entry.sha256


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
