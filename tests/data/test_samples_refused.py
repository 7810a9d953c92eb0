"""Data that cannot be meant is refused in a sentence that names it."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset, WeightedRandomSampler

from dlcft.data.images import Preprocess
from dlcft.data.samples import Inputs, Samples
from tests.support.samples import BYTES, Alone, Pairs, Stream, X, Y, write_images, write_table


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
    (lambda p: Samples((X, Y[:4])), ValueError, r"there are 6 inputs and 4 labels"),
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
    (lambda p: Samples(write_table(p, [], ("path", "label", "label"))), ValueError, "the column label more than once"),
    (lambda p: Samples(write_table(p, [])), ValueError, "has a header only"),
    (lambda p: Samples(write_table(p, [("a.png", "")])), ValueError, "line 2 of .* has no label"),
    (lambda p: Samples(write_table(p, [("a.png", "cat")])), ValueError, r"line 2 of .* names 'a\.png'"),
    (lambda p: Samples(p / "other.npz"), ValueError, "holds x_train, y_train; it must hold x and y or images"),
    (lambda p: Samples(p / "objects.npz"), ValueError, r"cannot read .*objects\.npz \(y holds Python objects"),
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
    code = "import sys, torch; from dlcft.data.samples import Samples; data = torch.ones(2, 3), [0, 1]"
    code += "; Samples(data).fetch(torch.arange(2))"
    program = f"{code}; print('PIL' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_table_in_another_encoding(tmp_path):
    (tmp_path / "a.csv").write_bytes("path,label\na.png,caf\xe9\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.csv is not written in UTF-8"):
        Samples(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("text,label\nI like it, really,pos\n", "line 2 of .* has more fields than the header"),
        ("\n\ntext,label\nfine,pos\nawful,\n", "line 5 of .* has no label"),
    ],
)
def test_lines_of_a_table_that_cannot_be_read(table, words, tmp_path):
    (tmp_path / "a.csv").write_text(table)
    with pytest.raises(ValueError, match=words):
        Samples(tmp_path / "a.csv", tokenizer=lambda texts: torch.zeros(len(texts), 2))


def test_a_folder_is_no_image(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a.csv").write_text("path,label\na,cat\n")
    with pytest.raises(ValueError, match=r"line 2 of .*a\.csv names 'a', which is no regular file"):
        Samples(tmp_path / "a.csv")


def test_labels_are_text():
    with pytest.raises(ValueError, match="UTF-8 cannot hold"):
        Samples((torch.zeros(1, 2), ["caf\udce9"]))
