"""Full disks, failing calls, kills and other processes: a store is as before or as after."""

import builtins
import errno
import fcntl
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch

from dlcft.data import files as _files
from dlcft.store import manifest
from dlcft.store.files import CheckpointError, state_digest
from dlcft.store.store import Store
from tests.support.stores import MANIFEST, committed, content, digest, files


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


@pytest.mark.parametrize("room", [1_000, 50_000])
def test_full_disk_inside_a_triangle(tmp_path, monkeypatch, room):
    store = committed(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr(_files, "open", FullDisk(room).open, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        store.commit({"symmetric": torch.eye(130).double()}, {})
    assert files(tmp_path) == before
    assert digest(store) == state_digest(*content(1))


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
        with pytest.raises(OSError, match="Input/output error") as error:
            store.commit(*content(3))
        after = "version 3 was written before that, version 3 is current; a power cut now might undo it."
        before = "its versions are as they were."
        assert str(error.value).endswith(before if store.current.number == 2 else after)
    number = store.current.number
    assert number == (3 if call > 2 and not (function == "fsync" and call == 3) else 2)
    assert digest(store) == state_digest(*content(number))
    referenced = {v.file for v in store.look().versions}
    assert files(tmp_path).keys() == {MANIFEST, *referenced}


def test_a_lock_that_cannot_be_ended_does_not_hide_the_commit(tmp_path, monkeypatch):
    store = committed(tmp_path, 2)

    def failing(*arguments, **options):
        release(*arguments, **options)
        raise OSError(errno.EIO, "Input/output error")

    with store.lock():
        release = store._lock.release
        monkeypatch.setattr(type(store._lock), "release", failing)
        with pytest.raises(OSError, match="version 3 was written before that, version 3 is current"):
            store.commit(*content(3))
        monkeypatch.undo()
    assert digest(store) == state_digest(*content(3))


def test_a_new_directory_and_those_above_it_are_brought_to_the_disk(tmp_path, monkeypatch):
    synced, genuine = set(), os.fsync

    def noted(descriptor):
        synced.add(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        genuine(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    Store(tmp_path / "a" / "b" / "model").commit(*content(1))
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b"), str(tmp_path / "a/b/model")} <= synced


READING = """
import sys
from dlcft.store.store import Store
store, seen = Store(sys.argv[1]), set()
print("ready", flush=True)
for _ in range(int(sys.argv[2])):
    tensors, version = store.load()
    assert set(tensors["t"].tolist()) == {version.header["n"]}
    seen.add(version.number)
print(len(seen))
"""


@pytest.mark.parametrize("reads", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_reading_while_another_process_commits(tmp_path, reads):
    """With keep=1 every file that is read is deleted soon."""
    store = Store(tmp_path)

    def commit(n):
        store.commit({"t": torch.full((100_000,), float(n))}, {"n": n}, keep=1)

    commit(1)
    command = [sys.executable, "-c", READING, str(tmp_path), str(reads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout.readline() == "ready\n"
        n = 1
        while reader.poll() is None:
            n += 1
            commit(n)
        out, err = reader.communicate()
    assert reader.returncode == 0, err
    assert int(out) > 5


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
from dlcft.store.store import Store
torch.set_num_threads(1)
# torch is imported once; each child is a process that commits until it is killed
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        store = Store(sys.argv[1])
        while True:
            n = store.look().history[-1]["version"] + 1 if store.look().history else 1
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
            while not store.look().versions:  # the first child tells how long a commit takes on this disk
                time.sleep(0.001)
            period = period or 3 * (time.perf_counter() - start)
            time.sleep(generator.uniform(0, period))
            os.kill(child, signal.SIGKILL)
            assert process.stdout.readline() == "dead\n"
            tensors, version = store.load()
            assert version.header["n"] == store.current.number >= last
            assert torch.equal(tensors["t"], torch.full((200_000,), float(version.header["n"])))
            last = version.header["n"]
            progress = store.load_progress()
            assert progress is None or progress[1]["n"] == last + 1
            referenced = {MANIFEST, *(v.file for v in store.look().versions)}
            dirty += any(name not in referenced for name in files(tmp_path))
        process.stdin.close()
    assert last > 1, "the children did commit"
    assert dirty > 0, "some were killed at work"
    store.commit(*content(1))
    assert files(tmp_path).keys() == {MANIFEST, *(v.file for v in store.look().versions)}
    assert store.current.number == last + 1


HOLDING = """
import sys, time
from dlcft.store.store import Store
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


def test_a_lock_that_its_holder_removes_is_taken_anew(tmp_path, monkeypatch):
    removed, flock = [], fcntl.flock

    def after_removal(file, operation):
        if not removed:  # the holder ends between opening and locking
            removed.append((tmp_path / ".lock").unlink())
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", after_removal)
    with Store(tmp_path).lock(), pytest.raises(CheckpointError, match="in use"), Store(tmp_path).lock():
        pass
    assert removed


def test_a_lock_that_cannot_be_signed_holds_all_the_same(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = committed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with store.lock(), pytest.raises(CheckpointError, match="is in use by another process"):
            Store(tmp_path).commit(*content(2))
    with Store(tmp_path).lock():
        pass
    assert store.commit(*content(2)) == 2


def test_a_lock_file_with_another_name_is_not_written(tmp_path):
    (tmp_path / "precious").write_text("a letter")
    (tmp_path / "model").mkdir()
    os.link(tmp_path / "precious", tmp_path / "model" / ".lock")
    with pytest.raises(OSError, match=r"cannot be written \(the lock file has another name too\); its versions are as"):
        Store(tmp_path / "model").commit(*content(1))
    assert (tmp_path / "precious").read_text() == "a letter"


FORKING = """
import os, signal, sys
from dlcft.store.store import CheckpointError, Store
store = Store(sys.argv[1])
with store.lock():
    worker = os.fork()
    if worker == 0:
        signal.pause()
    child = os.fork()
    if child == 0:  # the parent's lock is not the child's
        try:
            store.commit({}, {})
        except CheckpointError as error:
            os._exit(0 if f"in use by process {os.getppid()};" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        with Store(sys.argv[1]).lock():
            sys.exit("the child has ended the parent's lock")
    except CheckpointError:
        pass
try:
    with Store(sys.argv[1]).lock():  # although the worker lives
        pass
finally:
    os.kill(worker, signal.SIGKILL)
child = os.fork()
if child == 0:
    store.commit({}, {})
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert store.commit({}, {}) == 2
"""


def test_the_lock_belongs_to_one_process(tmp_path):
    assert subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], check=False).returncode == 0


def test_only_what_a_first_commit_made_is_abandoned(tmp_path):
    store = Store(tmp_path / "model")
    store.commit(*content(1))
    store.abandon(None)
    with Store(tmp_path / "model").lock():
        store.abandon(store.current.sha256)
    assert store.current.number == 1
    store.abandon(store.current.sha256)
    assert list((tmp_path / "model").iterdir()) == []
    store.commit(*content(1))
    store.commit(*content(2))
    store.abandon(store.current.sha256)
    assert store.current.number == 2


def test_what_cannot_be_written_is_told_once(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(27, "File too large")

    store = Store(tmp_path)
    monkeypatch.setattr("dlcft.store.store.write_tensors", full)
    with pytest.raises(OSError, match=r"cannot be written \(File too large\)") as caught, store.writing():
        store.commit(*content(1), keep=1)
    assert str(caught.value).count("cannot be written") == 1


def test_while_the_lock_is_held_the_manifest_is_read_once(tmp_path, monkeypatch):
    """After that, what others have written is seen."""
    store, reads, genuine = committed(tmp_path, 2), [], manifest.read_json
    monkeypatch.setattr(manifest, "read_json", lambda path: reads.append(path) or genuine(path))
    store.commit(*content(3))
    assert len(reads) == 1
    with store.writing():
        store.save_progress(*content(20))
        assert store.look().current == store.current == store.look().versions[-1]
        store.commit(*content(4))
        assert (store.current.number, len(store.look().history)) == (4, 4)
        assert (store.load_progress(), store.strangers()) == (None, [])
        assert store.rollback() == 3
        store.prune(1)
        kept = store.look()
    assert len(reads) == 2
    assert kept == store.look(), "the same as on the disk"
    assert digest(store) == state_digest(*content(3))
    Store(tmp_path).commit(*content(5))
    assert store.current.number == 5
    with store.lock():
        assert store.current.number == 5
