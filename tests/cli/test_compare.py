"""`dlcft compare`, as a person or a script meets it."""

import io
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dlcft.cli.compare import _progress
from dlcft.comparison.clock import Stage
from tests.support.commands import dlcft
from tests.support.samples import pictures

QUICK = ["--method", "ncm", "--method", "ridge"]


@pytest.fixture
def folder(tmp_path):
    pictures(tmp_path / "january", ["red", "green", "grey"])
    return tmp_path


def test_a_table_a_recommendation_and_a_picture(folder):
    done = dlcft("compare", "--data", "january", *QUICK, "--picture", "methods.svg", cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "18 of 18 samples, 3 labels; 5 folds: 14 learned and about 4 tested each time"
    assert lines[1].split()[:2] == ["accuracy,", "%"]
    assert {line.lstrip("* ").split()[0] for line in lines[2:4]} == {"ncm", "ridge"}
    assert sum(line.startswith("*") for line in lines) == 1
    chosen = next(line for line in lines if line.startswith("*")).split()[1]
    assert f"recommended: {chosen}, the closed-form method that is smallest on disk" in done.stdout
    assert lines[-1] == "picture: methods.svg"
    assert done.stderr.startswith("takes about ")
    assert f"Recommended: {chosen}" in (folder / "methods.svg").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["january", "methods.svg"]


def test_json_of_other_forms_and_of_a_part(folder):
    images = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "data.npz", x=images, y=np.arange(60) % 3)
    done = dlcft("compare", "--data", "data.npz", *QUICK, "--samples", 30, "--folds", 3, "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert (found["samples"], found["total"], found["folds"], found["learned"]) == (30, 60, 3, 20)
    assert {row["method"] for row in found["rows"]} == {"ncm", "ridge"}
    assert found["recommended"] in ("ncm", "ridge")
    assert found["picture"] is None


def test_labels_with_one_sample_and_uneven_ones_are_told(folder):
    for number in range(1, 6):
        (folder / "january" / "red" / f"{number}.png").unlink()
    for number in range(3, 6):
        (folder / "january" / "green" / f"{number}.png").unlink()
    done = dlcft("compare", "--data", "january", "--method", "ncm", cwd=folder)
    assert "1 label with one sample, learned and never tested: red" in done.stdout
    assert "every label the same" in done.stdout


def test_the_backbone_of_a_model(folder):
    small = ["--set", "depth_features=30"]
    assert dlcft("update", "--model", "m", "--data", "january", *small, cwd=folder).returncode == 0
    before = {path: path.read_bytes() for path in (folder / "m").rglob("*") if path.is_file()}
    done = dlcft("compare", "--data", "january", "--model", "m", *QUICK, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("18 of 18 samples")
    assert {path: path.read_bytes() for path in (folder / "m").rglob("*") if path.is_file()} == before
    done = dlcft("compare", "--data", "january", "--model", "m", "--backbone", "resnet18", *QUICK, cwd=folder)
    assert (done.returncode, "was made on 'shipped'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], "there is no file or folder"),
        (["--data", "january", "--method", "rigde"], "did you mean 'ridge'"),
        (["--data", "january", "--samples", "1"], "--samples is 1; it must be at least 2"),
        (["--data", "january", "--folds", "1"], "--folds is 1"),
        (["--data", "january", "--seed", "-1"], "--seed is -1"),
        (["--data", "january", "--picture", "a.jpeg"], "whose name ends in .svg or .png"),
        (["--data", "january", "--picture", "no/a.svg"], "a file in a folder that exists"),
        (["--data", "january", "--picture", "january/red/a.png"], "in what is read"),
        (["--data", "january", "--picture", "there.png"], "an image that is there already"),
        (["--data", "january", "--model", "one", "--picture", "one/a.svg"], "in what is read"),
        (["--data", "january", "--model", "nowhere"], "holds no model"),
        (["--data", "january", "--model", "m", "--weights", "w.pth"], "leave one of them out"),
        (["--data", "one"], "two labels, and two samples of one of them"),
    ],
)
def test_wrong_input_is_one_sentence(folder, arguments, words):
    pictures(folder / "one", ["blue"])
    (folder / "there.png").write_bytes(b"")
    done = dlcft("compare", *arguments, cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_terminal_sees_how_much_is_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    now, terminal = [1000.0], Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with _progress() as report:
        for step in range(100):
            now[0] += 0.01  # faster than lines are written
            report(Stage("ridge: folds", step / 100, 100 - step))
    first, *lines = terminal.getvalue().split("\r")
    assert first == "takes about 100 s\n"
    assert 4 <= len([line for line in lines if "left  ridge: folds" in line]) <= 6
    assert lines[0].startswith("  0%  100 s left")
    assert lines[-2:] == [" " * 78, ""]


def test_ctrl_c_is_one_line(folder):
    images = np.random.default_rng(0).integers(0, 256, (4000, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "data.npz", x=images, y=np.arange(4000) % 3)
    words = ["compare", "--data", "data.npz", "--picture", "a.svg", "--samples", "4000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", "dlcft", *words], cwd=folder, **pipes) as process:
        assert process.stderr.readline().startswith("takes about ")
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "dlcft: interrupted.\n")
    assert not (folder / "a.svg").exists()
