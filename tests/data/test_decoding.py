"""Damaged files of every kind: each is read, or refused in one sentence with its name."""

import subprocess
import sys
import zipfile

import numpy as np
import pytest

from dlcft.data.arrays import read_npy, read_npz
from tests.support.fuzzed import X, Y, encrypted


@pytest.mark.skipif(sys.platform == "win32", reason="limits the memory")
@pytest.mark.parametrize("cases", [500, pytest.param(50_000, marks=pytest.mark.slow)])
def test_damaged_files_are_read_or_refused(cases):
    command = [sys.executable, "-m", "tests.support.fuzzed", str(cases), "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{cases} files, ")


def test_a_flipped_pixel_of_a_stored_array_is_noticed(tmp_path):
    path = tmp_path / "x.npz"
    np.savez(path, x=X, y=Y)
    x, y = read_npz(path)
    assert isinstance(x, np.memmap)
    assert np.array_equal(x, X)
    assert np.array_equal(y, Y)
    data = bytearray(path.read_bytes())
    data[data.find(X.tobytes()) + 7] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot read .*x\.npz \(x is damaged: its checksum is another one\)"):
        read_npz(path)


def test_an_encrypted_archive(tmp_path):
    (tmp_path / "x.npz").write_bytes(encrypted())
    with pytest.raises(ValueError, match=r"cannot read .*x\.npz \(x is encrypted\); give what np\.savez wrote"):
        read_npz(tmp_path / "x.npz")


def test_an_archive_is_no_array(tmp_path):
    np.savez(tmp_path / "x.npz", x=X)
    (tmp_path / "x.npz").rename(tmp_path / "x.npy")
    with pytest.raises(ValueError, match=r"cannot read .*x\.npy"):
        read_npy(tmp_path / "x.npy")


def test_an_array_larger_than_its_file(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (10**12,)})
    with pytest.raises(ValueError, match=r"x\.npy \(it has 128 bytes, which are no array of uint8 and shape"):
        read_npy(tmp_path / "x.npy")


def test_a_compressed_array_larger_than_the_memory(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "x.npz", x=X, y=Y)
    monkeypatch.setattr("dlcft.data.arrays._memory", lambda: 500)
    with pytest.raises(ValueError, match=r"x\.npz \(x takes 1,088 bytes of memory; np\.savez writes what is read in"):
        read_npz(tmp_path / "x.npz")


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (5, 0)])
def test_arrays_that_hold_nothing(tmp_path, shape):
    np.save(tmp_path / "x.npy", np.zeros(shape))
    assert read_npy(tmp_path / "x.npy").shape == shape


def test_elements_without_a_size(tmp_path):
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<U0", "fortran_order": False, "shape": (3 * 10**8,)})
    with pytest.raises(ValueError, match=r"x\.npy \(it holds nothing; numbers or strings are needed\)"):
        read_npy(tmp_path / "x.npy")


def test_other_compressions_are_refused_where_they_are_damaged(tmp_path):
    np.savez(tmp_path / "x.npz", x=X, y=Y)
    with zipfile.ZipFile(tmp_path / "x.npz") as whole:
        members = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(tmp_path / "l.npz", "w", zipfile.ZIP_LZMA) as file:
        for name, content in members.items():
            file.writestr(name, content)
    assert np.array_equal(read_npz(tmp_path / "l.npz")[0], X)
    data = bytearray((tmp_path / "l.npz").read_bytes())
    data[60] ^= 0xFF
    (tmp_path / "l.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"cannot read .*l\.npz"):
        read_npz(tmp_path / "l.npz")
