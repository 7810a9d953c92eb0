"""Official files of each data set, tiny, as tests write them."""

import gzip
import struct
import tarfile

import numpy as np
import torch

NUMBERS = np.random.default_rng(0)


def one_sentence(error):
    text = str(error.value)
    assert text.endswith(".")
    assert "\n" not in text
    assert ". " not in text
    return text


def pixels(count, *shape):
    return NUMBERS.integers(0, 256, (count, *shape), dtype=np.uint8)


def python2_pickle(content):
    """As Python 2 wrote dicts of arrays, strings, and lists of them, in protocol 2: bytes and text are the same."""

    def string(value):
        value = value.encode() if isinstance(value, str) else value
        return b"T" + struct.pack("<I", len(value)) + value

    def item(value):
        if isinstance(value, np.ndarray):
            empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR"
            kind = b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
            shape = b"(" + b"".join(b"J" + struct.pack("<i", n) for n in value.shape) + b"t"
            return empty + b"(K\x01" + shape + kind + b"\x89" + string(value.tobytes()) + b"tb"
        if isinstance(value, list):
            return b"](" + b"".join(map(item, value)) + b"e"
        return b"J" + struct.pack("<i", value) if isinstance(value, int) else string(value)

    return b"\x80\x02}(" + b"".join(string(key) + item(value) for key, value in content.items()) + b"u."


def write_cifar100(folder, dump=python2_pickle):
    train, test = pixels(6, 3072), pixels(3, 3072)
    files = {
        "train": {"data": train, "fine_labels": [2, 0, 1, 2, 1, 0], "coarse_labels": [0] * 6, "filenames": ["a"] * 6},
        "test": {"data": test, "fine_labels": [1, 1, 2]},
        "meta": {"fine_label_names": ["apple", "bear", "cloud"]},
    }
    (folder / "cifar-100-python").mkdir(parents=True)
    for name, content in files.items():
        (folder / "cifar-100-python" / name).write_bytes(dump(content))
    return train, test


def pack_cifar100(folder, **options):
    train, test = write_cifar100(folder / "unpacked", **options)
    with tarfile.open(folder / "cifar-100-python.tar.gz", "w:gz") as tar:
        tar.add(folder / "unpacked" / "cifar-100-python", "cifar-100-python")
    return folder / "cifar-100-python.tar.gz", train, test


def assert_cifar100(images, train, test):
    assert torch.equal(images.x_train, torch.from_numpy(train.reshape(-1, 3, 32, 32)))
    assert torch.equal(images.x_test, torch.from_numpy(test.reshape(-1, 3, 32, 32)))
    assert images.y_train.tolist() == [2, 0, 1, 2, 1, 0]
    assert images.y_test.tolist() == [1, 1, 2]
    assert images.classes == ("apple", "bear", "cloud")
    assert (images.name, images.augment, images.preprocess.size) == ("seq-cifar100", "crop4+flip", (32, 32))
    assert images.preprocess.mean == (0.5071, 0.4865, 0.4409)


def write_idx(folder, separator="-", ending="", counts=(5, 2)):
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for part, count in zip(("train", "t10k"), counts, strict=True):
        for kind, array in (("images", pixels(count, 28, 28)), ("labels", np.arange(count, dtype=np.uint8))):
            content = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
            file = folder / f"{part}-{kind}{separator}idx{array.ndim}-ubyte{ending}"
            file.write_bytes(gzip.compress(content) if ending else content)
            written.append(array)
    return written


def write_image(path, size=(8, 8), colour=0):
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 0, 0)).save(path, "PNG" if path.suffix == ".png" else "JPEG")


def write_mit67(folder, above=False):
    train = ["bakery/b1.jpg", "airport_inside/a1.jpg", "bakery/b2.jpg"]
    root = folder / "indoorCVPR_09" if above else folder
    for name in [*train, "airport_inside/a2.jpg"]:
        write_image(root / "Images" / name, size=(300, 200), colour=100)
    (folder / "TrainImages.txt").write_text("\n".join(train) + "\n")
    (folder / "TestImages.txt").write_text("airport_inside/a2.jpg")


def write_tiny(folder):
    for wnid in ("n02", "n01"):
        for number in range(2):
            write_image(folder / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", size=(64, 64))
    write_image(folder / "val" / "images" / "val_0.JPEG", size=(64, 64))
    (folder / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t62\t62\n")
    write_image(folder / "test" / "images" / "test_0.JPEG", size=(64, 64))
