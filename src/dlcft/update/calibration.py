"""Outputs to probabilities, with one temperature that is fitted on held-out data.

References:
    Guo et al., On calibration of modern neural networks (2017), https://arxiv.org/abs/1706.04599
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2
_RANGE = (-4.0, 4.0)  # of log10 of the temperature


def probabilities(outputs: Tensor, temperature: float) -> Tensor:
    """`softmax(outputs / temperature)`."""
    return (outputs.double() / temperature).softmax(1)


def fit_temperature(outputs: Tensor, labels: Tensor, steps: int = 60) -> float:
    """The temperature of the least negative log-likelihood on held-out samples, by golden-section search.

    Labels are smoothed as if one sample more had all labels alike: n right answers of n do not make certainty.
    """

    def loss(exponent: float) -> float:
        return float(F.cross_entropy(outputs.double() / 10**exponent, labels, label_smoothing=1 / (len(labels) + 1)))

    low, high = _RANGE
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = loss(left), loss(right)
    for _ in range(steps):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = loss(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = loss(right)
    return float(10 ** ((low + high) / 2))


def calibration_bins(probability: Tensor, labels: Tensor, bins: int = 15) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy and number of the samples in each bin of confidence that has some, of equal width."""
    confidence, answer = probability.double().max(1)
    right = (answer == labels).double()
    place = (confidence * bins).long().clamp(max=bins - 1)
    held = [place == number for number in range(bins)]
    return [(float(confidence[one].mean()), float(right[one].mean()), int(one.sum())) for one in held if one.any()]


def calibration_error(bins: list[tuple[float, float, int]]) -> float:
    """The expected calibration error: by how much confidence and accuracy differ in the bins, weighted by samples."""
    total = sum(count for _, _, count in bins)
    return sum(count * abs(confidence - accuracy) for confidence, accuracy, count in bins) / total
