"""Official data files are pickles, and a pickle may run any code; here it makes plain values and arrays, no more.

Numpy's own classes are not called: their `__setstate__` does not check its input. Stand-ins collect the description
of an array, and the array is made once that was checked.
"""

from __future__ import annotations

import math
import pickle
from typing import IO, Any

import numpy as np

from dlcft.data.decoding import decoding

_TYPES = {"b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8"}
_ORDERS = {"|", "<", ">", "="}


class _Made:
    """Stands for numpy's types and arrays, and for the function that makes an empty array for its state to fill."""

    state: Any = ()

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Buffered(_Made):
    """Stands for numpy's function that makes an array of a buffer (protocol 5)."""


def _array(made: _Made) -> np.ndarray[Any, Any]:
    if isinstance(made, _Buffered):
        data, kind, shape, layout = made.given
    else:
        _, shape, kind, fortran, data = made.state
        layout = "F" if fortran else "C"
    if not all(type(length) is int and length >= 0 for length in shape) or not isinstance(kind, _Made):
        raise ValueError(f"an array of shape {shape}")
    code, order = _text(kind.given[0]), _text(kind.state[1]) if kind.state else "|"
    if code not in _TYPES or order not in _ORDERS:
        raise ValueError(f"an array of type {order}{code}")
    dtype = np.dtype(order + code)
    if not isinstance(data, bytes | bytearray) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {shape} without its numbers")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if layout == "F" else "C")


def _encoded(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which old protocols write bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes written in {encoding}")
    return text.encode("latin1")


_CONTAINERS = (bytes, bytearray, dict, list, set, tuple)
_ALLOWED: dict[str, Any] = {
    "_codecs.encode": _encoded,
    "numpy.dtype": _Made,
    "numpy.ndarray": _Made,
    "numpy.core.multiarray._reconstruct": _Made,  # before numpy 2
    "numpy.core.numeric._frombuffer": _Buffered,
    "numpy._core.multiarray._reconstruct": _Made,
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
    """The dict in a pickle called `name`, from Python 2 or 3, with numpy arrays; arrays are read-only."""
    with decoding(name, "a whole pickled dict of numbers, text and arrays is needed"):
        found = _Restricted(file, encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}")
        return {_text(key): _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, _Made):
        return _array(value)
    if isinstance(value, list) and value and all(isinstance(item, bytes) for item in value):
        return [_text(item) for item in value]
    return value


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where text belongs")
    return value
