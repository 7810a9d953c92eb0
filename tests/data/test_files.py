"""Files of arrays and images, and what happens to images."""

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dlcft.data.files import write_text, written_whole
from dlcft.data.images import Preprocess, read_image
from dlcft.data.samples import Inputs, Samples
from tests.support.samples import ALL, BYTES, SOME, Alone, Pairs, X, Y, pixels_of, write_images, write_table


def test_memory_mapped_arrays_are_read_by_batch(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert torch.equal(Samples((x, Y)).fetch(SOME), X[SOME])
    assert torch.equal(Samples((tmp_path / "x.npy", Y)).fetch(SOME), X[SOME])
    assert torch.equal(Inputs(str(tmp_path / "x.npy")).fetch(SOME), X[SOME])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(("x", "y"), [("x", "y"), ("images", "labels"), ("data", "targets")])
def test_npz(tmp_path, save, x, y):
    for array in (X.numpy(), np.asfortranarray(X.numpy())):
        save(tmp_path / "data.npz", **{x: array, y: np.array(["b", "a"] * 3), "more": np.zeros(3)})
        samples = Samples(tmp_path / "data.npz")
        assert samples.labels == ["b", "a"] * 3
        assert torch.equal(samples.fetch(SOME), X[SOME])
        assert isinstance(samples._source._x, np.memmap) == (save is np.savez)
        assert torch.equal(Inputs(tmp_path / "data.npz").fetch(SOME), X[SOME])


def test_image_folders_tables_and_lists_of_files(tmp_path):
    folder = write_images(tmp_path / "pets")
    (folder / "cat" / "notes.txt").write_text("no image")
    (folder / ".cache").mkdir()
    shutil.copytree(folder / "dog", folder / "cat" / ".ipynb_checkpoints")
    (folder / "cat" / "a folder.png").mkdir()
    files = [str(folder / ("cat", "dog")[n // 2] / f"{n}.png") for n in range(4)]
    table = write_table(
        tmp_path, [(f"pets/{('cat', 'dog')[n // 2]}/{n}.png", ("cat", "dog")[n // 2]) for n in range(4)]
    )
    for form in (str(folder), folder, table, (files, ["cat", "cat", "dog", "dog"]), (np.array(files), ["cat"] * 4)):
        samples = Samples(form)
        assert samples.labels[0] == "cat"
        assert torch.equal(samples.fetch(torch.tensor([3, 1])), torch.stack([pixels_of(3), pixels_of(1)]))
    assert Samples(folder).labels == Samples(table).labels == ["cat", "cat", "dog", "dog"]
    for form in (folder, files, tuple(files), table):
        inputs = Inputs(form)
        assert [inputs.name(index) for index in range(len(inputs))] == files
        assert torch.equal(inputs.fetch(torch.tensor([2])), pixels_of(2)[None])
    assert torch.equal(Inputs(files[3]).fetch(torch.tensor([0])), pixels_of(3)[None])
    assert Inputs(X).name(1) == "1"


def test_files_are_read_when_fetched(tmp_path):
    folder = write_images(tmp_path)
    samples = Samples(folder)
    (folder / "dog" / "3.png").write_bytes(b"broken")
    assert samples.fetch(torch.tensor([0])).shape == (1, 3, 8, 5)
    with pytest.raises(ValueError, match=r"cannot read the image file .*3\.png"):
        samples.fetch(torch.tensor([3]))


def test_kinds_of_image_files(tmp_path):
    grey = np.arange(40, dtype=np.uint8).reshape(8, 5)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey.astype(np.uint16) << 8).save(tmp_path / "deep.png")
    Image.fromarray(np.dstack([grey] * 4)).save(tmp_path / "clear.png")
    for name in ("grey.png", "deep.png", "clear.png"):
        colour = read_image(tmp_path / name)
        assert colour.shape == (3, 8, 5), name
        assert torch.equal(colour[1], torch.from_numpy(grey)), name
        assert torch.equal(read_image(tmp_path / name, 1), torch.from_numpy(grey)[None]), name
    turned = Image.fromarray(grey)
    turned.getexif()[0x0112] = 6
    turned.save(tmp_path / "turned.png", exif=turned.getexif())
    assert read_image(tmp_path / "turned.png").shape == (3, 5, 8)


def test_pillow_images_in_data_sets_and_lists():
    images = [Image.fromarray(x.permute(1, 2, 0).numpy()) for x in BYTES]
    for form in (Pairs(images), (images, Y)):
        assert torch.equal(Samples(form).fetch(SOME), BYTES[SOME].float() / 255)
    assert Inputs([image.convert("L") for image in images]).fetch(SOME).shape == (3, 1, 8, 5)


@pytest.mark.parametrize(
    ("x", "shape"),
    [
        (BYTES, (6, 3, 8, 5)),
        (BYTES.permute(0, 2, 3, 1), (6, 3, 8, 5)),
        (BYTES[:, 0], (6, 1, 8, 5)),
        (BYTES[:, :1].permute(0, 2, 3, 1), (6, 1, 8, 5)),
    ],
)
def test_bytes_become_floats(x, shape):
    for form in (x, x.numpy(), list(x), list(x.numpy()), Alone(x)):
        fetched = Inputs(form).fetch(ALL)
        assert fetched.shape == shape
        assert fetched.dtype == torch.float32
        assert torch.equal(fetched, BYTES[:, : shape[1]].float() / 255)


@pytest.mark.parametrize(
    ("shape", "layout", "expected"),
    [
        ((2, 8, 8, 3), "auto", (2, 3, 8, 8)),
        ((2, 8, 8, 3), "first", (2, 8, 8, 3)),
        ((2, 3, 8, 8), "auto", (2, 3, 8, 8)),
        ((2, 3, 8, 8), "last", (2, 8, 3, 8)),
        ((2, 1, 4, 4), "auto", (2, 1, 4, 4)),
        ((2, 3, 4, 4), "auto", (2, 3, 4, 4)),
        ((2, 4, 4, 4), "auto", (2, 4, 4, 4)),
        ((2, 4, 4, 3), "last", (2, 3, 4, 4)),
        ((2, 512, 4, 4), "auto", (2, 512, 4, 4)),
        ((2, 6, 7, 5), "auto", (2, 6, 7, 5)),
        ((2, 8, 3), "auto", (2, 8, 3)),
    ],
)
def test_layouts(shape, layout, expected):
    inputs = Inputs(torch.zeros(shape), preprocess=Preprocess(layout=layout))
    assert inputs.fetch(torch.arange(2)).shape == expected


def test_preprocess_against_pillow():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8))
    for name in ("bilinear", "bicubic", "nearest"):
        small = image.resize((12, 16), Image.Resampling[name.upper()])
        reference = torch.from_numpy(np.array(small)).permute(2, 0, 1).float() / 255
        preprocess = Preprocess(size=(16, 12), interpolation=name)
        ours = Inputs([image], preprocess=preprocess).fetch(torch.tensor([0]))[0]
        assert (ours - reference).abs().max() < 1.01 / 255, name
    grey = Inputs([image], preprocess=Preprocess(channels=1)).fetch(torch.tensor([0]))[0]
    assert (grey - torch.from_numpy(np.array(image.convert("L"))) / 255).abs().max() < 1.01 / 255


def test_preprocess_of_floats_and_bytes():
    preprocess = Preprocess(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
    expected = (X - torch.tensor([0.1, 0.2, 0.3])[:, None, None]) / torch.tensor([1.0, 2.0, 4.0])[:, None, None]
    for form in (X, list(X), Pairs(), DataLoader(Pairs()), X.permute(0, 2, 3, 1)):
        assert torch.allclose(Inputs(form, preprocess=preprocess).fetch(SOME), expected[SOME])
    assert Inputs(X, preprocess=Preprocess(size=(4, 4))).fetch(ALL).shape == (6, 3, 4, 4)
    grey = Inputs(X[:, 0], preprocess=Preprocess(channels=3)).fetch(ALL)
    assert torch.equal(grey, X[:, :1].expand(-1, 3, -1, -1))
    four = torch.cat([BYTES, BYTES[:, :1]], 1)
    assert torch.equal(Inputs(four, preprocess=Preprocess(channels=3)).fetch(ALL), BYTES.float() / 255)
    both = Inputs({"image": BYTES, "age": torch.ones(6)}, preprocess=Preprocess(size=(2, 2))).fetch(ALL)
    assert both["image"].shape == (6, 3, 2, 2)
    assert both["age"].tolist() == [1] * 6
    assert Preprocess()(torch.ones(2, 5)).tolist() == torch.ones(2, 5).tolist()


def test_preprocess_is_stored_as_json():
    for preprocess in (Preprocess(), Preprocess((2, 3), (0.5,), (0.25,), "bicubic", 3, "last")):
        assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess


def test_images_of_many_sizes_need_one(tmp_path):
    folder = write_images(tmp_path, sizes=((8, 5), (6, 9)))
    with pytest.raises(ValueError, match=r"1\.png has shape \(3, 6, 9\) and .*0\.png has \(3, 8, 5\); one shape"):
        Samples(folder).fetch(torch.arange(4))
    samples = Samples(folder, preprocess=Preprocess(size=(4, 4)))
    assert samples.fetch(torch.arange(4)).shape == (4, 3, 4, 4)
    samples = Samples(folder)
    samples.fetch(torch.tensor([0]))
    with pytest.raises(ValueError, match="one shape is needed"):  # also from batch to batch
        samples.fetch(torch.tensor([1]))


def test_texts_and_a_tokenizer(tmp_path):
    def tokenizer(texts):
        longest = max(map(len, texts))
        return {"ids": torch.tensor([[ord(letter) for letter in text.ljust(longest)] for text in texts])}

    texts, labels = ["ab", "c,d", "e"], ["x", "y", "x"]
    table = tmp_path / "texts.csv"
    table.write_text('text,label\nab,x\n"c,d",y\ne,x\n')
    for form in (table, (texts, labels), list(zip(texts, labels, strict=True)), (np.array(texts), labels)):
        samples = Samples(form, tokenizer=tokenizer)
        assert (samples.labels, samples.name(1)) == (labels, "c,d")
        found = samples.fetch(torch.tensor([1, 2]))["ids"]
        assert found.tolist() == [[99, 44, 100], [101, 32, 32]]
        assert samples.fingerprint() == Samples((texts, labels), tokenizer=tokenizer).fingerprint()
    some = samples.part(torch.tensor([2, 0, 2]))
    assert (len(some), some.labels, some.name(1)) == (3, ["x", "x", "x"], "ab")
    assert some.fetch(torch.tensor([1]))["ids"].tolist() == [[97, 98]]
    with pytest.raises(ValueError, match=r"holds texts, and this backbone reads images"):
        Samples(table)
    with pytest.raises(ValueError, match=r"holds images, and this backbone reads texts"):
        Inputs(tmp_path, tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"the tokenizer made \[1\] inputs of 2 samples"):
        Inputs(texts, tokenizer=lambda texts: tokenizer(texts[:1])).fetch(torch.tensor([0, 1]))


def test_blanks_around_the_values_of_a_table_are_no_part_of_them(tmp_path):
    folder = write_images(tmp_path)
    name = next(folder.glob("dog/*")).relative_to(folder)
    assert Samples(write_table(folder, [(f" {name} ", " apple"), (name, "apple ")])).labels == ["apple", "apple"]


def test_pages_are_written_in_utf_8_wherever(tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "ascii")
    write_text(tmp_path / "page.html", "\u2195")
    assert (tmp_path / "page.html").read_bytes() == "\u2195".encode()


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path, link = tmp_path / "new" / "page.html", tmp_path / "link"
    write_text(path, "old\r\n")
    link.symlink_to(path)
    with pytest.raises(KeyError), written_whole(link) as file:
        file.writelines({0: "half"}[place] for place in range(2))
    assert path.read_bytes() == b"old\r\n"
    write_text(link, "new")
    assert (path.read_text(), link.is_symlink()) == ("new", True)
    assert sorted(entry.name for entry in tmp_path.rglob("*")) == ["link", "new", "page.html"]
    with pytest.raises(ValueError, match="is a folder; a file is needed"):
        write_text(tmp_path, "new")


def test_names_that_begin_with_a_tilde_or_two_lines_are_names(tmp_path, monkeypatch):
    for label in ("__x", "y"):
        (tmp_path / "data" / label).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "data" / label / "~$a.png")
    (tmp_path / "data" / "__MACOSX").mkdir()
    monkeypatch.chdir(tmp_path / "data" / "y")
    assert len(Inputs(".")) == 1
    assert Samples(tmp_path / "data").labels == ["__x", "y"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(Samples("~/data")) == 2
    with pytest.raises(ValueError, match="there is no file or folder ~nobody/x"):
        Samples("~nobody/x")


def test_half_precision_images_are_resized():
    x = Preprocess(size=(4, 4))(torch.rand(2, 8, 8, 3).half())
    assert (x.dtype, x.shape) == (torch.float32, (2, 3, 4, 4))
