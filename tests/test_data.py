"""Every form in which data may be handed in, and a sentence for every form in which it may not."""

import collections
import csv
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from dlcft.data import Batches, Inputs, Labels, Samples, to_device
from dlcft.images import Preprocess, read_image

X = torch.arange(6 * 3 * 8 * 5, dtype=torch.float32).reshape(6, 3, 8, 5) / 100
BYTES = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (6, 3, 8, 5), dtype=np.uint8))
Y = [3, 7, 3, -1, 7, 3]
ALL = torch.arange(6)
SOME = torch.tensor([4, 0, 5])
CPU = torch.device("cpu")


class Pairs(Dataset):
    """A map-style data set that counts how often an input is read."""

    def __init__(self, x=X, y=Y, **attributes):
        self.x, self.y, self.read = x, y, 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        self.read += 1
        return self.x[index], self.y[index]


class Alone(Pairs):
    def __getitem__(self, index):
        return self.x[index]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 1)])


def write_images(folder, sizes=((8, 5),), suffix="png"):
    """Two images of each class "cat" and "dog"; one byte pattern each."""
    for number in range(4):
        path = folder / ("cat", "dog")[number // 2] / f"{number}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = sizes[number % len(sizes)]
        pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return folder


def pixels_of(number):
    pixels = np.random.default_rng(number).integers(0, 256, (8, 5, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def write_table(folder, rows, header=("path", "label")):
    path = folder / "table.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


SAME = {
    "tensors": lambda: (X, torch.tensor(Y)),
    "arrays": lambda: (X.numpy(), np.array(Y, dtype=np.int16)),
    "a list as pair": lambda: [X, Y],
    "float labels that are whole": lambda: (X, torch.tensor(Y, dtype=torch.float64)),
    "scalars of numpy and torch": lambda: (X, [np.int64(3), 7, torch.tensor(3), np.int8(-1), np.float32(7), 3]),
    "other byte order": lambda: (X.numpy().astype(">f4"), Y),
    "channels last": lambda: (X.permute(0, 2, 3, 1).numpy(), Y),
    "needs gradients": lambda: (X.clone().requires_grad_(), Y),
    "a list of tensors": lambda: (list(X), Y),
    "a list of lists": lambda: (X.tolist(), Y),
    "a list of pairs": lambda: [(x, y) for x, y in zip(X, Y, strict=True)],
    "a dict": lambda: {"x": X, "y": Y},
    "a dict of images": lambda: {"images": X.numpy(), "labels": np.array(Y)},
    "TensorDataset": lambda: TensorDataset(X, torch.tensor(Y)),
    "Dataset": lambda: Pairs(),
    "Dataset of arrays": lambda: Pairs(X.numpy(), np.array(Y)),
    "Dataset of dicts": lambda: DictPairs(),
    "Subset": lambda: Subset(Pairs(torch.cat([X, X]), [9] * 6 + Y), range(6, 12)),
    "ConcatDataset": lambda: ConcatDataset([Subset(Pairs(), [0, 1]), TensorDataset(X[2:], torch.tensor(Y[2:]))]),
    "DataLoader": lambda: DataLoader(Pairs(), batch_size=4, shuffle=True, drop_last=True),
    "DataLoader of a list": lambda: DataLoader([(x, y) for x, y in zip(X, Y, strict=True)]),
    "DataLoader with a sampler of a subset": lambda: DataLoader(
        Pairs(torch.cat([X, X]), [9] * 6 + Y), sampler=SubsetRandomSampler(range(6, 12))
    ),
    "DataLoader with collate_fn": lambda: DataLoader(
        Pairs(X, [str(y) for y in Y]),
        collate_fn=lambda items: (torch.stack([x for x, _ in items]), [int(y) for _, y in items]),
    ),
}


class DictPairs(Pairs):
    def __getitem__(self, index):
        return {"image": self.x[index], "label": self.y[index]}


@pytest.mark.parametrize("form", SAME)
def test_every_form_gives_the_same_samples(form):
    samples = Samples(SAME[form]())
    assert len(samples) == 6
    assert samples.labels == Y
    assert {type(label) for label in samples.labels} == {int}
    fetched = samples.fetch(SOME)
    assert fetched.dtype == torch.float32
    assert not fetched.requires_grad
    assert torch.equal(fetched, X[SOME])
    assert torch.equal(samples.fetch(ALL), X)


def test_strings_as_labels():
    for names in (["b", "a"] * 3, np.array(["b", "a"] * 3), tuple(np.array(["b", "a"] * 3))):
        labels = Samples((X, names)).labels
        assert labels == ["b", "a"] * 3
        assert {type(label) for label in labels} == {str}


class Encoding(collections.UserDict):
    """What a tokeniser returns: a mapping that is no dict."""


def test_several_inputs():
    ids, mask = torch.arange(12).reshape(6, 2), torch.ones(6, 2, dtype=torch.bool)
    named = {"input_ids": ids, "attention_mask": mask.numpy()}
    forms = [
        (named, Y),
        (Encoding(named), Y),
        ({"input_ids": ids.tolist(), "attention_mask": mask}, Y),
        {**named, "labels": Y},
        Pairs([{"input_ids": i, "attention_mask": m} for i, m in zip(ids, mask, strict=True)]),
        Pairs([{"input_ids": i, "attention_mask": m} for i, m in zip(ids.tolist(), mask, strict=True)]),
    ]
    for form in forms:
        samples = Samples(form)
        fetched = samples.fetch(SOME)
        assert samples.labels == Y
        assert fetched.keys() == named.keys()
        assert torch.equal(fetched["input_ids"], ids[SOME])
        assert torch.equal(fetched["attention_mask"], mask[SOME])
    for form in (
        ((X, ids), Y),
        Pairs(list(zip(X, ids, strict=True))),
        DataLoader(Pairs(list(zip(X, ids, strict=True)))),
    ):
        fetched = Samples(form).fetch(SOME)
        assert isinstance(fetched, tuple)
        assert torch.equal(fetched[0], X[SOME])
        assert torch.equal(fetched[1], ids[SOME])


def test_a_collate_function_may_pad():
    texts = Pairs([torch.arange(n + 1) for n in range(6)])

    def pad(items):
        ids = torch.nn.utils.rnn.pad_sequence([x for x, _ in items], batch_first=True)
        return {"input_ids": ids, "labels": torch.tensor([y for _, y in items])}

    samples = Samples(DataLoader(texts, collate_fn=pad))
    assert samples.labels == Y
    assert samples.fetch(torch.tensor([0, 2]))["input_ids"].tolist() == [[0, 0, 0], [0, 1, 2]]
    inputs = Inputs(DataLoader(texts, collate_fn=pad))
    assert inputs.fetch(torch.tensor([1]))["input_ids"].tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("dataset", "reads"),
    [
        (Pairs(targets=Y), 2),
        (Pairs(targets=torch.tensor(Y)), 2),
        (Pairs(labels=np.array(Y)), 2),
        (Pairs(samples=[(f"{n}.png", y) for n, y in enumerate(Y)]), 2),
        (Pairs(targets=[0] * 6), 8),  # not those of its samples
        (Pairs(targets=["a", "b"]), 6),
        (Pairs(targets=Y, target_transform=lambda y: y), 6),
        (Pairs(), 6),
    ],
)
def test_labels_without_reading_inputs(dataset, reads):
    assert Samples(dataset).labels == Y
    assert dataset.read == reads
    dataset.read = 0
    part = random_split(dataset, [4, 2], generator=torch.Generator().manual_seed(0))[0]
    assert Samples(part).labels == [Y[index] for index in part.indices]
    assert dataset.read <= min(reads, 6)


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
        assert inputs.files == files
        assert torch.equal(inputs.fetch(torch.tensor([2])), pixels_of(2)[None])
    assert torch.equal(Inputs(files[3]).fetch(torch.tensor([0])), pixels_of(3)[None])
    assert Inputs(X).files is None


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


def test_inputs_of_data_sets_with_and_without_labels():
    for form in (X, X.numpy(), list(X), Alone(), Pairs(), DataLoader(Alone()), DataLoader(Pairs()), (X,)):
        inputs = Inputs(form)
        fetched = inputs.fetch(SOME)
        assert len(inputs) == 6
        assert torch.equal(fetched[0] if isinstance(fetched, tuple) else fetched, X[SOME])
    two = Inputs(Alone(list(zip(X, X, strict=True)))).fetch(SOME)
    assert isinstance(two, tuple)
    assert torch.equal(two[1], X[SOME])


def test_batches_and_devices():
    samples = Samples((X.numpy().astype(np.float64), Y))
    batches = Batches(samples, torch.arange(6), 4, CPU, dtype=torch.float32)
    for _ in range(2):
        seen = list(batches)
        assert [len(y) for _, y in seen] == [4, 2]
        assert torch.equal(torch.cat([x for x, _ in seen]), X)
    assert next(iter(Batches(samples, torch.arange(6), 4, CPU)))[0].dtype == torch.float64
    moved = to_device({"ids": torch.arange(3), "x": torch.ones(3)}, CPU, dtype=torch.float64)
    assert (moved["ids"].dtype, moved["x"].dtype) == (torch.int64, torch.float64)


def test_labels_keep_their_index():
    labels = Labels().append(Labels().unknown([7, 3, 7]))
    assert labels.names == [3, 7]
    labels = labels.append(labels.unknown([7, -1, 3]))
    assert labels.names == [3, 7, -1]
    assert labels.indices([-1, 3]).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"labels are integers \(-1\) and strings \('cat'\); give one kind"):
        labels.append(["cat"])


def test_fingerprint(tmp_path):
    folder = write_images(tmp_path)
    for make in (lambda: (X, Y), lambda: Pairs(), lambda: folder, lambda: ({"a": X.bfloat16(), "b": ALL}, Y)):
        assert Samples(make()).fingerprint() == Samples(make()).fingerprint()
    plain = Samples((X, Y)).fingerprint()
    changed = X.clone()
    changed[3, 0, 0, 0] += 1
    others = [(changed, Y), (X, [*Y[:-1], 4]), (X[:5], Y[:5]), (X.double(), Y), (X.flip(0), Y), (X.flatten(1), Y)]
    assert len({plain, *(Samples(other).fingerprint() for other in others)}) == 7
    assert Samples((X.numpy(), np.array(Y))).fingerprint() == plain
    assert Samples((X, Y), preprocess=Preprocess(size=(2, 2))).fingerprint() == plain
    before = Samples(folder).fingerprint()
    Image.fromarray(np.zeros((8, 5, 3), dtype=np.uint8)).save(folder / "cat" / "0.png")
    assert Samples(folder).fingerprint() != before
    large = torch.zeros(10_000, 2)
    assert Samples((large, [0] * 10_000)).fingerprint() == Samples((large.clone(), [0] * 10_000)).fingerprint()


class Augmented(Pairs):
    def __getitem__(self, index):
        return self.x[index] + torch.rand(()).round(), self.y[index]


def test_random_augmentation_does_not_change_the_fingerprint():
    torch.manual_seed(0)
    wide = Augmented(X.repeat(8, 1, 1, 1), Y * 8)
    prints = {Samples(wide).fingerprint() for _ in range(5)}
    assert len(prints) == 1
    assert Samples(Augmented(X.repeat(8, 1, 1, 1), [0] * 48)).fingerprint() not in prints


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found(value):
    x = X.clone()
    x[4, 1, 2, 3] = value
    for form in ((x, Y), (x.numpy(), Y), Pairs(x), DataLoader(Pairs(x))):
        samples = Samples(form)
        assert torch.equal(samples.fetch(ALL[:4]), X[:4])
        with pytest.raises(ValueError, match=f"^sample 4 holds {value}; finite numbers are needed"):
            samples.fetch(SOME.flip(0))
        with pytest.raises(ValueError, match="sample 4 holds"):
            list(Batches(samples, ALL, 2, CPU))
    with pytest.raises(ValueError, match="sample 1 holds nan"):
        Inputs({"x": X, "age": torch.tensor([0, torch.nan, 0, 0, 0, 0])}).fetch(ALL)
    mask = torch.full((6, 2), -torch.inf)
    assert torch.equal(Inputs({"x": X, "mask": mask}).fetch(ALL)["mask"], mask)


def fetch(x, **options):
    return Inputs(x, preprocess=Preprocess(**options)).fetch(torch.arange(2))


BAD = [
    (lambda p: Samples(42), TypeError, "data is a int; give a pair"),
    (lambda p: Samples(None), TypeError, "data is a NoneType; give a pair"),
    (lambda p: Samples(X), TypeError, "data is a Tensor; give a pair"),
    (lambda p: Samples((X, Y, Y)), TypeError, "data is a tuple; give a pair"),
    (lambda p: Samples(x for x in X), TypeError, "data is a generator, which can be read only once; give"),
    (lambda p: Samples(Stream()), TypeError, "data is a Stream without an index .* give a map-style Dataset"),
    (lambda p: Samples(DataLoader(Stream())), TypeError, "data is a Stream without an index"),
    (lambda p: Samples(DataLoader(Pairs(), batch_size=None)), ValueError, "batch_size=None .* give its dataset"),
    (lambda p: Samples(DataLoader(Pairs(), sampler=WeightedRandomSampler([1] * 6, 6))), ValueError, "by a Weighted"),
    (lambda p: Samples(DataLoader(Pairs(), sampler=RandomSampler(Pairs(), num_samples=3))), ValueError, "by a RandomS"),
    (lambda p: Samples(DataLoader(Pairs(), batch_sampler=[[0, 1]])), ValueError, "draws by a list; give its dataset"),
    (lambda p: Samples(Alone()), TypeError, "a sample is a Tensor; pairs"),
    (lambda p: Samples(TensorDataset(X, X, X)), TypeError, r"a sample is a tuple of 3; pairs \(input, label\)"),
    (lambda p: Samples({"x": X}), ValueError, r"a dict has the keys \['x'\]; inputs and one of label"),
    (lambda p: Samples(({"a": X, "b": X[:2]}, Y)), ValueError, r"the inputs have \[2, 6\] samples"),
    (lambda p: Samples((X, Y[:4])), ValueError, r"there are \[6\] inputs and 4 labels"),
    (lambda p: Samples((X[:0], [])), ValueError, "the data set is empty"),
    (lambda p: Samples([]), TypeError, "data is a list; give a pair"),
    (lambda p: Samples(Subset(Pairs(), [])), ValueError, "the data set is empty"),
    (lambda p: Inputs([]), ValueError, "the data set is empty"),
    (lambda p: Samples((X, torch.eye(6))), ValueError, r"labels have shape \(6, 6\); one label .* y.argmax\(1\)"),
    (lambda p: Samples((X, torch.eye(6).tolist())), TypeError, r"a label is \[1.0.* of type list"),
    (lambda p: Samples(Pairs(X, torch.eye(6))), ValueError, r"a label has shape \(6,\); an integer"),
    (lambda p: Samples((X, torch.tensor(1))), ValueError, r"labels have shape \(\); one label"),
    (lambda p: Samples((X, [0, 1, 2, 3, 4, 0.5])), ValueError, "a label is 0.5; an integer or a string"),
    (lambda p: Samples((X, np.array([0.0, np.nan] * 3))), ValueError, "a label is nan; an integer"),
    (lambda p: Samples((X, ["cat", 3] * 3)), ValueError, r"labels are integers \(3\) and strings \('cat'\)"),
    (lambda p: Samples((X, torch.tensor([True] * 6))), TypeError, "a label is True of type bool"),
    (lambda p: Samples((X, [None] * 6)), TypeError, "a label is None of type NoneType"),
    (lambda p: Samples((X, np.array([b"cat"] * 6))), TypeError, "a label is b'cat' of type bytes"),
    (lambda p: Samples((X, "catdog")), TypeError, "labels are a str; a list"),
    (lambda p: Samples((X, 3)), TypeError, "labels are a int; a list"),
    (lambda p: Samples((3, Y)), TypeError, "x is a int; it may be a tensor"),
    (lambda p: Inputs(x for x in X), TypeError, "x is a generator, which can be read only once"),
    (lambda p: Inputs({"x": "cat"}), TypeError, "the inputs hold a str; tensors or numpy arrays"),
    (lambda p: Inputs(np.array([{}, {}])), ValueError, "the inputs hold an array of object; numbers"),
    (lambda p: Inputs(np.ones(2, dtype=np.complex64)), ValueError, "an array of complex64; numbers"),
    (lambda p: Inputs(torch.eye(2).to_sparse()), ValueError, "layout torch.sparse_coo; give a dense one"),
    (lambda p: Inputs(torch.tensor(1.0)), ValueError, "the inputs hold a single number"),
    (lambda p: fetch(["great film", "dull film"]), ValueError, "there is no file or folder great film"),
    (lambda p: fetch(["long text " * 900]), ValueError, "there is no file or folder long text"),
    (lambda p: fetch([{"text": "cat"}, {"text": "dog"}]), TypeError, "an input is a str; tensors"),
    (lambda p: fetch([["a"], ["b"]]), TypeError, "an input is a list of <U1; numbers"),
    (lambda p: fetch([[[1, 2], [3]], [[1], [2]]]), ValueError, "lists that differ in length .*; pad them"),
    (lambda p: fetch([X[0], X[1, :1]]), ValueError, r"sample 1 has shape \(1, 8, 5\) and sample 0 has \(3, 8, 5\)"),
    (lambda p: fetch(DataLoader(Pairs(), collate_fn=lambda items: (X[:1], 0))), ValueError, r"made \[1\] inputs of 2"),
    (lambda p: fetch(torch.zeros(2, 3, 8, 8, dtype=torch.int64)), ValueError, r"int64 tensor of shape \(2, 3, 8, 8\)"),
    (
        lambda p: fetch(torch.zeros(2, 4, 4, 3)),
        ValueError,
        r"shape \(2, 4, 4, 3\), whose channels may be first or last",
    ),
    (lambda p: fetch(BYTES[0].permute(1, 2, 0)), ValueError, r"shape \(2, 5, 3\), which looks like one image"),
    (lambda p: fetch(torch.ones(2, 5), size=(4, 4)), ValueError, r"float32 tensor of shape \(2, 5\); images are"),
    (lambda p: fetch(X, mean=(0.5, 0.5), std=(1, 1)), ValueError, "images have 3 channels and mean has 2 numbers"),
    (lambda p: fetch(torch.ones(2, 2, 8, 8), channels=3), ValueError, "have 2 channels, of which 3 cannot be made"),
    (lambda p: Preprocess(size=224), ValueError, "size is 224; it must be a tuple"),
    (lambda p: Preprocess(size=(224, 0)), ValueError, r"size is \(224, 0\); it must be two positive integers"),
    (lambda p: Preprocess(mean=(0.5,)), ValueError, r"mean is \(0.5,\) and std is None; give both"),
    (lambda p: Preprocess(mean=(0.5,), std=(0.0,)), ValueError, r"std is \(0.0,\); it must be positive"),
    (lambda p: Preprocess(interpolation="area"), ValueError, "interpolation is 'area'; it must be one of bilinear"),
    (lambda p: Preprocess(channels=2), ValueError, "channels is 2; it must be 1, 3 or None"),
    (lambda p: Preprocess(layout="NHWC"), ValueError, "layout is 'NHWC'; it must be 'auto'"),
    (lambda p: Preprocess.from_dict({"crop": 3}), ValueError, "unknown preprocessing 'crop'; known: size"),
    (lambda p: Samples(p / "nowhere"), ValueError, "there is no file or folder .*nowhere"),
    (lambda p: Samples(p / "notes.txt"), ValueError, r"cannot read labelled data from .*notes\.txt; give a folder"),
    (lambda p: Inputs(p / "notes.txt"), ValueError, r"cannot read inputs from .*notes\.txt; give a folder"),
    (lambda p: Samples(p / "empty"), ValueError, "the image folder .*empty holds no folders; one folder a class"),
    (lambda p: Inputs(p / "empty"), ValueError, "the folder .*empty holds no images; .bmp"),
    (lambda p: Samples(p / "pets" / "cat"), ValueError, r"cat holds the image 0\.png outside of a class"),
    (lambda p: Samples(p / "split"), ValueError, "split holds test, train, which are no classes; give one of them"),
    (lambda p: Samples(p / "hollow"), ValueError, "the folder .*owl holds no images"),
    (lambda p: fetch([p / "notes.txt"] * 2), ValueError, r"cannot read the image file .*notes\.txt"),
    (lambda p: fetch([p / "wide.tif"] * 2), ValueError, r"wide\.tif \(an image of mode 'F' has pixels of 32 bits"),
    (lambda p: Samples(write_table(p, [], ("file", "class"))), ValueError, r"has the columns \['file', 'class'\]"),
    (lambda p: Samples(write_table(p, [])), ValueError, "has a header only"),
    (lambda p: Samples(write_table(p, [("a.png", "")])), ValueError, "line 2 of .* has no label"),
    (lambda p: Samples(write_table(p, [("a.png", "cat")])), ValueError, r"there is no file or folder .*a\.png"),
    (lambda p: Samples(p / "other.npz"), ValueError, "holds x_train, y_train; it must hold x and y or images"),
    (lambda p: Samples(p / "objects.npz"), ValueError, r"cannot read y of .*objects\.npz"),
    (lambda p: Samples(p / "broken.npz"), ValueError, r"cannot read .*broken\.npz \(File is not a zip file\)"),
    (lambda p: Inputs(p / "broken.npy"), ValueError, r"cannot read .*broken\.npy"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bad")
    write_images(path / "pets")
    write_images(path / "split" / "train")
    write_images(path / "split" / "test")
    write_images(path / "hollow")
    (path / "hollow" / "owl").mkdir()
    (path / "empty").mkdir()
    (path / "notes.txt").write_text("no data")
    (path / "broken.npz").write_text("no archive")
    (path / "broken.npy").write_text("no array")
    np.savez(path / "other.npz", x_train=X.numpy(), y_train=np.array(Y))
    np.savez(path / "objects.npz", x=X.numpy(), y=np.array([{}] * 6))
    Image.fromarray(np.zeros((8, 5), dtype=np.float32)).save(path / "wide.tif")
    return path


@pytest.mark.parametrize(("action", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_what_is_refused_is_named(folder, action, error, message):
    with pytest.raises(error, match=message) as caught:
        action(folder)
    text = str(caught.value)
    assert text.endswith("."), "a sentence"
    assert "\n" not in text


def test_pillow_is_imported_only_for_images():
    code = (
        "import sys, torch; from dlcft.data import Samples; Samples((torch.ones(2, 3), [0, 1])).fetch(torch.arange(2))"
    )
    program = f"{code}; print('PIL' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_without_pillow_a_sentence_says_so(monkeypatch, tmp_path):
    write_images(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="reading image files needs Pillow: pip install pillow"):
        read_image(tmp_path / "cat" / "0.png")
