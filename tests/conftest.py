"""Keeps tests away from the network and from files of the user."""

import logging
import urllib.error

import pytest

logging.getLogger("torch.__trace").propagate = False  # pytest would keep all of torch's record of each graph


@pytest.fixture
def no_data_outside(monkeypatch, tmp_path):
    """No network, and an empty folder of data sets."""

    def refuse(url, **_):
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setenv("DLCFT_DATA", str(tmp_path / "default"))


@pytest.fixture
def weights_folder(tmp_path, monkeypatch):
    """An empty folder of weights, beside nothing else."""
    folder = tmp_path / "weights"
    folder.mkdir()
    monkeypatch.setenv("DLCFT_WEIGHTS", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder
