"""The store of versions: exact, atomic under kills and full disks, and deaf to damaged or hostile files."""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dlcft.store.files import DTYPES, CheckpointError, state_digest, stored_bytes
from dlcft.store.store import Manifest, Store
from tests.support.stores import MANIFEST, bits, committed, content, digest, files, forge


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_comes_back_bit_by_bit(tmp_path, dtype):
    raw = torch.randint(0, 256, (6, 4 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
    tensors = {"matrix": tensor, "strided": tensor.t()[1:], "scalar": tensor[0, 0], "none": tensor[:0]}
    store = Store(tmp_path)
    store.commit(tensors, {})
    got, _ = store.load()
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
    got, _ = store.load()
    assert got.keys() == tensors.keys()
    assert all(torch.equal(got[name], tensors[name]) for name in tensors)
    got["base"].zero_()
    assert got["same"].any(), "what is read shares nothing, neither with itself nor with the file"
    assert torch.equal(store.load()[0]["base"], base)


def test_other_programs_can_read_the_files(tmp_path):
    store = committed(tmp_path)
    tensors, header = content(1)
    version = store.current
    got = load_file(tmp_path / version.file)
    assert state_digest(got, {}) == state_digest(tensors, {})
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert (manifest["format"], manifest["format_version"], manifest["current"]) == ("dlcft", 2, 1)
    assert manifest["versions"][0]["header"] == header
    assert set(version.packages) == {"dlcft", "torch", "numpy", "safetensors", "python"}
    data = (tmp_path / version.file).read_bytes()
    assert (version.bytes, version.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def symmetric(size, dtype=torch.float64):
    matrix = torch.randn(size, size, dtype=dtype, generator=torch.Generator().manual_seed(size))
    return matrix + matrix.T


def test_a_symmetric_matrix_takes_half_and_comes_back_bit_by_bit(tmp_path):
    odd = symmetric(600)  # more than a block
    odd[0, 1] = odd[1, 0] = -0.0
    odd[2, 3] = odd[3, 2] = math.nan
    stack = torch.stack([symmetric(130, torch.float32), torch.eye(130)])
    tensors = {"odd": odd, "stack": stack, "after": torch.tensor([1, 2, 3], dtype=torch.int8), "small": torch.eye(3)}
    store = Store(tmp_path)
    store.commit(tensors, {})
    assert state_digest(store.load()[0], {}) == state_digest(tensors, {})
    packed = load_file(tmp_path / store.current.file)
    assert packed["odd"].tolist()[:2] == odd[0, :2].tolist()
    assert bits(packed["odd"]) == bits(odd[tuple(torch.triu_indices(600, 600))])
    assert packed["stack"].shape == (2, 130 * 131 // 2)
    assert torch.equal(packed["small"], torch.eye(3))
    assert store.current.bytes == stored_bytes(tensors) == (tmp_path / store.current.file).stat().st_size


@pytest.mark.parametrize("other", [1e-300, -0.0, math.nan])
def test_a_matrix_that_differs_from_its_transpose_in_a_bit_is_stored_whole(tmp_path, other):
    matrix = symmetric(600)
    matrix[599, 7], matrix[7, 599] = 0.0, other
    store = Store(tmp_path)
    store.commit({"matrix": matrix}, {})
    assert state_digest(store.load()[0], {}) == state_digest({"matrix": matrix}, {})
    assert store.current.bytes > matrix.nbytes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_a_symmetric_matrix_is_never_in_memory_twice(tmp_path):
    """Saving takes a twentieth of it at most, loading it that and the matrix."""
    program = f"""
import torch
from pathlib import Path
from dlcft.store.store import Store

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024

def extra(program):
    Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on
    before = status("VmRSS")
    kept = program()
    return (status("VmHWM") - before) / matrix.nbytes

for size in (600, 4500):  # a small one first: torch's own code is not counted
    matrix, store = torch.eye(size).double(), Store(Path({str(tmp_path)!r}) / str(size))
    found = extra(lambda: store.commit({{"matrix": matrix}}, {{}})), extra(store.load)
print(*found)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    saving, loading = map(float, done.stdout.split())
    assert saving < 0.05
    assert 0.95 < loading < 1.05


def test_no_tensors_at_all(tmp_path):
    Store(tmp_path / "new" / "directory").commit({}, {"only": "words"})
    tensors, version = Store(tmp_path / "new" / "directory").load()
    assert (tensors, version.header) == ({}, {"only": "words"})


def test_header_keeps_its_order_and_tuples_become_lists(tmp_path):
    store = Store(tmp_path)
    store.commit({}, {"b": (1, 2.5), "a": {"y": None, "x": True}})
    assert json.dumps(store.current.header) == '{"b": [1, 2.5], "a": {"y": null, "x": true}}'


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


def test_keep(tmp_path):
    store = committed(tmp_path, 5, keep=3)
    assert [v.number for v in store.look().versions] == [3, 4, 5]
    for number in (3, 4, 5):
        assert digest(store, number) == state_digest(*content(number))
    assert {path.name for path in tmp_path.glob("*.safetensors")} == {f"version-{n}.safetensors" for n in (3, 4, 5)}
    assert [v.parent for v in store.look().versions][1:] == [v.sha256 for v in store.look().versions][:-1]
    store.commit(*content(6), keep=1)
    assert [v.number for v in store.look().versions] == [6]
    with pytest.raises(CheckpointError, match=r"version 5 is not kept; .* holds the versions 6\."):
        store.load(5)
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
    assert [v.number for v in store.look().versions] == [2, 4], "the version it was learned from outlives a newer one"
    assert store.current.parent == store.look().versions[0].sha256
    events = [(e["action"], e["version"]) for e in store.look().history]
    rolled = [("rollback", n) for n in (2, 1, 3, 2)]
    assert events == [("commit", 1), ("commit", 2), ("commit", 3), *rolled, ("commit", 4)]


def test_rollback_needs_a_whole_version(tmp_path):
    store = committed(tmp_path, 2, keep=1)
    with pytest.raises(CheckpointError, match="version 2 was learned from version 1, which is not kept"):
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
        assert (store.look(), store.current, store.load_progress()) == (Manifest(), None, None)
        with pytest.raises(CheckpointError, match=r"there is nothing to use; .* holds no checkpoint"):
            store.load()
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


def test_a_version_kept_aside_costs_no_version_that_was_current(tmp_path):
    store = committed(tmp_path, 3)
    assert [v.number for v in store.look().versions] == [2, 3]
    for _ in range(2):
        store.commit(*content(4), current=False)
        assert store.current.number == 3
    assert [v.number for v in store.look().versions] == [2, 3, 5], "the newest aside, and what can be gone back to"
    assert store.rollback() == 2
    assert store.rollback(5) == 5
    store.commit(*content(6), keep=3)
    assert [v.number for v in store.look().versions] == [3, 5, 6], "what the new one came from, then what was current"
    assert all(v.accepted for v in store.look().versions)


def test_equal_content_is_not_taken_for_the_version_before(tmp_path):
    store = committed(tmp_path)
    store.commit(*content(7), current=False)
    store.commit(*content(7), keep=4)
    store.commit(*content(8), keep=4)
    assert store.look().versions[1].sha256 == store.look().versions[2].sha256
    assert store.rollback() == 3
    assert store.rollback() == 1
    with pytest.raises(CheckpointError, match="version 1 was learned from no version"):
        store.rollback()


def test_versions_are_pruned(tmp_path):
    store = committed(tmp_path, 3, keep=3)
    store.commit(*content(4), keep=3, current=False)
    assert store.prune(2) == [1, 4]
    assert [v.number for v in store.look().versions] == [2, 3]
    assert store.prune(2) == []
    assert store.rollback() == 2
    with pytest.raises(ValueError, match="keep is 0"):
        store.prune(0)


def test_the_manifest_does_not_grow(tmp_path):
    store, sizes = Store(tmp_path), []
    for number in range(300):
        store.commit({"t": torch.zeros(2)}, {})
        if number >= 150:
            sizes.append((tmp_path / MANIFEST).stat().st_size)
    assert max(sizes) < 20_000
    assert max(sizes) - min(sizes) < 100
    assert (store.look().last, store.look().events, len(store.look().history)) == (300, 300, 100)


def test_ancestors_are_known_without_the_history(tmp_path):
    store = committed(tmp_path, 3, keep=3)
    store.rollback(1)
    store.commit(*content(4), keep=3)
    assert [v.number for v in store.look().versions] == [1, 3, 4]
    store.rollback(3)
    store.commit(*content(5), keep=3)
    assert [v.number for v in store.look().versions] == [1, 3, 5], "3 came from 2, which is gone, and that from 1"
    assert store.rollback() == 3
    with pytest.raises(CheckpointError, match="was learned from version 2, which is not kept"):
        store.rollback()


def test_a_manifest_of_format_1_goes_on(tmp_path):
    """It told everything by a history of all events."""
    store = committed(tmp_path, 3, keep=3)
    store.commit(*content(4), keep=3, current=False)
    store.rollback(2)
    now = store.look()

    def earlier(fields):
        fields["format_version"] = 1
        del fields["last"], fields["events"]
        for version in fields["versions"]:
            del version["accepted"], version["ancestors"]

    forge(tmp_path, earlier)
    then = Store(tmp_path).look()
    assert then.base() == now.base()
    assert (then.last, then.number) == (4, 2)
    assert [(v.number, v.accepted, v.ancestors[:1]) for v in then.versions] == [
        (v.number, v.accepted, v.ancestors[:1]) for v in now.versions
    ]
    assert store.commit(*content(5), keep=3) == 5
    assert [v.number for v in store.look().versions] == [1, 2, 5]


def test_a_store_that_lives_to_the_end_of_the_program_leaves_without_a_word(tmp_path):
    program = f"import torch\nfrom dlcft.store.store import Store\nstore = Store({str(tmp_path / 'm')!r})\n"
    program += "store.commit({'x': torch.zeros(2)}, {'tasks': 1}, keep=1)\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
