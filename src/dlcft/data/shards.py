"""Samples in .tar files: many images in few files, each read at its place, as WebDataset and others write them.

Members that share a name up to its first dot are one sample, `0001.jpg` and `0001.cls`; where none of them is an image
then, up to the last dot. Its label is the text of `.cls`, the field `label` of `.json`, or else the folder that it lies
in: a packed folder with one folder a class. Hidden members, and those of other kinds, are no samples.
"""

from __future__ import annotations

import io
import json
import tarfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, cast

from torch import Tensor

from dlcft.data.decoding import decoding, first_line
from dlcft.data.images import EXTENSIONS, decode_image
from dlcft.data.labels import label_name

SHARD = ".tar"
_NEEDED = "give a whole, uncompressed .tar"
Members = list[tuple[str, tarfile.TarInfo]]  # each with its name's ending, in small letters
_MOST = 1 << 20  # bytes of a label's member, or of a text


class Shards:
    """The images, or texts, of .tar files, in their order; known by their places, so that little memory is needed.

    Args:
        files: the .tar files.
        text: whether samples are texts (`.txt`) instead of images.
        labelled: whether each must have a label.

    Attributes:
        labels: of each sample; empty unless `labelled`.

    Raises:
        ValueError: when a file is damaged or compressed, holds no sample, or a sample has no label.
    """

    def __init__(self, files: Sequence[Path], *, text: bool = False, labelled: bool = True) -> None:
        self._files, self._text = list(files), text
        self._shard, self._offset = array("L"), array("Q")
        self.labels: list[str] = []
        known: dict[str, str] = {}  # one object a label
        for number, path in enumerate(self._files):
            for offset, label in _scan(path, self._kinds, labelled):
                self._shard.append(number)
                self._offset.append(offset)
                if labelled:
                    self.labels.append(known.setdefault(label, label))
        if not self._offset:
            raise ValueError(f"{self._files[0]} holds no sample; members such as 0001{self._kinds[0]} are needed.")

    @property
    def _kinds(self) -> tuple[str, ...]:
        return (".txt",) if self._text else EXTENSIONS

    def __len__(self) -> int:
        return len(self._offset)

    def name(self, index: int) -> str:
        """The .tar and the member of a sample."""
        with self._at(index) as (_, name, _):
            return name

    def content(self, index: int) -> bytes:
        """The bytes of a sample's image or text."""
        return self._read(index)[0]

    def read(self, index: int, channels: int | None) -> Tensor | str:
        """An image as uint8, or a text."""
        content, name = self._read(index)
        if self._text:
            with decoding(name, "give a text in UTF-8"):
                return content.decode()
        return decode_image(io.BytesIO(content), name, channels)

    def _read(self, index: int) -> tuple[bytes, str]:
        with self._at(index) as (file, name, size):
            found = file.read(size)
            if len(found) < size:
                raise ValueError(f"it ends inside {name}")
            return bytes(found), name

    @contextmanager
    def _at(self, index: int) -> Iterator[tuple[IO[bytes], str, int]]:
        """The file at the place of a sample's content, the sample's name, and its size."""
        path = self._files[self._shard[index]]
        with decoding(path, _NEEDED), tarfile.open(path, "r:") as tar:
            assert tar.fileobj is not None
            tar.fileobj.seek(self._offset[index])
            member = tarfile.TarInfo.fromtarfile(tar)
            tar.fileobj.seek(member.offset_data)
            yield cast("IO[bytes]", tar.fileobj), f"{path}/{member.name}", member.size


def find_shards(path: Path) -> list[Path]:
    """The .tar files that a path names: itself, or those in a folder that holds no other; else none."""
    if path.suffix.lower() == SHARD and path.is_file():
        return [path]
    if not path.is_dir():
        return []
    files = sorted(found for found in path.iterdir() if not found.name.startswith("."))
    shards = [found for found in files if found.suffix.lower() == SHARD and found.is_file()]
    others = [
        found for found in files if found not in shards and (found.is_dir() or found.suffix.lower() in EXTENSIONS)
    ]
    if shards and others:
        raise ValueError(f"the folder {path} holds {shards[0].name} and {others[0].name}; give one of them.")
    return shards


@dataclass(frozen=True)
class _Found:
    """A sample in a .tar: its name, the place of its image or text, and the member that has its label, if any."""

    key: str
    offset: int
    kind: str = ""
    content: bytes = b""

    def label(self, path: Path) -> str:
        """Its label: of a member, or the folder that it lies in."""
        try:
            label = _READERS[self.kind](self.content) if self.kind else PurePosixPath(self.key).parent.name
            if not label:
                raise ValueError(f"a member {self.key}.cls or {self.key}.json, or a folder, is needed")
            return str(label_name(label))
        except (TypeError, ValueError) as error:
            wrong = f"the sample {self.key} in {path} has no label that can be read"
            raise ValueError(f"{wrong} ({first_line(error)}).") from error


def _scan(path: Path, kinds: Sequence[str], labelled: bool) -> list[tuple[int, str]]:
    """The place of each sample in a .tar, and its label."""
    with decoding(path, _NEEDED), tarfile.open(path, "r:") as tar:
        groups = (part for group in _grouped(tar) for part in _apart(*group, kinds))
        found = [_sample(tar, path, key, members, kinds, labelled) for key, members in groups]
    for one in found:
        if isinstance(one, str):
            raise ValueError(one)
    samples = [one for one in found if isinstance(one, _Found)]
    if labelled and len({bool(one.kind) for one in samples}) > 1:
        one, other = (next(s.key for s in samples if bool(s.kind) == has) for has in (True, False))
        raise ValueError(f"in {path} the sample {one} has a member with its label, and {other} has none; give all one.")
    return [(one.offset, one.label(path) if labelled else "") for one in samples]


def _apart(key: str, members: Members, kinds: Sequence[str]) -> Iterator[tuple[str, Members]]:
    """The samples among members of one name up to its first dot: one, or, where names have more dots, several."""
    if any(kind in kinds for kind, _ in members):
        yield key, members
        return
    stems: dict[str, Members] = {}
    for kind, member in members:
        stem, _, last = kind.rpartition(".")
        stems.setdefault(key + stem, []).append((f".{last}", member))
    yield from ((stem, own) for stem, own in stems.items() if any(kind in kinds for kind, _ in own))


def _sample(
    tar: tarfile.TarFile, path: Path, key: str, members: Members, kinds: Sequence[str], labelled: bool
) -> _Found | str:
    """A sample with the bytes of its label, or a sentence on what is wrong with it."""
    images = [member for kind, member in members if kind in kinds]
    if len(images) > 1:
        return f"the sample {key} in {path} has {len(images)} members of {', '.join(kinds)}; one is needed."
    for kind, member in members if labelled else ():
        if kind in _READERS:
            if member.size > _MOST:
                return f"{member.name} in {path} has {member.size} bytes; at most {_MOST} are read for a label."
            file = tar.extractfile(member)
            assert file is not None
            return _Found(key, images[0].offset, kind, file.read())
    return _Found(key, images[0].offset)


def _grouped(tar: tarfile.TarFile) -> Iterator[tuple[str, Members]]:
    """Neighbouring members of the same name up to its first dot, each with the rest of its name."""
    before = None
    members: Members = []
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # kept for getmembers, which nobody asks for
        path = PurePosixPath(member.name)
        if not member.isreg() or path.name.startswith("."):
            continue
        stem, dot, rest = path.name.partition(".")
        key = str(path.parent / stem)
        if key != before and members:
            yield str(before), members
            members = []
        before = key
        members.append(((dot + rest).lower(), member))
    if members:
        yield str(before), members
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # which tarfile takes for its end
        raise ValueError(f"it is damaged or cut at byte {tar.offset}")


def _label_field(text: bytes) -> str:
    content = json.loads(text)
    label = content.get("label") if isinstance(content, dict) else None
    return "" if label is None else str(label_name(label))


_READERS: dict[str, Callable[[bytes], str]] = {".cls": lambda text: text.decode().strip(), ".json": _label_field}
