"""The sums in float32 at sizes that oneDNN computes, against float64 and against torch's own products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dlcft.curvature import grams
from dlcft.network.forward_mode import without_mkldnn

LAYERS = {
    "large-image": (nn.Conv2d(16, 24, 3, padding=1), (16, 14, 15)),
    "large-image-stride": (nn.Conv2d(16, 24, 3, stride=2, padding=1), (16, 24, 25)),
    "reflect": (nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect", dilation=1, bias=False), (8, 12, 12)),
    "many-channels": (nn.Conv2d(120, 130, 3, padding=1), (120, 4, 4)),
    "many-channels-stride": (nn.Conv2d(120, 130, 3, stride=2, padding=1, bias=False), (120, 8, 8)),
    "tokens": (nn.Linear(400, 300), (20, 400)),
}


def sums(layer: grams.Layer, x: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Every sum of one layer."""
    gram, moments = grams.InputGram(layer), grams.GradientGrams(layer)
    gram.add([x])
    moments.add([x], [g])
    columns = gram.result().shape[-1]
    outputs = len(layer.weight)
    generator = torch.Generator().manual_seed(1)
    left = torch.linalg.qr(torch.randn(1, outputs, outputs, generator=generator).double())[0].to(x)
    right = torch.linalg.qr(torch.randn(1, columns, columns, generator=generator).double())[0].to(x)
    phi, psi, delta = moments.result()
    return {
        "A": gram.result(),
        "G": grams.output_gram(layer, [g]),
        "phi": phi,
        "psi": psi,
        "delta": delta,
        "norms": grams.gradient_norms(layer, [x], [g]),
        "squares": grams.squared_gradient(layer, [x], [g]),
        "rotated": grams.rotated_squares(layer, [x], [g], left, right),
        "gradients": grams.per_sample_gradients(layer, [x], [g]),
    }


@pytest.mark.parametrize("name", LAYERS)
def test_float32_equals_float64_with_and_without_onednn(name: str) -> None:
    layer, size = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, *size, generator=generator)
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    g = torch.randn(layer(x).shape, generator=generator)
    expected = sums(layer, x.double(), g.double())
    fused = sums(layer, x, g)
    with without_mkldnn():
        plain = sums(layer, x, g)
    for found in (fused, plain):
        for key, value in expected.items():
            assert found[key].dtype == torch.float32
            if key in ("A", "G", "phi", "psi"):  # a file holds half of what is symmetric to the last bit
                assert torch.equal(found[key], found[key].mT), key
            error = (found[key] - value).abs().max() / value.abs().max()
            assert error < 1e-5, (key, float(error))
