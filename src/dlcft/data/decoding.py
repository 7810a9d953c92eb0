"""Files from elsewhere: whatever their decoders raise becomes one sentence with the file's name."""

from __future__ import annotations

import contextlib
import pickle
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors

# raised by Pillow, numpy, zipfile, tarfile, csv, pickle, safetensors and torch for broken, cut and forged files
BROKEN: tuple[type[Exception], ...] = (OSError, EOFError, MemoryError, RuntimeError, SyntaxError, AssertionError)
BROKEN += (ArithmeticError, AttributeError, ImportError, LookupError, TypeError, ValueError)
BROKEN += (struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error, pickle.UnpicklingError)
BROKEN += (tarfile.TarError, safetensors.SafetensorError)
with contextlib.suppress(ImportError):  # Python can be built without it
    from lzma import LZMAError

    BROKEN += (LZMAError,)


@contextmanager
def decoding(name: str | Path, needed: str) -> Iterator[None]:
    """Turn an error of a decoder into a ValueError: what cannot be read, why, and what is needed.

    Its warnings, of what is odd and was read all the same, are not shown.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BROKEN as error:
        raise ValueError(f"cannot read {name} ({first_line(error)}); {needed}.") from error


def first_line(error: Exception) -> str:
    """The message of an error, to be put into a sentence."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return text if len(text) <= 200 else f"{text[:200]}…"
