"""A directory of versions: tensors in safetensors files, everything else in a JSON manifest.

The store knows named tensors and JSON headers, nothing of learners. A file is never changed: a version is written under
a new name, then the manifest is replaced by a rename, which is the commit. A kill at any moment therefore leaves the
old state or the new one. Reading never runs code, and every byte that is used was checked against a hash.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import numpy as np
import safetensors
import torch
from torch import Tensor

from dlcft import __version__
from dlcft.data.files import make_folder
from dlcft.store.files import (
    CheckpointError,
    Header,
    Tensors,
    check_fields,
    plain,
    read_json,
    read_tensors,
    state_digest,
    verified,
    write_json,
    write_tensors,
)
from dlcft.store.manifest import FILE_FIELDS, Manifest, Version, now

__all__ = ["CheckpointError", "Manifest", "Store", "Version", "state_digest"]

log = logging.getLogger("dlcft")

DATA_FILE = re.compile(r"(version-[0-9]+|progress-[0-9a-f]+)\.safetensors")
UNFINISHED_FILE = re.compile(r"progress-[0-9a-f]+\.safetensors|\.dlcft-[0-9a-f]+\.tmp")
PROGRESS_FIELDS = FILE_FIELDS | {"base": {dict}}


class Store:
    """The versions kept in one directory, which the first commit creates.

    Every method that writes takes the lock while it runs; hold `lock()` to keep others out for longer.

    Args:
        directory: where the versions are, or will be.

    Raises:
        CheckpointError: from any method, when the manifest is damaged; from those that write, also when another
            process, or another `Store` in this one, holds the lock.
        OSError: from methods that write, when the directory cannot be written; the message says whether its versions
            are as they were.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._manifest_path, self._progress_path = self.directory / "manifest.json", self.directory / "progress.json"
        self._lock_path = self.directory / ".lock"
        self._lock: filelock.BaseFileLock | None = None  # while it is held: at Python's end one could not end itself
        self._known: Manifest | None = None  # the manifest on the disk, while the lock is held
        self._told: OSError | None = None  # the last error of writing that names the directory

    def __reduce__(self) -> tuple[type[Store], tuple[Path]]:
        return Store, (self.directory,)  # a copy shares no lock

    def look(self) -> Manifest:
        """The manifest: one reading that tells the versions, the current one and the history.

        While this object holds the lock, nobody else writes, so the file is read only once.
        """
        if self._lock is None or not self._lock.is_locked:
            return Manifest.read(self._manifest_path)
        if self._known is None:
            self._known = Manifest.read(self._manifest_path)
        return self._known

    @property
    def current(self) -> Version | None:
        """The version that `load()` gives; None while there is none."""
        return self.look().current

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep others from writing while the block runs; may be nested. Reading needs no lock.

        The operating system ends the lock with the process, even if that is killed.
        """
        if self._lock is None or not self._lock.is_locked:  # after a fork, the parent's lock object cannot be used
            self._lock = filelock.FileLock(self._lock_path, timeout=0, thread_local=False, on_acquired=_sign)
            self._known = None
        lock = self._lock
        try:
            make_folder(self.directory)
            try:
                lock.acquire()
            except filelock.Timeout:
                lock.acquire()  # the first attempt also fails where the holder has just removed the file
        except filelock.Timeout as error:
            message = f"{self.directory} is in use by {self._holder()}; wait until that has ended."
            raise CheckpointError(message) from error
        except OSError as error:
            raise self._unwritable(error, None) from error
        try:
            yield
        finally:
            lock.release()
            if not lock.is_locked:
                self._lock = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock, and turn an OSError into one message: which directory, and what is in it now."""
        before = None
        try:
            with self.lock():
                before = self.look()
                yield
        except OSError as error:
            if error is self._told:  # an inner block has made the message
                raise
            raise self._unwritable(error, before) from error

    def _unwritable(self, error: OSError, before: Manifest | None) -> OSError:
        """The error with one message: which directory, why, and what is in it now."""
        message = f"{self.directory} cannot be written ({error.strerror or error}); {self._state_since(before)}."
        self._told = OSError(error.errno, message)
        return self._told

    def _state_since(self, before: Manifest | None) -> str:
        """What has become of the versions, after a failure that may have come after the commit."""
        try:
            now = Manifest.read(self._manifest_path)
        except (CheckpointError, OSError):
            return "what became of its versions cannot be read"
        if before is None or now.base() == before.base():
            return "its versions are as they were"
        what = f"version {now.last} was written" if now.last > before.last else "the change was made"
        return f"{what} before that, version {now.number} is current; a power cut now might undo it"

    def commit(
        self, tensors: Mapping[str, Tensor], header: Mapping[str, Any], *, keep: int = 2, current: bool = True
    ) -> int:
        """Write a new version, make it current, and remove the progress and the versions that are no longer kept.

        Args:
            tensors: dense tensors of real numbers; they may share memory and lie on any device.
            header: any JSON object.
            keep: how many versions stay: the new one, its ancestors, others that were once current, then the newest.
            current: False to store the new version without making it current; `rollback(number)` can do so later.

        Returns:
            The new version's number.
        """
        _check_keep(keep)
        stored: Header = plain(header)
        with self.writing():
            manifest = self.look()
            lost = [] if manifest.versions else [name for name in self.strangers() if name.startswith("version-")]
            if lost:
                found = f"{self.directory} holds {lost[0]} but no manifest.json"
                raise CheckpointError(f"{found}; restore that or move these.")
            number, parent = 1 + manifest.last, manifest.current
            file = f"version-{number}.safetensors"
            try:
                size, sha256 = write_tensors(self.directory / file, tensors)
                source = None if parent is None else parent.sha256
                line = () if parent is None else (parent.number, *parent.ancestors)
                aside = not current and parent is not None
                version = Version(number, file, size, sha256, source, stored, _packages(), now(), not aside, line)
                kept = [version, *manifest.kept_first()[: keep - 1 + aside]]
                action, chosen = ("aside", manifest.number) if aside else ("commit", number)
                self._replace(manifest.after(action, version, versions=kept, number=chosen))
            finally:
                self._sweep()
        return number

    def load(self, version: int | None = None) -> tuple[Tensors, Version]:
        """The tensors of a version, of the current one by default, and its entry in the manifest.

        Raises:
            CheckpointError: when there is no such version or a single byte is not as it was written.
        """
        while True:
            manifest = self.look()
            entry = self._entry(manifest, manifest.number if version is None else version)
            try:
                return read_tensors(self._path(entry.file), entry.bytes, entry.sha256), entry
            except CheckpointError:
                # Another process may have committed meanwhile and no longer keep the version that was current.
                if self.look() == manifest:
                    raise

    def rollback(self, version: int | None = None) -> int:
        """Make a kept version current again, by default the one from which the current one was learned.

        Returns:
            The number of the version that is current now.

        Raises:
            CheckpointError: when that version is not kept or its file is damaged.
        """
        with self.writing():
            manifest = self.look()
            if version is None:
                current = self._entry(manifest, manifest.number)
                if not current.ancestors:
                    learned = f"version {current.number} was learned from no version"
                    raise CheckpointError(f"{learned}; {self._holds(manifest)}.")
                version = current.ancestors[0]
                if manifest.find(version) is None:
                    learned = f"version {current.number} was learned from version {version}, which is not kept"
                    raise CheckpointError(f"{learned}; {self._holds(manifest)}.")
            entry = self._entry(manifest, version)
            with verified(self._path(entry.file), entry.bytes, entry.sha256):
                pass
            self._replace(manifest.after("rollback", entry, versions=manifest.versions, number=entry.number))
        return version

    def prune(self, keep: int) -> list[int]:
        """Remove all but `keep` versions: the current one stays, then its ancestors.

        Returns:
            The numbers of the removed versions.

        Raises:
            CheckpointError: when the current version's file is damaged; nothing is removed then.
        """
        _check_keep(keep)
        with self.writing():
            manifest = self.look()
            ranked = manifest.kept_first()
            if len(ranked) > keep:
                first = ranked[0]
                with verified(self._path(first.file), first.bytes, first.sha256):
                    pass  # it may be the only one left
                self._replace(manifest.after("prune", first, versions=ranked[:keep], number=manifest.number))
            self._sweep()  # in any case: a kill may have left the files of a version that is not kept any more
        return sorted(version.number for version in ranked[keep:])

    def abandon(self, sha256: str | None) -> None:
        """Remove the only version that ever was, or the files of a first commit that did not end.

        Nothing is removed where another process is at work, or has made another version current.

        Args:
            sha256: of that version; None if there is none.
        """
        with contextlib.suppress(CheckpointError), self.lock():
            manifest = self.look()
            if manifest.base()["sha256"] != sha256 or manifest.events > 1 or self.strangers():
                return
            self._known = None
            self._manifest_path.unlink(missing_ok=True)
            self._progress_path.unlink(missing_ok=True)
            self._sweep()
            with contextlib.suppress(PermissionError):  # Windows removes it when the lock ends
                self._lock_path.unlink()

    def strangers(self) -> list[str]:
        """The names in the directory that are not the store's own.

        An unlisted version counts as foreign, as it may be lost work; except version 1, which a killed first commit
        leaves.
        """
        own = {self._manifest_path.name, self._progress_path.name, self._lock_path.name, "version-1.safetensors"}
        own |= {v.file for v in self.look().versions}
        names = sorted(os.listdir(self.directory)) if self.directory.is_dir() else []
        return [name for name in names if name not in own and not UNFINISHED_FILE.fullmatch(name)]

    def save_progress(self, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
        """Save the state inside a task; the next commit or rollback removes it."""
        stored: Header = plain(header)
        with self.writing():
            base, file = self.look().base(), f"progress-{secrets.token_hex(8)}.safetensors"
            try:
                size, sha256 = write_tensors(self.directory / file, tensors)
                entry = {"base": base, "file": file, "bytes": size, "sha256": sha256, "header": stored}
                write_json(self._progress_path, entry)
            finally:
                self._sweep()

    def load_progress(self) -> tuple[Tensors, Header] | None:
        """The state inside a task that was begun from the current version; None when there is none.

        Writing is atomic, so damage means a failing disk or an edited file: it is logged, and the task begins anew.
        """
        base = self.look().base()
        try:
            entry = self._progress()
            if entry is None or entry["base"] != base:
                return None
            return read_tensors(self._path(entry["file"]), entry["bytes"], entry["sha256"]), entry["header"]
        except (CheckpointError, OSError) as error:
            log.warning("the progress inside the task is ignored: %s", error)
            return None

    def clear_progress(self) -> None:
        """Remove the state inside a task."""
        if self.directory.is_dir():
            with self.writing():
                self._progress_path.unlink(missing_ok=True)
                self._sweep()

    def _holder(self) -> str:
        """The process that holds the lock, as `_sign` wrote it."""
        with contextlib.suppress(OSError), open(self._lock_path, "rb", buffering=0) as file:
            file.seek(1)
            if number := file.read(32).decode("ascii", "replace").strip():
                return f"process {number}"
        return "another process"

    def _progress(self) -> Header | None:
        content = read_json(self._progress_path)
        if content is not None:
            check_fields(content, PROGRESS_FIELDS, self._progress_path)
        return content

    def _path(self, file: str) -> Path:
        if not DATA_FILE.fullmatch(file):
            raise CheckpointError(f"{self.directory} refers to the file {file[:80]!r}, a name that is never written.")
        return self.directory / file

    def _entry(self, manifest: Manifest, number: int) -> Version:
        entry = manifest.find(number)
        if entry is None:
            wanted = f"version {number} is not kept" if manifest.versions else "there is nothing to use"
            raise CheckpointError(f"{wanted}; {self._holds(manifest)}.")
        return entry

    def _holds(self, manifest: Manifest) -> str:
        numbers = ", ".join(str(v.number) for v in manifest.versions)
        return f"{self.directory} holds {f'the versions {numbers}' if numbers else 'no checkpoint'}"

    def _replace(self, manifest: Manifest) -> None:
        """Replace the manifest: the one moment at which the store changes. Progress is stale from then on."""
        self._known = None  # if writing fails, only the disk tells whether the rename was done
        manifest.write(self._manifest_path)  # the commit: one rename, in `data.files.new_file`
        self._known = manifest
        with contextlib.suppress(OSError):
            self._progress_path.unlink()

    def leftovers(self) -> list[str]:
        """Data files that neither the manifest nor the progress refers to: they could not be deleted yet."""
        kept = {v.file for v in self.look().versions}
        with contextlib.suppress(CheckpointError):
            kept.add((self._progress() or {"file": ""})["file"])
        names = sorted(name for name in os.listdir(self.directory) if name not in kept)
        return [name for name in names if DATA_FILE.fullmatch(name) or UNFINISHED_FILE.fullmatch(name)]

    def _sweep(self) -> None:
        """Delete leftovers; files of other kinds stay."""
        for name in self.leftovers():
            with contextlib.suppress(OSError):  # Windows keeps files in use; the next commit tries again
                (self.directory / name).unlink()


def _sign(descriptor: int) -> None:
    """Write this process's number into its lock file, behind the first byte, which Windows lets no other read.

    On a full disk it is left out; a file that has another name too is not ours to write.
    """
    if os.fstat(descriptor).st_nlink > 1:
        raise OSError(errno.EMLINK, "the lock file has another name too")
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f" {os.getpid()}\n".encode())


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep is {keep}; it must be at least 1.")


def _packages() -> dict[str, str]:
    used = {"dlcft": __version__, "torch": str(torch.__version__), "numpy": np.__version__}
    return used | {"safetensors": safetensors.__version__, "python": platform.python_version()}
