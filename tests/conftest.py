"""Keeps tests away from the network and from files of the user; and a browser for those that look at pages."""

import logging
import shutil
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


@pytest.fixture(scope="module")
def browser():
    """Chromium, or skip the test."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for found in map(shutil.which, names) if found), None)
    if path is None:
        pytest.skip("no chromium is installed")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()
