"""What a learner shows while it works."""

import itertools

from dlcft.learner.display import Progress, reporter
from tests.learner.test_learner import data, make


def test_progress_is_quiet_off_a_terminal(capsys):
    seen = []
    learner = make("dlcft")
    learner.learn(data([0, 1]), progress=seen.append)
    assert len(seen) == 2 * 3
    assert seen[-1].share == 1
    assert seen[-1].epoch == seen[-1].epochs == 2
    assert all(a.share < b.share for a, b in itertools.pairwise(seen))
    make("dlcft").learn(data([0, 1]))
    assert capsys.readouterr() == ("", "")


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    show = reporter(True)
    show(Progress(0, 1, 2, 3.5, 0.5, 12.0))
    show(Progress(0, 2, 2, 3.5, 1.0, 0.0))
    said = capsys.readouterr().err
    assert "task 1  epoch 1/2   50%  loss 3.5  12 s left" in said
    assert said.endswith("\r")
