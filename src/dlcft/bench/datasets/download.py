"""Where official files come from, and fetching them if asked to: checked, and never half there."""

from __future__ import annotations

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

_CHUNK = 1 << 20
_SECONDS = 60  # without a byte


@dataclass(frozen=True)
class Remote:
    """An official file.

    Args:
        url: its source.
        md5: as published; None where no checksum is.
        unpacked: paths of which one exists where it was unpacked; empty for a file that is read as it is.
    """

    url: str
    md5: str | None = None
    unpacked: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of the file."""
        return self.url.rpartition("/")[2]

    def __str__(self) -> str:
        return f"{self.name} ({self.url}, {f'md5 {self.md5}' if self.md5 else 'no checksum is published'})"


class Absent(FileNotFoundError):
    """A data set is not where it was looked for; the text is the file that is missing."""


def fetch(remote: Remote, folder: Path) -> None:
    """Bring an official file into a folder, unpacked if it must be; what is already there stays.

    Raises:
        FileNotFoundError: when it cannot be reached.
        ValueError: when what arrived, or lies there, is not the official file.
    """
    if any((folder / path).exists() for path in remote.unpacked):
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
    """Into a temporary file beside it, which is renamed once it is whole."""
    digest, size = hashlib.md5(usedforsecurity=False), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=path.parent) as folder:
            partial = Path(folder) / remote.name
            with urllib.request.urlopen(remote.url, timeout=_SECONDS) as answer, partial.open("wb") as file:
                while chunk := answer.read(_CHUNK):
                    file.write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                announced = answer.headers.get("Content-Length")
            if announced is not None and int(announced) != size:
                raise ValueError(f"{remote.url} gave {size} of {announced} bytes; try again.")
            if remote.md5 is not None and digest.hexdigest() != remote.md5:
                raise ValueError(
                    f"{remote.url} gave a file with the md5 {digest.hexdigest()} instead of {remote.md5}; nothing was "
                    "kept."
                )
            os.replace(partial, path)
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
            if archive.suffix == ".zip":
                with zipfile.ZipFile(archive) as pack:
                    pack.extractall(name)  # drops absolute paths and ..
            else:
                with tarfile.open(archive, "r:") as tar:
                    tar.extractall(name, filter="data")
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise ValueError(f"cannot unpack {archive} ({error}); delete it to download it again.") from error
        for entry in sorted(Path(name).iterdir()):
            target = folder / entry.name
            if target.exists():
                raise ValueError(f"{archive} cannot be unpacked over {target}; move that away.")
            entry.rename(target)
