"""The two kinds of files in a store, sealed JSON and safetensors: written whole or not at all, damage is noticed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from dlcft import __version__
from dlcft.closed_form import triangles
from dlcft.data.files import new_file

Tensors = dict[str, Tensor]
Header = dict[str, Any]

FORMAT = "dlcft"
FORMAT_VERSION = 2  # 1, with the whole history in the manifest, is read too
LARGEST_JSON = 64 * 2**20
_DIGITS = 18  # of a whole number
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
        content = json.loads(raw, parse_int=_whole_number)
        intact = isinstance(content, dict) and raw == _sealed(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON that dlcft has written.") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path} was not written by dlcft.")
    version = content["format_version"] if type(content.get("format_version")) is int else 0
    if version > FORMAT_VERSION:
        accepted = f"dlcft {__version__} reads versions up to {FORMAT_VERSION}"
        raise CheckpointError(f"{path} has format version {version}; {accepted}.")
    if not intact or version < 1:
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
    with verified(path, size, sha256) as file:
        try:
            entries, packed = _layout(file, size)
            return {name: _read(file, entry, name in packed) for name, entry in entries.items()}
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} is not a safetensors file that dlcft has written ({error}).") from error


@contextmanager
def verified(path: Path, size: int, sha256: str) -> Iterator[BinaryIO]:
    """A file of this size and hash, opened once: another process may delete it meanwhile."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(CHUNK))
    try:
        _check_file(path, size, size)
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed below; errors of reading are not of opening)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing.") from error
    with file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
        if digest.hexdigest() != sha256:
            raise CheckpointError(f"{path} is damaged: its sha256 is not the one that was recorded.")
        file.seek(0)
        yield file


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


def _layout(file: BinaryIO, size: int) -> tuple[dict[str, Header], Collection[str]]:
    """What a safetensors file says of its tensors, in their order, and the names of those that are triangles.

    Raises:
        ValueError: when their data do not follow each other, or do not fill the file.
    """
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= size - 8:
        raise ValueError(f"its description has {length} bytes")
    entries = json.loads(file.read(length))
    packed = entries.pop("__metadata__", {})
    ordered = {name: entries[name] for name in sorted(entries, key=lambda name: entries[name]["data_offsets"])}
    end = 0
    for name, entry in ordered.items():
        if any(type(n) is not int or n < 0 for n in entry["shape"]):
            raise ValueError(f"{name} has the shape {entry['shape']}")
        start, end = end, end + math.prod(entry["shape"]) * _BY_NAME[entry["dtype"]].itemsize
        if entry["data_offsets"] != [start, end]:
            raise ValueError(f"{name} does not follow the tensor before it")
    if end != size - 8 - length:
        raise ValueError(f"its tensors take {end} bytes, and {size - 8 - length} are there")
    return ordered, packed


def _read(file: BinaryIO, entry: Header, packed: bool) -> Tensor:
    """The next tensor of a file; of a symmetric one the triangle, which is mirrored in place."""
    shape = triangles.whole_shape(entry["shape"]) if packed else entry["shape"]
    tensor = torch.empty(shape, dtype=_BY_NAME[entry["dtype"]])
    for piece in _pieces(tensor, packed):
        place = 0
        while place < len(piece):  # an unbuffered file may give less than asked for
            count = file.readinto(piece[place:])  # type: ignore[attr-defined]
            if not count:
                raise ValueError("it ended early")
            place += count
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


def _whole_number(text: str) -> int:
    """A number of JSON that fits into 64 bits, as all do that dlcft writes."""
    if len(text) > _DIGITS:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _sealed(content: Header) -> bytes:
    """JSON in its only accepted spelling: a line per field and a checksum last.

    Comparing bytes therefore also finds changed blanks, repeated fields and another order.
    """

    def lines(fields: Header) -> bytes:
        spelled = (f"{json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in fields.items())
        return ("{\n" + ",\n".join(spelled) + "\n}\n").encode()

    fields = {"format": FORMAT, "format_version": FORMAT_VERSION} | content  # which is read with its own version
    fields.pop("checksum", None)
    return lines(fields | {"checksum": hashlib.sha256(lines(fields)).hexdigest()})


def _check_file(path: Path, least: int, most: int) -> None:
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file; links are not followed, they may lead elsewhere.")
    if not least <= status.st_size <= most:
        raise CheckpointError(f"{path} has {status.st_size} bytes; {most} are expected{' at most' * (least < most)}.")
