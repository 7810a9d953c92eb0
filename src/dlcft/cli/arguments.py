"""What commands make of their arguments."""

from __future__ import annotations

import json
from typing import Any


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
