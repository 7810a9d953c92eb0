"""For the reference pages: a section `Example:` is code, as `Examples:` is."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Rename the section before it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
