"""Files that are hostile, damaged or not there: one sentence, and nothing of theirs runs."""

import io
import pickle
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dlcft.bench.datasets import ImageSet, load
from dlcft.bench.datasets.catalogue import CATALOGUE
from dlcft.bench.datasets.unpickle import read_pickle
from dlcft.data.images import Preprocess
from tests.support.dataset_files import (
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
        with pytest.raises(ValueError, match=rf"cannot read {path} \(.*{said}.*; give a file of np.savez"):
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
    with pytest.raises(ValueError, match="n03 holds no images"):
        load("tiny-imagenet", tmp_path / "tiny")


def test_parts_that_do_not_fit():
    x, y, settings = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), (("a", "b"), Preprocess())
    for x_test, y_test, said in ((x, y[:1], "2 test images and 1 labels"), (x[:0], y[:0], "0 test images")):
        with pytest.raises(ValueError, match=said) as error:
            ImageSet("mine", x, y, x_test, y_test, *settings)
        one_sentence(error)
    with pytest.raises(ValueError, match="test labels from 1 to 2 and 2 classes"):
        ImageSet("mine", x, y, x, y + 1, *settings)


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
        ValueError, match="unknown data set or path 'seq-cifar1000'; did you mean 'seq-cifar100'"
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
