"""One writer at a time, by a lock of the operating system: it ends with the process, however that ends."""

from __future__ import annotations

import os
import sys
from io import FileIO
from pathlib import Path
from types import TracebackType

from dlcft.store.files import CheckpointError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FAR = 2**30  # Windows forbids reading what is locked, so the locked byte lies far behind the holder's number


class Lock:
    """A context manager that may be entered again while it is held.

    Args:
        path: a file to hold; whoever holds it may remove it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether this object holds it."""
        return self._depth > 0

    def __enter__(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: when another process, or another object in this one, holds it.
            OSError: when the file cannot be written.
        """
        if self._depth == 0:
            while not self._taken():
                pass
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n".encode())
        self._depth += 1

    def _taken(self) -> bool:
        """Whether the file that was locked is still the one of that name: its last holder may have removed it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        follow = 0 if sys.platform == "win32" else os.O_NOFOLLOW
        self._file = FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT | follow, 0o666), "r+")
        try:
            _take(self._file)
        except (BlockingIOError, PermissionError) as error:
            holder = self._file.read(32).decode("ascii", "replace").strip() or "that has just begun"
            self._file.close()
            raise CheckpointError(
                f"{self.path.parent} is in use by process {holder}; wait until that has ended."
            ) from error
        try:
            same = os.path.samestat(os.fstat(self._file.fileno()), os.lstat(self.path))
        except FileNotFoundError:
            same = False
        if not same:
            _free(self._file)
            self._file.close()
        return same

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Free the lock when the outermost block ends."""
        self._depth -= 1
        if self._depth == 0:
            _free(self._file)
            self._file.close()


def _take(file: FileIO) -> None:
    if sys.platform == "win32":
        file.seek(FAR)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        finally:
            file.seek(0)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _free(file: FileIO) -> None:
    if sys.platform == "win32":
        file.seek(FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(file, fcntl.LOCK_UN)  # closing is not enough: a forked worker may hold the same open file
