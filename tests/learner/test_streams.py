"""Streams: samples that are read once, in order, and in parts."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dlcft import Learner
from dlcft.data.streams import Stream, is_stream
from dlcft.learner import parts
from tests.learner.test_learner import backbone, data


def named(names, **options):
    x, y = data(list(range(len(names))), **options)
    return x, [names[label] for label in y.tolist()]


X, Y = named(["cat", "dog", "ant"], n=50, seed=1)
MORE_X, MORE_Y = named(["dog", "bee"], n=23, seed=2)


class Pairs(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x, self.y, strict=True))


def make(method="dlcft-exact", **settings):
    return Learner(backbone().double(), method, device="cpu", **{"batch_size": 8, **settings})


def dicts(x, y):
    return ({"image": a, "label": b} for a, b in zip(x, y, strict=True))


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART", 16)


@pytest.mark.parametrize(
    "stream",
    [lambda x, y: zip(x, y, strict=True), dicts, Pairs, lambda x, y: DataLoader(Pairs(x, y))],
    ids=["iterator", "dicts", "data set", "loader"],
)
def test_a_stream_is_learned_as_its_samples_are(small_parts, stream):
    whole, streamed = make(), make()
    for x, y in ((X, Y), (MORE_X, MORE_Y)):
        whole.learn((x, y), progress=False)
        streamed.learn(stream(x, y), progress=False)
    order = [streamed.labels().index(label) for label in whole.labels()]
    assert sorted(streamed.labels()) == sorted(whole.labels())
    torch.testing.assert_close(streamed.outputs(X)[:, order], whole.outputs(X))
    assert streamed.predicted_increase() == pytest.approx(whole.predicted_increase(), rel=1e-9)
    assert [record.samples for record in streamed.history] == [len(Y), len(MORE_Y)]


def test_a_stream_is_read_once_and_batch_by_batch(small_parts):
    taken = []

    def samples():
        for x, y in zip(X, Y, strict=True):
            taken.append(y)
            yield x, y

    seen = []
    make().learn(samples(), progress=lambda progress: seen.append((len(taken), progress.samples)))
    assert len(taken) == len(Y)
    assert seen[-1] == (len(Y), len(Y))


def test_labels_that_come_late_get_outputs_in_the_order_of_their_parts(small_parts):
    y = ["b"] * 20 + ["a"] * 20 + ["d", "c"] * 5
    stream = zip(X[:50], y, strict=True)
    learner = make("ridge")
    learner.learn(stream, progress=False)
    assert learner.labels()[:4] == sorted(learner.labels()[:4])  # seen in the look at the first samples
    assert learner.history[0].samples == 50
    again = make("ridge")
    again.learn((X[:50], y), progress=False)
    torch.testing.assert_close(learner.outputs(X), again.outputs(X))


def test_an_interrupted_stream_goes_on_and_ends_bit_for_bit_the_same(small_parts, tmp_path, monkeypatch):
    monkeypatch.setattr("dlcft.learner.notes.PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr("dlcft.learner.gathering.LOOK", 4)
    x, y = torch.cat([X, X, X]), [f"{label}{n // 30}" for n, label in enumerate(Y * 3)]
    first = make("ridge")
    first.learn((MORE_X, MORE_Y), progress=False)
    first.save(tmp_path / "a")
    first.save(tmp_path / "b")
    whole = Learner.load(tmp_path / "a", backbone().double(), device="cpu")
    whole.learn(zip(x, y, strict=True), progress=False)

    def cut():
        yield from zip(x[:70], y[:70], strict=True)
        raise KeyboardInterrupt

    learner = Learner.load(tmp_path / "b", backbone().double(), device="cpu")
    with pytest.raises(KeyboardInterrupt):
        learner.learn(cut(), progress=False)
    assert learner.labels() == first.labels()
    again, read = Learner.load(tmp_path / "b", backbone().double(), device="cpu"), []
    again.learn(zip(x, y, strict=True), progress=lambda progress: read.append(progress.samples))
    assert read[0] > 64  # what was noted is passed over
    assert again.labels() == whole.labels()
    mine, theirs = again.state()[0], whole.state()[0]
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert again.history[-1].samples == len(y)


def test_closed_form_on_indexed_data_goes_on_too(small_parts, tmp_path, monkeypatch):
    monkeypatch.setattr("dlcft.learner.notes.PROGRESS_SECONDS", 0.0)
    learner = make()
    learner.save(tmp_path / "model")
    whole = make()
    whole.learn((X, Y), progress=False)

    def stop(progress):
        if progress.samples > 40:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learner.learn((X, Y), progress=stop)
    again, read = Learner.load(tmp_path / "model", backbone().double(), device="cpu"), []
    again.learn((X, Y), progress=lambda progress: read.append((progress.samples, progress.share)))
    assert read[0][0] == 40
    assert read[-1] == (len(Y), 1.0)
    mine, theirs = again.state()[0], whole.state()[0]
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize(
    ("method", "stream", "told"),
    [
        ("dlcft", zip(X, Y, strict=True), "which is read once"),
        ("none", Pairs(X, Y), "which is read once"),
        ("ridge", iter([]), "there is no sample"),
        ("ridge", iter([(X[0], "a"), (X[0][..., :1], "b")]), "in samples 0 to 1 of the stream"),
        ("ridge", iter([X[0]]), "pairs"),
        (
            "ridge",
            iter([*zip(X[:20], Y[:20], strict=True), (X[0] * float("nan"), "a")]),
            "in samples 16 to 20 of the stream.*nan",
        ),
    ],
)
def test_streams_that_cannot_be_learned_are_refused(method, stream, told):
    learner = make(method)
    with pytest.raises((TypeError, ValueError), match=told):
        learner.learn(stream, progress=False)
    assert learner.tasks == 0


def test_every_task_alike_needs_a_length():
    with pytest.raises(ValueError, match="a stream has none"):
        make("ridge", weigh_by="tasks").learn(Pairs(X, Y), progress=False)


def test_what_is_a_stream():
    assert is_stream(iter([]))
    assert is_stream(Pairs(X, Y))
    assert not is_stream((X, Y))
    assert not is_stream([(X[0], 1)])


def test_a_look_at_the_first_samples_leaves_them_in_the_stream():
    stream = Stream(zip(X, Y, strict=True), preprocess=None, tokenizer=None, shares=False)
    assert stream.first(3).labels == Y[:3]
    assert stream.first(5).labels == Y[:5]
    assert stream.take(2).labels == Y[:2]
    assert stream.skip(4) == 4
    assert (stream.read, stream.take(1).labels) == (6, Y[6:7])
    assert stream.skip(100) == 43
    assert stream.ended()


@pytest.mark.parametrize("method", ["none", "ridge"])
def test_a_task_after_one_that_was_not_saved_is_learned_too(small_parts, tmp_path, monkeypatch, method):
    monkeypatch.setattr("dlcft.learner.notes.PROGRESS_SECONDS", 0.0)
    learner = make(method, **({"epochs": 2} if method == "none" else {}))
    learner.save(tmp_path / "model")
    learner.learn((X, Y), progress=False)
    learner.learn((MORE_X, MORE_Y), progress=False)
    assert learner.save() == 2
    assert learner.tasks == 2
