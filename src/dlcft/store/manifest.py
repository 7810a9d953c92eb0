"""The manifest of a store: the versions it keeps, which one is current, and everything that happened to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from dlcft.store.files import CheckpointError, Header, check_fields, read_json, write_json

FILE_FIELDS: dict[str, set[type]] = {"file": {str}, "bytes": {int}, "sha256": {str}, "header": {dict}}
VERSION_FIELDS = FILE_FIELDS | {"number": {int}, "parent": {str, type(None)}, "packages": {dict}, "created": {str}}
EVENT_FIELDS: dict[str, set[type]] = {"action": {str}, "version": {int}, "sha256": {str}, "time": {str}}
MANIFEST_FIELDS: dict[str, set[type]] = {"current": {int}, "versions": {list}, "history": {list}}


@dataclass(frozen=True)
class Version:
    """One kept version.

    Attributes:
        number: counts commits from 1; never used twice.
        file: the safetensors file's name.
        bytes: its size.
        sha256: of its content.
        parent: the sha256 of the version from which this one was learned; None for the first.
        header: the JSON that the caller stored with the tensors.
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
class Manifest:
    """The state of a store at one moment; for reading only.

    Attributes:
        versions: the versions that are kept, oldest first.
        number: of the current version; 0 while there is none.
        history: all events, oldest first: action (commit, aside, rollback, prune), version, sha256, time.
    """

    versions: tuple[Version, ...] = ()
    number: int = 0
    history: tuple[Header, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a file; an empty one where there is no file."""
        content = read_json(path)
        if content is None:
            return cls()
        check_fields(content, MANIFEST_FIELDS, path)
        for entry in content["versions"]:
            check_fields(entry, VERSION_FIELDS, path)
        for event in content["history"]:
            check_fields(event, EVENT_FIELDS, path)
        versions = tuple(Version(**entry) for entry in content["versions"])
        numbers, current = [v.number for v in versions], content["current"]
        if current not in numbers or len(set(numbers)) < len(numbers):
            raise CheckpointError(f"{path} lists the versions {numbers}, with {current} as the current one.")
        return cls(versions, current, tuple(content["history"]))

    def write(self, path: Path) -> None:
        """Replace the file, whole or not at all."""
        entries = [vars(v) for v in self.versions]
        write_json(path, {"current": self.number, "versions": entries, "history": list(self.history)})

    def after(self, action: str, version: Version, *, versions: Iterable[Version], number: int) -> Manifest:
        """The manifest after one more event, with these versions kept and this number current."""
        event = {"action": action, "version": version.number, "sha256": version.sha256, "time": now()}
        return Manifest(tuple(sorted(versions, key=lambda v: v.number)), number, (*self.history, event))

    @property
    def current(self) -> Version | None:
        """The current version; None while there is none."""
        return self.find(self.number)

    @property
    def been_current(self) -> set[int]:
        """The numbers of the versions that are, or once were, current; others were only kept aside."""
        return {event["version"] for event in self.history if event["action"] in ("commit", "rollback")}

    def find(self, number: int) -> Version | None:
        """The version of this number, if it is kept."""
        return next((v for v in self.versions if v.number == number), None)

    def parents(self) -> dict[int, int]:
        """For every version that ever was, the number of the version that was current before it; 0 for none.

        Hashes would not do: the same data learned twice from the same version gives the same content.
        """
        current, found = 0, {}
        for event in self.history:
            if event["action"] in ("commit", "aside"):
                found[event["version"]] = current
            if event["action"] in ("commit", "rollback"):
                current = event["version"]
        return found

    def kept_first(self) -> list[Version]:
        """The current version, its ancestors, others that were current, then the rest; newest first in each group."""
        parents, ancestors, number = self.parents(), set(), self.number
        while number and number not in ancestors:
            ancestors.add(number)
            number = parents.get(number, 0)
        current = self.been_current
        return sorted(self.versions, key=lambda v: (v.number in ancestors, v.number in current, v.number), reverse=True)

    def base(self) -> Header:
        """Identifies this state of the store: the history only grows."""
        sha256 = None if self.current is None else self.current.sha256
        return {"version": self.number, "sha256": sha256, "events": len(self.history)}


def now() -> str:
    """The time in UTC, to the second, in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
