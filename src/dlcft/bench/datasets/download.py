"""Fetch official files: checked, and whole or not at all."""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from dlcft.data.files import new_file

_CHUNK = 1 << 20
_SECONDS = 60  # without a byte


@dataclass(frozen=True)
class Remote:
    """An official file."""

    url: str
    md5: str | None = None  # as published, if it is
    unpacked: str = ""  # a path that is there, or one folder below, once it was unpacked; for archives only

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.url}, {f'md5 {self.md5}' if self.md5 else 'no checksum is published'})"


def fetch(remote: Remote, folder: Path) -> None:
    """Download an official file into a folder, unless it is there, and unpack it if it must be."""
    if remote.unpacked and any((place / remote.unpacked).exists() for place in (folder, *folder.glob("*/"))):
        return
    path = folder / remote.name
    if not path.exists():
        _download(remote, path)
    elif remote.md5 is not None and (found := md5_of(path)) != remote.md5:
        raise ValueError(
            f"{path} has the md5 {found} and the official file has {remote.md5}; delete it to download it again."
        )
    if remote.unpacked:
        _unpack(path, folder)


def _download(remote: Remote, path: Path) -> None:
    """Whole, and with the announced size and checksum, or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_file(path) as file, urllib.request.urlopen(remote.url, timeout=_SECONDS) as answer:
            shutil.copyfileobj(answer, file)
            file.flush()
            announced, size, found = answer.headers.get("Content-Length"), file.tell(), md5_of(Path(file.name))
            if announced is not None and int(announced) != size:
                raise ValueError(f"{remote.url} gave {size} of {announced} bytes; try again.")
            if remote.md5 not in (None, found):
                raise ValueError(f"{remote.url} gave a file with the md5 {found}, not {remote.md5}; nothing was kept.")
    except (OSError, http.client.HTTPException) as error:
        raise FileNotFoundError(
            f"cannot download {remote.name} from {remote.url} ({error}); fetch it elsewhere and put it into "
            f"{path.parent}."
        ) from error


def md5_of(path: Path) -> str:
    """Of a file's content."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(archive: Path, folder: Path) -> None:
    """A .tar or .zip file's content into a folder, each of its top entries by one rename."""
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=folder) as name:
        try:
            # of a .zip file, absolute paths and .. are left out anyway
            shutil.unpack_archive(archive, name, filter=None if archive.suffix == ".zip" else "data")
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise ValueError(f"cannot unpack {archive} ({error}); delete it to download it again.") from error
        for entry in sorted(Path(name).iterdir()):
            target = folder / entry.name
            if target.exists():
                raise ValueError(f"{archive} cannot be unpacked over {target}; move that away.")
            entry.rename(target)
