"""Official data files are pickles, and a pickle may run anything; here it can make plain values and arrays, no more.

Even numpy's own classes are out of its reach: their `__setstate__` trusts what it is given. Stand-ins collect what the
file says of an array, and the array is made after all of that was checked.
"""

from __future__ import annotations

import math
import pickle
import struct
from typing import IO, Any

import numpy as np

_TYPES = {"b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}
_ORDERS = {"|", "<", ">", "="}
# what a damaged pickle makes the unpickler, or a stand-in, raise
_BROKEN = (
    pickle.UnpicklingError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
    struct.error,
)


class _Type:
    """Stands for `numpy.dtype`."""

    def __init__(self, code: Any = None, *_: Any) -> None:
        self.code, self.order = code, "|"

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])

    def dtype(self) -> np.dtype[Any]:
        code = _text(self.code)
        if code not in _TYPES or self.order not in _ORDERS:
            raise ValueError(f"an array of type {self.order}{code}")
        return np.dtype(self.order + code)


class _Array:
    """Stands for `numpy.ndarray`, and for the function that makes an empty one for its state to fill."""

    state: tuple[Any, ...] = ()

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        _, *rest = state
        self.state = tuple(rest)

    def array(self) -> np.ndarray[Any, Any]:
        shape, kind, fortran, data = self.state
        if not all(type(length) is int and length >= 0 for length in shape) or not isinstance(kind, _Type):
            raise ValueError(f"an array of shape {shape}")
        dtype = kind.dtype()
        if not isinstance(data, bytes | bytearray) or len(data) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"an array of shape {shape} without its numbers")
        return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")


class _Buffered(_Array):
    """Stands for numpy's function that makes an array of a buffer (protocol 5)."""

    def __init__(self, data: Any = None, kind: Any = None, shape: Any = (), order: Any = "C", *_: Any) -> None:
        self.state = (shape, kind, order == "F", data)


def _encoded(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which old protocols write bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes written in {encoding}")
    return text.encode("latin1")


_CONTAINERS = (bytes, bytearray, dict, list, set, tuple)
_ALLOWED: dict[str, Any] = {
    "_codecs.encode": _encoded,
    "numpy.dtype": _Type,
    "numpy.ndarray": _Array,
    "numpy.core.multiarray._reconstruct": _Array,  # before numpy 2
    "numpy.core.numeric._frombuffer": _Buffered,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy._core.numeric._frombuffer": _Buffered,
    **{f"{module}.{kind.__name__}": kind for module in ("__builtin__", "builtins") for kind in _CONTAINERS},
}


class _Restricted(pickle._Unpickler):
    """The unpickler written in Python, because a damaged file makes that in C allocate gigabytes."""

    # for the same reason a bytearray, which is allocated before it is read, is read as bytes are
    dispatch = pickle._Unpickler.dispatch | {pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]]}

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _ALLOWED[f"{module}.{name}"]


def read_pickle(file: IO[bytes], name: str) -> dict[str, Any]:
    """The dict in a pickle, from Python 2 or 3, with numpy arrays; arrays are read-only.

    Args:
        file: opened for reading bytes.
        name: what to call it in a sentence.

    Raises:
        ValueError: when it is damaged, no dict, or asks for anything but plain values and arrays of numbers.
    """
    try:
        found = _Restricted(file, encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        return {_text(key): _plain(value) for key, value in found.items()}
    except _BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"cannot read {name} ({reason}); a whole pickled dict of numbers, text and arrays is needed."
        ) from error


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.array()
    if isinstance(value, list) and value and all(isinstance(item, bytes) for item in value):
        return [_text(item) for item in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where text belongs")
    return value
