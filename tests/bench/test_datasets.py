"""Tiny files in each official format, whole and broken: what is read, what is said, and that nothing in them runs."""

import io
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.bench.datasets import NAMES, ImageFiles, load
from dlcft.bench.datasets.catalogue import CATALOGUE
from dlcft.bench.datasets.unpickle import read_pickle
from dlcft.data.augment import Augmentation
from tests.support.dataset_files import (
    NUMBERS,
    assert_cifar100,
    one_sentence,
    pack_cifar100,
    pixels,
    python2_pickle,
    write_cifar100,
    write_idx,
    write_image,
    write_mit67,
    write_tiny,
)

pytestmark = pytest.mark.usefixtures("no_data_outside")


def test_digits_are_digits_whatever_path_is_given_for_other_data_sets(tmp_path):
    assert torch.equal(load("digits", tmp_path / "cifar100.npz").x_train, load("digits").x_train)


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
    detected = load(tmp_path / name)
    assert (detected.name, detected.classes) == (name, images.classes)


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
    of_files.learn(images.train())
    assert of_files.evaluate(images.test())["accuracy"] == 1
    of_arrays = Learner(backbone, "ridge", preprocess=images.preprocess)
    of_arrays.learn((images.x_train.decoded(), images.y_train))
    red = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    red[:, 0] = 200
    assert torch.allclose(of_arrays.outputs(red), of_files.outputs(red), atol=1e-4)
    assert of_files.predict(images.x_test) == [0, 1]


def test_parts_of_arrays():
    images = load("digits")
    assert images.train()[1] is images.y_train
    assert images.test()[0] is images.x_test
    assert images.decoded().x_train is images.x_train


@pytest.mark.parametrize("name", NAMES[1:])
def test_every_entry_has_a_known_augmentation(name):
    Augmentation(CATALOGUE[name].augment)
    assert CATALOGUE[name].preprocess is not None or name == "npz"
