"""Saved learners that someone has changed and sealed again: refused in one sentence, or as harmless as before."""

import json

import pytest
import torch

from dlcft import Learner
from dlcft.learner.state import LEARNER_FORMAT
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store
from tests.learner.test_learner import SMALL, backbone, data
from tests.support.stores import forge

WRONG = [None, -1, 10**17, 0.5, "x", [], {}, True, [None], {"a": None}, "os:abort"]


def saved(directory, method="dlcft-exact"):
    options = SMALL.get(method, {}) if method in SMALL else {"epochs": 1, "batch_size": 8}
    learner = Learner(backbone(), method, device="cpu", **options)
    learner.learn(data([0, 1], seed=1), progress=False)
    learner.save(directory)
    return learner


def places(value, path=()):
    """Every place in a JSON value."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def put(header, path, value):
    for key in path[:-1]:
        header = header[key]
    header[path[-1]] = value


@pytest.mark.parametrize("method", ["dlcft-exact", "dlcft", "derpp"])
def test_any_wrong_value_is_refused_or_harmless(tmp_path, method):
    """Every field of the header is replaced by values that it never has."""
    learner = saved(tmp_path, method)
    whole = (tmp_path / "manifest.json").read_bytes()
    header = json.loads(whole)["versions"][0]["header"]
    x = data([0, 1], seed=2)[0]
    refused = broken = 0
    for path in places(header):
        for value in WRONG if path else []:

            def change(fields, path=path, value=value):
                put(fields["versions"][0]["header"], path, value)

            (tmp_path / "manifest.json").write_bytes(whole)
            forge(tmp_path, change)
            try:
                loaded = Learner.load(tmp_path, backbone(), device="cpu")
                assert loaded.outputs(x).shape[1] == learner.outputs(x).shape[1]
            except ValueError as error:
                refused += "\n" not in str(error)
                broken += "\n" in str(error)
            except Exception as error:
                raise AssertionError(f"{path} as {value!r}: {error!r}") from error
    assert refused > 200
    assert not broken, "more than one line"


def test_a_newer_learner_is_told_before_all_else(tmp_path):
    saved(tmp_path)
    newer = {"learner": LEARNER_FORMAT + 1}
    forge(tmp_path, lambda fields: fields["versions"][0].update(header=newer))
    with pytest.raises(CheckpointError, match=f"written by a newer dlcft .learner format {LEARNER_FORMAT + 1}."):
        Learner.load(tmp_path, backbone())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model/heads.main.weight", lambda t: t.to(torch.int8), "was saved as torch.int8"),
        ("model/heads.main.weight", lambda t: t * float("nan"), "NaN"),
        ("model/heads.main.weight", lambda t: t[:, 1:], "the network has"),
        ("method/sums/gram", lambda t: t.float(), "the sums hold gram as torch.float32"),
        ("method/sums/gram", lambda t: t + float("inf"), "finite float64"),
        ("method/sums/counts", lambda t: t[1:], "the sums hold class_sums"),
        ("history", lambda t: t[:-1], "holds a learner|Expecting|Unterminated|delimiter"),
        ("history", lambda t: t.float(), "holds a learner|decode|Expecting"),
    ],
)
def test_other_tensors_are_refused(tmp_path, name, change, words):
    saved(tmp_path / "whole")
    tensors, version = Store(tmp_path / "whole").load()
    assert name in tensors
    Store(tmp_path / "forged").commit(tensors | {name: change(tensors[name])}, version.header)
    with pytest.raises(ValueError, match=words) as error:
        Learner.load(tmp_path / "forged", backbone())
    assert "\n" not in str(error.value)


def test_an_anchor_of_integers_is_refused(tmp_path):
    saved(tmp_path / "whole", "dlcft")
    tensors, version = Store(tmp_path / "whole").load()
    name = next(name for name in tensors if "anchor|" in name)
    Store(tmp_path / "forged").commit(tensors | {name: tensors[name].to(torch.int8)}, version.header)
    with pytest.raises(ValueError, match=r"the memory holds anchor\|.* as torch.int8; real numbers are needed"):
        Learner.load(tmp_path / "forged", backbone())


def test_notes_nested_without_end_are_refused(tmp_path):
    saved(tmp_path)
    deep = []
    for _ in range(900):
        deep = [deep]
    forge(tmp_path, lambda fields: fields["versions"][0]["header"]["notes"].update(x=deep))
    with pytest.raises(CheckpointError, match=r"holds a learner that cannot be read|is not JSON"):
        Learner.load(tmp_path, backbone())


@pytest.mark.parametrize("notes", [{"backbone": "abc"}, {"backbone": {"name": ["a"]}}, {"temperature": 1e-320}])
def test_notes_that_are_never_written(tmp_path, notes):
    saved(tmp_path)
    forge(tmp_path, lambda fields: fields["versions"][0]["header"]["notes"].update(notes))
    with pytest.raises(CheckpointError, match="whose tasks, width or notes dlcft has not written"):
        Learner.load(tmp_path, backbone())


@pytest.mark.parametrize("change", [{"parts": 5}, {"parts": {}}, {"data": 3}])
def test_a_progress_note_that_is_none(tmp_path, change):
    learner = saved(tmp_path, "ewc")
    learner.store.save_progress({}, {"data": "x", "parts": {}} | change)
    with pytest.raises(CheckpointError, match=r"cannot be read|interrupted run on other data"):
        learner.learn(data([0, 1], seed=3), progress=False)
    learner.learn(data([0, 1], seed=3), progress=False, resume=False)
    assert learner.tasks == 2
