"""Downloads: asked for, checked, whole or not at all."""

import hashlib
import io
import tarfile
import zipfile
from dataclasses import replace

import pytest

from dlcft.bench.datasets import load
from dlcft.bench.datasets.catalogue import CATALOGUE
from dlcft.bench.datasets.download import Remote
from tests.support.dataset_files import assert_cifar100, one_sentence, pack_cifar100, write_mit67, write_tiny

pytestmark = pytest.mark.usefixtures("no_data_outside")


@pytest.fixture
def served(tmp_path, monkeypatch):
    """Put a file where the network would be."""
    from urllib.request import FileHandler, build_opener

    opened = []

    def urlopen(url, timeout):
        opened.append(url)
        return build_opener(FileHandler).open(url, timeout=timeout)

    monkeypatch.setattr("urllib.request.urlopen", urlopen)

    def serve(name, *files, md5=None, unpacked=""):
        sums = [hashlib.md5(file.read_bytes()).hexdigest() if md5 is None else md5 for file in files]
        remotes = tuple(
            Remote(file.as_uri(), found, unpacked if file.suffix in (".tar", ".zip") else "")
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
    with pytest.raises(ValueError, match=r"gave a file with the md5 \w{32}, not 0{32}; nothing was kept") as error:
        load("seq-cifar100", download=True)
    one_sentence(error)
    assert list((tmp_path / "default" / "seq-cifar100").iterdir()) == []


def test_a_file_that_lies_there_is_checked_and_never_overwritten(tmp_path, served):
    pack = tmp_path / "web" / "tiny-imagenet-200.zip"
    pack.write_bytes(b"official")
    opened = served("tiny-imagenet", pack, unpacked="tiny-imagenet-200")
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
    opened = served("seq-mit67", tar_path, *lists, unpacked="Images")
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
    served("tiny-imagenet", path, unpacked="val/val_annotations.txt")
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
    served("seq-mit67", path, unpacked="Images")
    with pytest.raises(ValueError, match=f"cannot unpack .*{path.name} ") as error:
        load("seq-mit67", download=True)
    assert "\n" not in str(error.value)
    assert [p.name for p in (tmp_path / "default" / "seq-mit67").iterdir()] == [path.name]
    assert not list(tmp_path.rglob("escaped"))
