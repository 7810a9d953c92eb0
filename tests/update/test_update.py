"""An update in use: what is told, and the gates."""

import pytest
import torch

from dlcft import Learner
from dlcft.data.samples import Samples
from dlcft.store.files import CheckpointError
from dlcft.store.store import Store
from dlcft.update import update as module
from dlcft.update.update import update
from tests.learner.test_learner import backbone, data, make
from tests.support.samples import write_images


@pytest.fixture
def learner(tmp_path):
    learner = make("dlcft-exact")
    learner.save(tmp_path / "model")
    return learner


def test_what_is_told(learner):
    holdout = data([0, 1, 2], n=30, seed=9)
    first = update(learner, data([0, 1]), holdout=holdout)
    assert (first.samples, first.new_labels, first.version, first.accepted) == (24, [0, 1], 2, True)
    assert (first.predicted_increase, first.accuracy_before, first.drop, first.flips) == (None, None, None, None)
    assert first.accuracy == pytest.approx(2 / 3)
    assert first.per_class == {"0": (10, 10), "1": (10, 10), "2": (0, 10)}
    before = learner.evaluate(data([0, 1]))["loss"]
    second = update(learner, data([2], seed=2), holdout=holdout)
    assert second.new_labels == [2]
    assert second.predicted_increase == pytest.approx(learner.evaluate(data([0, 1]))["loss"] - before, rel=1e-3)
    assert (second.accuracy, second.drop, second.flips) == (1.0, 0.0, 0.0)
    assert 0 <= second.calibration_error < 0.2
    loaded = Learner.load(Store(learner.directory).directory, backbone())
    assert loaded.notes["temperature"] == second.temperature


def test_a_gate_keeps_the_new_version_aside(learner):
    x, y = data([0, 1], n=40)
    holdout = data([0, 1], n=30, seed=9)
    update(learner, (x, y), holdout=holdout)
    directory = learner.directory
    spoiled = update(learner, (x.repeat(3, 1, 1, 1), 1 - y.repeat(3)), holdout=holdout, max_drop=0.05)
    assert not spoiled.accepted
    assert spoiled.drop > 0.5
    assert spoiled.flips > 0.5
    store = Store(directory)
    assert store.current.number == 2
    assert [v.number for v in store.look().versions] == [2, 3]
    loaded = Learner.load(directory, backbone())
    assert loaded.evaluate(holdout)["accuracy"] == 1
    again = update(loaded, (x.repeat(3, 1, 1, 1), 1 - y.repeat(3)), holdout=holdout, max_flips=0.01)
    assert not again.accepted
    store.rollback(again.version)
    assert Learner.load(directory, backbone()).evaluate(holdout)["accuracy"] < 0.5


def test_a_broken_holdout_is_found_before_anything_is_learned(learner, tmp_path, monkeypatch):
    holdout = write_images(tmp_path / "holdout")
    (holdout / "dog" / "3.png").write_bytes(b"no image")
    monkeypatch.setattr(Learner, "learn", lambda *_, **__: pytest.fail("learned first"))
    with pytest.raises(ValueError, match=r"3\.png"):
        update(learner, write_images(tmp_path / "data"), holdout=holdout)


def test_gates_need_a_holdout(learner):
    with pytest.raises(ValueError, match="holdout samples only"):
        update(learner, data([0, 1]), max_drop=0.1)
    for limit in (-0.1, 2.0, float("nan")):
        with pytest.raises(ValueError, match=r"max_flips is .*; it must lie between 0 and 1"):
            update(learner, data([0, 1]), holdout=data([0, 1]), max_flips=limit)
    with pytest.raises(ValueError, match="neither saved nor loaded"):
        update(make("dlcft-exact"), data([0, 1]))
    assert learner.tasks == 0


def test_what_turned_wrong_and_what_changed_on_disk(learner):
    x, y = data([0, 1], n=40)
    holdout = data([0, 1], n=30, seed=9)
    update(learner, (x, y), holdout=holdout)
    spoiled = update(learner, (x.repeat(3, 1, 1, 1), 1 - y.repeat(3)), holdout=holdout, keep=1)
    assert spoiled.learned == {"0": 60, "1": 60}
    assert len(spoiled.flipped) == round(spoiled.flips * 30) > 15
    flip = spoiled.flipped[0]
    assert flip.label == str(int(holdout[1][int(flip.input)])) != flip.answer
    assert spoiled.per_class_before == {"0": 15, "1": 15}
    assert sum(count for _, _, count in spoiled.calibration) == 30
    assert (spoiled.disk.removed, [row["version"] for row in spoiled.disk.kept]) == ([2], [3])
    assert spoiled.disk.written == spoiled.disk.kept[0]["bytes"] > 1000
    assert [task["accuracy"] for task in spoiled.tasks] == [1.0, spoiled.accuracy]
    assert spoiled.tasks[1]["predicted_increase"] == spoiled.predicted_increase > 1


def test_one_version_kept_and_a_gate(learner):
    x, y = data([0, 1], n=40)
    update(learner, (x, y), holdout=(x, y), keep=1)
    spoiled = update(learner, (torch.cat([x, x]), torch.cat([1 - y, 1 - y])), holdout=(x, y), max_drop=0.0, keep=1)
    assert not spoiled.accepted
    store = Store(learner.directory)
    assert store.current.number == 2
    assert len(store.look().versions) == 2


def test_a_holdout_that_tells_nothing_is_refused(learner):
    update(learner, data([0, 1]))
    with pytest.raises(ValueError, match="max_flips are measured on known labels, and the holdout has none of them"):
        update(learner, data([5], seed=2), holdout=data([5], seed=3), max_drop=0.1)
    with pytest.raises(
        ValueError, match="answers are known labels, and the holdout has none of them: its labels are 5"
    ):
        update(learner, data([2], seed=2), holdout=data([5], seed=3))
    assert update(learner, data([5], seed=2), holdout=data([5], seed=3)).accuracy == 1


def test_nothing_learned_is_no_version(tmp_path):
    done = update(make("dlcft"), data([0, 1]), directory=tmp_path / "model", keep=2)
    assert [row["version"] for row in done.disk.kept] == [done.version]
    with pytest.raises(CheckpointError, match="is not kept"):
        Store(tmp_path / "model").rollback()


def test_learned_before():
    learner = make("dlcft-exact")
    first, second = data([0, 1]), data([0, 1], seed=1)
    learner.learn(first)
    learner.learn(second)
    assert [learner.learned_before(part) for part in (first, second, data([0, 1], seed=2))] == [0, 1, None]
    learner.forget(first)
    assert learner.learned_before(first) is None
    for task in (2, 3):
        learner.learn(first)
        assert learner.learned_before(first) == task
    learner.forget(first)
    assert learner.learned_before(first) == 3, "learned once more than forgotten"


class Answers:
    """A learner that answers a first so many times, then b."""

    def __init__(self, first):
        self.first = first

    def labels(self):
        return ["a", "b"]

    def outputs(self, held_out, batch_size):
        return torch.tensor([[1.0, 0.0] if index < self.first else [0.0, 1.0] for index in range(len(held_out))])


@pytest.mark.parametrize(("count", "limit"), [(50, 0.02), (100, 0.01), (100, 0.02)])
def test_a_drop_that_is_the_limit_passes(count, limit):
    held_out, lost = Samples((torch.zeros(count, 1), ["a"] * count)), round(limit * count)
    for right in range(lost, count + 1):
        before = ["a"] * right + ["b"] * (count - right)
        drop = module._compared(Answers(right - lost), held_out, before, {"a", "b"})["drop"]
        assert drop <= limit
        assert drop > limit - 1e-6
