"""What commands make of their arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# what ends a command in one sentence; of RuntimeErrors, those about memory
FAILURES = (ValueError, TypeError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError)


def setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """`key=value`, the value a number, true, false, null or a word.

    Raises:
        ValueError: when there is no =.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} is {text!r}; key=value is needed.")
    try:
        return key, json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
    except json.JSONDecodeError:
        return key, value


def positive(name: str, value: int) -> None:
    """Refuse what is below 1.

    Raises:
        ValueError: when it is.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1.")


def in_number(count: int, what: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def apart(option: str, path: Path, model: Path, *inputs: Path | None) -> None:
    """Refuse to write over what is read.

    Raises:
        ValueError: when the path is one of the inputs, has an image's name, or lies in the model's directory.
    """
    from dlcft.data.images import EXTENSIONS

    if path.suffix.lower() in EXTENSIONS:
        raise ValueError(f"{option} is {path}, the name of an image; choose another one.")
    place = path.resolve()
    if model.resolve() in place.parents:
        raise ValueError(f"{option} is {path}, in the directory of the model; choose another place.")
    if place in [given.resolve() for given in inputs if given is not None]:
        raise ValueError(f"{option} is {path}, which is read; choose another place.")
