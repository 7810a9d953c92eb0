"""Classes by name: a built-in name such as "kfac", or "module:Name" for a class of the user's own."""

from __future__ import annotations

import difflib
import importlib
import operator
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def check_name(kind: str, name: str, known: Collection[str]) -> None:
    """Refuse an unknown name, and suggest the nearest known one."""
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? Known" if near else "known"
        raise ValueError(f"unknown {kind} {name!r}; {hint}: {', '.join(known)}.")


def qualified(cls: type) -> str:
    """The "module:Name" by which `find_class` finds a class again."""
    if "<locals>" in cls.__qualname__:
        raise ValueError(f"{cls.__name__} is defined inside a function; define it at the top of a module.")
    return f"{cls.__module__}:{cls.__qualname__}"


def is_imported(name: str) -> bool:
    """Whether the module of a "module:Name" is imported already."""
    return name.partition(":")[0] in sys.modules


def find_class(kind: str, name: str, known: Mapping[str, type[T]], base: type[Any]) -> type[T]:
    """The subclass of `base` with a built-in name or a "module:Name", whose module is imported if need be."""
    module, colon, attribute = name.partition(":")
    if not colon:
        check_name(kind, name, known)
        return known[name]
    if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise ValueError(f"{kind} {name!r} is no 'module:Name'.")
    try:
        found: Any = operator.attrgetter(attribute)(importlib.import_module(module))
    except ImportError as error:
        raise ValueError(f"the {kind} {name!r} cannot be imported: {error}.") from error
    except AttributeError as error:
        raise ValueError(f"the {kind} {name!r} does not exist: {error}.") from error
    if not (isinstance(found, type) and issubclass(found, base)):
        got = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise ValueError(f"the {kind} {name!r} must be a subclass of {base.__name__}; it is {got}.")
    return found
