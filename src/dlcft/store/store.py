"""A directory of versions: tensors in safetensors files, all else in a JSON manifest whose replacement is the commit.

The store knows named tensors and JSON headers, nothing of learners. A file is never changed: a version is written under
a new name, then the manifest is replaced by a rename. A kill at any moment therefore leaves the old state or the new
one. Nothing that is read can run code, and every byte that is used was checked against a hash.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor

from dlcft import __version__
from dlcft.store._lock import Lock
from dlcft.store.files import (
    CheckpointError,
    Header,
    Tensors,
    check_fields,
    plain,
    read_json,
    read_tensors,
    state_digest,
    verify,
    write_json,
    write_tensors,
)

__all__ = ["CheckpointError", "Store", "Version", "state_digest"]

log = logging.getLogger("dlcft")

PROGRESS_FILE = re.compile(r"progress-[0-9a-f]+\.safetensors")
DATA_FILE = re.compile(rf"version-[0-9]+\.safetensors|{PROGRESS_FILE.pattern}")
TEMPORARY_FILE = re.compile(r"\.dlcft-[0-9a-f]+\.tmp")
FILE_FIELDS: dict[str, set[type]] = {"file": {str}, "bytes": {int}, "sha256": {str}, "header": {dict}}
PROGRESS_FIELDS = FILE_FIELDS | {"base": {dict}}
VERSION_FIELDS = FILE_FIELDS | {"number": {int}, "parent": {str, type(None)}, "packages": {dict}, "created": {str}}
EVENT_FIELDS: dict[str, set[type]] = {"action": {str}, "version": {int}, "sha256": {str}, "time": {str}}
MANIFEST_FIELDS: dict[str, set[type]] = {"current": {int}, "versions": {list}, "history": {list}}


@dataclass(frozen=True)
class Version:
    """One kept version, as the manifest describes it.

    Attributes:
        number: counts commits from 1; never used twice.
        file: the safetensors file's name.
        bytes: its size.
        sha256: of its content.
        parent: the sha256 of the version from which this one was learned; None for the first.
        header: what the caller stored beside the tensors.
        packages: versions of Python and of the packages that wrote it.
        created: ISO time, UTC.
    """

    number: int
    file: str
    bytes: int
    sha256: str
    parent: str | None
    header: Header
    packages: dict[str, str]
    created: str


@dataclass(frozen=True)
class _Manifest:
    versions: tuple[Version, ...] = ()
    current: int = 0
    history: tuple[Header, ...] = ()

    def find(self, number: int) -> Version | None:
        return next((v for v in self.versions if v.number == number), None)

    def parents(self) -> dict[int, int]:
        """Of each version that there ever was, the one that was current when it came; 0 for none.

        Hashes would not do: the same data learned twice from the same version gives the same content.
        """
        current, found = 0, {}
        for event in self.history:
            if event["action"] in ("commit", "aside"):
                found[event["version"]] = current
            if event["action"] in ("commit", "rollback"):
                current = event["version"]
        return found

    def been_current(self) -> set[int]:
        """The versions that are, or once were, current."""
        return {event["version"] for event in self.history if event["action"] in ("commit", "rollback")}

    def kept_first(self) -> list[Version]:
        """The current version, those it came from, others that were current, and the rest; of each the newest first."""
        parents, ancestors, number = self.parents(), set(), self.current
        while number and number not in ancestors:
            ancestors.add(number)
            number = parents.get(number, 0)
        current = self.been_current()
        return sorted(self.versions, key=lambda v: (v.number in ancestors, v.number in current, v.number), reverse=True)

    def base(self) -> Header:
        """Names this state among all that the directory has been in: the history only grows."""
        current = self.find(self.current)
        sha256 = None if current is None else current.sha256
        return {"version": self.current, "sha256": sha256, "events": len(self.history)}


class Store:
    """The versions kept in one directory, which the first commit creates.

    Every method that writes takes the lock for its duration; hold `lock()` to keep others out for longer.

    Args:
        directory: where the versions are, or will be.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._manifest_path, self._progress_path = self.directory / "manifest.json", self.directory / "progress.json"
        self._lock = Lock(self.directory / ".lock")

    @property
    def current(self) -> Version | None:
        """The version that `read()` gives; None while there is none."""
        manifest = self._manifest()
        return manifest.find(manifest.current)

    @property
    def history(self) -> list[Header]:
        """All that ever happened, oldest first: action (commit, aside, rollback, prune), version, sha256, time."""
        return list(self._manifest().history)

    @property
    def been_current(self) -> set[int]:
        """The numbers of the versions that are, or once were, current; others were only kept aside."""
        return self._manifest().been_current()

    def versions(self) -> list[Version]:
        """The versions that are kept, oldest first."""
        return list(self._manifest().versions)

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Keep other processes from writing while the block runs; may be nested. Reading needs no lock."""
        return self._lock

    def commit(
        self, tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, keep: int = 2, current: bool = True
    ) -> int:
        """Write a new version, make it current, and remove what is no longer kept, progress included.

        Args:
            tensors: dense tensors of real numbers; they may share memory and lie on any device.
            header: what JSON can hold.
            keep: how many versions stay: the new one, those it came from, others that were current, then the newest.
            current: False to keep the new version beside these, for `rollback` to make it current.

        Returns:
            The new version's number.

        Raises:
            CheckpointError: when the directory holds what cannot be read, or another process uses it.
            OSError: when the directory cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1.")
        stored: Header = plain(header)
        with self.writing():
            manifest = self._manifest()
            self._refuse_orphans(manifest)
            number = 1 + max((event["version"] for event in manifest.history), default=0)
            file = f"version-{number}.safetensors"
            parent = manifest.find(manifest.current)
            try:
                size, sha256 = write_tensors(self.directory / file, tensors)
                source = None if parent is None else parent.sha256
                version = Version(number, file, size, sha256, source, stored, _packages(), _now())
                aside = not current and parent is not None
                kept = [version, *manifest.kept_first()[: keep - 1 + aside]]
                now = manifest.current if aside else number
                self._change(manifest, kept, version, "aside" if aside else "commit", now)
            finally:
                self._sweep()
        return number

    def read(self, version: int | None = None) -> tuple[Tensors, Header]:
        """The tensors and the header of a version, of the current one by default.

        Raises:
            CheckpointError: when there is no such version or a single byte is not as it was written.
        """
        while True:
            manifest = self._manifest()
            entry = self._entry(manifest, manifest.current if version is None else version)
            try:
                return read_tensors(self._path(entry.file), entry.bytes, entry.sha256), entry.header
            except CheckpointError:
                # Another process may have committed meanwhile and no longer keep the version that was current.
                if self._manifest() == manifest:
                    raise

    def rollback(self, version: int | None = None) -> int:
        """Make a kept version current again, by default the one from which the current one was learned.

        Returns:
            The number of the version that is current now.

        Raises:
            CheckpointError: when that version is not kept or its file is damaged.
            OSError: when the directory cannot be written.
        """
        with self.writing():
            manifest = self._manifest()
            if version is None:
                current = self._entry(manifest, manifest.current).number
                version = manifest.parents().get(current, 0)
                if manifest.find(version) is None:
                    why = "was learned from is not kept" if version else "was learned from is no version"
                    raise CheckpointError(f"what version {current} {why}; {self._holds(manifest)}.")
            entry = self._entry(manifest, version)
            verify(self._path(entry.file), entry.bytes, entry.sha256)
            self._change(manifest, manifest.versions, entry, "rollback", entry.number)
        return version

    def prune(self, keep: int) -> list[int]:
        """Remove all but so many versions: the current one stays, then those it came from.

        Returns:
            The numbers of those that are gone.

        Raises:
            CheckpointError: when the current version's file is damaged; nothing is removed then.
            OSError: when the directory cannot be written.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; it must be at least 1.")
        with self.writing():
            manifest = self._manifest()
            ranked = manifest.kept_first()
            if len(ranked) > keep:
                verify(self._path(ranked[0].file), ranked[0].bytes, ranked[0].sha256)  # no other may be left then
                self._change(manifest, ranked[:keep], ranked[0], "prune", manifest.current)
                self._sweep()
        return sorted(version.number for version in ranked[keep:])

    def abandon(self, sha256: str | None) -> None:
        """Remove the only version there ever was, or what a first commit has left where it did not come so far.

        Nothing is removed where another process is at work, or has made another version current.

        Args:
            sha256: of that version; None where there was none.
        """
        with contextlib.suppress(CheckpointError), self.lock():
            manifest = self._manifest()
            if manifest.base()["sha256"] != sha256 or len(manifest.history) > 1 or self.strangers():
                return
            self._manifest_path.unlink(missing_ok=True)
            self._progress_path.unlink(missing_ok=True)
            self._sweep()
            self._lock.path.unlink()

    def strangers(self) -> list[str]:
        """What lies in the directory and is not the store's own; a version that no manifest names may be lost work.

        The first version is not: a first commit that was killed leaves it.
        """
        own = {self._manifest_path.name, self._progress_path.name, self._lock.path.name, "version-1.safetensors"}
        own |= {v.file for v in self._manifest().versions}
        names = sorted(os.listdir(self.directory)) if self.directory.is_dir() else []
        left = (name for name in names if name not in own and not TEMPORARY_FILE.fullmatch(name))
        return [name for name in left if not PROGRESS_FILE.fullmatch(name)]

    def save_progress(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Keep the state inside a task; the next commit or rollback makes it stale and removes it.

        Raises:
            CheckpointError: when another process uses the directory.
            OSError: when the directory cannot be written; the progress saved before is as it was.
        """
        stored: Header = plain(header)
        with self.writing():
            base, file = self._manifest().base(), f"progress-{secrets.token_hex(8)}.safetensors"
            try:
                size, sha256 = write_tensors(self.directory / file, tensors)
                entry = {"base": base, "file": file, "bytes": size, "sha256": sha256, "header": stored}
                write_json(self._progress_path, entry)
            finally:
                self._sweep()

    def load_progress(self) -> tuple[Tensors, Header] | None:
        """The state inside a task that was begun from the current version; None when there is none.

        Writing is atomic, so damage means a failing disk or a hand: it is logged, and the task begins anew.
        """
        base = self._manifest().base()
        try:
            entry = self._progress()
            if entry is None or entry["base"] != base:
                return None
            return read_tensors(self._path(entry["file"]), entry["bytes"], entry["sha256"]), entry["header"]
        except (CheckpointError, OSError) as error:
            log.warning("the progress inside the task is ignored: %s", error)
            return None

    def clear_progress(self) -> None:
        """Forget the state inside a task.

        Raises:
            OSError: when the directory cannot be written.
        """
        if self.directory.is_dir():
            with self.writing():
                self._progress_path.unlink(missing_ok=True)
                self._sweep()

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """As `lock`, for the time of a few writes: what goes wrong with the disk is told in one sentence.

        Raises:
            OSError: when the directory cannot be written.
        """
        try:
            with self._lock:
                yield
        except OSError as error:
            if self._lock.held:  # the block around this one tells it
                raise
            message = f"{self.directory} cannot be written ({error.strerror or error}); its versions are as they were."
            raise OSError(error.errno, message) from error

    def _manifest(self) -> _Manifest:
        content, where = read_json(self._manifest_path), self._manifest_path
        if content is None:
            return _Manifest()
        check_fields(content, MANIFEST_FIELDS, where)
        for entry in content["versions"]:
            check_fields(entry, VERSION_FIELDS, where)
        for event in content["history"]:
            check_fields(event, EVENT_FIELDS, where)
        versions = tuple(Version(**entry) for entry in content["versions"])
        numbers, current = [v.number for v in versions], content["current"]
        if current not in numbers or len(set(numbers)) < len(numbers):
            raise CheckpointError(f"{where} lists the versions {numbers}, with {current} as the current one.")
        return _Manifest(versions, current, tuple(content["history"]))

    def _progress(self) -> Header | None:
        content = read_json(self._progress_path)
        if content is not None:
            check_fields(content, PROGRESS_FIELDS, self._progress_path)
        return content

    def _path(self, file: str) -> Path:
        if not DATA_FILE.fullmatch(file):
            raise CheckpointError(f"{self.directory} refers to the file {file[:80]!r}, a name that is never written.")
        return self.directory / file

    def _entry(self, manifest: _Manifest, number: int) -> Version:
        entry = manifest.find(number)
        if entry is None:
            wanted = f"version {number} is not kept" if manifest.versions else "there is nothing to use"
            raise CheckpointError(f"{wanted}; {self._holds(manifest)}.")
        return entry

    def _holds(self, manifest: _Manifest) -> str:
        numbers = ", ".join(str(v.number) for v in manifest.versions)
        return f"{self.directory} holds {f'the versions {numbers}' if numbers else 'no checkpoint'}"

    def _change(
        self, manifest: _Manifest, versions: Sequence[Version], version: Version, action: str, current: int
    ) -> None:
        """Replace the manifest: the one moment at which the store changes. Progress is stale from then on."""
        event = {"action": action, "version": version.number, "sha256": version.sha256, "time": _now()}
        history = [*manifest.history, event]
        entries = [vars(v) for v in sorted(versions, key=lambda v: v.number)]
        write_json(self._manifest_path, {"current": current, "versions": entries, "history": history})
        with contextlib.suppress(OSError):
            self._progress_path.unlink()

    def _refuse_orphans(self, manifest: _Manifest) -> None:
        """A first commit that was killed leaves version 1; later ones without a manifest are someone's lost work."""
        lost = [] if manifest.versions else [name for name in self.strangers() if name.startswith("version-")]
        if lost:
            raise CheckpointError(f"{self.directory} holds {lost[0]} but no manifest.json; restore that or move these.")

    def _sweep(self) -> None:
        """Remove what neither the manifest nor the progress on the disk refers to; files of other kinds stay."""
        kept = {v.file for v in self._manifest().versions}
        with contextlib.suppress(CheckpointError):
            kept.add((self._progress() or {"file": ""})["file"])
        for name in os.listdir(self.directory):
            if TEMPORARY_FILE.fullmatch(name) or (DATA_FILE.fullmatch(name) and name not in kept):
                with contextlib.suppress(OSError):  # Windows keeps what is in use; the next commit tries again
                    (self.directory / name).unlink()


def _packages() -> dict[str, str]:
    return {
        "dlcft": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
