"""The manifest of a store: the versions it keeps, which one is current, and everything that happened to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

from dlcft.store.files import CheckpointError, Header, check_fields, read_json, write_json

FILE_FIELDS: dict[str, set[type]] = {"file": {str}, "bytes": {int}, "sha256": {str}, "header": {dict}}
_WRITTEN: dict[str, set[type]] = {"number": {int}, "parent": {str, type(None)}, "packages": {dict}, "created": {str}}
_LINE: dict[str, set[type]] = {"accepted": {bool}, "ancestors": {list}}
VERSION_FIELDS = FILE_FIELDS | _WRITTEN | _LINE
EVENT_FIELDS: dict[str, set[type]] = {"action": {str}, "version": {int}, "sha256": {str}, "time": {str}}
_COUNTS: dict[str, set[type]] = {"last": {int}, "events": {int}}
MANIFEST_FIELDS: dict[str, set[type]] = {"current": {int}, **_COUNTS, "versions": {list}, "history": {list}}
_EVENTS = 100  # that a manifest keeps: its size must not grow with the number of tasks


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
        accepted: whether it is, or once was, current; others were only kept aside.
        ancestors: the number of the version from which it was learned, then of those before that are still kept.
            Hashes would not do: the same data learned twice from the same version gives the same content.
    """

    number: int
    file: str
    bytes: int
    sha256: str
    parent: str | None
    header: Header
    packages: dict[str, str]
    created: str
    accepted: bool
    ancestors: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The state of a store at one moment; for reading only.

    Attributes:
        versions: the versions that are kept, oldest first.
        number: of the current version; 0 while there is none.
        last: the largest number that a version ever had.
        events: how many commits, rollbacks and removals there were.
        history: the last events, oldest first: action (commit, aside, rollback, prune), version, sha256, time.
    """

    versions: tuple[Version, ...] = ()
    number: int = 0
    last: int = 0
    events: int = 0
    history: tuple[Header, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in a file; an empty one where there is no file."""
        content = read_json(path)
        if content is None:
            return cls()
        if "events" not in content:
            content = _from_history(content, path)
        check_fields(content, MANIFEST_FIELDS, path)
        for entry in content["versions"]:
            check_fields(entry, VERSION_FIELDS, path)
        for event in content["history"]:
            check_fields(event, EVENT_FIELDS, path)
        if any(type(n) is not int for entry in content["versions"] for n in entry["ancestors"]):
            raise CheckpointError(f"{path} has ancestors that are no numbers.")
        versions = tuple(Version(**entry | {"ancestors": tuple(entry["ancestors"])}) for entry in content["versions"])
        numbers, current = [v.number for v in versions], content["current"]
        if current not in numbers or len(set(numbers)) < len(numbers) or max(numbers) > content["last"]:
            listed = f"{path} lists the versions {numbers}, with {current} as the current one"
            raise CheckpointError(f"{listed} and {content['last']} as the last.")
        return cls(versions, current, content["last"], content["events"], tuple(content["history"]))

    @classmethod
    def alone(cls, version: Version) -> Manifest:
        """The manifest of a directory that holds this version and none before or after it."""
        first = replace(version, ancestors=())
        return cls().after("commit", first, versions=[first], number=first.number)

    def write(self, path: Path) -> None:
        """Replace the file, whole or not at all."""
        entries = [vars(v) for v in self.versions]
        counts = {"current": self.number, "last": self.last, "events": self.events}
        write_json(path, {**counts, "versions": entries, "history": list(self.history)})

    def after(self, action: str, version: Version, *, versions: Iterable[Version], number: int) -> Manifest:
        """The manifest after one more event, with these versions kept and this number current."""
        event = {"action": action, "version": version.number, "sha256": version.sha256, "time": now()}
        kept = sorted(versions, key=lambda v: v.number)
        numbers = {v.number for v in kept}
        told = tuple(
            replace(
                v,
                accepted=v.accepted or v.number == number,
                ancestors=(*v.ancestors[:1], *(n for n in v.ancestors[1:] if n in numbers)),
            )
            for v in kept
        )
        return Manifest(
            told,
            number,
            max(self.last, version.number),
            self.events + 1,
            (*self.history, event)[-_EVENTS:],
        )

    @property
    def current(self) -> Version | None:
        """The current version; None while there is none."""
        return self.find(self.number)

    def find(self, number: int) -> Version | None:
        """The version of this number, if it is kept."""
        return next((v for v in self.versions if v.number == number), None)

    def kept_first(self) -> list[Version]:
        """The current version, its ancestors, others that were current, then the rest; newest first in each group."""
        line = set() if self.current is None else {self.number, *self.current.ancestors}
        return sorted(self.versions, key=lambda v: (v.number in line, v.accepted, v.number), reverse=True)

    def base(self) -> Header:
        """Identifies this state of the store: the number of events only grows."""
        sha256 = None if self.current is None else self.current.sha256
        return {"version": self.number, "sha256": sha256, "events": self.events}


def _from_history(content: Header, path: Path) -> Header:
    """A manifest of format 1, which tells everything by a history of all events, in today's form."""
    check_fields(content, {name: kinds for name, kinds in MANIFEST_FIELDS.items() if name not in _COUNTS}, path)
    current, parents, accepted = 0, {0: 0}, set()
    for event in content["history"]:
        check_fields(event, EVENT_FIELDS, path)
        if event["action"] in ("commit", "aside"):
            parents[event["version"]] = current
        if event["action"] in ("commit", "rollback"):
            current = event["version"]
            accepted.add(current)
    versions = []
    for entry in content["versions"]:
        check_fields(entry, FILE_FIELDS | _WRITTEN, path)
        line: dict[int, None] = {}  # in order
        number = parents.get(entry["number"], 0)
        while number and number not in line:
            line[number] = None
            number = parents.get(number, 0)
        versions.append({**entry, "accepted": entry["number"] in accepted, "ancestors": list(line)})
    counts = {"last": max(parents), "events": len(content["history"])}
    return {**content, **counts, "versions": versions, "history": content["history"][-_EVENTS:]}


def now() -> str:
    """The time in UTC, to the second, in ISO format."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
