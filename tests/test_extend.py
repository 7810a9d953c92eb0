"""A method, a curvature and a block of one's own: learned, saved, killed, loaded and learned on, everywhere."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dlcft import Learner
from dlcft.learner import notes
from dlcft.store.store import Store
from tests.support.stores import learned

EXAMPLES = Path(__file__).parents[1] / "examples"
X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > X[:, 1]).long()
TASKS = [(X[:20], Y[:20]), (X[20:] + 1, Y[20:])]


@pytest.fixture
def examples(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))


def method():
    from new_method import StayNear

    return Learner(backbone(), StayNear(strength=3.0), epochs=3, batch_size=8, device="cpu")


def curvature():
    from new_curvature import LayerMean

    return Learner(backbone(), "dlcft", curvature=LayerMean, adapt="always", epochs=3, batch_size=8, device="cpu")


def block():
    from tests.support.own_block import IsotropicStatistics

    settings = {"curvature": IsotropicStatistics, "adapt": "always", "epochs": 3, "batch_size": 8}
    return Learner(backbone(), "dlcft", device="cpu", **settings)


def learn(directory, make):
    """Begin, or go on where the directory stands."""
    if Store(directory).current is None:
        make().save(directory)
    learner = Learner.load(directory, backbone(), device="cpu")
    while learner.tasks < 2:
        learner.learn(TASKS[learner.tasks], progress=False)
        learner.save()


@pytest.mark.parametrize("make", [method, curvature, block])
def test_killed_in_a_task_and_continued(make, tmp_path, examples, monkeypatch):
    monkeypatch.setattr(notes, "PROGRESS_SECONDS", 0.0)
    learn(tmp_path / "whole", make)
    child = os.fork()
    if child == 0:
        steps = []
        write = notes.ProgressNotes.write

        def killed(self, **parts):
            write(self, **parts)
            steps.append(len(steps))
            if len(steps) == 12:  # inside the second task
                os.kill(os.getpid(), signal.SIGKILL)

        notes.ProgressNotes.write = killed
        learn(tmp_path / "killed", make)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert Learner.load(tmp_path / "killed", backbone(), device="cpu").tasks == 1
    learn(tmp_path / "killed", make)
    assert learned(tmp_path / "killed") == learned(tmp_path / "whole")


def test_settings_come_back(tmp_path, examples):
    for make in (method, curvature, block):
        learner = make()
        learner.save(tmp_path / make.__name__)
        loaded = Learner.load(tmp_path / make.__name__, backbone(), device="cpu")
        assert loaded.recipe == learner.recipe
    assert Learner.load(tmp_path / "method", backbone()).method.strength == 3.0


def test_curvatures_are_called_and_differ(examples, monkeypatch):
    from new_curvature import LayerMean

    added = []
    add = LayerMean.add
    monkeypatch.setattr(LayerMean, "add", lambda self, *rows: added.append(self.name) or add(self, *rows))
    outputs = {}
    own = {"dlcft": {"curvature": LayerMean, "adapt": "always"}}
    for name in ("dlcft", "dlcft-diagonal", "dlcft-kfac", "dlcft-tkfac", "dlcft-ekfac"):
        settings = {"epochs": 3, "lr": 1e-2, "batch_size": 8, **own.get(name, {})}
        learner = Learner(backbone(), name, device="cpu", **settings)
        for task in TASKS:
            learner.learn(task, progress=False)
        outputs[name] = learner.outputs(X)
    assert set(added) == {"backbone.delta.0", "backbone.delta.2"}
    names = list(outputs)
    same = [(a, b) for a in names for b in names if a < b and torch.equal(outputs[a], outputs[b])]
    assert same == [], "every curvature is used in the default scenario"


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("new_method", ["--method", "new_method:StayNear", "--set", "strength=3"]),
        ("new_curvature", ["--method", "dlcft", "--set", "adapt=always", "--set", "curvature=new_curvature:LayerMean"]),
    ],
)
def test_on_the_command_line(module, options, tmp_path):
    """By name, from the current folder; later commands ask for the module before they import it."""
    images = torch.randint(0, 256, (8, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "data.npz", x=images.numpy(), y=np.array([0, 1] * 4))
    given = ["--model", tmp_path / "model", "--data", tmp_path / "data.npz"]

    first = ["--backbone", "shipped", "--train", "layer4", "--set", "epochs=1", *options]
    done = run("update", *given, *first, cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    asked = run("evaluate", *given, cwd=EXAMPLES)
    assert asked.returncode == 2
    assert f"give --import {module}, if you trust it" in asked.stderr
    assert run("evaluate", *given, "--import", module, cwd=EXAMPLES).returncode == 0


def run(*words, **options):
    """A command as the installed script runs it: the current folder is not on the path."""
    program = "import sys; sys.path.remove(''); from dlcft.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_in_an_experiment(tmp_path):
    small = ["run", "--out", tmp_path, "--per-class", "4", "--classes", "4", "--set", "epochs=1"]
    done = run(*small, "--method", "new_method:StayNear", "--set", "strength=3", cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    done = run(*small, "--method", "dlcft-paper", "--set", "curvature=new_curvature:LayerMean", cwd=EXAMPLES)
    assert done.returncode == 0, done.stderr
    done = run("report", "--runs", tmp_path, "--format", "md", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "new_method:StayNear" in done.stdout.replace("\\", "")


def test_a_report_imports_nothing(tmp_path):
    small = ["run", "--out", tmp_path / "runs", "--per-class", "4", "--classes", "4", "--set", "epochs=1"]
    assert run(*small, "--method", "new_method:StayNear", cwd=EXAMPLES).returncode == 0
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (path,) = (tmp_path / "runs").glob("*.json")
    path.write_text(path.read_text().replace("new_method:StayNear", "evil:StayNear"))
    run(
        "report",
        "--runs",
        tmp_path / "runs",
        "--format",
        "md",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert not (tmp_path / "ran").exists()
