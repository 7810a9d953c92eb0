"""A look at a new batch before it is learned: swapped labels are named, ordinary ones are not."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest
import torch

from dlcft import Learner
from dlcft.update.incoming import MOST, Incoming, doubted, doubtful_share, doubts, look_at
from dlcft.update.update import update
from tests.learner.test_learner import backbone, data, make
from tests.support.commands import dlcft
from tests.support.samples import pictures


@pytest.fixture
def learner(tmp_path):
    learner = make("dlcft-exact")
    learner.learn(data([0, 1, 2, 3], n=80))
    learner.save(tmp_path / "model")
    return learner


def permuted(y, places):
    return torch.tensor([places.get(int(label), int(label)) for label in y])


def test_an_ordinary_batch_raises_no_doubt(learner, caplog):
    done = update(learner, data([0, 1, 2, 3], n=80, seed=1), max_doubtful=0)
    assert done.accepted
    assert (done.doubts, done.doubtful) == ([], 0)
    assert [(row.label, row.samples, row.looked_at, row.same) for row in done.incoming] == [
        (str(label), 20, 20, 20) for label in range(4)
    ]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_two_swapped_labels_are_named_before_anything_is_learned(learner, caplog, monkeypatch):
    x, y = data([0, 1, 2, 3], n=80, seed=1)
    seen = []
    monkeypatch.setattr(learner, "learn", lambda *_, **__: seen.append([*caplog.messages]) or pytest.skip("learning"))
    with pytest.raises(pytest.skip.Exception):
        update(learner, (x, permuted(y, {1: 3, 3: 1})))
    said = "1 is answered as 3 in 100% of 20 samples, and 3 as 1 in 100% of 20: are these two labels swapped?"
    assert seen == [[said]]


def test_swapped_labels_are_only_told_unless_a_gate_is_set(learner):
    x, y = data([0, 1, 2, 3], n=80, seed=1)
    batch = (x, permuted(y, {1: 3, 3: 1}))
    stopped = update(learner, batch, max_doubtful=0.4)
    assert stopped.gates == ["new samples whose label is doubtful: 50.00%, and max_doubtful is 40.00%"]
    assert not stopped.accepted
    told = update(Learner.load(learner.directory, backbone()), batch)
    assert told.accepted
    assert told.doubtful == 0.5


def test_labels_that_change_places_in_a_ring_and_one_wrong_label(learner):
    x, y = data([0, 1, 2, 3], n=80, seed=1)
    rows = look_at(learner, learner.samples((x, permuted(y, {0: 1, 1: 2, 2: 0}))))
    assert {row.label: row.other for row in rows if row.doubtful} == {"0": "2", "1": "0", "2": "1"}
    assert len(doubts(rows)) == 3
    rows = look_at(learner, learner.samples((x[y == 0], permuted(y[y == 0], {0: 3}))))
    assert doubts(rows) == ["3 is answered as 0 in 100% of 20 samples: are these labels right?"]


def test_new_labels_are_not_looked_at(learner):
    assert look_at(learner, learner.samples(data([7, 8], n=20))) == []
    assert doubtful_share([]) is None
    assert look_at(make("dlcft-exact"), learner.samples(data([0, 1]))) == []


def test_of_a_large_label_some_are_looked_at(learner, monkeypatch):
    asked = []
    outputs = learner.outputs
    monkeypatch.setattr(learner, "outputs", lambda part, **_: asked.append(len(part)) or outputs(part))
    rows = look_at(learner, learner.samples(data([0, 1], n=5 * MOST)))
    assert asked == [2 * MOST]
    assert [(row.samples, row.looked_at) for row in rows] == [(5 * MOST // 2, MOST)] * 2


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"a": {"b": 1}, "b": {"a": 2}}, set()),  # three samples may be chance
        ({"a": {"b": 2}, "b": {"a": 2}}, {"a", "b"}),
        ({"a": {"b": 6}, "b": {"b": 6}}, set()),  # one label alone needs more of them
        ({"a": {"b": 7}, "b": {"b": 6}}, {"a"}),
        ({"a": {"a": 10, "b": 30}, "b": {"b": 40}}, {"a"}),  # most of one folder
        ({"a": {"a": 2, "b": 18, "c": 20}, "b": {"b": 40}}, set()),  # a weak version: no answer has more than half
        ({"a": {"a": 2, "b": 15, "c": 13}, "b": {"b": 2, "a": 15, "c": 13}}, {"a", "b"}),  # but these change places
        ({"a": {"b": 9}, "b": {"c": 9}, "c": {"a": 9}, "d": {"a": 3}}, {"a", "b", "c"}),  # and these in a ring
        ({"a": {"a": 14, "b": 16}}, set()),  # hardly more than its own
    ],
)
def test_what_is_doubtful(counts, expected):
    assert doubted({label: Counter(given) for label, given in counts.items()}) == expected


def test_the_share_counts_all_samples_of_a_doubtful_label():
    rows = [Incoming("a", 300, 100, 0, "b", 100, True), Incoming("b", 100, 100, 99, "a", 1, False)]
    assert doubtful_share(rows) == 0.75


def test_at_the_command_line(tmp_path):
    model = tmp_path / "model"
    january = pictures(tmp_path / "january", ["red", "green", "blue"])
    dlcft("update", "--model", model, "--data", january, "--backbone", "shipped", "--set", "depth_features=60")
    february = pictures(tmp_path / "february", ["red", "green", "blue"], seed=1)
    (february / "red").rename(february / "kept")
    (february / "blue").rename(february / "red")
    (february / "kept").rename(february / "blue")
    said = "blue is answered as red in 100% of 6 samples, and red as blue in 100% of 6: are these two labels swapped?"
    tried = dlcft("update", "--model", model, "--data", february, "--dry-run")
    assert said in tried.stderr
    assert "6 of 18 samples of known labels are answered as labelled" in tried.stdout
    assert json.loads(dlcft("update", "--model", model, "--data", february, "--dry-run", "--json").stdout)["doubts"]
    done = dlcft("update", "--model", model, "--data", february, "--max-doubtful", "0", "--json")
    assert (done.returncode, said in done.stderr) == (3, True)
    facts = json.loads(done.stdout)
    assert facts["doubts"] == [said]
    assert facts["incoming"][0] == {
        "label": "blue", "samples": 6, "looked_at": 6, "same": 0, "other": "red", "as_other": 6, "doubtful": True,
    }  # fmt: skip
    assert "are these two labels swapped?" in Path(facts["page"]).read_text(encoding="utf-8")
    done = dlcft("update", "--model", model, "--data", february, "--again")
    assert done.returncode == 0
    assert f"doubtful: {said}" in done.stdout
    assert "  red: 0 of 6, 6 as blue  <- doubtful" in done.stdout
