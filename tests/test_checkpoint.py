"""The store of versions: exact, atomic under kills and full disks, and deaf to damaged or hostile files."""

import builtins
import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from dlcft.checkpoint import CheckpointError, Store, _files, state_digest
from dlcft.checkpoint._files import DTYPES

MANIFEST = "manifest.json"


def content(seed, size=50):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(size, 3, generator=generator),
        "sums": torch.randn(size, generator=generator).double(),
    }
    return tensors, {"seed": seed, "labels": ["cat", "hund", "ελέφαντας"], "loss": [0.1, 1e-300]}


def committed(directory, count=1, **options):
    store = Store(directory)
    for seed in range(1, count + 1):
        store.commit(*content(seed), **options)
    return store


def digest(store, version=None):
    return state_digest(*store.read(version))


def bits(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name != ".lock"}


def forge(directory, change, name=MANIFEST):
    """Change a JSON file and seal it again, as someone who knows the format would."""
    path = directory / name
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_bytes(_files._sealed(fields))


def assert_refused(store, match):
    """Reading, committing and rolling back fail with one sentence and change nothing."""
    before = files(store.directory)
    for action in (store.read, lambda: store.commit(*content(9)), lambda: store.rollback(1)):
        with pytest.raises(CheckpointError, match=match) as caught:
            action()
        message = str(caught.value)
        assert message.endswith(".")
        assert "\n" not in message
    assert files(store.directory) == before


# --- what is stored ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(tmp_path, dtype):
    raw = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
    tensors = {"matrix": tensor, "strided": tensor.t()[1:], "scalar": tensor[0, 0], "none": tensor[:0]}
    store = Store(tmp_path)
    store.commit(tensors, {})
    got, _ = store.read()
    assert state_digest(got, {}) == state_digest(tensors, {})
    for name, expected in tensors.items():
        assert got[name].dtype == dtype
        assert got[name].shape == expected.shape
        assert bits(got[name]) == bits(expected)


def test_tensors_that_share_memory_or_lie_oddly(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "base": base,
        "same": base,
        "column": base[:, 1],
        "expanded": base[:1].expand(5, 6),
        "channels_last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "negated": torch.complex(base, base).conj().imag,
        "parameter": torch.nn.Parameter(base[1]),
        "naïve/ключ|": torch.tensor(3),
    }
    store = Store(tmp_path)
    store.commit(tensors, {})
    got, _ = store.read()
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    got["base"].zero_()
    assert got["same"].any(), "what is read shares nothing, neither with itself nor with the file"
    assert torch.equal(store.read()[0]["base"], base)


def test_other_programs_can_read_the_files(tmp_path):
    store = committed(tmp_path)
    tensors, header = content(1)
    version = store.current
    got = load_file(tmp_path / version.file)
    assert state_digest(got, {}) == state_digest(tensors, {})
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["format"], manifest["format_version"], manifest["current"]) == ("dlcft", 1, 1)
    assert manifest["versions"][0]["header"] == header
    assert set(version.packages) == {"dlcft", "torch", "numpy", "safetensors", "python"}
    data = (tmp_path / version.file).read_bytes()
    assert (version.bytes, version.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_no_tensors_at_all(tmp_path):
    Store(tmp_path / "new" / "directory").commit({}, {"only": "words"})
    assert Store(tmp_path / "new" / "directory").read() == ({}, {"only": "words"})


def test_header_keeps_its_order_and_tuples_become_lists(tmp_path):
    store = Store(tmp_path)
    store.commit({}, {"b": (1, 2.5), "a": {"y": None, "x": True}})
    header = store.read()[1]
    assert json.dumps(header) == '{"b": [1, 2.5], "a": {"y": null, "x": true}}'


@pytest.mark.parametrize("header", [{1: "a"}, {"a": float("nan")}, {"a": [float("inf")]}, {"a": torch.zeros(1)}])
def test_headers_that_json_would_change_are_refused(tmp_path, header):
    with pytest.raises(TypeError, match="the header h"):
        Store(tmp_path).commit({}, header)
    assert files(tmp_path) == {}


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.zeros(2, dtype=torch.complex64)},
        {"a": torch.zeros(2, device="meta")},
        {"a": torch.eye(2).to_sparse()},
        {"__metadata__": torch.zeros(1)},
    ],
)
def test_tensors_that_cannot_be_stored_are_refused(tmp_path, tensors):
    with pytest.raises(ValueError, match="cannot be stored"):
        Store(tmp_path).commit(tensors, {})
    assert files(tmp_path) == {}


def test_digest_sees_every_bit():
    tensors, header = {"a": torch.zeros(3), "b": torch.ones(2)}, {"x": 1, "y": [2]}
    reference = state_digest(tensors, header)
    assert reference == state_digest(dict(reversed(tensors.items())), dict(reversed(header.items())))
    others = [
        ({**tensors, "a": torch.tensor([0.0, 0.0, -0.0])}, header),
        ({**tensors, "a": torch.zeros(3, dtype=torch.int32)}, header),
        ({**tensors, "a": torch.zeros(3, 1)}, header),
        ({"a": tensors["a"], "c": tensors["b"]}, header),
        (tensors, {"x": 1, "y": [3]}),
    ]
    assert len({reference, *(state_digest(*other) for other in others)}) == 6


# --- versions ---------------------------------------------------------------------------------------------------------


def test_keep(tmp_path):
    store = committed(tmp_path, 5, keep=3)
    assert [v.number for v in store.versions()] == [3, 4, 5]
    for number in (3, 4, 5):
        assert digest(store, number) == state_digest(*content(number))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"version-{n}.safetensors" for n in (3, 4, 5)}
    assert [v.parent for v in store.versions()][1:] == [v.sha256 for v in store.versions()][:-1]
    store.commit(*content(6), keep=1)
    assert [v.number for v in store.versions()] == [6]
    with pytest.raises(CheckpointError, match=r"version 5 is not kept; .* holds the versions 6\."):
        store.read(5)
    with pytest.raises(ValueError, match="keep is 0"):
        store.commit({}, {}, keep=0)


def test_rollback(tmp_path):
    store = committed(tmp_path, 3, keep=3)
    assert store.rollback() == 2
    assert digest(store) == state_digest(*content(2))
    assert store.rollback() == 1
    assert store.rollback(3) == 3
    assert store.rollback(2) == 2
    number = store.commit(*content(4), keep=2)
    assert number == 4
    assert [v.number for v in store.versions()] == [2, 4], "the version it was learned from outlives a newer one"
    assert store.current.parent == store.versions()[0].sha256
    events = [(e["action"], e["version"]) for e in store.history]
    rolled = [("rollback", n) for n in (2, 1, 3, 2)]
    assert events == [("commit", 1), ("commit", 2), ("commit", 3), *rolled, ("commit", 4)]


def test_rollback_needs_a_whole_version(tmp_path):
    store = committed(tmp_path, 2, keep=1)
    with pytest.raises(CheckpointError, match="version 2 was learned from is not kept"):
        store.rollback()
    store = committed(tmp_path, 1)
    (tmp_path / "version-2.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        store.rollback()
    assert store.current.number == 3


def test_numbers_are_never_used_twice(tmp_path):
    store = committed(tmp_path, 2)
    store.rollback()
    assert store.commit(*content(7), keep=1) == 3
    assert store.commit(*content(8), keep=1) == 4


def test_nothing_there(tmp_path):
    for directory in (tmp_path, tmp_path / "absent", tmp_path / "file" / "under"):
        (tmp_path / "file").touch()
        store = Store(directory)
        assert (store.versions(), store.history, store.current, store.load_progress()) == ([], [], None, None)
        with pytest.raises(CheckpointError, match=r"there is nothing to use; .* holds no checkpoint"):
            store.read()
    with pytest.raises(OSError, match="cannot be written"):
        Store(tmp_path / "file").commit({}, {})


def test_files_of_others_stay(tmp_path):
    for name in ("README.md", "other.safetensors", "notes.tmp", "version-x.safetensors"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds version-x\.safetensors but no manifest"):
        Store(tmp_path).commit({}, {})
    (tmp_path / "version-x.safetensors").unlink()
    committed(tmp_path, 3)
    assert all((tmp_path / name).read_text() == "mine" for name in ("README.md", "other.safetensors", "notes.tmp"))


def test_a_lost_manifest_does_not_cost_the_versions(tmp_path):
    store = committed(tmp_path, 2)
    kept = (tmp_path / MANIFEST).read_bytes()
    (tmp_path / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match=r"version-2\.safetensors but no manifest"):
        store.commit(*content(3))
    (tmp_path / MANIFEST).write_bytes(kept)
    assert digest(store) == state_digest(*content(2))


def test_reading_while_another_commits(tmp_path, monkeypatch):
    store, path = committed(tmp_path), Store._path

    def late(self, file):
        monkeypatch.setattr(Store, "_path", path)
        Store(tmp_path).commit(*content(2), keep=1)
        return path(self, file)

    monkeypatch.setattr(Store, "_path", late)
    assert digest(store) == state_digest(*content(2))


# --- progress ---------------------------------------------------------------------------------------------------------


def test_progress(tmp_path):
    store = Store(tmp_path)
    store.save_progress(*content(20))
    assert state_digest(*store.load_progress()) == state_digest(*content(20)), "also before the first version"
    store.commit(*content(1))
    assert store.load_progress() is None
    for seed in (21, 22):
        store.save_progress(*content(seed))
        assert state_digest(*Store(tmp_path).load_progress()) == state_digest(*content(seed))
    assert len(list(tmp_path.glob("progress*"))) == 2, "the progress before was removed"
    assert digest(store) == state_digest(*content(1))
    store.clear_progress()
    assert store.load_progress() is None
    assert list(tmp_path.glob("progress*")) == []
    Store(tmp_path / "absent").clear_progress()
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("change", [lambda s: s.commit(*content(3)), lambda s: s.rollback()])
def test_progress_of_another_version_is_stale(tmp_path, change):
    store = committed(tmp_path, 2)
    store.save_progress(*content(20))
    left = {name: data for name, data in files(tmp_path).items() if name.startswith("progress")}
    change(store)
    for name, data in left.items():  # as if killed between the commit and the removal
        (tmp_path / name).write_bytes(data)
    assert store.load_progress() is None
    store.rollback(2)
    for name, data in left.items():
        (tmp_path / name).write_bytes(data)
    assert store.load_progress() is None, "not even when its version is current again"
    store.commit(*content(4))
    assert list(tmp_path.glob("progress*")) == []


def test_damaged_progress_is_ignored_with_a_warning(tmp_path, caplog):
    store = committed(tmp_path)
    for pattern in ("progress.json", "progress-*.safetensors"):
        store.save_progress(*content(20))
        path = next(tmp_path.glob(pattern))
        path.write_bytes(path.read_bytes()[:-1])
        caplog.clear()
        assert store.load_progress() is None
        assert "is ignored" in caplog.text
    store.save_progress(*content(21))
    forge(tmp_path, lambda fields: fields.update(file="../version-1.safetensors"), "progress.json")
    assert store.load_progress() is None
    assert digest(store) == state_digest(*content(1))


# --- damage and hostility ---------------------------------------------------------------------------------------------


def test_no_flipped_byte_is_accepted(tmp_path):
    store, generator = committed(tmp_path, 2), random.Random(0)
    for name in ("version-2.safetensors", MANIFEST):
        whole = (tmp_path / name).read_bytes()
        for _ in range(200):
            place, change = generator.randrange(len(whole)), generator.randrange(1, 256)
            (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            with pytest.raises(CheckpointError):
                store.read()
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
                store.read()
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "version-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.read()


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
        (b'{"format": "dlcft", "format_version": 7, "all": "else"}', r"version 7; dlcft \S+ reads versions up to 1"),
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
        ({"bytes": 10**30}, "has .* bytes; 10{30} are expected"),
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
    for action in (store.read, lambda: store.rollback(1)):
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
        store.read()
    (inside / name).unlink()
    os.mkfifo(inside / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        store.read()


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
            store.read()


def test_manifests_that_are_too_large(tmp_path, monkeypatch):
    store = committed(tmp_path)
    monkeypatch.setattr(_files, "LARGEST_JSON", 2_000)
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"bytes long; 2000 are accepted"):
        store.commit({}, {"labels": ["x" * 50] * 50})
    assert files(tmp_path) == before
    (tmp_path / MANIFEST).write_bytes(b" " * 2_001)
    assert_refused(store, "has 2001 bytes; 2000 are expected at most")


# --- disks and processes ----------------------------------------------------------------------------------------------


class FullDisk:
    """Lets `room` bytes through, over all files that are opened for writing."""

    def __init__(self, room):
        self.room = room

    def open(self, path, mode="r", **options):
        file = builtins.open(path, mode, **options)  # noqa: SIM115 (Limited closes it)
        return Limited(file, self) if "x" in mode else file


class Limited:
    def __init__(self, file, disk):
        self.file, self.disk = file, disk

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        part = bytes(data)[: self.disk.room]
        self.disk.room -= len(part)
        self.file.write(part)
        if len(part) < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk(tmp_path, monkeypatch):
    store = committed(tmp_path, 2)
    store.save_progress(*content(20))
    before, room, actions = files(tmp_path), 0, 0
    for action in (lambda: store.save_progress(*content(21)), lambda: store.commit(*content(3))):
        for room in [0, 5, 300, 900, 1_000, 1_300, 10**9]:
            monkeypatch.setattr(_files, "open", FullDisk(room).open, raising=False)
            if room == 10**9:
                action()
                break
            with pytest.raises(OSError, match=r"cannot be written \(No space left on device\); its versions are as"):
                action()
            actions += 1
            assert files(tmp_path) == before
            assert digest(store) == state_digest(*content(2))
            assert state_digest(*store.load_progress()) in {state_digest(*content(seed)) for seed in (20, 21)}
        before = files(tmp_path)
    assert actions == 12
    assert digest(store) == state_digest(*content(3))


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_failing_calls(tmp_path, monkeypatch, function, call):
    """A commit syncs the data, the directory, the manifest, the directory, and renames twice."""
    store, genuine, calls = committed(tmp_path, 2), getattr(os, function), []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == call:
            raise OSError(errno.EIO, "Input/output error")
        return genuine(*arguments)

    monkeypatch.setattr(os, function, failing)
    if function == "replace" and call > 2:
        store.commit(*content(3))
    else:
        with pytest.raises(OSError, match="Input/output error"):
            store.commit(*content(3))
    number = store.current.number
    assert number == (3 if call > 2 and not (function == "fsync" and call == 3) else 2)
    assert digest(store) == state_digest(*content(number))
    referenced = {v.file for v in store.versions()}
    assert files(tmp_path).keys() == {MANIFEST, *referenced}


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="the superuser may write anywhere")
def test_read_only_directory(tmp_path):
    store = committed(tmp_path)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError, match="cannot be written"):
            store.commit(*content(2))
        assert digest(store) == state_digest(*content(1))
    finally:
        tmp_path.chmod(0o700)


def test_what_a_read_only_directory_answers(tmp_path, monkeypatch):
    """The same for the superuser, whom permissions do not bind."""
    store, genuine = committed(tmp_path), os.open

    def forbidden(path, flags, *mode):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return genuine(path, flags, *mode)

    monkeypatch.setattr(os, "open", forbidden)
    for action in (lambda: store.commit(*content(2)), store.rollback, store.clear_progress):
        with pytest.raises(PermissionError, match=r"cannot be written \(Permission denied\)"):
            action()
    assert digest(store) == state_digest(*content(1))


COMMITTING = """
import os, sys, torch
from dlcft.checkpoint import Store
torch.set_num_threads(1)
# torch is imported once; each child is a process that commits until it is killed
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        store = Store(sys.argv[1])
        while True:
            n = store.history[-1]["version"] + 1 if store.history else 1
            store.save_progress({"t": torch.full((200_000,), float(n))}, {"n": n})
            store.commit({"t": torch.full((200_000,), float(n))}, {"n": n})
    print(child, flush=True)
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_kill_at_any_moment(tmp_path):
    generator, last, dirty, store, period = random.Random(0), 0, 0, Store(tmp_path), 0.0
    process = subprocess.Popen(
        [sys.executable, "-c", COMMITTING, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        for _ in range(20):
            process.stdin.write("\n")
            process.stdin.flush()
            child = int(process.stdout.readline())
            start = time.perf_counter()
            while not store.versions():  # the first child tells how long a commit takes on this disk
                time.sleep(0.001)
            period = period or 3 * (time.perf_counter() - start)
            time.sleep(generator.uniform(0, period))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "dead\n"
            tensors, header = store.read()
            assert header["n"] == store.current.number >= last
            assert torch.equal(tensors["t"], torch.full((200_000,), float(header["n"])))
            last = header["n"]
            progress = store.load_progress()
            assert progress is None or progress[1]["n"] == last + 1
            referenced = {MANIFEST, *(v.file for v in store.versions())}
            dirty += any(name not in referenced for name in files(tmp_path))
        process.stdin.close()
    assert last > 1, "the children did commit"
    assert dirty > 0, "some were killed at work"
    store.commit(*content(1))
    assert files(tmp_path).keys() == {MANIFEST, *(v.file for v in store.versions())}
    assert store.current.number == last + 1


HOLDING = """
import sys, time
from dlcft.checkpoint import Store
with Store(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_two_processes(tmp_path):
    store = committed(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", HOLDING, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout.readline() == "held\n"
        before = files(tmp_path)
        for action in (lambda: store.commit(*content(2)), store.rollback, lambda: store.save_progress({}, {})):
            with pytest.raises(CheckpointError, match=rf"is in use by process {holder.pid}; wait"):
                action()
        assert files(tmp_path) == before
        assert digest(store) == state_digest(*content(1)), "reading needs no lock"
        holder.kill()
    assert store.commit(*content(2)) == 2


def test_the_lock_nests_and_ends(tmp_path):
    store = Store(tmp_path)
    with store.lock(), store.lock():
        store.commit(*content(1))
        with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()};"):
            Store(tmp_path).commit(*content(2))
    assert Store(tmp_path).commit(*content(2)) == 2
    with pytest.raises(KeyError), store.lock():
        raise KeyError
    with Store(tmp_path).lock():
        pass
