"""Gates: each stops what it is for, and nothing that may be chance."""

import pytest

from dlcft.update.gates import Gates, fallen, too_few
from dlcft.update.update import Flip, update
from tests.learner.test_learner import data, make


def facts(before, lost, gained, total):
    flips = [Flip(str(number), "cat", "dog") for number in range(lost)]
    return {
        "per_class_before": {"cat": before, "dog": 90},
        "per_class": {"cat": (before - lost + gained, total), "dog": (90, 100)},
        "flipped": flips,
    }


@pytest.mark.parametrize(
    ("before", "lost", "gained", "total", "counts"),
    [
        (3, 3, 0, 3, False),  # all of three: chance
        (4, 4, 0, 4, True),
        (20, 5, 1, 30, False),  # four more wrong than right, of six that turned: 4 < 2·√6
        (20, 6, 1, 30, False),
        (20, 7, 1, 30, True),
        (20, 3, 5, 30, False),  # better
    ],
)
def test_a_label_counts_from_two_standard_errors_on(before, lost, gained, total, counts):
    given = facts(before, lost, gained, total)
    assert bool(fallen(given)) is counts
    sentences = Gates(max_drop_per_label=0.1).exceeded(given)
    assert bool(sentences) is counts
    if counts:
        drop, now = (lost - gained) / total, before - lost + gained
        assert sentences == [
            f"cat fell by {drop:.1%}, from {before} to {now} of {total} right, and max_drop_per_label is 10.00%"
        ]
        assert Gates(max_drop_per_label=drop).exceeded(given) == []
    assert too_few(given, ["cat", "owl"]) == (["cat", "owl"] if total < 4 else ["owl"])


def test_one_label_falls_where_the_whole_hardly_does(tmp_path):
    """Twenty labels of which two are swapped: the whole falls little, and the gate for each label sees it."""
    learner, labels = make("dlcft-exact"), list(range(10))
    x, y = data(labels, n=200)
    learner.learn((x, y))
    learner.save(tmp_path / "model")
    holdout = data(labels, n=100, seed=9)
    x, y = data(labels, n=800, seed=1)
    wrong = y.clone()
    wrong[y == 3], wrong[y == 4] = 4, 3
    done = update(learner, (x, wrong), holdout=holdout, max_drop=0.5, max_drop_per_label=0.5)
    assert not done.accepted
    assert [sentence.split()[0] for sentence in done.gates] == ["3", "4"]
    assert 0 < done.drop < 0.3


def test_the_rise_is_a_share_of_the_old_loss(tmp_path):
    learner = make("dlcft-exact")
    first = data([0, 1], n=40)
    learner.learn(first)
    learner.save(tmp_path / "model")
    before = learner.evaluate(first)["loss"]
    x, y = first
    done = update(learner, (x.repeat(3, 1, 1, 1), 1 - y.repeat(3)), max_rise=0.5)
    after = learner.evaluate(first)["loss"]
    assert done.rise == pytest.approx((after - before) / before, rel=1e-2)
    assert done.gates == [f"the old data's mean loss rose by {done.rise:.2%}, and max_rise is 50.00%"]
    assert not done.accepted


def test_what_a_gate_needs(tmp_path):
    trained = make("dlcft")
    with pytest.raises(ValueError, match=r"max_rise is 0\.5, a share of the old loss, which only closed-form methods"):
        update(trained, data([0, 1]), directory=tmp_path / "model", max_rise=0.5)
    with pytest.raises(ValueError, match="max_drop_per_label can be measured on holdout samples only"):
        update(make("dlcft-exact"), data([0, 1]), directory=tmp_path / "model", max_drop_per_label=0.1)
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"max_rise is .*; it must be a finite number from 0 on"):
            Gates(max_rise=wrong)
    assert not (tmp_path / "model").exists()


def test_labels_that_were_never_learned_do_not_hide_the_accuracy(tmp_path):
    learner = make("dlcft-exact")
    learner.save(tmp_path / "model")
    done = update(learner, data([0, 1]), holdout=data([0, 1, 2], n=30, seed=9))
    assert done.accuracy == pytest.approx(2 / 3)
    assert (done.accuracy_known, done.not_learned) == (1.0, ["2"])
