"""Outputs to probabilities, with one temperature that is fitted on held-out data.

References:
    Guo et al., On calibration of modern neural networks (2017), https://arxiv.org/abs/1706.04599
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

_GOLDEN = (math.sqrt(5) - 1) / 2
_RANGE = (-4.0, 4.0)  # of log10 of the temperature


def probabilities(outputs: Tensor, temperature: float) -> Tensor:
    """`softmax(outputs / temperature)`."""
    return (outputs.double() / temperature).softmax(1)


def fit_temperature(outputs: Tensor, labels: Tensor, steps: int = 60) -> float:
    """The temperature of the least negative log-likelihood on held-out samples, by golden-section search.

    As if one sample more had been seen whose label is anybody's guess: n right answers of n do not make certainty.

    Raises:
        ValueError: when there is no sample.
    """
    if not len(labels):
        raise ValueError("there is no held-out sample to calibrate on; at least one is needed.")

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


def calibration_error(probability: Tensor, labels: Tensor, bins: int = 15) -> float:
    """The expected calibration error: by how much confidence and accuracy differ, over bins of equal width."""
    confidence, answer = probability.max(1)
    right = (answer == labels).double()
    place = (confidence * bins).long().clamp(max=bins - 1)
    total = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, confidence.double() - right)
    return float(total.abs().sum() / len(labels))
