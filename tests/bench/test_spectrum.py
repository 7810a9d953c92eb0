"""Eigenvalues during training: computed once, and read again."""

from dataclasses import replace

import pytest

from dlcft.bench.spectrum import Spectrum, Trace, trace


def test_spectrum(tmp_path):
    base = Spectrum(per_class=10, epochs=8, points=4, samples=50, iterations=5, width=30, lr=3e-3)
    found = {
        loss: trace(replace(base, loss=loss), tmp_path, report=lambda line: None) for loss in ("cross-entropy", "mse")
    }
    for loss, result in found.items():
        assert [record["epochs"] for record in result.records][-1] == 8
        assert len(result.records) == 4
        assert result.records[-1]["train_loss"] < result.records[0]["train_loss"]
        assert all(record["eigenvalue"] > 0 for record in result.records)
        assert Trace.read(tmp_path / replace(base, loss=loss).file) == result
        assert trace(replace(base, loss=loss), tmp_path) is not result
    with pytest.raises(ValueError, match="unknown loss 'mce'"):
        replace(base, loss="mce")
    with pytest.raises(ValueError, match="points is 0"):
        replace(base, points=0)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="no spectrum file"):
        Trace.read(tmp_path / "x.json")
