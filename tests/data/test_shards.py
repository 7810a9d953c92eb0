"""Samples in .tar files."""

import io
import json
import pickle
import tarfile

import pytest
import torch
from PIL import Image

from dlcft.data.samples import Inputs, Samples
from dlcft.data.shards import Shards
from tests.support.samples import pixels_of, write_images


def write_tar(path, members, mode="w"):
    """A .tar of members by name: bytes, or text."""
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def image_of(number):
    buffer = io.BytesIO()
    pixels = (pixels_of(number) * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def test_webdataset_shards_are_read_in_order_each_sample_at_its_place(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    write_tar(folder / "b-1.tar", [("5.json", json.dumps({"label": "owl"})), ("5.png", image_of(5))])
    write_tar(
        folder / "b-0.tar",
        [
            *[("0.cls", "cat\n"), ("0.png", image_of(0)), ("0.txt", "a cat"), ("0.mask.png", b"no image")],
            *[("notes", ""), ("3.png", image_of(3)), ("3.cls", "7")],
        ],
    )
    samples = Samples(folder)
    assert samples.labels == ["cat", "7", "owl"]
    assert torch.equal(samples.fetch(torch.tensor([2, 0])), torch.stack([pixels_of(5), pixels_of(0)]))
    assert samples.name(2) == f"{folder}/b-1.tar/5.png"
    inputs = Inputs(folder / "b-0.tar")
    assert len(inputs) == 2
    assert torch.equal(inputs.fetch(torch.tensor([1])), pixels_of(3)[None])
    assert torch.equal(pickle.loads(pickle.dumps(samples._source._shards)).read(1, None), samples._source._get(1))


def test_a_packed_image_folder_equals_the_folder(tmp_path):
    folder = write_images(tmp_path / "pets")
    with tarfile.open(tmp_path / "pets.tar", "w") as tar:
        tar.add(folder, arcname="./a folder name that is so long that its header takes more than one block " * 2)
    packed, plain = Samples(tmp_path / "pets.tar"), Samples(folder)
    assert sorted(packed.labels) == plain.labels
    order = sorted(range(4), key=lambda index: packed.name(index)[-9:])
    assert [packed.labels[index] for index in order] == plain.labels
    assert torch.equal(packed.fetch(torch.tensor(order)), plain.fetch(torch.arange(4)))
    assert Samples(tmp_path / "pets.tar").fingerprint() == packed.fingerprint()


def test_texts_in_shards(tmp_path):
    write_tar(tmp_path / "texts.tar", [("1.txt", "grün"), ("1.cls", "colour"), ("2.txt", "blau"), ("2.cls", "colour")])

    def tokenizer(texts):
        return torch.tensor([[len(text), ord(text[0])] for text in texts])

    samples = Samples(tmp_path / "texts.tar", tokenizer=tokenizer)
    assert samples.fetch(torch.tensor([1, 0])).tolist() == [[4, ord("b")], [4, ord("g")]]
    assert samples.name(0) == "grün"


def test_names_with_dots_are_taken_to_the_last_one(tmp_path):
    members = [("cat.3.png", image_of(3)), ("cat.3.cls", "cat"), ("cat.4.png", image_of(4)), ("cat.4.cls", "owl")]
    samples = Samples(write_tar(tmp_path / "a.tar", members))
    assert samples.labels == ["cat", "owl"]
    assert torch.equal(samples.fetch(torch.tensor([1])), pixels_of(4)[None])
    folders = [("x/IMG.2024.1.png", image_of(1)), ("x/0.png", image_of(0)), ("y/.hidden.png", b""), ("y/note", b"")]
    assert Samples(write_tar(tmp_path / "b.tar", folders)).labels == ["x", "x"]
    parts = [("1.png", image_of(1)), ("1.mask.png", b"another part of the same sample"), ("1.cls", "cat")]
    assert Samples(write_tar(tmp_path / "c.tar", parts)).labels == ["cat"]


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ([("1.png", b"")], r"sample 1 in .*data.tar has no label that can be read \(a member 1.cls"),
        ([("1.cls", "cat")], "holds no sample"),
        ([("a/1.png", b""), ("a/1.jpg", b"")], "sample a/1 in .* has 2 members"),
        ([("1.png", b""), ("1.cls", "x" * 2_000_000)], "1.cls in .* has 2000000 bytes"),
        ([("1.png", b""), ("1.json", "[1]")], "sample 1 in .* has no label"),
        ([("1.png", b""), ("1.json", '{"label": [1]}')], r"has no label that can be read \(a label is"),
        ([("1.png", b""), ("1.json", "{")], "sample 1 in .* has no label that can be read"),
        ([("1.png", b""), ("1.cls", b"\xff")], "sample 1 in .* has no label that can be read"),
        ([("a/1.png", b""), ("a/1.cls", "cat"), ("a/2.png", b"")], "a/1 has a member with its label, and a/2 has none"),
    ],
)
def test_shards_without_labels_or_samples_are_refused(tmp_path, members, told):
    with pytest.raises(ValueError, match=told):
        Samples(write_tar(tmp_path / "data.tar", members))


def test_damaged_compressed_and_mixed_shards_are_refused(tmp_path):
    members = [("cat/1.png", image_of(1)), ("cat/2.png", image_of(2))]
    whole = write_tar(tmp_path / "whole.tar", members).read_bytes()
    write_tar(tmp_path / "packed.tar", members, "w:gz")
    with pytest.raises(ValueError, match=r"packed.tar .*uncompressed"):
        Samples(tmp_path / "packed.tar")
    samples = Samples(tmp_path / "whole.tar")
    (tmp_path / "whole.tar").write_bytes(whole[:1700])
    with pytest.raises(ValueError, match=r"cannot read .*whole.tar"):
        samples.fetch(torch.tensor([1]))
    with pytest.raises(ValueError, match=r"cannot read .*whole.tar"):
        Shards([tmp_path / "whole.tar"])
    for damage in (whole[:1024], whole[:1024] + b"x" + whole[1025:]):  # at the second header
        (tmp_path / "whole.tar").write_bytes(damage)
        with pytest.raises(ValueError, match="damaged or cut at byte 1024"):
            Samples(tmp_path / "whole.tar")
    broken = write_tar(tmp_path / "broken.tar", [("cat/1.png", b"no image")])
    with pytest.raises(ValueError, match=r"broken.tar/cat/1.png"):
        Samples(broken).fetch(torch.tensor([0]))
    (tmp_path / "mixed" / "cat").mkdir(parents=True)
    write_tar(tmp_path / "mixed" / "dog.tar", members)
    with pytest.raises(ValueError, match=r"dog.tar and cat; give one"):
        Samples(tmp_path / "mixed")
