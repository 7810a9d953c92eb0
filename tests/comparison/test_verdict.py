"""The rule that recommends a method."""

import math

import pytest
import torch

from dlcft.comparison.verdict import Answers, ahead, recommended, share_right, weights

SAMPLES = 400
SAME = torch.ones(SAMPLES, dtype=torch.float64)
ALL = torch.ones(SAMPLES, dtype=torch.bool)


def answers(right, size=1, *, closed=True, tested=ALL):
    """A method that is right on the first samples; so many, or those given."""
    hits = torch.arange(SAMPLES) < right if isinstance(right, int) else right
    return Answers(hits, tested, size, closed)


def test_the_error_of_a_difference_is_that_of_the_samples_on_which_two_differ():
    one, other = answers(300), answers(290)
    share, error = share_right(one, SAME)
    assert (share, error) == pytest.approx((0.75, math.sqrt(0.75 * 0.25 / SAMPLES)))
    difference, paired = ahead(one, other, SAME)
    assert difference == pytest.approx(10 / SAMPLES)
    assert paired == pytest.approx(math.sqrt((10 / SAMPLES - (10 / SAMPLES) ** 2) / SAMPLES))
    assert ahead(other, one, SAME) == (-difference, paired)
    assert ahead(one, one, SAME) == (0, 0)


def test_the_smallest_within_one_error_is_taken():
    turned = torch.arange(SAMPLES) >= 101  # right on 299, often others than those of `large`
    methods = {"large": answers(300, 100), "small": answers(turned, 10), "poor": answers(200, 1)}
    assert recommended(methods, SAME) == "small"
    # here the same answers but for ten: the difference of 10 is more than one error
    assert recommended({"large": answers(300, 100), "small": answers(290, 10)}, SAME) == "large"
    assert recommended({"one": answers(250, 10), "same": answers(250, 10)}, SAME) == "one"
    assert recommended({"one": answers(250, 10), "better": answers(251, 10)}, SAME) == "better"


def test_a_trained_method_has_to_be_ahead_by_two_errors():
    part = torch.arange(SAMPLES) % 2 == 0
    few = {"closed": answers(300), "trained": answers(302, closed=False, tested=part)}
    many = {"closed": answers(300), "trained": answers(320, closed=False, tested=part)}
    assert recommended(few, SAME) == "closed"
    assert recommended(many, SAME) == "trained"
    assert ahead(many["trained"], many["closed"], SAME)[0] == pytest.approx(10 / 200)
    assert recommended({"a": answers(300, 9, closed=False), "b": answers(300, 8, closed=False)}, SAME) == "b"


def test_every_class_can_count_the_same():
    classes = torch.cat([torch.zeros(360, dtype=torch.long), torch.ones(40, dtype=torch.long)])
    fair = weights(classes, balanced=True)
    only_large, both = answers(classes == 0), answers((torch.arange(SAMPLES) % 10) < 8)
    assert share_right(only_large, weights(classes, balanced=False))[0] == pytest.approx(0.9)
    assert share_right(only_large, fair)[0] == pytest.approx(0.5)
    assert share_right(both, fair)[0] == pytest.approx(0.8)
    methods = {"large": only_large, "both": both}
    assert recommended(methods, SAME) == "large"
    assert recommended(methods, fair) == "both"
