"""Pages for people: one file that loads nothing, fits a telephone, and follows the reader's choice of light or dark."""

from __future__ import annotations

from importlib import resources
from typing import Any

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def render(template: str, **values: Any) -> str:
    """A page from a template that is named by its path in the package and extends `pages/frame.html.jinja`."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    files = FunctionLoader(lambda name: (resources.files("dlcft") / name).read_text(encoding="utf-8"))
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=files, autoescape=True, undefined=StrictUndefined, **options)
    return environment.get_template(template).render(values)


def in_bytes(size: float) -> str:
    """A number of bytes in words."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


def in_seconds(seconds: float) -> str:
    """A duration in words."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.3g} s"
