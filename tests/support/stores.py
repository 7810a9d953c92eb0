"""Stores to write to, to look at and to forge."""

import json

import pytest
import torch

from dlcft.learner.state import read_learner
from dlcft.store import files as _files
from dlcft.store.files import CheckpointError, state_digest
from dlcft.store.store import Store

MANIFEST = "manifest.json"


def content(seed, size=50):
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "weight": torch.randn(size, 3, generator=generator),
        "sums": torch.randn(size, generator=generator).double(),
    }
    return tensors, {"seed": seed, "labels": ["cat", "hund", "ελέφαντας"], "loss": [0.1, 1e-300]}


def committed(directory, count=1, **options):
    store = Store(directory)
    for seed in range(1, count + 1):
        store.commit(*content(seed), **options)
    return store


def digest(store, version=None):
    tensors, entry = store.load(version)
    return state_digest(tensors, entry.header)


def bits(tensor):
    return tensor.flatten().view(torch.uint8).tolist()


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name != ".lock"}


def forge(directory, change, name=MANIFEST):
    """Change a JSON file and seal it again, as someone who knows the format would."""
    path = directory / name
    fields = json.loads(path.read_bytes())
    change(fields)
    path.write_bytes(_files._sealed(fields))


def assert_refused(store, match):
    """Reading, committing and rolling back fail with one sentence and change nothing."""
    before = files(store.directory)
    for action in (store.load, lambda: store.commit(*content(9)), lambda: store.rollback(1)):
        with pytest.raises(CheckpointError, match=match) as caught:
            action()
        message = str(caught.value)
        assert message.endswith(".")
        assert "\n" not in message
    assert files(store.directory) == before


def learned(directory):
    """The digest of everything that a saved learner holds, but for times."""
    tensors, header, _ = read_learner(Store(directory), None)
    history = [{k: v for k, v in e.items() if not k.startswith("seconds")} for e in header["history"]]
    return state_digest(tensors, header | {"history": history})
