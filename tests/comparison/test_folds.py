"""Which samples are looked at, and how they are split."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlcft.comparison.folds import chosen, split

COUNTS = st.lists(st.integers(1, 40), min_size=2, max_size=8).filter(lambda counts: max(counts) > 1)


def labels_of(counts):
    return [f"label {place}" for place, count in enumerate(counts) for _ in range(count)]


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(2, 100), st.integers(0, 3))
def test_chosen_samples_keep_the_shares_of_labels(counts, most, seed):
    labels = labels_of(counts)
    places = chosen(labels, most, seed=seed)
    assert places.tolist() == sorted(set(places.tolist()))
    least = sum(min(2, count) for count in counts)
    assert len(places) == min(len(labels), max(most, least))
    kept = Counter(labels[place] for place in places.tolist())
    for place, count in enumerate(counts):
        got = kept[f"label {place}"]
        assert got >= min(2, count)
        if got > 2:  # more than the two that each label keeps: no more than its share, but for rounding
            assert got <= count * most / len(labels) + 1.5


@settings(max_examples=60, deadline=None)
@given(COUNTS, st.integers(2, 10), st.integers(0, 3))
def test_folds_are_even_and_leave_something_of_every_label_to_learn(counts, most, seed):
    labels = labels_of(counts)
    folds = split(labels, most, seed=seed)
    number = min(most, max(counts))
    sizes = torch.bincount(folds[folds >= 0], minlength=number)
    assert len(sizes) == number
    assert int(sizes.max() - sizes.min()) <= 1
    for place, count in enumerate(counts):
        own = folds[[label == f"label {place}" for label in labels]]
        assert (own == -1).all() if count == 1 else (own >= 0).all()
        if count > 1:
            spread = torch.bincount(own, minlength=number)
            assert int(spread.max()) <= -(-count // number)
            assert int(spread.max()) < count


def test_another_seed_is_another_choice():
    labels = labels_of([50, 50])
    assert chosen(labels, 20).equal(chosen(labels, 20))
    assert not chosen(labels, 20).equal(chosen(labels, 20, seed=1))
    assert not split(labels, 5).equal(split(labels, 5, seed=1))


@pytest.mark.parametrize(("labels", "words"), [(["a"] * 5, "1 label with at most 5"), (["a", "b"], "2 labels")])
def test_too_little_is_refused(labels, words):
    with pytest.raises(ValueError, match=words):
        split(labels, 5)
