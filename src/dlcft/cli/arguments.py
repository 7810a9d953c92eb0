"""Arguments of commands, parsed and checked."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TextIO
from unicodedata import category

from cyclopts import Parameter

# errors that end a command with one sentence; of RuntimeErrors, those about memory
FAILURES = (ValueError, TypeError, OSError, ImportError, FloatingPointError, MemoryError, RuntimeError)
Model = Annotated[Path, Parameter(help="The directory of the model.")]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]
_OWN = "A module of your own that defines the model's method or curvature; may be repeated."
Import = Annotated[list[str] | None, Parameter(name="--import", help=_OWN)]
_REPEATED = "The model's backbone, repeated, where its name imports or downloads something (module:factory, timm:, …)."
Backbone = Annotated[str | None, Parameter(help=_REPEATED)]
_MOVED = "Where the backbone's file of weights is now, if it was moved; it must hold the same network."
Weights = Annotated[str | None, Parameter(help=_MOVED)]
_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


def setting(text: str, option: str = "--set") -> tuple[str, Any]:
    """`key=value`, the value a number, true, false, null or a word."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{option} is {text!r}; key=value is needed.")
    try:
        return key, json.loads({"None": "null", "True": "true", "False": "false"}.get(value, value))
    except json.JSONDecodeError:
        return key, value


def import_own(names: Iterable[str | None]) -> None:
    """Import the modules (`module` or `module:Name`) of a user's own classes, also from the current folder."""
    for name in names:
        if name is None:
            continue
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # last: a file of the folder never replaces an installed module
        try:
            importlib.import_module(name.partition(":")[0])
        except ImportError as error:
            raise ValueError(f"{name} cannot be imported ({error}).") from error


def printable(text: object, *, lines: bool = False) -> str:
    """A text without characters that move a terminal's cursor, colour it, or turn the direction of reading."""

    def steers(character: str) -> bool:
        return category(character) == "Cc" or character in _TURNING

    kept = "\n" if lines else ""
    return "".join(f"\\u{ord(c):04x}" if c not in kept and steers(c) else c for c in str(text))


def say(text: str, *, to: TextIO | None = None) -> None:
    """Print lines in which labels, file names and sentences of others may stand; to standard output by default."""
    print(printable(text, lines=True), file=to)


def warn(sentence: str) -> None:
    """Print a sentence to standard error."""
    say(f"dlcft: {sentence}", to=sys.stderr)


def positive(name: str, value: int) -> None:
    """Reject a number below 1."""
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1.")


def in_number(count: int, what: str) -> str:
    """`1 task`, `2 tasks`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def apart(option: str, path: Path, model: Path, *inputs: Path | None) -> None:
    """Refuse to write over an input: the path of one, an image's name, or a place in the model's directory."""
    from dlcft.data.images import EXTENSIONS

    if path.suffix.lower() in EXTENSIONS:
        raise ValueError(f"{option} is {path}, the name of an image; choose another one.")
    place = path.resolve()
    if model.resolve() in place.parents:
        raise ValueError(f"{option} is {path}, in the directory of the model; choose another place.")
    if place in [given.resolve() for given in inputs if given is not None]:
        raise ValueError(f"{option} is {path}, which is read; choose another place.")
