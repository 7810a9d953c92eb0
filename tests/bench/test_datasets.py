"""Tiny files in each official format, whole and broken: what is read, what is said, and that nothing in them runs."""

import gzip
import hashlib
import io
import pickle
import random
import struct
import tarfile
import urllib.error
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.augment import Augmentation
from dlcft.bench.datasets import NAMES, ImageFiles, ImageSet, digits, load
from dlcft.bench.datasets.catalogue import CATALOGUE
from dlcft.bench.datasets.download import Remote
from dlcft.bench.datasets.unpickle import read_pickle
from dlcft.images import Preprocess

NUMBERS = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch, tmp_path):
    def refuse(url, **_):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setenv("DLCFT_DATA", str(tmp_path / "default"))


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


# --- what is read ---


def test_digits_are_those_of_the_demo():
    images, demo = load("digits"), digits()
    assert images.x_train.shape == (1198, 1, 32, 32)
    assert torch.equal(images.y_test, demo.y_test)
    assert (images.preprocess(images.x_test) - demo.x_test).abs().max() < 0.01  # rounding to 1/255


def as_pickle(protocol):
    return lambda content: pickle.dumps(content, protocol=protocol)


@pytest.mark.parametrize("dump", [python2_pickle, *map(as_pickle, (2, 3, 4, 5))])
def test_cifar100_files_of_any_age(tmp_path, dump):
    train, test = write_cifar100(tmp_path, dump)
    assert_cifar100(load("seq-cifar100", tmp_path), train, test)
    assert_cifar100(load("seq-cifar100", tmp_path / "cifar-100-python"), train, test)
    assert_cifar100(load(tmp_path), train, test)


def test_arrays_pickled_before_numpy_2():
    content = pickle.dumps({"data": pixels(2, 3072)}, protocol=2).replace(b"numpy._core.", b"numpy.core.")
    assert b"numpy.core.multiarray" in content
    assert read_pickle(io.BytesIO(content), "x")["data"].shape == (2, 3072)


@pytest.mark.parametrize("kind", ["<i4", ">i4", "<f8", "|b1"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_unpickled_arrays_are_equal_in_any_type_and_order(kind, protocol):
    array = np.asfortranarray(NUMBERS.integers(0, 2, (3, 4)).astype(kind))
    found = read_pickle(io.BytesIO(pickle.dumps({"a": array, "empty": np.zeros(0)}, protocol=protocol)), "x")
    assert found["a"].dtype == array.dtype
    assert (found["a"] == array).all()
    assert found["empty"].shape == (0,)


def test_cifar100_in_its_archive(tmp_path):
    archive, train, test = pack_cifar100(tmp_path)
    assert_cifar100(load("seq-cifar100", tmp_path), train, test)
    assert_cifar100(load("seq-cifar100", archive), train, test)
    assert_cifar100(load(archive), train, test)


def test_the_default_folder(tmp_path, monkeypatch):
    train, test = write_cifar100(tmp_path / "default" / "seq-cifar100")
    assert_cifar100(load("seq-cifar100"), train, test)
    monkeypatch.setenv("DLCFT_DATA", str(tmp_path / "default" / "seq-cifar100"))
    assert_cifar100(load("seq-cifar100"), train, test)
    monkeypatch.delenv("DLCFT_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache" / "dlcft").mkdir(parents=True)
    (tmp_path / "default").rename(tmp_path / ".cache" / "dlcft" / "data")
    assert_cifar100(load("seq-cifar100"), train, test)


def test_cifar100_as_npz(tmp_path):
    train, test = pixels(6, 32, 32, 3), pixels(3, 32, 32, 3)
    labels = {"y_train": np.array([2, 0, 1, 2, 1, 0]), "y_test": np.array([1, 1, 2], dtype=np.uint8)}
    np.savez(tmp_path / "part.npz", x_train=train, x_test=test, classes=["apple", "bear", "cloud"], **labels)
    rows = [x.transpose(0, 3, 1, 2).reshape(-1, 3072) for x in (train, test)]
    assert_cifar100(load("seq-cifar100", tmp_path / "part.npz"), *rows)
    assert_cifar100(load("seq-cifar100", tmp_path), *rows)
    own = load(tmp_path / "part.npz")
    assert (own.name, own.augment, own.preprocess.size) == ("npz", "none", (32, 32))
    expected = torch.from_numpy(train).double().reshape(-1, 3) / 255
    assert own.preprocess.mean == pytest.approx(expected.mean(0).tolist(), abs=1e-4)
    assert own.preprocess.std == pytest.approx(expected.std(0, correction=0).tolist(), abs=1e-4)


@pytest.mark.parametrize("shape", [(9, 9), (9, 9, 1), (1, 9, 9), (3, 9, 9)])
def test_npz_layouts_and_labels_by_name(tmp_path, shape):
    x = np.zeros((2, *shape), np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=["dog", "cat"], x_test=x, y_test=["dog", "dog"])
    images = load("mine", tmp_path / "a.npz")
    assert images.x_train.shape == (2, 3 if 3 in shape else 1, 9, 9)
    assert (images.classes, images.y_train.tolist(), images.y_test.tolist()) == (("cat", "dog"), [1, 0], [1, 1])
    assert torch.isfinite(images.preprocess(images.x_train)).all(), "a constant channel has no spread"


def test_cifar10(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    rows = {f"data_batch_{number}": pixels(2, 3072) for number in range(1, 6)} | {"test_batch": pixels(1, 3072)}
    for name, data in rows.items():
        content = {"data": data, "labels": [len(name) % 10] * len(data)}
        (tmp_path / "cifar-10-batches-py" / name).write_bytes(python2_pickle(content))
    names = [f"class {number}" for number in range(10)]
    (tmp_path / "cifar-10-batches-py" / "batches.meta").write_bytes(python2_pickle({"label_names": names}))
    images = load(tmp_path)
    assert (images.name, images.augment, images.classes) == ("seq-cifar10", "crop4+flip", tuple(names))
    assert torch.equal(images.x_train[4:6].flatten(1), torch.from_numpy(rows["data_batch_3"]))
    assert images.x_test.shape == (1, 3, 32, 32)


def test_imagenet32(tmp_path):
    train, val = tmp_path / "Imagenet32_train", tmp_path / "Imagenet32_val"
    train.mkdir()
    val.mkdir()
    for number in range(1, 11):
        content = {"data": pixels(2, 3072), "labels": [number, 1000], "mean": np.zeros(3072)}
        (train / f"train_data_batch_{number}").write_bytes(pickle.dumps(content))
    (val / "val_data").write_bytes(pickle.dumps({"data": pixels(1, 3072), "labels": [1]}))
    images = load(tmp_path)
    assert images.name == "imagenet32"
    assert images.y_train.tolist() == [y for number in range(10) for y in (number, 999)]
    assert torch.equal(images.x_train[-2:].flatten(1), torch.from_numpy(content["data"]))
    assert (images.y_test.tolist(), len(images.classes)) == ([0], 1000)
    (val / "val_data").write_bytes(pickle.dumps({"data": pixels(1, 3072), "labels": [0]}))
    with pytest.raises(ValueError, match=r"val_data has the label 0; labels are 1 to 1000") as error:
        load("imagenet32", tmp_path)
    one_sentence(error)
    (train / "train_data_batch_7").unlink()
    with pytest.raises(FileNotFoundError, match="train_data_batch_7 is missing"):
        load("imagenet32", tmp_path)


@pytest.mark.parametrize("separator", ["-", "."])
@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files(tmp_path, name, separator, ending):
    x_train, _, x_test, _ = write_idx(tmp_path / name, separator, ending)
    images = load(name, tmp_path / name)
    assert torch.equal(images.x_train, torch.from_numpy(x_train)[:, None])
    assert torch.equal(images.x_test, torch.from_numpy(x_test)[:, None])
    assert images.y_train.tolist() == [0, 1, 2, 3, 4]
    assert len(images.classes) == 10
    assert images.preprocess(images.x_test).shape == (2, 3, 32, 32)
    assert load(tmp_path / name).name == name


def test_mnist_and_fashion_mnist_are_not_taken_for_each_other(tmp_path, monkeypatch):
    folder = tmp_path / "somewhere"
    monkeypatch.chdir(write_idx(folder) and folder)
    monkeypatch.setattr(Path, "absolute", lambda path: Path("/somewhere"))  # pytest's folder has this test's name
    with pytest.raises(ValueError, match=r"say which, load\('mnist', path\)") as error:
        load(folder)
    one_sentence(error)
    monkeypatch.setenv("DLCFT_DATA", str(folder))
    with pytest.raises(FileNotFoundError, match="fashion-mnist is not in"):
        load("fashion-mnist")


@pytest.mark.parametrize("above", [False, True])
def test_mit67_is_256_in_training_and_a_central_224_in_testing(tmp_path, above):
    write_mit67(tmp_path, above)
    images = load(tmp_path)
    assert (images.name, images.augment) == ("seq-mit67", "window224")
    assert images.classes == ("airport_inside", "bakery")
    assert (images.y_train.tolist(), images.y_test.tolist()) == ([1, 0, 1], [0])
    assert images.x_train[0].shape == (3, 256, 256)
    assert images.x_train[0].dtype == torch.uint8
    assert images.x_test[0].shape == (3, 224, 224)
    in_memory = images.decoded()
    assert in_memory.x_train.shape == (3, 3, 256, 256)
    window = Augmentation(images.augment)(images.preprocess(in_memory.x_train), torch.Generator().manual_seed(0))
    assert window.shape == (3, 3, 224, 224)


def test_the_central_window_is_that_of_the_resized_image(tmp_path):
    from PIL import Image

    ramp = np.tile(np.arange(256, dtype=np.uint8)[:, None, None], (1, 256, 3))
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    whole = ImageFiles([tmp_path / "ramp.png"])[0]
    cut = ImageFiles([tmp_path / "ramp.png"], size=(256, 256), crop=(224, 224))[0]
    assert torch.equal(cut, whole[:, 16:240, 16:240])
    with pytest.raises(ValueError, match=r"at least \(300, 300\) are needed") as error:
        ImageFiles([tmp_path / "ramp.png"], crop=(300, 300))[0]
    one_sentence(error)


def test_tiny_imagenet(tmp_path):
    write_tiny(tmp_path / "tiny-imagenet-200")
    for place in (tmp_path, tmp_path / "tiny-imagenet-200"):
        images = load(place)
        assert (images.name, images.classes, images.augment) == ("tiny-imagenet", ("n01", "n02"), "crop4+flip")
        assert (images.y_train.tolist(), images.y_test.tolist()) == ([0, 0, 1, 1], [1])
        assert images.x_train[3].shape == (3, 64, 64)
        assert images.x_train.paths[3].name == "n02_1.JPEG"


@pytest.mark.parametrize("part", ["test", "val"])
def test_any_image_folder(tmp_path, part):
    for name in ("zebra", "ape"):
        write_image(tmp_path / "train" / name / "1.png", size=(8 + len(name), 8))
    write_image(tmp_path / part / "zebra" / "1.png")
    images = load(tmp_path)
    assert (images.name, images.classes, images.augment) == ("folder", ("ape", "zebra"), "none")
    assert (images.y_train.tolist(), images.y_test.tolist()) == ([0, 1], [1])
    assert images.preprocess.size == (224, 224)
    with pytest.raises(ValueError, match="one size is needed") as error:
        images.decoded()
    one_sentence(error)


def test_a_learner_takes_arrays_and_files_alike(tmp_path):
    for name, colour in (("dark", 0), ("red", 255)):
        for number in range(4):
            write_image(tmp_path / "train" / name / f"{number}.png", colour=colour)
        write_image(tmp_path / "test" / name / "1.png", size=(9, 7), colour=colour)
    images = load(tmp_path)
    images = replace(images, preprocess=replace(images.preprocess, size=(8, 8)))
    backbone = nn.Sequential(nn.Conv2d(3, 4, 1), nn.AvgPool2d(8), nn.Flatten())
    of_files = Learner(backbone, "ridge", preprocess=images.preprocess)
    of_files.learn(images.train(torch.tensor([0, 1, 4, 5])))
    of_files.learn(images.train(torch.tensor([2, 3, 6, 7])))
    assert of_files.evaluate(images.test())["accuracy"] == 1
    of_arrays = Learner(backbone, "ridge", preprocess=images.preprocess)
    of_arrays.learn((images.x_train.decoded(), images.y_train))
    red = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    red[:, 0] = 200
    assert torch.allclose(of_arrays.outputs(red), of_files.outputs(red), atol=1e-4)
    assert of_files.predict(images.x_test) == [0, 1]


def test_parts_of_arrays():
    images = load("digits")
    x, y = images.train(torch.tensor([3, 1]))
    assert torch.equal(x, images.x_train[[3, 1]])
    assert torch.equal(y, images.y_train[[3, 1]])
    assert images.test()[0] is images.x_test
    assert images.decoded().x_train is images.x_train


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_entry_has_a_known_augmentation(name):
    Augmentation(CATALOGUE[name].augment)
    assert CATALOGUE[name].preprocess is not None or name == "npz"


# --- hostile and damaged files ---


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("where", ["file", "archive"])
def test_a_hostile_pickle_does_not_run(tmp_path, where):
    evil = Hostile(Path.touch, tmp_path / "ran")

    def dump(content):
        return pickle.dumps(content | {"data": evil})

    pickle.loads(dump({}))
    assert (tmp_path / "ran").exists(), "it would run if it were let"
    (tmp_path / "ran").unlink()
    place = write_cifar100(tmp_path, dump) and tmp_path if where == "file" else pack_cifar100(tmp_path, dump=dump)[0]
    with pytest.raises(
        ValueError, match=r"cannot read .*cifar-100-python/\w+ .*\(it asks for pathlib.*\); a whole pickled"
    ) as error:
        load("seq-cifar100", place)
    one_sentence(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"c_codecs\nlookup\n(S'x'\ntR.",
        b"\x80\x04\x8c\x08builtins\x8c\x0ddict.__init__\x93.",
    ],
)
def test_only_what_arrays_need_is_found(text):
    with pytest.raises(ValueError, match=r"it asks for [\w.]+\); a whole pickled dict") as error:
        read_pickle(io.BytesIO(text), "the file")
    one_sentence(error)


@pytest.mark.parametrize("kind", ["|O8", "<U4", "|V8", "<M8"])
def test_arrays_of_anything_but_numbers_are_refused(kind):
    content = pickle.dumps({"data": np.zeros(2, kind)}, protocol=2)
    with pytest.raises(ValueError, match="cannot read the file"):
        read_pickle(io.BytesIO(content), "the file")


def test_no_damage_to_a_pickle_escapes_as_another_error():
    draw = random.Random(0)
    for whole in (python2_pickle({"data": pixels(1, 40), "labels": [1, 2]}), pickle.dumps({"d": pixels(1, 40)})):
        for _ in range(1500):
            content = bytearray(whole[: draw.randrange(len(whole))] if draw.random() < 0.3 else whole)
            for _ in range(draw.randrange(1, 4)):
                if content:
                    content[draw.randrange(len(content))] = draw.randrange(256)
            try:
                assert isinstance(read_pickle(io.BytesIO(bytes(content)), "x"), dict)
            except ValueError as error:
                assert str(error).startswith("cannot read x (")  # noqa: PT017


@pytest.mark.parametrize("file", ["train", "test", "meta"])
def test_truncated_cifar_files_are_named(tmp_path, file):
    write_cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / file
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=f"cannot read {path} ") as error:
        load("seq-cifar100", tmp_path)
    one_sentence(error)


def test_truncated_and_incomplete_archives_are_named(tmp_path):
    archive, *_ = pack_cifar100(tmp_path)
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:30], b"", b"no archive"):
        archive.write_bytes(content)
        with pytest.raises(ValueError, match=f"cannot read .*{archive} ") as error:
            load("seq-cifar100", tmp_path)
        one_sentence(error)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "unpacked" / "cifar-100-python" / "meta", "cifar-100-python/meta")
    with pytest.raises(ValueError, match="has no cifar-100-python/train; the official file has"):
        load("seq-cifar100", tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"data": pixels(6, 3000)}, "has no data of N × 3072 bytes"),
        ({"fine_labels": [0, 1]}, "has no fine_labels, one integer for each of its 6 images"),
        ({"fine_labels": [0, 1, 2, 3, 0, 0]}, "has the label 3; labels are 0 to 2"),
        ({"fine_labels": ["a"] * 6}, "has no fine_labels"),
    ],
)
def test_content_that_is_not_the_official_one(tmp_path, change, said):
    write_cifar100(tmp_path)
    path = tmp_path / "cifar-100-python" / "train"
    path.write_bytes(pickle.dumps({"data": pixels(6, 3072), "fine_labels": [0] * 6} | change))
    with pytest.raises(ValueError, match=f"{path} {said}") as error:
        load("seq-cifar100", tmp_path)
    one_sentence(error)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_damaged_idx_files_are_named(tmp_path, ending):
    write_idx(tmp_path, ending=ending)
    path = tmp_path / f"train-images-idx3-ubyte{ending}"
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:7], b"", b"GIF89a and so on", whole + b"0000"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"cannot read {path} ") as error:
            load("mnist", tmp_path)
        one_sentence(error)
    write_idx(tmp_path, ending=ending, counts=(300, 2))
    with pytest.raises(ValueError, match="mnist has training labels from 0 to 255 and 10 classes"):
        load("mnist", tmp_path)


def test_damaged_and_other_npz_files_are_named(tmp_path):
    path, x, y = tmp_path / "a.npz", np.zeros((2, 8, 8, 3), np.uint8), np.zeros(2, int)
    cases = {
        "no x_test": {"x_train": x, "y_train": y},
        "its images are float64": {"x_train": x * 1.0, "y_train": y, "x_test": x, "y_test": y},
        r"\(2, 3, 8, 3\)": {"x_train": x[:, :3], "y_train": y, "x_test": x, "y_test": y},
        "its labels are float64": {"x_train": x, "y_train": y * 1.0, "x_test": x, "y_test": y},
        "the label 'b' is none": {"x_train": x, "y_train": ["a", "a"], "x_test": x, "y_test": ["a", "b"]},
        "allow_pickle": {"x_train": x, "y_train": np.array([{}, 1]), "x_test": x, "y_test": y},
    }
    for said, arrays in cases.items():
        np.savez(path, **arrays)
        with pytest.raises(ValueError, match=rf"cannot read {path} \(.*{said}.*; give what np.savez wrote"):
            load(path)
    np.savez_compressed(path, x_train=x, y_train=y, x_test=x, y_test=y)
    for content in (path.read_bytes()[:-30], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"cannot read {path} "):
            load(path)


def test_damaged_trees_are_named(tmp_path):
    write_mit67(tmp_path / "mit")
    (tmp_path / "mit" / "Images" / "bakery" / "b2.jpg").write_bytes(b"no image")
    images = load("seq-mit67", tmp_path / "mit")
    with pytest.raises(ValueError, match=r"b2\.jpg"):
        images.x_train[2]
    (tmp_path / "mit" / "Images" / "bakery" / "b2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no .*b2.jpg, which .*TrainImages.txt lists") as error:
        load("seq-mit67", tmp_path / "mit")
    one_sentence(error)
    (tmp_path / "mit" / "TestImages.txt").write_text("cellar/c.jpg")
    with pytest.raises(ValueError, match=r"TestImages.txt has the class 'cellar'"):
        load("seq-mit67", tmp_path / "mit")
    (tmp_path / "mit" / "TestImages.txt").write_text("cellar")
    with pytest.raises(ValueError, match=r"TestImages.txt has the line 'cellar'; lines are <class>/<image>"):
        load("seq-mit67", tmp_path / "mit")
    write_tiny(tmp_path / "tiny")
    (tmp_path / "tiny" / "val" / "val_annotations.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"cannot read .*val_annotations.txt"):
        load("tiny-imagenet", tmp_path / "tiny")
    (tmp_path / "tiny" / "val" / "val_annotations.txt").write_text("val_0.JPEG\n")
    with pytest.raises(ValueError, match=r"val_annotations.txt has the line 'val_0.JPEG'"):
        load("tiny-imagenet", tmp_path / "tiny")
    (tmp_path / "tiny" / "train" / "n03").mkdir()
    with pytest.raises(ValueError, match="n03 has no images"):
        load("tiny-imagenet", tmp_path / "tiny")


def test_parts_that_do_not_fit():
    x, y, settings = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), (("a", "b"), Preprocess())
    for x_test, y_test, said in ((x, y[:1], "2 test images and 1 labels"), (x[:0], y[:0], "0 test images")):
        with pytest.raises(ValueError, match=said) as error:
            ImageSet("mine", x, y, x_test, y_test, *settings)
        one_sentence(error)
    with pytest.raises(ValueError, match="test labels from 1 to 2 and 2 classes"):
        ImageSet("mine", x, y, x, y + 1, *settings)


# --- absent data ---


@pytest.mark.parametrize("name", [name for name, entry in CATALOGUE.items() if entry.files])
def test_absent_data_says_what_to_get_from_where_and_to_put_it_where(tmp_path, name):
    with pytest.raises(FileNotFoundError) as error:
        load(name)
    said = one_sentence(error)
    assert f"{name} is not in {tmp_path / 'default' / name} " in said
    for file in CATALOGUE[name].files:
        assert f"{file.name} ({file.url}, {f'md5 {file.md5}' if file.md5 else 'no checksum is published'})" in said
    assert f"load({name!r}, download=True)" in said
    with pytest.raises(FileNotFoundError, match=f"is not in {tmp_path} "):
        load(name, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"cannot download .* \(<urlopen error no network in tests>\)") as error:
        load(name, download=True)
    one_sentence(error)


def test_known_checksums():
    sums = {file.name: file.md5 for name in ("seq-cifar100", "seq-cifar10") for file in CATALOGUE[name].files}
    assert sums["cifar-100-python.tar.gz"] == "eb9058c3a382ffc7106e4002c42a8d85"
    assert sums["cifar-10-python.tar.gz"] == "c58f30108f718f92721af3b95e74349a"


def test_a_file_that_is_missing_among_others_is_named(tmp_path):
    write_cifar100(tmp_path)
    (tmp_path / "cifar-100-python" / "test").unlink()
    with pytest.raises(FileNotFoundError, match=r"\(cifar-100-python/test is missing\)"):
        load("seq-cifar100", tmp_path)
    write_mit67(tmp_path / "mit")
    (tmp_path / "mit" / "TestImages.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"\(TestImages.txt is missing\)"):
        load("seq-mit67", tmp_path / "mit")
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny-imagenet-200.zip").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"as tiny-imagenet-200.zip, and .* unpack it there") as error:
        load("tiny-imagenet", tmp_path / "tiny")
    one_sentence(error)


def test_unknown_names_and_paths(tmp_path):
    with pytest.raises(
        ValueError, match="no data set or path 'seq-cifar1000'; the nearest is 'seq-cifar100' of"
    ) as error:
        load("seq-cifar1000")
    one_sentence(error)
    with pytest.raises(FileNotFoundError, match="there is no file or folder") as error:
        load(tmp_path / "nowhere")
    one_sentence(error)
    (tmp_path / "cat").mkdir()
    for place in (tmp_path, tmp_path / "cat"):
        with pytest.raises(ValueError, match="holds no known data set") as error:
            load(place)
        one_sentence(error)
    for name in ("folder", "npz"):
        with pytest.raises(ValueError, match=f"'{name}' has no place of its own"):
            load(name)
        with pytest.raises(FileNotFoundError, match=rf"load\('{name}', path\) needs it"):
            load(name, tmp_path / "cat")


def test_an_image_folder_without_a_test_part(tmp_path):
    write_image(tmp_path / "train" / "cat" / "1.png")
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="has train/ and no test part; put images") as error:
        load("folder", tmp_path)
    one_sentence(error)
    write_image(tmp_path / "test" / "dog" / "1.png")
    with pytest.raises(ValueError, match="has the class 'dog', of which there are no training images"):
        load("folder", tmp_path)


# --- downloads ---


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Put a file where the network would be."""
    from urllib.request import FileHandler, build_opener

    opened = []

    def urlopen(url, timeout):
        opened.append(url)
        return build_opener(FileHandler).open(url, timeout=timeout)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)

    def serve(name, *files, md5=None, unpacked=()):
        sums = [hashlib.md5(file.read_bytes()).hexdigest() if md5 is None else md5 for file in files]
        remotes = tuple(
            Remote(file.as_uri(), found, unpacked if file.suffix in (".tar", ".zip") else ())
            for file, found in zip(files, sums, strict=True)
        )
        monkeypatch.setitem(CATALOGUE, name, replace(CATALOGUE[name], files=remotes))
        return opened

    (tmp_path / "web").mkdir()
    return serve


def test_a_download_is_checked_and_done_once(tmp_path, served):
    archive, train, test = pack_cifar100(tmp_path / "web")
    opened = served("seq-cifar100", archive)
    with pytest.raises(FileNotFoundError):
        load("seq-cifar100")
    assert opened == [], "nothing is downloaded unless asked for"
    for _ in range(2):
        assert_cifar100(load("seq-cifar100", download=True), train, test)
    assert_cifar100(load("seq-cifar100"), train, test)
    assert opened == [archive.as_uri()]
    assert [path.name for path in (tmp_path / "default" / "seq-cifar100").iterdir()] == [archive.name]
    assert_cifar100(load("seq-cifar100", tmp_path / "mine", download=True), train, test)


def test_a_wrong_checksum_keeps_nothing(tmp_path, served):
    archive, *_ = pack_cifar100(tmp_path / "web")
    served("seq-cifar100", archive, md5="0" * 32)
    with pytest.raises(
        ValueError, match=r"gave a file with the md5 \w{32} instead of 0{32}; nothing was kept"
    ) as error:
        load("seq-cifar100", download=True)
    one_sentence(error)
    assert list((tmp_path / "default" / "seq-cifar100").iterdir()) == []


def test_a_file_that_lies_there_is_checked_and_never_overwritten(tmp_path, served):
    pack = tmp_path / "web" / "tiny-imagenet-200.zip"
    pack.write_bytes(b"official")
    opened = served("tiny-imagenet", pack, unpacked=("tiny-imagenet-200",))
    there = tmp_path / "default" / "tiny-imagenet" / pack.name
    there.parent.mkdir(parents=True)
    there.write_bytes(b"half")
    with pytest.raises(ValueError, match=r"has the md5 \w+ and the official file has \w+; delete it") as error:
        load("tiny-imagenet", download=True)
    one_sentence(error)
    assert (there.read_bytes(), opened) == (b"half", [])


def test_a_cut_download_without_a_checksum_is_noticed(tmp_path, served, monkeypatch):
    class Answer(io.BytesIO):
        headers = {"Content-Length": "100"}  # noqa: RUF012

    served("seq-mit67", tmp_path / "TrainImages.txt", md5="")
    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Answer(b"a/b.jpg"))
    monkeypatch.setitem(
        CATALOGUE, "seq-mit67", replace(CATALOGUE["seq-mit67"], files=(Remote("http://x/TrainImages.txt"),))
    )
    with pytest.raises(ValueError, match="gave 7 of 100 bytes; try again") as error:
        load("seq-mit67", download=True)
    one_sentence(error)
    assert list((tmp_path / "default" / "seq-mit67").iterdir()) == []


def test_tar_files_are_unpacked(tmp_path, served):
    write_mit67(tmp_path / "web")
    tar_path = tmp_path / "web" / "indoorCVPR_09.tar"
    with tarfile.open(tar_path, "w") as tar:
        tar.add(tmp_path / "web" / "Images", "indoorCVPR_09/Images")
    lists = [tmp_path / "web" / name for name in ("TrainImages.txt", "TestImages.txt")]
    opened = served("seq-mit67", tar_path, *lists, unpacked=("indoorCVPR_09/Images",))
    images = load("seq-mit67", download=True)
    assert images.x_test[0].shape == (3, 224, 224)
    folder = tmp_path / "default" / "seq-mit67"
    assert sorted(p.name for p in folder.iterdir()) == [
        "TestImages.txt",
        "TrainImages.txt",
        "indoorCVPR_09",
        "indoorCVPR_09.tar",
    ]
    (folder / "TestImages.txt").unlink()
    load("seq-mit67", download=True)
    assert len(opened) == 4, "only what is missing comes again"


def test_zip_files_are_unpacked_and_not_over_what_is_there(tmp_path, served):
    write_tiny(tmp_path / "web" / "tiny-imagenet-200")
    path = tmp_path / "web" / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w") as pack:
        for file in sorted((tmp_path / "web" / "tiny-imagenet-200").rglob("*")):
            pack.write(file, file.relative_to(tmp_path / "web"))
    served("tiny-imagenet", path, unpacked=("tiny-imagenet-200/val/val_annotations.txt",))
    assert load("tiny-imagenet", download=True).classes == ("n01", "n02")
    (tmp_path / "default" / "tiny-imagenet" / "tiny-imagenet-200" / "val" / "val_annotations.txt").unlink()
    with pytest.raises(ValueError, match=r"cannot be unpacked over .*tiny-imagenet-200; move that away") as error:
        load("tiny-imagenet", download=True)
    one_sentence(error)


@pytest.mark.parametrize("kind", ["outside", "broken", "page"])
def test_hostile_and_broken_archives_leave_nothing(tmp_path, served, kind):
    path = tmp_path / "web" / ("a.zip" if kind == "page" else "a.tar")
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("../../escaped" if kind == "outside" else "file"))
    if kind != "outside":
        path.write_bytes(b"<html>log in</html>" if kind == "page" else path.read_bytes()[:300])
    served("seq-mit67", path, unpacked=("Images",))
    with pytest.raises(ValueError, match=f"cannot unpack .*{path.name} ") as error:
        load("seq-mit67", download=True)
    assert "\n" not in str(error.value)
    assert [p.name for p in (tmp_path / "default" / "seq-mit67").iterdir()] == [path.name]
    assert not list(tmp_path.rglob("escaped"))
