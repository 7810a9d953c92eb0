"""Stores that are damaged or forged: refused in one sentence, and left as they are."""

import hashlib
import json
import os
import random

import pytest

from dlcft.store import files as _files
from dlcft.store.files import CheckpointError, state_digest
from tests.support.stores import MANIFEST, assert_refused, committed, content, digest, files, forge


def test_no_flipped_byte_is_accepted(tmp_path):
    store, generator = committed(tmp_path, 2), random.Random(0)
    for name in ("version-2.safetensors", MANIFEST):
        whole = (tmp_path / name).read_bytes()
        for _ in range(200):
            place, change = generator.randrange(len(whole)), generator.randrange(1, 256)
            (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            with pytest.raises(CheckpointError):
                store.load()
        (tmp_path / name).write_bytes(whole)
    assert digest(store) == state_digest(*content(2))


def test_no_other_length_is_accepted(tmp_path):
    store, generator = committed(tmp_path), random.Random(0)
    for name in ("version-1.safetensors", MANIFEST):
        whole = (tmp_path / name).read_bytes()
        lengths = {0, 1, 7, 8, len(whole) - 1, *(generator.randrange(len(whole)) for _ in range(40))}
        for data in [*(whole[:length] for length in lengths), whole + b"\n", whole + whole]:
            (tmp_path / name).write_bytes(data)
            with pytest.raises(CheckpointError):
                store.load()
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "version-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.load()


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b'{"name": "my app", "icons": []}', "was not written by dlcft"),
        (b"[1, 2]", "was not written by dlcft"),
        (b"null", "was not written by dlcft"),
        (b"\xff\xfe not text", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"9" * 5_000, "is not JSON"),
        (b'{"format": "dlcft", "current": 1e999}', "is not JSON"),
        (b'{"format": "dlcft"}', "is damaged"),
        (b'{"format": "dlcft", "format_version": true}', "is damaged"),
        (b'{"format": "dlcft", "format_version": 7, "all": "else"}', r"version 7; dlcft \S+ reads versions up to 2"),
    ],
)
def test_foreign_and_newer_manifests(tmp_path, data, match):
    store = committed(tmp_path)
    (tmp_path / MANIFEST).write_bytes(data)
    assert_refused(store, match)


def version_fields(**changes):
    return lambda fields: fields["versions"][0].update(changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda f: f.update(format_version=0), "is damaged"),
        (lambda f: f.update(format_version="1"), "is damaged"),
        (lambda f: f.update(extra=1), "an entry whose fields are not"),
        (lambda f: f.pop("history"), "an entry whose fields are not"),
        (lambda f: f.update(versions={}), "has a dict as 'versions'"),
        (lambda f: f.update(versions=[3]), "an entry whose fields are not"),
        (lambda f: f.update(versions=f["versions"] * 2), r"lists the versions \[1, 1\]"),
        (lambda f: f.update(versions=[]), r"lists the versions \[\], with 1"),
        (lambda f: f.update(current=4), r"with 4 as the current"),
        (lambda f: f.update(current=True), "has a bool as 'current'"),
        (lambda f: f.update(history=[{"version": "x"}]), "an entry whose fields are not"),
        (version_fields(number="1"), "has a str as 'number'"),
        (version_fields(bytes=1.5), "has a float as 'bytes'"),
        (version_fields(sha256=None), "has a NoneType as 'sha256'"),
        (version_fields(header=[]), "has a list as 'header'"),
    ],
)
def test_sealed_nonsense_is_refused(tmp_path, change, match):
    store = committed(tmp_path)
    forge(tmp_path, change)
    assert_refused(store, match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bytes": 10**30}, "is not JSON that dlcft has written"),
        ({"bytes": 10**17}, "has .* bytes; 10{17} are expected"),
        ({"ancestors": [{}]}, "has ancestors that are no numbers"),
        ({"bytes": -1}, "bytes; -1 are expected"),
        ({"sha256": "0" * 64}, "sha256 is not the one"),
        ({"file": "../outside.safetensors"}, "a name that is never written"),
        ({"file": "/etc/passwd"}, "a name that is never written"),
        ({"file": "..\\outside.safetensors"}, "a name that is never written"),
        ({"file": "version-1.safetensors\0"}, "a name that is never written"),
        ({"file": "x" * 10_000}, "a name that is never written"),
        ({"file": ""}, "a name that is never written"),
    ],
)
def test_sealed_lies_about_the_file_are_refused(tmp_path, changes, match):
    inside = tmp_path / "store"
    store = committed(inside)
    (tmp_path / "outside.safetensors").write_bytes((inside / "version-1.safetensors").read_bytes())
    forge(inside, version_fields(**changes))
    before = files(inside)
    for action in (store.load, lambda: store.rollback(1)):
        with pytest.raises(CheckpointError, match=match) as caught:
            action()
        assert len(str(caught.value)) < 500
    assert files(inside) == before


@pytest.mark.parametrize("name", ["version-1.safetensors", MANIFEST])
def test_links_and_devices_are_not_followed(tmp_path, name):
    inside, outside = tmp_path / "store", tmp_path / "outside"
    store = committed(inside)
    (inside / name).rename(outside)
    (inside / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match="not a regular file"):
        store.load()
    (inside / name).unlink()
    os.mkfifo(inside / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        store.load()


def test_a_linked_lock_file_is_not_overwritten(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="cannot be written"):
        committed(tmp_path / "store")
    assert (tmp_path / "precious").read_text() == "mine"


def test_a_version_file_that_is_something_else(tmp_path):
    store = committed(tmp_path)
    for data in (b"", b"\xff" * 64, (2**62).to_bytes(8, "little") + b"{}", b"\x80\x04 a pickle"):
        (tmp_path / "version-1.safetensors").write_bytes(data)
        forge(tmp_path, version_fields(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            store.load()


def test_a_triangle_of_no_matrix_is_refused(tmp_path):
    store = committed(tmp_path)
    for entry in (
        {"dtype": "F64", "shape": [4], "data_offsets": [0, 32]},  # 3 or 6 numbers are a triangle
        {"dtype": "F64", "shape": [], "data_offsets": [0, 8]},
        {"dtype": "F8_E8M0", "shape": [6], "data_offsets": [0, 6]},
    ):
        text = json.dumps({"__metadata__": {"sums": "symmetric"}, "sums": entry}).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(entry["data_offsets"][1])
        (tmp_path / "version-1.safetensors").write_bytes(data)
        forge(tmp_path, version_fields(bytes=len(data), sha256=hashlib.sha256(data).hexdigest()))
        with pytest.raises(CheckpointError, match="is not a safetensors file that dlcft has written"):
            store.load()


def test_manifests_that_are_too_large(tmp_path, monkeypatch):
    store = committed(tmp_path)
    monkeypatch.setattr(_files, "LARGEST_JSON", 2_000)
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"bytes long; 2000 are accepted"):
        store.commit({}, {"labels": ["x" * 50] * 50})
    assert files(tmp_path) == before
    (tmp_path / MANIFEST).write_bytes(b" " * 2_001)
    assert_refused(store, "has 2001 bytes; 2000 are expected at most")
