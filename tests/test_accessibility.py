"""Pages that the program writes, looked at by axe-core in a browser: no serious fault, light and dark."""

import shutil
import subprocess
import tarfile

import pytest

from tests.support.commands import dlcft
from tests.support.documents import ROOT
from tests.support.samples import pictures

AXE = "axe-core@4.14.0"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The program that looks at a page, from the npm registry."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed, which brings axe-core")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", AXE, "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        pytest.skip("the npm registry cannot be reached, which has axe-core")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        file = archive.extractfile("package/axe.min.js")
        return file.read().decode()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """An update's page with held-out samples, a gate and doubtful labels; and a report."""
    folder = tmp_path_factory.mktemp("pages")
    first = pictures(folder / "first", ["red", "green"], count=30)
    holdout = pictures(folder / "holdout", ["red", "green"], count=12, seed=9)
    swapped = folder / "swapped"
    shutil.copytree(first / "red", swapped / "green")
    shutil.copytree(first / "green", swapped / "red")
    options = ["--model", folder / "m", "--holdout", holdout, "--data"]
    small = ["--method", "ranpac", "--set", "random_features=50"]
    assert dlcft("update", *options, first, *small, "--page", folder / "first.html").returncode == 0
    assert dlcft("update", *options, swapped, "--max-doubtful", "0", "--page", folder / "gated.html").returncode == 3
    assert dlcft("report", "--runs", ROOT / "results" / "small", "--out", folder / "report.html").returncode == 0
    return [folder / name for name in ("first.html", "gated.html", "report.html")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(axe, browser, pages, scheme):
    found = {}
    for path in pages:
        page = browser.new_context(color_scheme=scheme).new_page()
        page.goto(path.as_uri())
        page.evaluate(axe)
        faults = page.evaluate("async () => (await axe.run()).violations")
        found[path.name] = [(fault["id"], fault["impact"]) for fault in faults]
    assert all(faults == [] for faults in found.values()), found
