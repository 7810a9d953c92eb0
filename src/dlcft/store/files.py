"""The two kinds of files in a store, sealed JSON and safetensors: written whole or not at all, damage is noticed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
import torch
from torch import Tensor

from dlcft import __version__
from dlcft.closed_form import triangles
from dlcft.data.files import new_file

Tensors = dict[str, Tensor]
Header = dict[str, Any]

FORMAT = "dlcft"
FORMAT_VERSION = 1
LARGEST_JSON = 64 * 2**20
CHUNK = 2**20  # stays in the processor's cache between hashing and writing

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_TRIANGLE = "symmetric: the upper triangle, row by row"


class CheckpointError(ValueError):
    """A directory cannot be used; the message says why, and nothing was changed."""


def state_digest(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """A sha256 that two states share only if every bit of every tensor and the whole header agree.

    >>> state_digest({"a": torch.zeros(2)}, {}) == state_digest({"a": -torch.zeros(2)}, {})
    False
    """
    digest = hashlib.sha256(json.dumps(plain(header), sort_keys=True).encode() + prefix(tensors))
    for name in _ordered(tensors):
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def write_json(path: Path, content: Header) -> None:
    """Replace a JSON file."""
    sealed = _sealed(content)
    if len(sealed) > LARGEST_JSON:
        raise CheckpointError(f"the header makes {path.name} {len(sealed)} bytes long; {LARGEST_JSON} are accepted.")
    with new_file(path) as file:
        file.write(sealed)


def read_json(path: Path) -> Header | None:
    """The content of a file that `write_json` wrote; None when there is no file."""
    try:
        _check_file(path, 0, LARGEST_JSON)
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        content = json.loads(raw)
        intact = isinstance(content, dict) and raw == _sealed(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON that dlcft has written.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by dlcft.")
    version = content["format_version"] if type(content.get("format_version")) is int else 0
    if version > FORMAT_VERSION:
        accepted = f"dlcft {__version__} reads versions up to {FORMAT_VERSION}"
        raise CheckpointError(f"{path} has format version {version}; {accepted}.")
    if not intact or version != FORMAT_VERSION:
        raise CheckpointError(f"{path} is damaged: its checksum does not match its content.")
    return {key: value for key, value in content.items() if key not in ("format", "format_version", "checksum")}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write a safetensors file and hash it in the same pass; gives its size and sha256.

    Of a symmetric matrix only the upper triangle is written; the file's metadata names these.
    """
    packed = _packed(tensors)
    start = prefix(tensors, packed)
    digest, size = hashlib.sha256(start), len(start)
    with new_file(path) as file:
        file.write(start)
        for name in _ordered(tensors):
            for piece in _pieces(tensors[name], name in packed):
                digest.update(piece)
                file.write(piece)
                size += len(piece)
    return size, digest.hexdigest()


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of the file that `write_tensors` would write."""
    packed = _packed(tensors)
    numbers = {name: math.prod(_stored_shape(tensor, name in packed)) for name, tensor in tensors.items()}
    return len(prefix(tensors, packed)) + sum(n * tensors[name].element_size() for name, n in numbers.items())


def read_tensors(path: Path, size: int, sha256: str) -> Tensors:
    """The tensors of a safetensors file of this size and hash."""
    verify(path, size, sha256)
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass  # it has checked that the data of all tensors follow each other, and fill the file
        # Its tensors are maps of the file, which counts as memory; and they change when the file is overwritten.
        with open(path, "rb") as file:
            entries = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            packed = entries.pop("__metadata__", {})
            ordered = sorted(entries, key=lambda name: entries[name]["data_offsets"])
            return {name: _read(file, entries[name], name in packed) for name in ordered}
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file that dlcft has written ({error}).") from error


def verify(path: Path, size: int, sha256: str) -> None:
    """Check the size and hash of a file."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    try:
        _check_file(path, size, size)
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its sha256 is not the one that was recorded.")


def check_fields(entry: object, fields: Mapping[str, set[type]], where: Path) -> None:
    """Check the names and types of all fields of a JSON object."""
    if not isinstance(entry, dict) or entry.keys() != fields.keys():
        raise CheckpointError(f"{where} has an entry whose fields are not {', '.join(fields)}.")
    for name, types in fields.items():
        if type(entry[name]) not in types:
            raise CheckpointError(f"{where} has a {type(entry[name]).__name__} as {name!r}.")


def plain(value: Any) -> Any:
    """A copy of a header as JSON gives it back: tuples become lists."""
    if isinstance(value, Mapping):
        wrong = [key for key in value if not isinstance(key, str)]
        if wrong:
            raise TypeError(f"the header has the key {wrong[0]!r}; JSON's keys are strings.")
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise TypeError(f"the header holds {value!r}; accepted are None, strings, booleans, finite numbers, lists, dicts.")


def prefix(tensors: Mapping[str, Tensor], packed: Collection[str] = ()) -> bytes:
    """The start of a safetensors file, before the data: the length of a JSON text, and the text."""
    entries: Header = {"__metadata__": dict.fromkeys(sorted(packed), _TRIANGLE)} if packed else {}
    end = 0
    for name in _ordered(tensors):
        tensor = tensors[name]
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta or name == "__metadata__":
            kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise ValueError(f"tensor {name!r} ({kind}) cannot be stored; accepted are dense tensors of real numbers.")
        shape = _stored_shape(tensor, name in packed)
        start, end = end, end + math.prod(shape) * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _packed(tensors: Mapping[str, Tensor]) -> set[str]:
    return {name for name, tensor in tensors.items() if not tensor.is_meta and triangles.is_symmetric(tensor)}


def _stored_shape(tensor: Tensor, packed: bool) -> list[int]:
    return triangles.packed_shape(tensor.shape) if packed else list(tensor.shape)


def _pieces(tensor: Tensor, packed: bool) -> Iterator[memoryview]:
    """The bytes of a tensor in the order of the file; where it lies in order itself, they can be read into."""
    if packed:
        yield from map(_bytes, triangles.rows(tensor))
        return
    data = _bytes(tensor)
    for place in range(0, len(data), CHUNK):
        yield data[place : place + CHUNK]


def _read(file: BinaryIO, entry: Header, packed: bool) -> Tensor:
    """The next tensor of a file; of a symmetric one the triangle, which is mirrored in place."""
    shape = triangles.whole_shape(entry["shape"]) if packed else entry["shape"]
    tensor = torch.empty(shape, dtype=_BY_NAME[entry["dtype"]])
    for piece in _pieces(tensor, packed):
        if file.readinto(piece) < len(piece):  # type: ignore[attr-defined]
            raise ValueError("it ended early")
    if packed:
        triangles.mirror(tensor)
    return tensor


def _ordered(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of the file: wide elements first, so that all data is aligned."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _bytes(tensor: Tensor) -> memoryview:
    """A tensor's elements in row-major order, copied only if they lie otherwise."""
    flat = tensor.detach().cpu().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _sealed(content: Header) -> bytes:
    """JSON in its only accepted spelling: a line per field and a checksum last.

    Comparing bytes therefore also finds changed blanks, repeated fields and another order.
    """

    def lines(fields: Header) -> bytes:
        spelled = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items())
        return ("{\n" + ",\n".join(spelled) + "\n}\n").encode()

    fields = {"format": FORMAT, "format_version": FORMAT_VERSION} | content
    fields.pop("checksum", None)
    return lines(fields | {"checksum": hashlib.sha256(lines(fields)).hexdigest()})


def _check_file(path: Path, least: int, most: int) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; links are not followed, they may lead elsewhere.")
    if not least <= status.st_size <= most:
        raise CheckpointError(f"{path} has {status.st_size} bytes; {most} are expected{' at most' * (least < most)}.")
