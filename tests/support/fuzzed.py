"""Damages files of every kind that dlcft reads, and reads them; prints how many were read, and how many refused.

    python -m tests.support.fuzzed CASES SEED

Each damaged file must be read, or refused by a ValueError of one line that names it; anything else ends the run. The
memory is limited: a file of some kilobytes must not take gigabytes. What was read from a checked file (npz) must be
what was written.
"""

import io
import os
import random
import resource
import struct
import sys
import tarfile
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from dlcft.backbones.files import read_weights
from dlcft.bench.datasets import arrays, unpickle
from dlcft.data.files import read_inputs, read_labelled
from dlcft.data.images import EXTENSIONS, read_image
from dlcft.data.samples import Samples

MEMORY = 6 * 2**30
X = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
Y = np.array(["cat", "dog", "cat", "owl", "dog"])


def write_files(folder: Path) -> dict[Path, object]:
    """One whole file of each kind, and the function that reads it."""
    readers: dict[Path, object] = {}
    for ending in EXTENSIONS:
        image = Image.fromarray(X[0]).resize((24, 18))
        options = {"exif": _exif()} if ending in (".jpg", ".png", ".webp", ".tif") else {}
        file = folder / f"photo{ending}"
        (image.convert("L") if ending == ".pgm" else image).save(file, **options)
        readers[file] = read_image
    np.save(folder / "x.npy", X)
    np.savez(folder / "stored.npz", x=X, y=Y)
    np.savez_compressed(folder / "packed.npz", x=X, y=Y)
    np.savez(folder / "parts.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    (folder / "table.csv").write_text("path,label\nphoto.png,cat\nphoto.jpg,dog\n", encoding="utf-8")
    save_file({"a.weight": torch.randn(3, 4), "a.bias": torch.zeros(3)}, folder / "net.safetensors")
    torch.save({"a.weight": torch.randn(3, 4), "a.bias": torch.zeros(3)}, folder / "net.pth")
    torch.save({"a.weight": torch.randn(3, 4)}, folder / "old.pth", _use_new_zipfile_serialization=False)
    (folder / "t10k-images-idx3-ubyte").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 5, 8, 8) + X[..., 0].tobytes())
    (folder / "batch").write_bytes(_pickled())
    with tarfile.open(folder / "shard.tar", "w") as tar:
        tar.add(folder / "photo.png", "cat/1.png")
        tar.add(folder / "photo.jpg", "cat/" + 120 * "2" + ".jpg")
    readers[folder / "x.npy"] = lambda path: np.array(read_inputs(path))
    readers[folder / "stored.npz"] = readers[folder / "packed.npz"] = _labelled
    readers[folder / "parts.npz"] = arrays.npz
    readers[folder / "table.csv"] = lambda path: Samples(path).fetch(torch.tensor([0]))
    for name in ("net.safetensors", "net.pth", "old.pth"):
        readers[folder / name] = read_weights
    readers[folder / "t10k-images-idx3-ubyte"] = lambda path: arrays._read_idx(path, 3)
    readers[folder / "batch"] = _read_pickle
    readers[folder / "shard.tar"] = lambda path: Samples(path).fetch(torch.tensor([0]))
    return readers


def _exif() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    exif[0x010F] = "maker"
    return exif.tobytes()


def _pickled() -> bytes:
    import pickle

    return pickle.dumps({b"data": X.reshape(5, -1), b"labels": [0, 1, 0, 2, 1]}, protocol=2)


def _read_pickle(path: Path) -> object:
    with path.open("rb") as file:
        return unpickle.read_pickle(file, str(path))


def _labelled(path: Path) -> object:
    x, y = read_labelled(path)
    assert np.array_equal(x, X), "other values were read than were written"
    assert np.array_equal(y, Y), "other values were read than were written"
    return x


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """A file with bytes flipped, cut, repeated, inserted, or overwritten by numbers that decoders trip over."""
    data = bytearray(whole)
    for _ in range(draw.choice([1, 1, 1, 2, 5, 20])):
        place = draw.randrange(len(data) + 1) if draw.random() < 0.5 else draw.randrange(min(len(data), 200) + 1)
        kind = draw.randrange(6)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1 and place < len(data):
            data[place] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, 0x28, 0x27, 0x5C])
        elif kind == 2:
            data = data[:place]
        elif kind == 3:
            data[place:place] = data[place : place + draw.randrange(1, 64)]
        elif kind == 4:
            data[place:place] = draw.randbytes(draw.randrange(1, 16))
        else:
            width = draw.choice([2, 4, 8])
            value = draw.choice([0, 1, 2 ** (8 * width) - 1, 2 ** (8 * width - 1), draw.getrandbits(8 * width)])
            data[place : place + width] = value.to_bytes(width, draw.choice(["little", "big"]))
        if not data:
            break
    return bytes(data)


def encrypted() -> bytes:
    """An .npz file whose members say that they are encrypted."""
    buffer = io.BytesIO()
    np.savez(buffer, x=X, y=Y)
    with zipfile.ZipFile(buffer) as archive:
        starts = [info.header_offset for info in archive.infolist()]
    data = bytearray(buffer.getvalue())
    for start in starts:
        data[start + 6] |= 1
    place = data.find(b"PK\x01\x02")
    while place >= 0:
        data[place + 8] |= 1
        place = data.find(b"PK\x01\x02", place + 4)
    return bytes(data)


def main(cases: int, seed: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    draw, told = random.Random(seed), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        readers = list(write_files(folder).items())
        for path, read in readers:
            read(path)  # whole, it is read
        for case in range(cases):
            path, read = readers[case % len(readers)]
            whole = path.read_bytes()
            content = encrypted() if path.suffix == ".npz" and case < 200 else damaged(whole, draw)
            path.write_bytes(content)
            try:
                read(path)
                told["read"] += 1
            except ValueError as error:
                sentence = str(error)
                if path.name not in sentence or "\n" in sentence:
                    _keep(path, seed, case)
                    raise
                told["refused"] += 1
            except BaseException:
                _keep(path, seed, case)
                raise
            finally:
                path.write_bytes(whole)
    print(f"{cases} files, {told['read']} read, {told['refused']} refused")


def _keep(path: Path, seed: int, case: int) -> None:
    kept = Path(tempfile.gettempdir(), f"fuzzed-{seed}-{case}-{path.name}")
    kept.write_bytes(path.read_bytes())
    print(f"seed {seed}, case {case}: {os.fspath(kept)}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
