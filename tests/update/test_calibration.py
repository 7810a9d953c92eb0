"""Probabilities from outputs: the temperature that made them is found again."""

import pytest
import torch

from dlcft.update.calibration import calibration_bins, calibration_error, fit_temperature, probabilities


@pytest.mark.parametrize("temperature", [0.02, 0.5, 3.0, 40.0])
def test_the_temperature_is_found(temperature):
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(20_000, 4, generator=generator, dtype=torch.float64) * 2 * temperature
    labels = torch.multinomial((outputs / temperature).softmax(1), 1, generator=generator)[:, 0]
    found = fit_temperature(outputs, labels)
    assert found == pytest.approx(temperature, rel=0.05)
    assert calibration_error(calibration_bins(probabilities(outputs, found), labels)) < 0.02
    assert calibration_error(calibration_bins(probabilities(outputs, temperature / 10), labels)) > 0.05


def test_the_error_by_hand():
    given = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6]])
    bins = calibration_bins(given, torch.tensor([0, 1, 1]), bins=10)
    assert [count for _, _, count in bins] == [1, 2]
    assert [accuracy for _, accuracy, _ in bins] == [1.0, 0.5]
    assert calibration_error(bins) == pytest.approx((0.4 + 0.8) / 3)


def test_a_few_right_answers_make_no_certainty():
    outputs = torch.eye(3)[torch.arange(12) % 3] * 15
    found = probabilities(outputs, fit_temperature(outputs, torch.arange(12) % 3)).max(1).values
    assert 0.9 < float(found.min()) < 0.99
