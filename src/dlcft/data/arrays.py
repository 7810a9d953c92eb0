"""Numpy's files: arrays are mapped into memory where they are not compressed, and read batch by batch."""

from __future__ import annotations

import math
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from dlcft.data.decoding import decoding

_KEYS = (("x", "y"), ("images", "labels"), ("data", "targets"))
_CHUNK = 2**20
Array = np.ndarray[Any, Any]


def read_npy(path: Path) -> Array:
    """The array of an .npy file, mapped into memory."""
    with decoding(path, "give numbers that np.save wrote"), path.open("rb") as file:
        return _mapped(path, file, path.stat().st_size, "it")


def read_npz(path: Path, *, labelled: bool = True) -> tuple[Array, Array | None]:
    """The arrays x and y (or images and labels, or data and targets) of an .npz file; y is None if not `labelled`.

    Arrays of `np.savez` are mapped into memory, those of `np.savez_compressed` are loaded; all were checked by the sums
    in the file.
    """
    with decoding(path, "give what np.savez wrote"), zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        pairs = [pair for pair in _KEYS if set(pair if labelled else pair[:1]) <= set(names)]
        found = [_member(path, archive, name) for name in pairs[0][: 1 + labelled]] if len(pairs) == 1 else []
    if not found:
        wanted = " or ".join(" and ".join(pair) if labelled else pair[0] for pair in _KEYS)
        raise ValueError(f"{path} holds {', '.join(names) or 'nothing'}; it must hold {wanted}.")
    return found[0], found[1] if labelled else None


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Array:
    """One array of an .npz file."""
    info = archive.getinfo(f"{name}.npy")
    if info.flag_bits & 1:
        raise ValueError(f"{name} is encrypted")
    if info.compress_type != zipfile.ZIP_STORED:
        if info.file_size > _memory():
            raise ValueError(f"{name} takes {info.file_size:,} bytes of memory; np.savez writes what is read in parts")
        with archive.open(info) as member:
            _header(member, info.file_size, name)
        with archive.open(info) as member:
            return np.lib.format.read_array(member, allow_pickle=False)
    with path.open("rb") as file:
        file.seek(info.header_offset + 26)  # two lengths end a member's header; they differ from those in `info`
        file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
        start, checksum, left = file.tell(), 0, info.file_size
        while left and (part := file.read(min(_CHUNK, left))):
            checksum, left = zlib.crc32(part, checksum), left - len(part)
        if left or checksum != info.CRC:
            raise ValueError(f"{name} is damaged: its checksum is another one")
        file.seek(start)
        return _mapped(path, file, info.file_size, name)


def _mapped(path: Path, file: IO[bytes], size: int, name: str) -> Array:
    """The array that begins at the file's position and takes `size` bytes, its header included."""
    shape, fortran, dtype = _header(file, size, name)
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", file.tell(), shape, "F" if fortran else "C")


def _header(file: IO[bytes], size: int, name: str) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, order and type of an array, which together take exactly the bytes that are there."""
    start = file.tell()
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(
            f"{name} holds {'Python objects' if dtype.hasobject else 'nothing'}; numbers or strings are needed"
        )
    length = file.tell() - start + math.prod(shape) * dtype.itemsize
    if any(type(n) is not int or n < 0 for n in shape) or length != size:
        raise ValueError(f"{name} has {size} bytes, which are no array of {dtype} and shape {shape}")
    return shape, fortran, dtype


def _memory() -> float:
    """The machine's memory in bytes, where it is known."""
    if not hasattr(os, "sysconf"):
        return math.inf
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
