"""The wheel in an empty environment: it installs, and the demo runs from it."""

import os
import shutil
import subprocess
import sys
import venv

import pytest

from tests.support.documents import ROOT

pytestmark = pytest.mark.slow


def run(*command, folder):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=clean, capture_output=True, text=True, check=False)
    if done.returncode and "pip" in command and "Failed to establish a new connection" in done.stderr:
        pytest.skip("the package index cannot be reached")
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def test_the_wheel_installs_and_the_demo_runs(tmp_path):
    source, empty = tmp_path / "source", tmp_path / "empty"
    kept = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".cache", "site", "results", "__pycache__")
    shutil.copytree(ROOT, source, ignore=kept)
    empty.mkdir()
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ".", folder=source)
    (wheel,) = tmp_path.glob("dlcft-*.whl")
    assert wheel.stat().st_size < 10e6

    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt")
    run(*install, "torch", folder=empty)
    run(*install, wheel, folder=empty)

    dlcft = tmp_path / "venv" / "bin" / "dlcft"
    where = run(python, "-c", "import dlcft; print(dlcft.__file__)", folder=empty)
    assert str(tmp_path / "venv") in where
    assert run(dlcft, "--version", folder=empty).strip() == wheel.name.split("-")[1]
    run(dlcft, "demo", "--epochs", "1", folder=empty)
    assert (empty / "dlcft-demo" / "report.html").stat().st_size > 10_000
